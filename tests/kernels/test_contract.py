import re

import pytest
import torch

import comera
from comera.calibrate.ways import tf32_products
from comera.ops.contract_cores import (
    CONTRACT,
    _contract_groups,
    arguments_of,
    contract_groups,
)
from comera.ops.cores import Chains
from comera.ops.kernels import choose, contract_kernel, launch
from comera.ops.kernels.launch import KernelError
from tests.kernels import emulation
from tests.kernels.numbers import assert_near, displaced, distance, taken_by
from tests.kernels.thorough import some
from tests.ops.test_contract_cores import SHAPES, Group

WIDE = {  # more rows, columns and depth than a tile has
    "4+2": ((1, 3, 17, 36, 5, 2, 1), (2, 3, 7, 5, 4, 9), 4),
    "2+4": ((1, 9, 33, 18, 5, 3, 1), (5, 9, 3, 7, 3, 2), 2),
    "3+1": ((1, 11, 64, 40, 1), (11, 14, 5, 200), 3),
    "1+3": ((1, 70, 45, 6, 1), (60, 3, 13, 6), 1),
}
DEEP = {  # more than four cores on a side, and as many as there may be
    "5+8": (
        (1, 5, 6, 9, 12, 70, 7, 9, 6, 5, 8, 4, 5, 1),
        (2, 3, 2, 3, 5, 8, 2, 3, 2, 2, 1, 2, 2),
        5,
    ),
    "8+6": ((1, 4, 6, 7, 12, 20, 35, 40, 9, 40, 33, 8, 5, 4, 1), (2,) * 7 + (5, 3) + (2,) * 5, 8),
    "1+7": ((1, 7, 9, 16, 11, 7, 5, 4, 1), (6, 9, 2, 3, 4, 2, 3, 2), 1),
}
WIDE |= DEEP
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NARROW = [torch.bfloat16, torch.float16]


def make(name, num_layers=2, gated=True, bias=True, dtype=torch.float32, device="cpu"):
    group = Group(name, num_layers, gated, bias, dtype)
    for core in group.cores:
        if name in DEEP:  # float16 holds gradients that are no larger
            core.data /= core.shape[0] ** 0.5
    for param in group.params:
        param.data = param.data.to(device)
    return group


def run(group):
    """Halves, then gradients of every parameter for a random gradient of each half."""
    halves = contract_groups([Chains(*group.arguments())])
    return [*halves, *torch.autograd.grad(halves, group.params, cotangents(halves))]


def cotangents(halves):
    made = torch.Generator().manual_seed(5)
    return [
        torch.randn(half.shape, generator=made).to(half.dtype).to(half.device) for half in halves
    ]


@pytest.fixture(autouse=True)
def _nothing_described():
    """Descriptors are written anew: what a test plants or counts is there."""
    contract_kernel._kept.clear()


def launches(monkeypatch):
    """List the functions that are launched from now on."""
    started, launch = [], contract_kernel.launch
    monkeypatch.setattr(contract_kernel, "launch", lambda *a: started.append(a[1]) or launch(*a))
    return started


def in_float64(group, dtype=None):
    """The same by the plain reference; gradients are given in the dtype of the factors."""
    wide = Group.__new__(Group)
    vars(wide).update(vars(group))
    params = iter([p.detach().double().cpu().requires_grad_() for p in group.params])
    for name in ("cores", "gates", "biases"):
        setattr(wide, name, [next(params) for _ in getattr(group, name)])
    halves = wide.reference()
    dtype = dtype or group.cores[0].dtype
    narrow = [torch.empty(half.shape, dtype=dtype) for half in halves]
    grads = [grad.double() for grad in cotangents(narrow)]
    params = [*wide.cores, *wide.gates, *wide.biases]
    return [*halves, *torch.autograd.grad(halves, params, grads)]


