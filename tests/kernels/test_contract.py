import re

import pytest
import torch

import comera
from comera.ops.cores import Chains
from comera.ops.factors import CONTRACT, contract_cores, contract_groups, layout_of
from comera.ops.kernels import choose, contract_kernel, emulate, nvrtc
from comera.ops.kernels.choose import KernelWarning
from comera.ops.kernels.nvrtc import KernelError
from tests.kernels.numbers import assert_near, distance
from tests.ops.test_factors import SHAPES, Group

WIDE = {  # more rows, columns and depth than a tile has
    "4+2": ((1, 3, 17, 36, 5, 2, 1), (2, 3, 7, 5, 4, 9), 4),
    "2+4": ((1, 9, 33, 18, 5, 3, 1), (5, 9, 3, 7, 3, 2), 2),
}
DTYPES = [torch.float32, torch.bfloat16]


def make(name, num_layers=2, gated=True, bias=True, dtype=torch.float32, device="cpu"):
    group = Group(name, num_layers, gated, bias, dtype)
    for param in group.params:
        param.data = param.data.to(device)
    return group


def run(group):
    """Halves, then gradients of every parameter for a random gradient of each half."""
    halves = contract_cores(*group.arguments())
    return [*halves, *torch.autograd.grad(halves, group.params, cotangents(halves))]


def cotangents(halves):
    made = torch.Generator().manual_seed(5)
    return [
        torch.randn(half.shape, generator=made).to(half.dtype).to(half.device) for half in halves
    ]


def in_float64(group):
    """The same by the plain reference."""
    wide = Group.__new__(Group)
    vars(wide).update(vars(group))
    params = iter([p.detach().double().cpu().requires_grad_() for p in group.params])
    for name in ("cores", "gates", "biases"):
        setattr(wide, name, [next(params) for _ in getattr(group, name)])
    halves = wide.reference()
    narrow = [torch.empty(half.shape, dtype=group.cores[0].dtype) for half in halves]
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
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_equal_the_reference(name, gated, bias, dtype, emulated):
    group = make(name, 2, gated, bias, dtype)
    assert_near(run(group), in_float64(group), dtype, factor=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WIDE)
@pytest.mark.usefixtures("_wide_shapes", "thread_order")
def test_kernels_equal_the_reference_beyond_one_tile_in_any_order_of_threads(name, dtype):
    group = make(name, 1, dtype=dtype)
    assert_near(run(group), in_float64(group), dtype, factor=2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tf32"),
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)],
    ids=["float32", "tf32", "bfloat16"],
)
@pytest.mark.parametrize("name", [*SHAPES, *WIDE])
@pytest.mark.usefixtures("_wide_shapes")
def test_kernels_equal_the_reference_on_a_card(name, dtype, tf32, monkeypatch):
    """To float32 rounding where torch's own products are allowed less."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", tf32)
    torch.seed()  # other numbers each time
    group = make(name, 3, dtype=dtype, device="cuda")
    assert CONTRACT.chosen([chains(group)]) == "kernel"
    assert_near([t.cpu() for t in run(group)], in_float64(group), dtype, factor=2)


@pytest.mark.gpu
def test_a_captured_step_of_a_model_follows_its_parameters():
    model = torch.nn.Sequential(*(torch.nn.Linear(48, 48) for _ in range(3))).cuda()
    comera.tensorize_(model, comera.TTConfig(rank=6))
    merged, x = comera.GroupedMerge(model), torch.randn(5, 48, device="cuda")

    def step():
        with merged:
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


def contracted_at_once(groups):
    lists, layout = [[], [], []], []
    for group in groups:
        *tensors, num_layers, split, _ = group.arguments()
        for whole, part in zip(lists, tensors, strict=True):
            whole.extend(part)
        layout += layout_of(*tensors, num_layers, split)
    return contract_groups(*lists, layout, [0.01] * len(groups))


@pytest.mark.parametrize("limits", [(16, 1536), (2, 1536), (16, 40)], ids=str)
def test_groups_share_launches_up_to_what_a_launch_can_carry(limits, emulated, monkeypatch):
    """Smaller limits than the kernel's are kept by it too."""
    monkeypatch.setattr(contract_kernel, "_MOST_GROUPS", limits[0])
    monkeypatch.setattr(contract_kernel, "_MOST_POINTERS", limits[1])
    started, launch = [], contract_kernel.launch
    monkeypatch.setattr(contract_kernel, "launch", lambda *a: started.append(a[1]) or launch(*a))
    groups = [make("2+1", 2, bias=False), make("3+3", 5), make("1+1", 3, gated=False)]
    halves = contracted_at_once(groups)
    launches = len(started)
    params = [param for group in groups for param in group.params]
    pairs = zip(halves[::2], halves[1::2], strict=True)
    grads = [grad for pair in pairs for grad in cotangents(pair)]
    got = torch.autograd.grad(halves, params, grads)
    # Backward has no biases to carry, and two kernels.
    expected = {(16, 1536): (1, 3), (2, 1536): (2, 6), (16, 40): (3, 7)}
    assert (launches, len(started)) == expected[limits]
    want = [in_float64(group) for group in groups]
    assert_near(halves, [t for one in want for t in one[:2]], torch.float32, factor=2)
    assert_near(got, [t for one in want for t in one[2:]], torch.float32, factor=2)


