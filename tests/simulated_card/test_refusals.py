"""What a card refuses, the simulated one refuses too; elsewhere these tests are skipped."""

import contextlib

import pytest
import torch
from torch.nn.functional import dropout

from comera.train.graphs import CudaGraphs
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


@contextlib.contextmanager
def broken_off():
    """A capture that fails, by torch's own context, which then leaves its stream in place."""
    stream, graph = torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="previous error"), stream, torch.cuda.graph(graph):
        yield


def put_right():
    generator = torch.cuda.default_generators[0]
    generator.graphsafe_set_state(generator.clone_state())


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
    with broken_off():
        step(x)
    assert places.capture is None
    put_right()


def test_a_capture_that_breaks_leaves_the_generator_in_it_until_it_is_put_right():
    x = torch.ones(3, device="cuda")
    with broken_off():
        x.sum().item()
    with pytest.raises(RuntimeError, match="Offset increment outside graph capture"):
        dropout(x)
    put_right()
    assert dropout(x).is_cuda


def waits(x):
    return x.sum() * float(x.sum())


def fails(x):
    raise KeyError(x)


@pytest.mark.parametrize("step", [waits, fails])
def test_after_a_recording_that_fails_training_random_numbers_and_captures_go_on(step):
    x, layer = torch.ones(4, 3, device="cuda"), torch.nn.Linear(3, 3, device="cuda")
    graphs = CudaGraphs(torch.device("cuda", 0))

    def train():
        loss = dropout(layer(x)).sum()
        loss.backward()
        return loss.detach()

    before = torch.cuda.current_stream()
    with pytest.raises((RuntimeError, KeyError)) as raised:
        graphs.record(lambda: step(x))
    assert "previous error" not in str(raised.value)
    assert torch.cuda.current_stream() == before
    for _ in range(2):
        with graphs.stream():
            train()
        recording = graphs.record(train)
        recording.replay()
        assert recording.output.isfinite()
    train()


def test_an_accumulator_that_another_stream_made_is_refused_in_a_capture_while_it_lives():
    weight = torch.ones(3, device="cuda", requires_grad=True)
    graphs = CudaGraphs(torch.device("cuda", 0))
    alive = (2 * weight).sum()
    with pytest.raises(RuntimeError, match="AccumulateGrad node's stream"):
        graphs.record(lambda: (3 * weight).sum())
    del alive
    with graphs.stream():
        (2 * weight).sum()
    graphs.record(lambda: (3 * weight).sum().detach())


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
