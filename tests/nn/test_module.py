"""What every tensor-train module does alike: saving, copying, moving, casting."""

import _thread
import copy
import importlib
import inspect
import io
import pickle
import queue

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from comera.nn.batched_contraction import BatchedContraction
from comera.nn.convert import densify_, tensorize_
from comera.nn.embedding import TTEmbedding, TTEmbeddingBag
from comera.nn.linear import BTTLinear, CompressedLinear, TTLinear
from comera.nn.module import tensor_trains
from comera.nn.targets import TTConfig
from comera.rank.two_stage import TwoStage
from comera.serving.freeze import to_plain_
from comera.surgery.canonical import canonicalize_
from comera.surgery.truncate import truncate_
from tests.peers import peer

MODULES = {
    "linear": lambda rank=4, **kw: TTLinear(24, 18, rank=rank, **kw),
    "no bias": lambda rank=4, **kw: TTLinear(23, 18, False, rank=rank, shape=((4, 6), (18,)), **kw),
    "blocks": lambda rank=4, **kw: BTTLinear(24, 18, rank=rank, shape=((4, 6), (3, 6)), **kw),
    "embedding": lambda rank=4, **kw: TTEmbedding(50, 12, 3, rank=rank, order=3, **kw),
    "hot rows": lambda rank=4, **kw: TTEmbedding(50, 12, rank=rank, hot_rows=5, order=3, **kw),
    "hot rank": lambda rank=4, **kw: TTEmbedding(50, 12, rank=rank, hot_rows=9, hot_rank=2, **kw),
    "bag": lambda rank=4, **kw: TTEmbeddingBag(50, 12, rank=rank, order=3, **kw),
}
TWINS = [
    (TTLinear, nn.Linear),
    (BTTLinear, nn.Linear),
    (TTEmbedding, nn.Embedding),
    (TTEmbeddingBag, nn.EmbeddingBag),
]
NARROW = [torch.bfloat16, torch.float16]


@pytest.fixture(params=MODULES)
def make(request):
    return MODULES[request.param]


def example(module):
    if isinstance(module, CompressedLinear):
        return torch.randn(3, module.in_features, dtype=module.cores[0].dtype)
    return torch.randint(50, (3, 4))


def shrunk(module, rank=2):
    """The same module as a truncation would leave it: every bond cut, parameters the same."""
    cores = [core[..., :rank] for core in module.cores[:-1]] + [module.cores[-1]]
    cores = [cores[0]] + [core[:rank] for core in cores[1:]]
    module.set_cores_([core.detach().clone() for core in cores])
    return module


@torch.no_grad()
def opened(module):
    """The module with gates that are not one, which tell bonds apart."""
    for train in tensor_trains(module).values():
        for gate in train.gates:
            gate.uniform_(0.3, 1.5)
    return module


def ids_of_gates(module):
    return {id(gate) for train in tensor_trains(module).values() for gate in train.gates}


def assert_same(one, other):
    x = example(one)
    assert torch.equal(one(x), other(x))
    assert one.ranks == other.ranks
    assert repr(one) == repr(other)


@pytest.mark.parametrize(("ours", "torchs"), TWINS)
@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_signature_starts_with_torchs(ours, torchs, method):
    mine = list(inspect.signature(getattr(ours, method)).parameters.values())
    theirs = [
        p
        for p in inspect.signature(getattr(torchs, method)).parameters.values()
        if not p.name.startswith("_")
    ]
    for got, want in zip(mine, theirs, strict=False):
        assert (got.name, got.default, got.kind) == (want.name, want.default, want.kind)
    assert len(mine) >= len(theirs)
    assert all(p.kind is p.KEYWORD_ONLY for p in mine[len(theirs) :])