@pytest.fixture
def _wide_shapes(monkeypatch):
    for name, shape in WIDE.items():
        monkeypatch.setitem(SHAPES, name, shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("name", [*SHAPES, *DEEP])
@pytest.mark.usefixtures("_wide_shapes")
def test_kernels_equal_the_reference(name, gated, bias, dtype, emulated):
    group = make(name, 2, gated, bias, dtype)
    assert_near(run(group), in_float64(group), dtype, factor=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WIDE)
@pytest.mark.usefixtures("_wide_shapes", "thread_order")
def test_kernels_equal_the_reference_beyond_one_tile_in_any_order_of_threads(name, dtype):
    group = make(name, 1, dtype=dtype)
    assert_near(run(group), in_float64(group), dtype, factor=2)


@pytest.fixture
def _a_little_at_once(monkeypatch):
    """Few values of a mode are staged at once, as of the widest cores."""
    monkeypatch.setattr(contract_kernel, "_STAGED", 900)
    monkeypatch.setattr(contract_kernel, "_STAGED_BACK", 1500)
    contract_kernel._walks.cache_clear()
    yield
    contract_kernel._walks.cache_clear()


@pytest.mark.parametrize("name", [*WIDE, "3+3"])
@pytest.mark.usefixtures("_wide_shapes", "thread_order", "_a_little_at_once")
def test_modes_are_staged_a_few_at_a_time(name):
    group = make(name, 1)
    walks = contract_kernel.walks(chains(group))
    assert name == "3+3" or any(
        once < mode
        for walk in walks
        for once, mode in zip(walk.at_once_back, walk.modes[1:-1], strict=True)
    )
    assert_near(run(group), in_float64(group), torch.float32, factor=2)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", ["3+3", "1+1", "vanished", "4+2", "5+8"])
@pytest.mark.usefixtures("_wide_shapes")
def test_factors_are_written_in_the_dtype_that_products_read(name, dtype, emulated):
    """Gradients of float32 cores are float32's, of what the factors' gradients were rounded to."""
    group = make(name)
    got = run_to(group, dtype)
    want = in_float64(group, dtype)
    assert [t.dtype for t in got] == [dtype] * 2 + [p.dtype for p in group.params]
    assert_near(got[:2], want[:2], dtype)
    assert_near(got[2:], want[2:], torch.float32, factor=2)


@pytest.mark.parametrize("dtype", NARROW)
def test_torch_writes_factors_in_the_dtype_asked_for(dtype):
    group = make("3+3")
    got = run_to(group, dtype)
    want = in_float64(group, dtype)
    assert [t.dtype for t in got] == [dtype] * 2 + [p.dtype for p in group.params]
    assert_near(got[:2], want[:2], dtype)
    assert_near(got[2:], want[2:], torch.float32, factor=2)


def run_to(group, dtype):
    factors = contract_groups([Chains(*group.arguments(), dtype=dtype)])
    return [*factors, *torch.autograd.grad(factors, group.params, cotangents(factors))]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tf32"),
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)],
    ids=["float32", "tf32", "bfloat16"],
)
@pytest.mark.parametrize("name", [*SHAPES, *WIDE])
@pytest.mark.usefixtures("_wide_shapes")
def test_kernels_equal_the_reference_on_a_card(name, dtype, tf32):
    """To float32 rounding where torch's own products are allowed less."""
    torch.seed()  # other numbers each time
    group = make(name, 3, dtype=dtype, device="cuda")
    assert taken_by(CONTRACT, [chains(group)]) == "kernel"
    with tf32_products(tf32):
        found = [t.cpu() for t in run(group)]
    assert_near_whatever_was_drawn(found, group, dtype)


def assert_near_whatever_was_drawn(found, group, dtype):
    """With all gates' gradients as one tensor: what one short gate's sum up to may cancel."""
    start = 2 + len(group.cores)
    end = start + len(group.gates)
    got, want = (
        [*tensors[:start], torch.cat(tensors[start:end]), *tensors[end:]]
        for tensors in (found, in_float64(group))
    )
    assert_near(got, want, dtype, factor=4)


def test_a_gate_whose_gradients_cancel_is_no_failure(emulated):
    """As every fourth draw has one."""
    torch.manual_seed(0)
    for _ in range(10):
        group = make("3+3", 3)
        assert_near_whatever_was_drawn(run(group), group, torch.float32)


@pytest.mark.gpu
def test_a_captured_step_of_a_model_follows_its_parameters():
    model = torch.nn.Sequential(*(torch.nn.Linear(48, 48) for _ in range(3))).cuda()
    comera.tensorize_(model, comera.TTConfig(rank=6))
    contracted, x = comera.BatchedContraction(model), torch.randn(5, 48, device="cuda")

    def step():
        with contracted:
            model(x).square().sum().backward()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
            model.zero_grad()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
    graph.replay()
    got = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    step()
    assert_near(got, [param.grad for param in model.parameters()], torch.float32, factor=4)


