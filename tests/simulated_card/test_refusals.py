"""What a card refuses, the simulated one refuses too; elsewhere these tests are skipped."""

import pytest
import torch

from tests.simulated_card import card_graphs, places

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.CUDAGraph is not card_graphs.Graph, reason="of the simulated card alone"
    ),
]


def test_tensors_say_where_they_are():
    here = torch.ones(3)
    there = here.to("cuda")
    assert there.is_cuda
    assert not there.is_cpu
    assert there[1:].view(2, 1).device == torch.device("cuda", 0)
    assert here.device == there.cpu().device == torch.device("cpu")
    assert torch.zeros_like(there).is_cuda
    assert torch.zeros(2, device="cuda").sum().is_cuda
    assert there.to(torch.ones(1, dtype=torch.float64)).dtype == torch.float64
    assert not there.to(here).is_cuda


def test_two_devices_in_one_operation():
    here = torch.ones(3)
    there = here.cuda()
    with pytest.raises(RuntimeError, match="same device"):
        here + there
    assert (there * torch.tensor(2.0)).is_cuda  # a number
    with pytest.raises(RuntimeError, match="written to one of the host"):
        torch.tensor(1.0).add_(there[0])
    with pytest.raises(TypeError, match="convert cuda:0"):
        there.numpy()


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x[x > 0],
        lambda x: torch.tensor([1.0], device="cuda"),
        lambda x: x + torch.ones(3).cuda(),
        lambda x: torch.cuda.synchronize(),
    ],
    ids=["item", "tolist", "cpu", "boolean index", "new values", "copy", "synchronize"],
)
def test_what_no_graph_holds(step):
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        step(x)
    assert places.capture is None


def test_a_graph_changes_nothing_until_it_is_replayed():
    x = torch.ones(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = (2 * x).cumsum(0)
        x.add_(y)
    assert x.tolist() == [1, 1, 1]
    graph.replay()
    assert y.tolist() == [2, 4, 6]
    x.fill_(0.5)
    graph.replay()
    assert x.tolist() == [1.5, 2.5, 3.5]
