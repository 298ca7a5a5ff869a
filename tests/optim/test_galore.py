import copy
import io
import math
import pickle
import warnings
from statistics import median
from time import perf_counter

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import functional as F

import comera
from comera.models.transformer import Encoder, SequenceClassifier
from comera.optim.galore import (
    PROJ_TYPES,
    GaLore,
    GaLoreAdafactor,
    GaLoreAdamW,
    basis_shapes,
    into_subspace,
    low_shape,
    new_bases,
    out_of_subspace,
)
from tests.peers import peer

RANK = 8


def make_model(dtype=torch.float32, dropout=0.0):
    torch.manual_seed(0)
    encoder = Encoder(300, 64, 2, 2, 128, 16, dropout, 2, "post")
    return SequenceClassifier(encoder, 3, dropout).to(dtype)


def groups(model, **settings):
    settings = {"rank": RANK, "update_proj_gap": 10, **settings}
    rank = settings.pop("rank")
    return comera.galore_param_groups(model, 1e-3, rank, weight_decay=0.0, **settings)


def backward(model, k):
    generator = torch.Generator().manual_seed(k)
    tokens = torch.randint(1, 300, (8, 16), generator=generator)
    labels = torch.randint(0, 3, (8,), generator=generator)
    loss = F.cross_entropy(model(tokens).float(), labels)
    loss.backward()
    return float(loss.detach())


def train(model, optimizer, first, last):
    losses = []
    for k in range(first, last):
        losses.append(backward(model, k))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def bases_by_svd(grad_MN, rank, proj_type, seed):
    """The leading singular vectors themselves, as galore-torch takes them."""
    u_MK, _, v_KN = torch.linalg.svd(grad_MN, full_matrices=False)
    bases = {"left": u_MK[:, :rank].contiguous(), "right": v_KN[:rank].contiguous()}
    return {side: bases[side] for side in basis_shapes(grad_MN, rank, proj_type)}


def train_alike(a, other, b, ours, steps):
    """On the gradients of ``a``: a closed loop would multiply rounding errors."""
    for k in range(steps):
        backward(a, k)
        for mine, its in zip(b.parameters(), a.parameters(), strict=True):
            mine.grad = None if its.grad is None else its.grad.clone()
        other.step()
        ours.step()
        other.zero_grad()


@pytest.fixture
def eight_bit():
    """torchao's optimizer, its steps not compiled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torchao's own making
        peer("torchao.optim")
        with torch.compiler.set_stance("force_eager"):
            yield comera.GaLoreAdamW8bit


@pytest.mark.parametrize("proj_type", PROJ_TYPES)
def test_trajectory_equals_that_of_galore_torch(proj_type, monkeypatch):
    """Once the randomized range finder has made way for the exact decomposition they take."""
    theirs = peer("galore_torch")
    monkeypatch.setattr("comera.optim.galore.new_bases", bases_by_svd)
    a, b = make_model(), make_model()
    eps = 1e-20  # next to nothing: theirs lacks the bias correction that torch gives it
    other = theirs.GaLoreAdamW(
        groups(a, proj_type=proj_type), lr=1e-3, eps=eps, no_deprecation_warning=True
    )
    ours = GaLoreAdamW(groups(b, proj_type=proj_type), eps=eps)
    train_alike(a, other, b, ours, 50)
    # In both its singular bases a gradient is diagonal: off it is rounding noise, which Adam scales
    # to full steps.
    atol = 5e-4 if proj_type == "full" else 2e-5
    for mine, its in zip(b.parameters(), a.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=atol)


def test_a_bfloat16_subspace_stays_orthonormal_where_theirs_does_not():
    """galore-torch rounds the basis to the parameter's dtype; ours stays float32."""
    grad = torch.randn(64, 96).bfloat16()
    basis = new_bases(grad, RANK, "std", 0)["left"]
    off = basis.T @ basis - torch.eye(RANK)
    rounded = basis.bfloat16().float()
    assert off.abs().max() < 1e-5 < (rounded.T @ rounded - torch.eye(RANK)).abs().max()


