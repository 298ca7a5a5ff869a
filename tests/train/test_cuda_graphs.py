"""The captured step against the eager one on a GPU, with CUDA graphs."""

import time

import pytest
import torch

import comera
from benchmarks.encoders import Encoders, learned_ranks, train_step
from comera.ops.context import static_shapes
from comera.ops.linear.fp8 import why_not_fp8
from comera.train.capture import WARM_UP
from comera.train.host_state import make_capturable_

from .conftest import evaluate, get_batch, loss_fn, make_step

pytestmark = pytest.mark.gpu

FIRST = WARM_UP + 2


def batches(count, start=0):
    return [get_batch(k, device="cuda") for k in range(start, start + count)]


def eager_step(**settings):
    step = make_step(graph=False, device="cuda", **settings)
    make_capturable_(step.optimizer, torch.device("cuda", torch.cuda.current_device()))
    return step


def assert_close(captured, eager, data):
    """Sums that a GPU adds up in any order keep the two from being the same bit for bit."""
    torch.manual_seed(7)
    got = torch.stack([captured(batch) for batch in data])
    torch.manual_seed(7)
    with static_shapes():
        want = torch.stack([eager(batch) for batch in data])
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(
        captured.model.state_dict(), eager.model.state_dict(), rtol=1e-2, atol=1e-3
    )


def came(groups):
    return comera.CAME(groups, lr=1e-2, weight_decay=0.01)


def muon(groups):
    return comera.MuonAdamW(groups, fused=True)


def plain_adamw(groups):
    return torch.optim.AdamW(groups)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"accumulate": 2},
        {"precision": "bf16"},
        {"make_optimizer": came},
        {"make_optimizer": muon},
        {"make_optimizer": plain_adamw},
        {"compile": True, "dropout": 0.0},
    ],
    ids=["plain", "accumulate", "bfloat16", "came", "muon", "not fused", "compiled"],
)
def test_replayed_steps_equal_eager_ones(settings):
    captured = make_step(early=100, device="cuda", **settings)
    settings = {key: value for key, value in settings.items() if key != "compile"}
    assert_close(captured, eager_step(early=100, **settings), batches(FIRST + 12))
    assert captured.describe().captured, captured.describe()
    assert captured.describe().replays == 13


def test_a_compiled_step_of_six_encoders_starts_within_a_minute(monkeypatch, tmp_path):
    """Nothing compiled before is used. On a CPU it takes 33 s of Python's time, and 40 of g++."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    torch._dynamo.reset()
    device = torch.device("cuda", torch.cuda.current_device())
    encoders = Encoders()
    model = encoders.model("comera", device)
    step = train_step(model, learned_ranks(model), compile=True)
    data = encoders.batch(8, device)
    began = time.perf_counter()
    float(step(data))
    assert time.perf_counter() - began < 60
    for _ in range(FIRST):
        step(data)
    assert step.describe().captured, step.describe()


def test_products_in_eight_bits_are_captured():
    device = torch.device("cuda", torch.cuda.current_device())
    if why_not_fp8(device) is not None:
        pytest.skip(why_not_fp8(device))
    settings = {"early": 100, "precision": "fp8", "dropout": 0.0}
    captured, eager = make_step(device="cuda", **settings), eager_step(**settings)
    data = batches(FIRST + 8)
    got = torch.stack([captured(batch) for batch in data])
    with static_shapes():
        want = torch.stack([eager(batch) for batch in data])
    # What is added up in another order may round to another number of three bits.
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)
    assert captured.describe().captured, captured.describe()


def test_all_stages_and_truncation():
    captured, eager = make_step(device="cuda"), eager_step()
    assert_close(captured, eager, batches(15))
    captured.ranks.finish_(captured.optimizer)
    eager.ranks.finish_(eager.optimizer)
    # The same ranks only if the same gates were the smallest: go on from the same model.
    eager.model.load_state_dict(captured.model.state_dict())
    before = captured.describe().captures
    for batch in batches(FIRST + 3, 15):
        captured(batch)
    assert captured.describe().captured
    assert captured.describe().captures == before + 1


def test_evaluation_and_a_short_batch_in_between():
    captured, eager = make_step(early=100, device="cuda"), eager_step(early=100)
    for start in (0, 10):
        data = [*batches(FIRST + 3, start), get_batch(99, rows=5, device="cuda")]
        assert_close(captured, eager, data)
        captured.model.eval()
        with torch.no_grad():
            evaluate(captured.model)
        captured.model.train()
    assert captured.describe().captures == 1


def test_two_recordings_of_a_step_share_their_memory():
    def scaled(model, batch):
        return loss_fn(model, batch) * batch["scale"]

    captured, eager = make_step(early=100, device="cuda"), eager_step(early=100)
    captured._loss_fn = eager._loss_fn = scaled
    mixed = [
        batch | {"scale": 2.0 if k >= FIRST and k % 3 else 0.5}
        for k, batch in enumerate(batches(FIRST + 20))
    ]
    assert_close(captured, eager, mixed[:FIRST])
    held = captured.describe().contents.pool_bytes
    assert_close(captured, eager, mixed[FIRST:])
    described = captured.describe()
    assert described.captures == 2
    assert described.contents.pool_bytes < 2 * held


def test_the_memory_of_steps_before_is_not_held_beside_that_of_the_graph():
    torch.cuda.empty_cache()
    step = make_step(early=100, device="cuda")
    assert_close(step, eager_step(early=100), batches(FIRST + 3))
    contents = step.describe().contents
    assert contents.pool_bytes < contents.peak_bytes
    # What is reserved is the graph's pool and the tensors outside it, in blocks of 2 MiB.
    blocks = 64 << 20
    assert torch.cuda.memory_reserved() <= contents.peak_bytes + blocks
    assert f"{contents.peak_bytes:,} bytes" in str(step.describe())


def test_what_cannot_be_captured_runs_eagerly_and_dropout_goes_on(caplog):
    def reads_back(model, batch):
        loss = loss_fn(model, batch)
        return loss * float(loss.detach() > 0)

    step = make_step(device="cuda")
    step._loss_fn = reads_back
    losses = [step(batch) for batch in batches(FIRST + 6)]
    assert torch.stack(losses).isfinite().all()
    assert "not captured as a CUDA graph" in caplog.text
    other = make_step(early=100, device="cuda")  # the device can capture still
    for batch in batches(FIRST + 1):
        other(batch)
    assert other.describe().captured


def test_memory_does_not_grow_with_captures():
    step = make_step(early=1000, device="cuda")
    held = []
    for k in range(4):
        step.clip_norm = 1.0 + k
        for batch in batches(FIRST + 2):
            step(batch)
        held.append(torch.cuda.memory_reserved())
    assert step.describe().captures == 4
    assert held[-1] <= held[1]


@pytest.mark.parametrize("early", [True, False])
def test_nodes_of_the_six_encoders(early):
    pytest.importorskip("cuda.bindings")
    device = torch.device("cuda", torch.cuda.current_device())
    encoders = Encoders()
    model = encoders.model("comera", device)
    step = train_step(model, learned_ranks(model, early))
    for _ in range(FIRST + 1):
        step(encoders.batch(32, device))
    contents = step.describe().contents
    assert sum(contents.nodes.values()) <= 900, step.describe()