def chains(group):
    return Chains(*group.arguments())


@pytest.mark.parametrize(
    ("limits", "expected"),
    [((64, 1 << 24), (1, 2)), ((2, 1 << 24), (3, 6)), ((64, 1000), (1, 4)), ((64, 1), (1, 16))],
    ids=str,
)
def test_groups_share_launches_up_to_what_a_launch_can_carry(
    limits, expected, emulated, monkeypatch
):
    """Addresses of factors, and scratch memory: that backward alone, in two kernels."""
    monkeypatch.setattr(contract_kernel, "_MOST_FACTORS", limits[0])
    monkeypatch.setattr(contract_kernel, "_MOST_SHARES", limits[1])
    started = launches(monkeypatch)
    groups = [make("2+1", 2, bias=False), make("3+3", 5), make("1+1", 3, gated=False)]
    halves = contract_groups(list(map(chains, groups)))
    forward = len([name for name in started if name != "contract_describe"])
    params = [param for group in groups for param in group.params]
    pairs = zip(halves[::2], halves[1::2], strict=True)
    grads = [grad for pair in pairs for grad in cotangents(pair)]
    got = torch.autograd.grad(halves, params, grads)
    both = len([name for name in started if name != "contract_describe"])
    assert (forward, both - forward) == expected
    want = [in_float64(group) for group in groups]
    assert_near(halves, [t for one in want for t in one[:2]], torch.float32, factor=2)
    assert_near(got, [t for one in want for t in one[2:]], torch.float32, factor=2)


def test_a_model_is_joined_in_one_launch_and_two_backward(emulated, monkeypatch):
    """Described on the card at the first step, and again only when a parameter has moved."""
    model = torch.nn.Sequential(
        torch.nn.Linear(24, 24), torch.nn.Linear(24, 24), torch.nn.Linear(24, 20, bias=False)
    )
    comera.tensorize_(model, comera.TTConfig(rank=4))
    contracted, x = comera.BatchedContraction(model), torch.randn(3, 24)
    model(x).sum().backward()
    want = [param.grad.clone() for param in model.parameters()]
    started = launches(monkeypatch)
    names = ["contract_f32", "contract_back_last_f32", "contract_back_first_f32"]

    def step():
        model.zero_grad()
        started.clear()
        with contracted:
            model(x).sum().backward()
        return [name for name in started if name != "contract_describe"], len(started)

    assert step() == (names, 5)
    with torch.no_grad():
        kept = [core.clone() for core in model[0].cores]
        model[0].cores[0].mul_(2)  # another value in its place
    contract_kernel._kept.clear()
    step()  # gates gathered for the step may lie anywhere
    with torch.no_grad():
        for core, before in zip(model[0].cores, kept, strict=True):
            core.copy_(before)
    step()
    assert_near([param.grad for param in model.parameters()], want, torch.float32, factor=4)


def test_what_is_described_once_is_used_again(emulated, monkeypatch):
    group, started = make("3+3"), launches(monkeypatch)
    run(group)
    assert started.count("contract_describe") == 2
    run(group)
    assert started.count("contract_describe") == 2
    group.cores[0].data = group.cores[0].data.clone()
    assert_near(run(group), in_float64(group), torch.float32, factor=2)
    assert started.count("contract_describe") == 4


def test_few_descriptions_are_kept_beside_those_of_graphs(emulated, monkeypatch):
    monkeypatch.setattr(contract_kernel, "_MOST_KEPT", 4)
    groups = [make("1+1") for _ in range(9)]
    for number, group in enumerate(groups):
        contract_groups([Chains(*group.arguments())])
        if number == 0:
            (graph,) = contract_kernel._kept
            monkeypatch.setattr(contract_kernel, "_captured", {graph})
    assert len(contract_kernel._kept) <= 5
    assert graph in contract_kernel._kept