@pytest.mark.parametrize(
    ("ours", "torchs", "args"),
    [
        (TTLinear, nn.Linear, (24, 18)),
        (BTTLinear, nn.Linear, (24, 18)),
        (TTEmbedding, nn.Embedding, (50, 12, -1)),
        (TTEmbeddingBag, nn.EmbeddingBag, (50, 12)),
    ],
)
def test_attributes_are_torchs(ours, torchs, args):
    mine, theirs = ours(*args), torchs(*args)
    names = [n for n in vars(theirs) if not n.startswith("_") and n != "training"]
    assert {n: getattr(mine, n) for n in names} == {n: getattr(theirs, n) for n in names}
    assert mine.weight.shape == theirs.weight.shape
    assert mine.weight.dtype == theirs.weight.dtype
    assert mine.training


def test_a_full_rank_module_takes_the_ranks_of_a_truncated_file(make):
    small, full = shrunk(make()), make()
    params = list(full.parameters())
    full.load_state_dict(small.state_dict())
    assert_same(small, full)
    assert all(a is b for a, b in zip(params, full.parameters(), strict=True))
    assert full.start_ranks == make().start_ranks


def test_a_truncated_module_takes_the_ranks_of_a_full_file(make):
    small, full = shrunk(make()), make()
    small.load_state_dict(full.state_dict())
    assert_same(small, full)


def test_gates_that_a_file_of_other_ranks_lacks_are_ones(make):
    state = {key: part for key, part in shrunk(make()).state_dict().items() if "gates" not in key}
    module = make()
    module.load_state_dict(state, strict=False)
    assert all((gate == torch.ones(2)).all() for gate in module.gates)


def test_other_ranks_load_inside_a_model(make):
    small, full = nn.Sequential(nn.ReLU(), shrunk(make())), nn.Sequential(nn.ReLU(), make())
    full.load_state_dict(small.state_dict())
    assert_same(small[1], full[1])


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        (((4, 6), (3, 6)), ((6, 4), (3, 6))),
        (((4, 6), (3, 6)), ((24,), (18,))),
        (((4, 6), (18,)), ((4, 6), (3, 6))),
    ],
    ids=["other order", "fewer", "more"],
)
def test_other_modes_do_not_load(mine, other):
    mine, other = (TTLinear(24, 18, rank=2, shape=shape) for shape in (mine, other))
    before = copy.deepcopy(mine)
    with pytest.raises(RuntimeError, match=r"size mismatch|Missing key|Unexpected key"):
        mine.load_state_dict(other.state_dict())
    assert mine.ranks == before.ranks


@pytest.mark.parametrize(
    "twin",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
    ids=["deepcopy", "pickle"],
)
def test_copies(make, twin):
    module = shrunk(make())
    copied = twin(module)
    assert_same(module, copied)
    assert {p.data_ptr() for p in module.parameters()}.isdisjoint(
        p.data_ptr() for p in copied.parameters()
    )
    assert copied.bfloat16().gates[0].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_a_type_that_is_not_floating_is_refused(make, dtype):
    with pytest.raises(ValueError, match=rf"dtype={dtype} must be a floating-point type of 16"):
        make(dtype=dtype)


@pytest.mark.parametrize("init", ["orthogonal", "normal"])
def test_a_deviation_below_zero_is_refused(make, init):
    module = make()
    before = module.weight.detach().clone()
    with pytest.raises(ValueError, match=r"std=-0\.5 must be at least 0"):
        module.reset_parameters(-0.5, init)
    assert torch.equal(module.weight, before)