def test_a_model_is_joined_in_one_launch_and_two_backward(emulated, monkeypatch):
    model = torch.nn.Sequential(
        torch.nn.Linear(24, 24), torch.nn.Linear(24, 24), torch.nn.Linear(24, 20, bias=False)
    )
    comera.tensorize_(model, comera.TTConfig(rank=4))
    merged, x = comera.GroupedMerge(model), torch.randn(3, 24)
    model(x).sum().backward()
    want = [param.grad.clone() for param in model.parameters()]
    started, launch = [], contract_kernel.launch
    model.zero_grad()
    monkeypatch.setattr(contract_kernel, "launch", lambda *a: started.append(a[1]) or launch(*a))
    with merged:
        model(x).sum().backward()
    assert started == ["contract_f32", "contract_back_factors_f32", "contract_back_cores_f32"]
    assert_near([param.grad for param in model.parameters()], want, torch.float32, factor=4)


def test_a_second_derivative_goes_through_torch_operations(emulated):
    group = make("2+1")
    left, _ = contract_cores(*group.arguments())
    (grad,) = torch.autograd.grad(left.square().sum(), group.cores[0], create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), group.cores[0])
    assert second.abs().sum() > 0


def test_registered_soundly(emulated):
    *tensors, num_layers, split, threshold = make("1+1").arguments()
    layout = layout_of(*tensors, num_layers, split)
    torch.library.opcheck(contract_groups.custom_op, (*tensors, layout, [threshold]))


def test_gradients_of_a_graph_that_kernels_were_compiled_into(emulated, monkeypatch):
    """Called where they run, and where they do not."""
    group = make("2+1", dtype=torch.bfloat16)
    *tensors, num_layers, split, threshold = group.arguments()
    halves = [half.detach() for half in contract_cores(*group.arguments())]
    detached = [[tensor.detach() for tensor in one] for one in tensors]
    layout = layout_of(*tensors, num_layers, split)
    arguments = (halves, *detached[:2], layout, [threshold])
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


def test_what_kernels_do_not_take_is_joined_by_torch(emulated, recwarn):
    group = make("3+3", dtype=torch.float64)
    assert CONTRACT.chosen([chains(group)]) == "torch"
    assert_near(run(group), in_float64(group), torch.float32, factor=1e-6)
    assert not [w for w in recwarn if w.category is KernelWarning]  # on a CPU nothing is missed


BUGS = {
    "no barrier before tiles are filled": (r"__syncthreads\(\);  // nobody", "//"),
    "no barrier before tiles are read": (
        r"__syncthreads\(\);\n +const int depth", "const int depth",
    ),
    "no barrier before gates are summed": (r"= gate_sum;\n  __syncthreads\(\);", "= gate_sum;"),
    "a row too few": (r"m < M && n < N\) store", "m + 1 < M && n < N) store"),
    "modes in the wrong order": (r"j \* rows \+ before", "before * modes + j"),
    "pruned gates let through": (r"gate\[c\] > threshold", "true"),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.usefixtures("_wide_shapes")
def test_planted_bugs_are_caught(bug, plant, monkeypatch):
    pattern, instead = BUGS[bug]
    mutant, count = re.subn(pattern, instead, nvrtc.text(choose.CONTRACT), count=1)
    assert count == 1
    plant(mutant)
    group = make("2+4", 1)
    want = in_float64(group)
    off = []
    for order in (emulate.ASCENDING, emulate.DESCENDING, 7):
        monkeypatch.setattr(emulate, "order", order)
        try:
            got = run(group)
        except KernelError:
            return
        off += [distance(one, other) for one, other in zip(got, want, strict=True)]
    assert not all(far <= 2e-6 for far in off)  # NaN is caught too