def test_results_are_the_same_each_time(emulated, monkeypatch):
    group, found = make("3+3"), []
    for order in (emulation.ASCENDING, emulation.DESCENDING, 7):
        monkeypatch.setattr(emulation, "thread_order", order)
        found.append(run(group))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize(
    ("bonds", "modes", "split", "reason"),
    [
        ((1, *(2,) * 9, 1), (2,) * 10, 9, "a side of a tensor train has 9 cores, not 1 to 8"),
        ((1, 65, 2, 2, 1), (65, 4, 4, 4), 2, "a bond is 65 wide, more than 64"),
        ((1, 64, 2, 2, 1), (500, 4, 4, 4), 2, "shared memory"),
    ],
)
def test_what_does_not_fit_is_contracted_by_torch(
    bonds, modes, split, reason, emulated, monkeypatch
):
    monkeypatch.setitem(SHAPES, "other", (bonds, modes, split))
    group = make("other", 1)
    assert reason in CONTRACT.reasons([chains(group)])["kernel"]
    assert_near(run(group), in_float64(group), torch.float32, factor=2)


@pytest.mark.parametrize(
    ("bonds", "modes"),
    [((4, 4, 8, 16, 32, 64, 64), (2, 2, 2, 2, 2, 2, 4, 4)), ((8, 64, 64), (8, 8, 8, 8))],
    ids=["eight cores", "four cores"],
)
def test_fewer_values_are_staged_where_products_leave_less_room(
    bonds, modes, emulated, monkeypatch
):
    """Wide bonds on both sides: all that is staged otherwise would be too much for a block."""
    shape = ((1, *bonds, 70, *bonds[::-1], 1), (*modes, *modes[::-1]), len(modes))
    monkeypatch.setitem(SHAPES, "full", shape)
    monkeypatch.setitem(DEEP, "full", shape)
    group = make("full", 1)
    left, _ = contract_kernel.walks(chains(group))
    core, once = len(modes) - 2, left.at_once[-1]
    assert left.shared[0] + 4 * left.staged(core, 1) > launch.MOST_SHARED
    assert left.staged(core, once + 1) <= contract_kernel._STAGED
    assert taken_by(CONTRACT, [chains(group)]) == "kernel"
    assert_near(run(group), in_float64(group), torch.float32, factor=2)


@pytest.mark.parametrize("kernel", ["contract_f32", "contract_back_first_f32"])
@pytest.mark.parametrize("name", WIDE)
@pytest.mark.usefixtures("_wide_shapes", "emulated")
def test_a_block_has_no_more_shared_memory_than_it_needs(name, kernel, monkeypatch):
    launch = contract_kernel.launch

    def with_less(*a):
        launch(*a[:5], a[5] - 256 if a[1] == kernel else a[5], *a[6:])

    monkeypatch.setattr(contract_kernel, "launch", with_less)
    with pytest.raises(KernelError, match=r"(behind the|beyond its) shared memory"):
        run(make(name, 1))


def test_a_middle_bond_may_be_of_any_width(emulated, monkeypatch):
    monkeypatch.setitem(SHAPES, "middle", ((1, 3, 130, 4, 1), (3, 44, 34, 4), 2))
    group = make("middle", 1)
    assert taken_by(CONTRACT, [chains(group)]) == "kernel"
    assert_near(run(group), in_float64(group), torch.float32, factor=2)


def test_a_second_derivative_goes_through_torch_operations(emulated):
    group = make("2+1")
    left, _ = contract_groups([Chains(*group.arguments())])
    (grad,) = torch.autograd.grad(left.square().sum(), group.cores[0], create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), group.cores[0])
    assert second.abs().sum() > 0


@pytest.mark.slow
def test_registered_soundly(emulated):
    arguments = arguments_of([chains(make("1+1"))])
    torch.library.opcheck(_contract_groups.custom_op, arguments)


def test_gradients_of_a_graph_that_kernels_were_compiled_into(emulated, monkeypatch):
    """Called where they run, and where they do not."""
    group = make("2+1", dtype=torch.bfloat16)
    cores, gates, _, *layout = arguments_of([chains(group)])
    halves = [half.detach() for half in contract_groups([Chains(*group.arguments())])]
    detached = [[tensor.detach() for tensor in one] for one in (cores, gates)]
    arguments = (halves, *detached, *layout)
    got = torch.ops.comera.contract_cores_backward(*arguments)
    monkeypatch.setattr(choose, "mode", lambda: "ref")
    want = torch.ops.comera.contract_cores_backward(*arguments)
    assert [t.dtype for t in got] == [t.dtype for t in want] == [torch.bfloat16, torch.float32]
    assert_near(got, want, torch.bfloat16, factor=2)


