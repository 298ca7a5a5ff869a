"""How many tensor operations a training step starts, by name."""

import collections

import pytest
import torch

import comera
from comera.models.transformer import Encoder, SequenceClassifier
from comera.ops.context import static_shapes
from comera.train.host_state import make_capturable_
from tests.train.counting import Calls, Launches, attention_as_on_a_card

pytestmark = pytest.mark.usefixtures("contracted_together")


def launched(step):
    """By name, of the second step."""
    data = batch()
    step(data)
    with Launches() as counter:
        step(data)
    return collections.Counter(counter.log)


def launches(step):
    return launched(step).total()


def make_model(layers=6):
    model = SequenceClassifier(Encoder(300, 64, layers, 2, 128, 16, 0.1, 2, "post"), 3)
    return comera.tensorize_(model, comera.TTConfig(rank=4, exclude_modules=["output"]))


def make_step(layers=6, late=False, **settings):
    return step_of(make_model(layers), late, **settings)


def step_of(model, late=False, **settings):
    optimizer = torch.optim.AdamW(comera.param_groups(model, 1e-3), fused=True)
    ranks = comera.TwoStage(model, 0.5, 0 if late else 100, 100)
    return comera.TrainStep(model, loss_fn, optimizer, ranks, clip_norm=1.0, **settings)


def loss_fn(model, batch):
    return torch.nn.functional.cross_entropy(model(batch["tokens"]), batch["labels"])


def batch():
    return {"tokens": torch.randint(1, 300, (4, 16)), "labels": torch.randint(0, 3, (4,))}


def test_launches_of_a_step_stay_within_their_budget():
    """The paper's six encoders, 38 tensor trains. Raise a budget only for a reason.

    The table has 150 of them, both ways and its halves included: it sorts its entries and groups
    rows by their slices, small operations on whole numbers that save larger ones on rows.
    """
    assert launches(make_step()) <= 903
    assert launches(make_step(late=True)) <= 929


def counted(layers=6, late=False, **settings):
    """Launches by name of a step as a card takes it, without hand-written kernels."""
    step = make_step(layers, late, **settings)
    make_capturable_(step.optimizer, torch.device("cpu"))
    with attention_as_on_a_card(), static_shapes():
        return launched(step)


@pytest.mark.parametrize(("late", "budget"), [(False, 704), (True, 730)])
def test_launches_of_a_captured_step_stay_within_their_budget(late, budget):
    """The course that a CUDA graph holds, counted by what PyTorch dispatches on a CPU."""
    assert counted(late=late).total() <= budget


BLOCK = {
    # Forward: q, k and v thin together, scores' factor, out of heads, its right half; two layers of
    # the feed-forward part two each, less the two with ones on the way (addmm). Backward: of each
    # product two, and the hidden activation's, computed once more.
    "mm": 23, "addmm": 2,
    # What stands between the projections, of all heads: scores and values; backward two each.
    "bmm": 6,
    "attention": 1,
    # At most; without a mask, or in bfloat16, a card has fewer. See Launches.
    "attention_backward": 4,
    # Gradients of keys and values that heads share, over the heads.
    "sum": 2,
    # Thin factors of q, k and v side by side, and their gradients.
    "cat": 2,
    # Ones for the biases of the feed-forward part, in the thin product of either layer.
    "fill_": 2,
    # The hidden activation, again in the backward pass.
    "gelu": 2, "gelu_backward": 1,
    "native_layer_norm": 2, "native_layer_norm_backward": 2,
    "native_dropout": 2, "native_dropout_backward": 2,
    # Residuals, and their gradients where they part.
    "add": 4,
}  # fmt: skip
"""Launches that one encoder block adds, optimizer, clipping and contraction of its cores included:
the last are batched over layers, so that more layers take no more."""

CASTS = {
    # Norms give float32, of which attention and feed-forward take bfloat16 each; back once each,
    # and the gradients that residuals hand to dropout. Weights are cast once for all layers.
    "_to_copy": 6,
}


def added_by_a_block(**settings):
    few, many = counted(2, **settings), counted(6, **settings)
    return {name: count / 4 for name, count in (many - few).items()}


def test_what_a_block_adds():
    assert added_by_a_block() == BLOCK


def test_what_a_block_adds_in_mixed_precision():
    assert added_by_a_block(precision="bf16") == BLOCK | CASTS


def calls(layers):
    step, data = make_step(layers), batch()
    step(data)
    with Calls() as counter:
        step(data)
    return counter.count


def test_calls_of_an_eager_block():
    """Operations that PyTorch dispatches for one encoder block, 421, of which 276 do no arithmetic.

    36 cores, 30 gates, 6 biases and 4 vectors of norms get their gradients as views of those of all
    layers (106 views, 84 slices), each detached once (88). The others compute or transpose
    operands, in backward passes of the package's operators too.
    """
    assert (calls(6) - calls(2)) / 4 <= 421


def test_merging_does_not_grow_with_the_number_of_layers():
    few, many = launches(make_step(2)), launches(make_step(6))
    # What one encoder block adds, optimizer and clipping included; three draw masks again.
    assert (many - few) / 4 <= 77


@pytest.mark.slow
def test_a_layer_that_forms_its_dense_matrix_is_one_compiled_graph():
    layer = comera.TTLinear(512, 512, rank=400)
    x = torch.randn(3000, 512)
    assert not layer.is_factorized(x)
    compiled = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))


def test_calls_that_a_plain_layer_adds_in_a_batched_contraction():
    """Products are 6 of 39. Its 6 cores, 5 gates and a bias get their gradients as views of those
    of all layers, each detached once (24); the gates are parts of one vector (5), and autograd
    turns operands around (4).
    """
    counts = []
    for layers in (2, 6):
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(layers)))
        model = comera.tensorize_(model, comera.TTConfig(rank=4, init="orthogonal"))
        x = torch.randn(4, 64, requires_grad=True)
        contracted = comera.BatchedContraction(model)
        with contracted:
            model(x).sum().backward()
        model.zero_grad()
        with Calls() as counter, contracted:
            model(x).sum().backward()
        counts.append(counter.count)
    assert (counts[1] - counts[0]) / 4 <= 39


def test_calls_of_a_layer_by_itself():
    """Of 89, 29 compute: 17 products, 10 multiplications by gates there and back, and the sums of
    those and of the bias. Views turn 5 matrices of cores around, there and back (24), and operands
    (12); each of 12 parameters and the batch get a gradient.
    """
    layer, x = comera.TTLinear(64, 64, rank=4), torch.randn(4, 64, requires_grad=True)
    with Calls() as counter:
        layer(x).sum().backward()
    assert counter.count <= 89
