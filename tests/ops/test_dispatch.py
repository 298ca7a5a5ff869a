"""The table of ways: which one is taken under which condition."""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from comera.nn import collection, fused  # noqa: F401  all operators are in the table then
from comera.ops import dispatch, product
from comera.ops.context import static_shapes
from comera.ops.dispatch import TABLE, Sample, Way, Ways
from comera.ops.kernels import choose
from comera.planning.way_times import BUILT_IN, Timing, WayTimes
from tests.kernels.numbers import taken_by

CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    """A card with all kernels, and a CPU whose faster products are oneDNN's."""
    monkeypatch.setattr(choose, "mode", lambda: "auto")
    monkeypatch.setattr(choose, "_why_not_on", lambda file, device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(product, "prefers_onednn", lambda: True)
    know(monkeypatch, CARD, kernel=1, torch=2)
    yield
    dispatch.forget_times()


def know(monkeypatch, device, **seconds):
    """Let these be the times of all operators on a device, at all sizes."""

    class Known(WayTimes):
        def nearest(self, group, dtype, captured, sizes):
            return Timing(group, dtype, captured, tuple(sizes), seconds)

    before = dispatch.way_times_of
    known = lambda of: Known("a test") if of == device else before(of)  # noqa: E731
    monkeypatch.setattr(dispatch, "way_times_of", known)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    dispatch.forget_times()


def sample(name, device, dtype=torch.float32):
    return TABLE[name].sample(lambda *shape: Sample(shape, dtype, device))


@contextlib.contextmanager
def compiling(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        yield


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# What each operator does: on a CPU; with static shapes; in float64 and bfloat16; on a card; there
# with static shapes, in float64, deterministic, and while a graph is compiled on a CPU and a card.
COLUMNS = (
    "cpu", "cpu static", "cpu float64", "cpu bfloat16", "card", "card static", "card float64",
    "card deterministic", "cpu compiling", "card compiling",
)  # fmt: skip
K, T = "kernel", "torch"
KERNEL_OR_TORCH = (T, T, T, T, K, K, T, K, T, K)
EXPECTED = {
    "factorized_feed_forward": (T,) * 10,
    "factorized_feed_forward_backward": (T,) * 10,
    "gated_hidden": (T,) * 10,
    "gated_hidden_backward": (T,) * 10,
    "contract_cores": KERNEL_OR_TORCH,
    "contract_cores_backward": KERNEL_OR_TORCH,
    "ttm_lookup": tuple("distinct rows" if way == T else way for way in KERNEL_OR_TORCH),
    "ttm_lookup_backward": (
        "by slots", "by slots", "by slots", "by slots", K, K, "by slots",
        "sort what a kernel may have read, then by slots", "by slots", K,
    ),
    "rows_of_a_table": ("lookup", "every row for itself", *("lookup",) * 8),
}  # fmt: skip


def test_every_operator_is_expected_to_do_something():
    assert set(EXPECTED) == set(TABLE)
    assert {len(ways) for ways in EXPECTED.values()} == {len(COLUMNS)}


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_which_way_is_taken(name, column, monkeypatch):
    device = CARD if column.startswith("card") else CPU
    where = contextlib.ExitStack()
    if "static" in column:
        where.enter_context(static_shapes())
    if "deterministic" in column:
        where.enter_context(deterministic())
    if "compiling" in column:
        where.enter_context(compiling(monkeypatch))
    dtype = getattr(torch, column.split()[-1], None)
    dtype = dtype if isinstance(dtype, torch.dtype) else torch.float32
    with where, torch.set_grad_enabled(not name.endswith("_backward")):
        got = taken_by(TABLE[name], *sample(name, device, dtype))
    assert got == EXPECTED[name][COLUMNS.index(column)]


def test_a_second_derivative_takes_no_kernel():
    with torch.enable_grad():
        reasons = TABLE["contract_cores_backward"].reasons(*sample("contract_cores_backward", CARD))
    assert reasons == {"kernel": choose.DIFFERENTIATED, "torch": None}


def test_static_shapes_without_a_kernel_read_every_row_for_itself():
    with static_shapes():
        args = sample("rows_of_a_table", CARD, torch.float64)
        assert taken_by(TABLE["rows_of_a_table"], *args) == "every row for itself"
        with deterministic():
            args = sample("rows_of_a_table", CARD)
            assert taken_by(TABLE["rows_of_a_table"], *args) == "every row for itself"


def test_the_first_way_that_does_not_refuse_runs_with_the_arguments(monkeypatch):
    monkeypatch.setattr("comera.ops.dispatch.TABLE", {})
    ways = Ways(
        "adding", "adding", lambda *_: None, lambda new: (1, 2),
        Way("never", lambda a, b: pytest.fail("it ran"), lambda a, b: "it is not wanted"),
        Way("small", lambda a, b: ("small", a + b), lambda a, b: "it is large" if a > 9 else None),
        Way("any", lambda a, b: ("any", a + b)),
    )  # fmt: skip
    assert ways(1, 2) == ("small", 3)
    assert ways(10, 2) == ("any", 12)
    assert ways.reasons(10, 2) == {"never": "it is not wanted", "small": "it is large", "any": None}
    with pytest.raises(AssertionError, match="adding is in the table already"):
        Ways("adding", "adding", lambda *_: None, lambda new: ())


@pytest.fixture
def three(monkeypatch):
    """An operator of three ways, of which the first is by a kernel and refuses what is negative."""
    monkeypatch.setattr(dispatch, "TABLE", {})
    case = lambda x: (x, x.dtype, x.shape)  # noqa: E731
    return Ways(
        "adding", "adding", case, lambda new: (new(4),),
        Way("kernel", lambda x: "kernel", lambda x: "it is narrow" if x.shape[0] < 4 else None,
            "adding"),
        Way("in pieces", lambda x: "in pieces", lambda x: "it is long" if x.shape[0] > 5 else None),
        Way("torch", lambda x: "torch"),
    )  # fmt: skip


def like(device, rows=4):
    return Sample((rows,), torch.float32, device)


def test_the_fastest_way_is_tried_first_and_a_refused_one_never_taken(three, monkeypatch):
    know(monkeypatch, CARD, kernel=1.0, torch=2.0)
    assert three(like(CARD)) == "kernel"
    with pytest.warns(choose.KernelWarning, match="it is narrow"):
        assert three(like(CARD, 3)) == "in pieces"
    know(monkeypatch, CARD, kernel=4.0, torch=2.0)
    assert [three(like(CARD, rows)) for rows in (4, 6)] == ["in pieces", "torch"]
    assert list(three.reasons(like(CARD))) == ["in pieces", "torch", "kernel"]
    know(monkeypatch, CARD, kernel=3.1, torch=3.0)
    assert three(like(CARD)) == "kernel"  # even times go by the list


def test_without_times_a_card_takes_no_kernel_on_hope_and_a_cpu_goes_by_the_list(
    three, monkeypatch
):
    assert three(like(CPU)) == "kernel"
    know(monkeypatch, CARD, torch=1.0)
    assert three(like(CARD)) == "in pieces"
    assert [way.name for way in three.order(like(CARD))] == ["in pieces", "torch", "kernel"]
    know(monkeypatch, CPU, torch=1.0)
    assert [way.name for way in three.order(like(CPU))] == ["kernel", "in pieces", "torch"]


def test_one_way_can_be_preferred_for_a_while(three, monkeypatch):
    know(monkeypatch, CARD, kernel=1.0, torch=2.0)
    with dispatch.preferring("adding", "torch"):
        assert three(like(CARD)) == "in pieces"
        with dispatch.preferring("adding", "kernel"):
            assert three(like(CARD)) == "kernel"
    with dispatch.preferring("another", "torch"):
        assert three(like(CARD)) == "kernel"
    assert three(like(CARD)) == "kernel"


def test_times_are_asked_for_once_a_case_and_never_in_a_graph(three, monkeypatch):
    asked = []

    def times_of(device):
        asked.append(device)
        return WayTimes("a test")

    monkeypatch.setattr(dispatch, "way_times_of", times_of)
    for _ in range(3):
        three(like(CARD))
        three(like(CARD, 5))
        three(like(CPU))
    assert asked == [CARD] * 2
    with compiling(monkeypatch):
        dispatch.forget_times()
        three(like(CARD, 6))
    with FakeTensorMode():
        three(torch.empty(7))
    assert asked == [CARD] * 2


def test_what_is_built_in_for_a_card_names_groups_and_is_what_the_papers_say():
    groups = {ways.group for ways in TABLE.values()}
    assert {timing.group for timing in BUILT_IN.timings} <= groups

    def fastest(group, dtype, *sizes):
        timing = BUILT_IN.nearest(group, dtype, True, sizes)
        return timing and timing.fastest

    assert fastest("contract_cores", "float32", 72, 30) == "kernel"
    assert fastest("feed_forward", "bfloat16", 4096, 768, 3072, 32) == "kernel"
    assert fastest("feed_forward", "float32", 4096, 768, 3072, 32) is None  # no kernel is exact
    assert fastest("feed_forward", "float32", 512, 768, 3072, 32, "tf32") == "torch"
    assert fastest("feed_forward", "bfloat16", 4096, 768, 3072, 40, "wide") == "kernel"
    assert fastest("gated_feed_forward", "bfloat16", 4096, 2048, 32) == "kernel"
    assert [fastest("lookup", "bfloat16", rows) for rows in (1024, 4096)] == ["torch", "kernel"]
    eager = BUILT_IN.nearest("lookup", "float32", False, (1024, "a block a row"))
    assert min(eager.seconds, key=eager.seconds.get) == "kernel"