def test_a_weight_of_complex_numbers_is_refused(make):
    module = make()
    with pytest.raises(TypeError, match="must be a tensor of real numbers"):
        module.weight = module.weight.detach().to(torch.complex64)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_gates_of_an_assigned_state_are_wide(make, dtype):
    module, other = make(), make()
    state = {key: value.to(dtype) for key, value in module.state_dict().items()}
    other.load_state_dict(state, assign=True)
    assert all(core.dtype == dtype for core in other.cores)
    assert {gate.dtype for train in tensor_trains(other).values() for gate in train.gates} == {
        torch.float32
    }
    assert all(param.requires_grad for param in other.parameters())
    assert_same(module.to(dtype), other)


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.channels_last_3d], ids=str)
def test_formats_of_pictures_leave_cores_alone(make, memory_format):
    module = make()
    kept, x = copy.deepcopy(module), example(module)
    module(x).sum().backward()
    rank = 4 if memory_format is torch.channels_last else 5
    model = nn.ModuleList([module, nn.Conv2d(3, 3, 2) if rank == 4 else nn.Conv3d(3, 3, 2)])
    for change in ({"memory_format": memory_format}, {"dtype": torch.float64}):
        model.to(**change)
        strides = [[param.stride() for param in layer.parameters()] for layer in (module, kept)]
        assert strides[0] == strides[1]
        assert model[1].weight.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(module.weight, kept.double().weight, rtol=1e-6, atol=1e-6)


def test_modules_made_in_inference_mode_can_be_trained(make):
    with torch.inference_mode():
        module = make()
    is_table = hasattr(module, "num_embeddings")
    module(torch.arange(50).view(5, 10) if is_table else example(module)).square().sum().backward()
    before = [param.detach().clone() for param in module.parameters()]
    torch.optim.SGD(module.parameters(), 0.1).step()
    assert not any(map(torch.equal, before, module.parameters()))


@pytest.mark.parametrize(
    ("cast", "dtype"),
    [
        (lambda m: m.half(), torch.float16),
        (lambda m: m.bfloat16(), torch.bfloat16),
        (lambda m: m.to(torch.bfloat16), torch.bfloat16),
        (lambda m: m.to("cpu", torch.float16), torch.float16),
        (lambda m: nn.Sequential(m).bfloat16()[0], torch.bfloat16),
        (lambda m: m.bfloat16().float().half(), torch.float16),
    ],
    ids=["half", "bfloat16", "to", "to device and dtype", "in a model", "there and back"],
)
def test_gates_stay_wide_and_exact(make, cast, dtype):
    module = make()
    with torch.no_grad():
        for gate in module.gates:
            gate.fill_(0.0099999)  # pruned; rounded to bfloat16 it would pass the threshold
    before = [(gate, gate.detach().clone()) for gate in module.gates]
    cast(module)
    assert all(core.dtype == dtype for core in module.cores)
    for gate, (same, values) in zip(module.gates, before, strict=True):
        assert gate is same
        assert gate.dtype == torch.float32
        assert torch.equal(gate, values)
    assert module.live_ranks == (0,) * len(module.gates)


def test_double_makes_everything_double(make):
    module = make().double()
    assert {p.dtype for p in module.parameters()} == {torch.float64}
    assert module.weight.dtype == torch.float64


def test_autocast_rounds_no_dense_weight(make):
    module = make(rank=2)
    want = module.weight.detach()
    with torch.autocast("cpu", torch.bfloat16):
        weight, dense = module.weight, module.to_dense()
        approximate = getattr(type(module), "from_linear", None) or type(module).from_embedding
        again = approximate(dense, tolerance=1e-4)
        error = module.set_weight_(want, tolerance=1e-4)
    assert torch.equal(weight, want)
    assert torch.equal(dense.weight, want)
    assert (again.weight - want).norm() <= 1e-4 * want.norm()
    assert error <= 1e-4


def test_pruned_gates_close_their_ranks(make):
    module, twin = make().double(), make().double()
    with torch.no_grad():
        for gate in module.gates:
            gate[0] = module.prune_below
    assert module.live_ranks == tuple(rank - 1 for rank in module.ranks)
    twin.load_state_dict(module.state_dict())
    last = len(module.gates)
    twin.set_cores_([c[min(k, 1) :][..., int(k < last) :] for k, c in enumerate(module.cores)])
    torch.testing.assert_close(twin.weight, module.weight)
    x = example(module)
    torch.testing.assert_close(twin(x), module(x))