@pytest.mark.parametrize("proj_type", PROJ_TYPES)
@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (30, 30)], ids=str)
def test_subspaces(shape, proj_type):
    torch.manual_seed(0)
    signal = torch.randn(shape[0], 4) @ torch.randn(4, shape[1])
    grad = signal + 1e-3 * torch.randn(shape)
    state = torch.get_rng_state()
    bases = new_bases(grad, 6, proj_type, 3)
    assert torch.equal(state, torch.get_rng_state())
    low = into_subspace(grad, bases)
    assert low.shape == low_shape(grad, 6, proj_type)
    for basis in bases.values():
        small = basis.T @ basis if basis.shape[0] > 6 else basis @ basis.T
        torch.testing.assert_close(small, torch.eye(6), rtol=0, atol=1e-5)
    # the leading directions are all in it
    torch.testing.assert_close(out_of_subspace(low, bases), grad, rtol=0, atol=2e-2)
    again, other = (new_bases(grad, 6, proj_type, seed) for seed in (3, 4))
    assert all(torch.equal(bases[side], again[side]) for side in bases)
    assert not any(torch.equal(bases[side], other[side]) for side in bases)


@pytest.mark.parametrize("size", [1e-25, 1e19, 1e30])
def test_bases_of_gradients_whose_squares_no_float32_holds(size):
    grad = torch.randn(40, 60, generator=torch.Generator().manual_seed(0))
    found, wanted = (new_bases(g, 6, "std", 3)["left"] for g in (grad * size, grad))
    assert torch.allclose(found.T @ wanted, torch.eye(6), atol=1e-4)


def test_weight_decay_is_that_of_the_inner_optimizer():
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(20, 30))
    start = param.detach().clone()
    group = {"params": [param], "rank": 4, "update_proj_gap": 5}
    optimizer = GaLoreAdamW([group], lr=0.1, weight_decay=0.5)
    param.grad = torch.zeros_like(param)  # no step is taken, but the decay is
    optimizer.step()
    torch.testing.assert_close(param.detach(), start * (1 - 0.1 * 0.5))
    coupled = GaLore([group], torch.optim.SGD, lr=0.1, weight_decay=0.5)
    param.grad = torch.zeros_like(param)
    before = param.detach().clone()
    coupled.step()  # an L2 penalty is part of the gradient, and so is projected
    assert torch.linalg.matrix_rank(before - param.detach()) == 4


@pytest.mark.slow
def test_eight_bit_state_resumes_exactly(eight_bit):
    def make():
        torch.manual_seed(0)
        param = nn.Parameter(torch.randn(128, 256))
        group = {"params": [param], "rank": 64, "update_proj_gap": 4}
        return param, eight_bit([group], lr=1e-2)

    def steps(param, optimizer, first, last):
        for k in range(first, last):
            generator = torch.Generator().manual_seed(k)
            param.grad = torch.randn(128, 256, generator=generator)
            optimizer.step()

    a, first = make()
    steps(a, first, 0, 6)
    file = io.BytesIO()
    torch.save((a.detach(), first.state_dict()), file)
    steps(a, first, 6, 12)
    b, second = make()
    file.seek(0)
    weight, state = torch.load(file, weights_only=True)
    assert state["state"][0]["exp_avg"].codes.dtype == torch.uint8
    b.data.copy_(weight)
    second.load_state_dict(state)
    steps(b, second, 6, 12)
    assert torch.equal(a, b)


def test_a_state_that_does_not_fit_is_refused_and_nothing_changes():
    a, b = make_model(), make_model()
    first, second = GaLoreAdamW(groups(a)), GaLoreAdamW(groups(b, rank=4))
    train(a, first, 0, 2)
    train(b, second, 0, 2)
    before = str(second.state_dict())
    with pytest.raises(ValueError, match=r"do not fit a parameter of shape \(64, 64\) at rank=4"):
        second.load_state_dict(first.state_dict())
    assert str(second.state_dict()) == before