def test_cores_that_are_not_contiguous(emulated):
    group = make("3+3")
    for number, core in enumerate(group.cores):
        turned = core.detach().transpose(0, 2).contiguous().transpose(0, 2)
        group.cores[number] = turned.requires_grad_()
    group.params = [*group.cores, *group.gates, *group.biases]
    assert_near(run(group), in_float64(group), torch.float32, factor=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cores_may_begin_anywhere(dtype, emulated):
    group = make("3+3", dtype=dtype)
    for param in group.params:
        param.data = displaced(param.data)
    assert_near(run(group), in_float64(group), dtype, factor=2)


def test_what_kernels_do_not_take_is_joined_by_torch(emulated):
    group = make("3+3", dtype=torch.float64)
    assert taken_by(CONTRACT, [chains(group)]) == "torch"
    assert_near(run(group), in_float64(group), torch.float32, factor=1e-6)


BUGS = {
    "no barrier before rows are replaced": (r"__syncthreads\(\);  // nobody reads what is", "//"),
    "no barrier before gradients are read": (r"__syncthreads\(\);  // the gradient is whole", "//"),
    "no barrier before its place is taken": (r"__syncthreads\(\);  // nobody reads the grad", "//"),
    "no barrier before columns are summed": (r"__syncthreads\(\);  // all products", "//"),
    "no barrier before shares are read": (r"__syncthreads\(\);  // g and the staged", "//"),
    "no barrier before gated gradients are read": (r"__syncthreads\(\);  // g is gated", "//"),
    "no barrier before gates are summed": (r"__syncthreads\(\);  // all have written", "//"),
    "no barrier before the next modes": (r"__syncthreads\(\);  // nobody reads the values", "//"),
    "a row too few": (r"r1 \+ row_in \+ i < rows", "r1 + row_in + i + 1 < rows"),
    "a column too many": (r"j0 \+ column_in \+ j < columns\)", "j0 + column_in + j <= columns)"),
    "a share forgotten": (r"b < d\.blocks; \+\+b\)\n#pragma", "b + 1 < d.blocks; ++b)\n#pragma"),
    "modes in the wrong order": (
        r"mode \* rows_before \+ before : ", "before * d.mode[s] + mode : ",
    ),
    "pruned gates let through": (r"gate\[c\] > threshold \?", "true ?"),
    "gradients of pruned gates": (r"> block\.d\.threshold \? sum : 0", ">= 0 ? sum : 0"),
    "a wrong sign": (r"of_gate \+= ungated", "of_gate -= ungated"),
    "the bias a row too early": (r"c == d\.width - 1", "c == d.width - 2"),
    "a gate too few": (r"s \+ 1 < d\.cores &&", "s + 1 < d.cores && s < 6 &&"),
    "a stage made from another": (r"float\* before = p;", "float* before = block.room + room[0];"),
    "a stage in the place of the one before": (r"room \+ room\[s\]", "room + room[s - 1]"),
    "no barrier before a stage is read": (r"__syncthreads\(\);  // P_s-1 and the staged", "//"),
    "a stage left out backward": (r"int s = last - 1; s > 0; --s", "int s = last - 1; s > 1; --s"),
    "another stage's gradient": (r"d\.room_back\[s \+ 1\]", "d.room_back[s]"),
    "shares instead of a gradient": (r"s \+ 2 < d\.cores", "s + 3 < d.cores"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("bug", some(BUGS))
@pytest.mark.usefixtures("_wide_shapes", "_a_little_at_once")
def test_planted_bugs_are_caught(bug, plant, monkeypatch):
    pattern, instead = BUGS[bug]
    mutant, count = re.subn(pattern, instead, launch.text("contract_f32"), count=1)
    assert count == 1
    plant(mutant, "")
    groups = [make(name, 1) for name in ("2+4", "3+3", "5+8")]
    wants = [in_float64(group) for group in groups]
    off = []
    for order in (emulation.ASCENDING, emulation.DESCENDING, 7):
        monkeypatch.setattr(emulation, "thread_order", order)
        try:
            gots = [run(group) for group in groups]
        except KernelError:
            return
        pairs = zip(gots, wants, strict=True)
        off += [distance(a, b) for got, want in pairs for a, b in zip(got, want, strict=True)]
    assert not all(far <= 2e-6 for far in off)  # NaN is caught too