def test_repr_names_modes_and_ranks(make):
    module = shrunk(make())
    assert type(module).__name__ in repr(module)
    assert "ranks=[2, 2" in repr(module) or "ranks=[2]" in repr(module)


def test_a_replica_of_data_parallel_keeps_its_gates(make, monkeypatch):
    def copies(tensors, devices, detach=False):  # as if of two cards
        return [[tensor * 1 for tensor in tensors] for _ in devices]

    replicate = importlib.import_module("torch.nn.parallel.replicate")
    monkeypatch.setattr(replicate, "_broadcast_coalesced_reshape", copies)
    module = opened(make())
    x = example(module)
    for replica in replicate.replicate(module, [0, 1]):
        assert torch.equal(replica(x), module(x))


class Same(nn.Module):
    def forward(self, param):
        return param * 1

    def right_inverse(self, param):
        return param


@pytest.mark.parametrize("part", ["cores", "gates"])
def test_bonds_keep_their_order_when_a_tensor_is_computed(make, part):
    """By ``parametrize`` or ``prune``, and once that is removed, which registers it anew."""
    module = opened(make())
    x, params = example(module), getattr(module, part)
    want = module(x).detach()
    for change in (
        lambda: parametrize.register_parametrization(params, "0", Same()),
        lambda: parametrize.remove_parametrizations(params, "0"),
        lambda: prune.identity(params, "0"),
        lambda: prune.remove(params, "0"),
    ):
        change()
        for _ in range(2):  # as each step computes it anew
            module.zero_grad()
            found = module(x)
            torch.testing.assert_close(found, want)
            found.square().sum().backward()
            assert all(param.grad.any() for param in params.parameters())
        if isinstance(module, TTLinear):
            with BatchedContraction(module):
                torch.testing.assert_close(module(x), want)
            torch.testing.assert_close(module.to_dense()(x), want)


@pytest.mark.parametrize("part", ["cores", "gates"])
def test_what_writes_to_computed_tensors_is_refused(make, part):
    module, file = make(), shrunk(make()).state_dict()
    parametrize.register_parametrization(getattr(module, part), "0", Same())
    before = module.weight.clone()
    for write in (
        lambda: module.set_weight_(torch.zeros_like(before)),
        lambda: truncate_(module),
        lambda: canonicalize_(module),
        lambda: TwoStage(module, 0.5, 2, 2),
    ):
        with pytest.raises(ValueError, match=rf"{part}.0 is computed from other tensors"):
            write()
    assert torch.equal(module.weight, before)
    with pytest.raises(ValueError, match=rf"{part}.0 is computed from other tensors"):
        module.load_state_dict(file)
    assert module.ranks == make().ranks


def test_tensor_trains_lists_each_layer_once(make):
    module = make()
    model = nn.ModuleDict({"a": module, "b": module, "c": nn.Linear(2, 2), "d": make()})
    assert [name for name in tensor_trains(model) if "hot" not in name] == ["a", "d"]


def test_what_a_layer_says_of_its_size_counts_all_of_it():
    table = TTEmbedding(2000, 32, rank=8, hot_rows=100)
    stored = sum(param.numel() for param in table.parameters())
    assert f"{2000 * 32 / stored:.1f}x smaller" in repr(table)
    layer = TTLinear(128, 64, rank=10_000)
    assert layer.num_stored > 128 * 64
    assert f"{layer.num_stored / (128 * 64):.1f}x larger" in repr(layer)


def onnx_of(dynamo):
    def export(model):
        peer("onnxscript")
        torch.onnx.export(model, (torch.randn(3, 24),), io.BytesIO(), dynamo=dynamo)

    return export