def test_bad_gradients():
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(20, 30))
    start = param.detach().clone()
    optimizer = GaLoreAdamW(
        [{"params": [param], "rank": 4, "update_proj_gap": 2}],
        lr=0.1, weight_decay=0.0,
    )  # fmt: skip
    param.grad = torch.zeros(20, 30)
    optimizer.step()  # as torch.distributed.checkpoint does to find the names of the state
    assert torch.equal(param, start)
    assert "galore_left" not in optimizer.state[param]
    for _ in range(2):
        param.grad = torch.randn(20, 30)
        optimizer.step()
    basis = optimizer.state[param]["galore_left"].clone()
    for value in (0.0, torch.nan):  # in steps in which the subspace is due
        param.grad = torch.full((20, 30), value)
        optimizer.step()
        assert torch.equal(optimizer.state[param]["galore_left"], basis)
    param.grad = torch.randn(20, 30)
    optimizer.step()
    assert not torch.equal(optimizer.state[param]["galore_left"], basis)


def test_convolutions_are_matrices_of_their_filters():
    conv = nn.Conv2d(6, 12, 3)
    optimizer = GaLoreAdamW(comera.galore_param_groups(conv, 1e-2, 4, weight_decay=0.0))
    conv(torch.randn(2, 6, 8, 8)).square().mean().backward()
    before = conv.weight.detach().clone()
    optimizer.step()
    assert optimizer.state[conv.weight]["galore_left"].shape == (12, 4)
    assert torch.linalg.matrix_rank((conv.weight - before).flatten(1).detach()) == 4


def test_state_of_the_paper():
    """m r + 2 n r numbers where Adam has 2 m n, and nothing between the steps."""
    param = nn.Parameter(torch.randn(64, 256))
    optimizer = GaLoreAdamW([{"params": [param], "rank": 16}])
    param.grad = torch.randn(64, 256)
    optimizer.step()
    entries = optimizer.state_dict()["state"][0]
    assert sum(v.numel() for v in entries.values() if v.dim()) == 64 * 16 + 2 * 16 * 256
    stand_in = optimizer.stand_ins.get(param)
    assert stand_in.untyped_storage().nbytes() == 4
    assert stand_in.grad is None


def test_state_of_a_llama_of_7_billion_parameters():
    """The paper's setting: 65.5 % less than AdamW's, embedding and head in full."""
    with torch.device("meta"):
        width, hidden, vocab = 4096, 11008, 32000
        block = [*[nn.Linear(width, width, bias=False) for _ in range(4)]]
        block += [nn.Linear(width, hidden, bias=False) for _ in range(2)]
        block += [nn.Linear(hidden, width, bias=False)]
        model = nn.ModuleDict(
            {
                "tokens": nn.Embedding(vocab, width),
                "layers": nn.ModuleList(block),  # one of 32
                "head": nn.Linear(width, vocab, bias=False),
            }
        )
    rank = 1024
    listed = comera.galore_param_groups(model, 1e-2, rank, target_modules=r"layers\.\d+")
    GaLoreAdamW(listed)  # allocates nothing there
    ours = theirs = 0
    for group in listed:
        for param in group["params"]:
            times = 32 if "rank" in group else 1
            theirs += times * 2 * param.numel()
            if "rank" not in group:
                ours += 2 * param.numel()
                continue
            rows, columns = low_shape(param, rank, "std")
            ours += times * (2 * rows * columns + rank * min(param.shape))
    assert 1 - ours / theirs == pytest.approx(0.65, abs=0.005)


def test_groups_leave_alone_what_is_small_or_shared():
    model = make_model()
    comera.tensorize_(model, comera.TTConfig(rank=4, target_modules=["fc1", "query"]))
    model.encoder.blocks[0].fc2.weight.requires_grad_(False)
    listed = comera.galore_param_groups(model, 1e-3, 8, gate_lr=2e-3, weight_decay=0.1)
    by_name = {group["name"]: group for group in listed}
    assert set(by_name) == {"cores", "gates", "dense", "vectors", "galore"}
    names = {id(p): n for n, p in model.named_parameters()}
    projected = [names[id(p)] for p in by_name["galore"]["params"]]
    assert all(
        n.endswith("weight") and ("attention" in n or "fc2" in n or "pooler" in n)
        for n in projected
    )
    assert "encoder.blocks.0.fc2.weight" not in projected
    assert "output.weight" not in projected  # three rows
    everything = [id(p) for group in listed for p in group["params"]]
    assert len(everything) == len(set(everything))
    assert set(everything) == {id(p) for p in model.parameters() if p.requires_grad}
    few = comera.galore_param_groups(model, 1e-3, 8, target_modules=["value"])
    assert len({g["name"]: g for g in few}["galore"]["params"]) == 2
    with pytest.raises(
        ValueError, match=r"target_modules='nothing' names no dense layer .* rank=8"
    ):
        comera.galore_param_groups(model, 1e-3, 8, target_modules="nothing")


@pytest.mark.parametrize("inner", [torch.optim.AdamW, comera.CAME])
def test_a_half_tensorised_model_trains_truncates_and_goes_on(inner):
    model = make_model()
    comera.tensorize_(model, comera.TTConfig(rank=8, target_modules=["fc1", "fc2"]))
    groups = comera.galore_param_groups(model, 3e-3, RANK, update_proj_gap=5)
    optimizer = GaLore(groups, inner)
    train(model, optimizer, 0, 4)
    with torch.no_grad():
        model.encoder.blocks[0].fc1.gates[2][3:] = 0
    comera.truncate_(model, optimizer)
    assert model.encoder.blocks[0].fc1.ranks[2] == 3
    key = "exp_avg_update" if inner is comera.CAME else "exp_avg"
    moments = optimizer.state[model.encoder.blocks[0].fc1.cores[2]][key]
    assert moments.shape == model.encoder.blocks[0].fc1.cores[2].shape
    assert all(math.isfinite(loss) for loss in train(model, optimizer, 4, 8))


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"params": [nn.Parameter(torch.randn(7))], "rank": 4}, r"shape \(7,\) is in .* rank=4"),
        ({"rank": 0}, "rank=0 must be at least 1"),
        ({"rank": 4, "proj_type": "both"}, "proj_type='both' must be one of 'std'"),
        ({"rank": 4, "update_proj_gap": 0}, "update_proj_gap=0 must be"),
        ({"rank": 4, "scale": -1.0}, r"scale=-1.0 must be above 0"),
        (
            {"rank": 4, "gap": 3},
            "no setting 'gap': did you mean update_proj_gap",
        ),
        ({"scale": 0.5}, r"has \['scale'\] but no rank"),
    ],
)
def test_bad_groups(group, message):
    with pytest.raises((ValueError, TypeError), match=message):
        GaLoreAdamW([{"params": [nn.Parameter(torch.randn(20, 30))], **group}])


def test_a_step_costs_little_more_than_adamws():
    torch.manual_seed(0)
    shapes = [(512, 512)] * 6 + [(1024, 512)] * 4

    def make(kind, **settings):
        params = [nn.Parameter(torch.randn(s)) for s in shapes]
        for p in params:
            p.grad = torch.randn_like(p)
        return params, kind(params, settings)

    plain, adamw = make(lambda p, _: torch.optim.AdamW(p))
    low, galore = make(
        lambda p, s: GaLoreAdamW([{"params": p, **s}]), rank=32, update_proj_gap=1000
    )
    times = {"adamw": [], "galore": []}
    for _ in range(7):
        for name, optimizer in (("adamw", adamw), ("galore", galore)):
            began = perf_counter()
            optimizer.step()
            times[name].append(perf_counter() - began)
    assert median(times["galore"]) < 10 * median(times["adamw"])
    assert len(plain) == len(low)


@pytest.fixture
def their_adafactor():
    package = peer("galore_torch")

    def make(listed, lr):
        return package.GaLoreAdafactor(listed, lr=lr, relative_step=False, scale_parameter=True)

    return make


def all_at(model, lr, **settings):
    return [{**group, "lr": lr} for group in groups(model, **settings)]


@pytest.mark.slow
@pytest.mark.parametrize("proj_type", ["std", "full"])
def test_the_trajectory_of_adafactor_equals_that_of_galore_torch(
    their_adafactor, proj_type, monkeypatch
):
    """Once the randomized range finder has made way for the exact decomposition they take."""
    monkeypatch.setattr("comera.optim.galore.new_bases", bases_by_svd)
    a, b = make_model(), make_model()
    start = [p.detach().clone() for p in a.parameters()]
    other = their_adafactor(all_at(a, 1e-2, proj_type=proj_type), 1e-2)
    ours = GaLoreAdafactor(all_at(b, 1e-2, proj_type=proj_type))
    train_alike(a, other, b, ours, 50)
    for mine, its, before in zip(b.parameters(), a.parameters(), start, strict=True):
        assert (mine - its).norm() <= 1e-3 * (its - before).norm()