@pytest.mark.parametrize(
    ("read", "make"),
    [
        (torch.jit.script, lambda: TTEmbedding(50, 24, rank=2)),
        (torch.jit.script, lambda: TTLinear(24, 24, rank=2)),
        (torch.fx.symbolic_trace, lambda: TTEmbedding(50, 24, rank=2)),
        (torch.fx.symbolic_trace, lambda: BTTLinear(24, 24, rank=2)),
        (onnx_of(True), lambda: TTLinear(24, 24, rank=2)),
        (onnx_of(False), lambda: TTLinear(24, 24, rank=2)),
        (onnx_of(False), lambda: BTTLinear(24, 24, rank=2)),
    ],
)
@pytest.mark.filterwarnings("ignore")  # said inside the exporter
def test_what_reads_only_layers_of_torch_is_told_how_to_get_them(read, make):
    model = nn.Sequential(make())
    convert = densify_ if isinstance(model[0], BTTLinear) else to_plain_
    with pytest.raises(Exception, match=rf"cannot read a .*: comera.{convert.__name__}\(copy.d"):
        read(model)
    read(convert(copy.deepcopy(model)))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_a_weight_cannot_be_parametrized_and_a_bias_can():
    layer = TTLinear(24, 24, rank=2)
    for norms in (parametrizations, nn.utils):
        for norm in (norms.weight_norm, norms.spectral_norm):
            with pytest.raises(ValueError, match=r"weight of a .* is computed .*exclude_modules"):
                norm(copy.deepcopy(layer))
    assert not parametrize.is_parametrized(layer)
    found = queue.SimpleQueue()  # a frame without another below it, as at a script's top level
    _thread.start_new_thread(lambda: found.put(hasattr(layer, "parametrizations")), ())
    assert found.get(timeout=10) is False
    parametrize.register_parametrization(layer, "bias", nn.Tanh())
    assert parametrize.is_parametrized(layer, "bias")
    assert layer(torch.zeros(1, 24)).abs().max() < 1


def test_parts_of_a_model_may_be_differentiated_one_after_the_other():
    layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))
    tensorize_(layers, TTConfig(rank=2, init="orthogonal", tokens=1 << 16))
    x = torch.randn(5, 32)
    actor, critic = (nn.Sequential(*part)(x).sum() for part in (layers[:4], layers[4:]))
    actor.backward()
    critic.backward()
    assert all(layer.cores[0].grad.any() for layer in layers)


@pytest.mark.parametrize("name", MODULES)
def test_rows_of_any_length_are_taken_as_a_nested_tensor(name):
    module = MODULES[name](dtype=torch.float64)
    wide, size = isinstance(module, CompressedLinear), getattr(module, "in_features", 0)
    rows = [torch.randn(n, size).double() if wide else torch.randint(50, (n,)) for n in (5, 1, 9)]
    given = torch.nested.nested_tensor(rows, layout=torch.jagged)
    found, wanted = module(given), module.to_dense()(given)
    if wanted.is_nested:
        (found + wanted).values().sum().backward()  # of one structure
        found, wanted = found.values(), wanted.values()
    else:
        found.sum().backward()
        offsets = given.offsets()[:-1]
        assert torch.equal(found, module(given.values(), offsets))
    torch.testing.assert_close(found, wanted)
    assert all(param.grad is not None for param in module.parameters())


# torch warns once in a process that nested tensors are a prototype of its own.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("linear_format", ["tt", "btt"])
def test_encoders_and_feed_forward_parts_take_nested_tensors(linear_format):
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    part = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    config = TTConfig(rank=1, linear_format=linear_format, init="orthogonal")
    rows = [torch.randn(n, 32) for n in (20, 3, 17)]
    for model in (nn.TransformerEncoder(layer, 1).eval(), part):
        tensorize_(model, config)
        with torch.no_grad():
            found = model(torch.nested.nested_tensor(rows))
            for x, y in zip(rows, found.unbind(), strict=True):
                torch.testing.assert_close(y, model(x[None])[0])