def test_torchs_own_eps_loses_the_scale_of_small_gradients():
    """Which is why ours is another: the step of a tiny gradient is no longer its direction's."""
    moved = {}
    for scale in (1.0, 1e-6):
        for eps in ((1e-15, 1e-3), (None, 1e-3)):
            torch.manual_seed(0)
            param = nn.Parameter(torch.randn(20, 30))
            start = param.detach().clone()
            optimizer = GaLoreAdafactor([{"params": [param], "rank": 4}], lr=0.1, eps=eps)
            torch.manual_seed(1)
            param.grad = scale * torch.randn(20, 30)
            optimizer.step()
            moved[scale, eps[0]] = param.detach() - start
    torch.testing.assert_close(moved[1.0, 1e-15], moved[1e-6, 1e-15])
    torch.testing.assert_close(moved[1.0, 1e-15], moved[1.0, None])
    off = (moved[1e-6, None] - moved[1e-6, 1e-15]).norm() / moved[1e-6, 1e-15].norm()
    assert off > 0.1


def test_adafactors_weight_decay_is_decoupled_where_theirs_depends_on_the_size_of_the_parameter(
    their_adafactor,
):
    """Theirs multiplies the decay by the root mean square too: small parameters never decay."""
    small = 0.01 * torch.ones(20, 30)
    left = []
    for make in (their_adafactor, GaLoreAdafactor):
        param = nn.Parameter(small.clone())
        group = {
            "params": [param], "rank": 4, "update_proj_gap": 5, "scale": 1.0, "proj_type": "std",
            "weight_decay": 0.5,
        }  # fmt: skip
        optimizer = make([group], lr=0.1)
        param.grad = torch.zeros(20, 30)  # no step is taken, but the decay is
        optimizer.step()
        left.append(param.detach() / small)
    torch.testing.assert_close(left[0], torch.full((20, 30), 1 - 0.1 * 0.5 * 0.01))
    torch.testing.assert_close(left[1], torch.full((20, 30), 1 - 0.1 * 0.5))


def test_a_step_is_relative_to_the_whole_parameter_and_not_rounded_to_it():
    torch.manual_seed(0)
    grad = torch.randn(20, 30, dtype=torch.float64)
    moved = []
    for dtype in (torch.float32, torch.float64):
        param = nn.Parameter(torch.zeros(20, 30, dtype=dtype))
        optimizer = GaLoreAdafactor([{"params": [param], "rank": 4}], lr=1e-6)
        param.grad = grad.to(dtype)
        optimizer.step()
        moved.append(param.detach().double())
    torch.testing.assert_close(*moved, rtol=1e-4, atol=1e-15)


def test_a_size_that_nothing_is_relative_to_is_refused():
    with pytest.raises(ValueError, match=r"eps=\(None, 0.0\) must have a second number above 0"):
        GaLoreAdafactor([{"params": [nn.Parameter(torch.ones(9, 8))], "rank": 4}], eps=(None, 0.0))


KINDS = {
    "adamw": GaLoreAdamW,
    "adafactor": GaLoreAdafactor,
    "came": lambda listed: GaLore(listed, comera.CAME, state_dtype="8bit"),
    "sgd": lambda listed: GaLore(listed, torch.optim.SGD, lr=0.1, momentum=0.9),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def test_a_state_without_subspaces_is_refused(kind):
    """As torch.distributed.checkpoint reads one, into what a step without gradients has made."""
    model = make_model()
    optimizer = kind(groups(model))
    train(model, optimizer, 0, 3)
    state = optimizer.state_dict()
    projected = [k for k, entries in state["state"].items() if "galore_step" in entries]
    state["state"] |= {k: {"galore_step": state["state"][k]["galore_step"]} for k in projected}
    with pytest.raises(ValueError, match="the state is of 3 steps, and no subspace and no moments"):
        kind(groups(make_model())).load_state_dict(state)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("whole", [True, False])
def test_torchs_state_of_a_model_and_its_optimizer_loads_into_a_new_one(kind, whole, tmp_path):
    """Whole at once, or in place from a checkpoint of parts."""
    model, new = make_model(), make_model()
    for each in (model, new):
        each.encoder.segments.requires_grad_(False)  # it is not used, and has no state
    optimizer, fresh = kind(groups(model)), kind(groups(new))
    train(model, optimizer, 0, 3)
    options = StateDictOptions(full_state_dict=whole)
    saved = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    if not whole:
        dcp.save(saved, checkpoint_id=tmp_path)
        saved = {"optimizer": get_optimizer_state_dict(new, fresh, options=options)}
        dcp.load(saved, checkpoint_id=tmp_path)
    set_optimizer_state_dict(new, fresh, copy.deepcopy(saved["optimizer"]), options=options)
    new.load_state_dict(model.state_dict())
    for each in ((model, optimizer), (new, fresh)):
        train(*each, 3, 6)
    assert all(map(torch.equal, new.parameters(), model.parameters()))


@pytest.mark.slow
def test_copies_in_eight_bits(eight_bit):
    model = make_model()
    optimizer = eight_bit(groups(model))
    train(model, optimizer, 0, 5)
    other, theirs = pickle.loads(pickle.dumps((model, optimizer)))
    train(model, optimizer, 5, 13)
    train(other, theirs, 5, 13)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_a_copy_beside_a_scheduler_is_its_own():
    model = make_model()
    optimizer = GaLoreAdamW(groups(model))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    train(model, optimizer, 0, 2)
    other, theirs = copy.deepcopy((model, optimizer))
    before = [p.detach().clone() for p in model.parameters()]
    train(other, theirs, 2, 3)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    schedule.step()
    assert theirs.param_groups[0]["lr"] == 2 * optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("rank", [4, 1000])
def test_gradients_are_left_as_they_were(rank):
    """A coupled penalty written into them would count twice in a second step, and thrice."""
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(20, 30))
    optimizer = GaLore(
        [{"params": [param], "rank": rank, "scale": 1.0}],
        torch.optim.SGD, lr=0.1, weight_decay=0.5,
    )  # fmt: skip
    grad = torch.randn(20, 30)
    param.grad = grad
    plain = param.detach().clone()
    basis = None
    for _ in range(3):
        optimizer.step()
        assert param.grad is grad
        basis = optimizer.state[param].get("galore_left", torch.eye(20))
        plain -= 0.1 * basis @ basis.T @ (grad + 0.5 * plain)
    torch.testing.assert_close(param.detach(), plain)


def test_eight_bits_follow_rates_in_groups_and_schedules(eight_bit):
    """torchao wants the rate in a tensor; groups and schedulers give numbers."""
    model = make_model()
    optimizer = eight_bit(groups(model))
    assert optimizer.param_groups[0]["lr"] == 1e-3
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step == 0))
    before = model.output.weight.detach().clone()
    train(model, optimizer, 0, 1)
    assert not torch.equal(model.output.weight, before)
    schedule.step()
    before = model.output.weight.detach().clone()
    train(model, optimizer, 1, 2)
    assert torch.equal(model.output.weight, before)


@pytest.mark.parametrize("within", [True, False], ids=["galore", "plain"])
def test_eight_bit_state_is_cut_with_the_cores(eight_bit, within):
    from torchao.optim import AdamW8bit

    torch.manual_seed(0)
    layer = comera.TTLinear(256, 256, rank=64, order=2)
    model = nn.Sequential(layer, nn.Linear(256, 64))
    if within:
        optimizer = eight_bit(comera.galore_param_groups(model, 1e-2, 8))
    else:
        optimizer = AdamW8bit(comera.param_groups(model, 1e-2))

    def step():
        model(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    core = layer.cores[1]
    full = optimizer.state[core]["exp_avg"].dequantize()
    assert full.shape == core.shape
    with torch.no_grad():
        layer.gates[1][48:] = 0
    comera.truncate_(model, optimizer)
    packed = optimizer.state[core]["exp_avg"]
    assert packed.shape == core.shape
    assert core.shape[-1] == 48
    assert type(packed).__name__ == "OptimState8bit"
    assert torch.allclose(packed.dequantize(), full[..., :48], atol=0.02 * float(full.abs().max()))
    step()
    assert all(p.isfinite().all() for p in model.parameters())
