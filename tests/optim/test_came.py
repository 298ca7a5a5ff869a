import copy
import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.state_dict import (
    _init_optim_state,
)

import comera
from comera.models.transformer import Encoder, MaskedLanguageModel
from comera.optim import came
from comera.optim.came import matrix_view, product
from comera.surgery.truncate import slice_state_
from tests.peers import peer
from tests.train.counting import Calls

from .training import (
    STATES,
    batches,
    gradients,
    loss_of,
    run,
    same_state,
    state_bytes,
    train,
    transformer,
)


@pytest.fixture
def authors():
    return peer("came_pytorch").CAME


def test_fifty_steps_of_a_transformer_are_the_same(authors):
    model, twin = (m := transformer()), copy.deepcopy(m)
    settings = {"lr": 1e-3, "weight_decay": 0.01}
    ours = comera.CAME(model.parameters(), **settings)
    theirs = authors(twin.parameters(), **settings)
    for batch in batches(50):
        loss_of(model, batch).backward()
        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
            other.grad = param.grad.clone()
        ours.step()
        theirs.step()
        ours.zero_grad()
    for (name, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        error = (param - other).norm() / other.norm()
        assert error < 3e-6, (name, tuple(param.shape), float(error))


def test_corrected_means_are_those_of_a_constant_gradient_at_once():
    """Its squares are g^2 and its u is one from the first step; authors' means take long."""
    param = nn.Parameter(torch.zeros(6, 8))
    vector = nn.Parameter(torch.zeros(5))
    optimizer = comera.CAME([param, vector], lr=1e-2, bias_correction=True)
    for step in range(1, 4):
        for each in (param, vector):
            each.grad = torch.ones_like(each)
        before = vector.detach().clone()
        optimizer.step()
        torch.testing.assert_close(before - vector, torch.full((5,), 1e-2))
        state = optimizer.state[param]
        mean = state["exp_avg_update"][0, 0] / (1 - 0.9**step)
        torch.testing.assert_close(mean, torch.tensor(1.0))
    # (u - m)^2 fell from 0.81 to 0.53 over three steps of one u; its corrected mean is between
    residual = state["exp_avg_res_factors"].mean() / (1 - 0.9999**3)
    assert 0.53 < residual < 0.81


def test_long_runs_need_no_correction():
    params = [nn.Parameter(torch.ones(8, 8)) for _ in range(2)]
    pair = [
        comera.CAME([p], lr=1e-3, betas=(0.5, 0.5, 0.5), bias_correction=k)
        for k, p in enumerate(params)
    ]
    for param, optimizer in zip(params, pair, strict=True):
        run(param, optimizer, steps=40)
    moved = [param.detach().clone() for param in params]
    for param, optimizer in zip(params, pair, strict=True):
        run(param, optimizer, steps=1, seed=7)
    torch.testing.assert_close(params[0] - moved[0], params[1] - moved[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "view"),
    [
        ((512, 64), (512, 64)),
        ((64, 512), (64, 512)),
        ((1, 12, 30), (12, 30)),
        ((30, 8, 30), (30, 240)),
        ((30, 64, 1), (30, 64)),
        ((16, 20, 12, 30), (320, 360)),
        ((64, 3, 3, 3), (64, 27)),
        ((1, 512), None),
        ((512, 1), None),
        ((512,), None),
        ((), None),
        ((4, 4), None),
        ((0, 5), None),
    ],
)
def test_a_tensor_is_factored_as_its_most_balanced_matrix(shape, view):
    assert matrix_view(shape) == view


def test_a_core_steps_like_its_matrix():
    core = nn.Parameter(torch.randn(6, 8, 5))
    matrix = nn.Parameter(core.detach().reshape(6, 40).clone())
    for param in (core, matrix):
        run(param, comera.CAME([param], lr=1e-2), steps=5)
    assert torch.equal(core.flatten(), matrix.flatten())


@pytest.mark.parametrize("shape", [(6, 40), (700, 2000)])
def test_blocks_of_rows_and_stacks_change_nothing(shape, monkeypatch):
    ends = []
    for block, stacked in ((1 << 30, 1), (97, 1), (1 << 30, 1 << 30)):
        monkeypatch.setitem(comera.optim.came._BLOCK, "cpu", block * shape[1] // 40)
        monkeypatch.setitem(comera.optim.came._STACKED, "cpu", (stacked, stacked))
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(shape, generator=generator)) for _ in range(2)]
        optimizer = comera.CAME(params, lr=1e-2)
        for _ in range(2):
            for param in params:
                param.grad = torch.randn(shape, generator=generator)
            optimizer.step()
        ends.append(torch.stack([p.detach() for p in params]))
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0])


def test_layouts_and_strides_change_nothing():
    kernel = nn.Parameter(torch.randn(16, 8, 3, 3))
    strided = nn.Parameter(kernel.detach().clone(memory_format=torch.channels_last))
    transposed = nn.Parameter(kernel.detach().permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0))
    for param in (kernel, strided, transposed):
        twins = [nn.Parameter(param.detach().clone()) for _ in range(2)]  # updated together
        together = comera.CAME(twins, lr=1e-2, weight_decay=0.1)
        for gradient in gradients(param, 3):
            for twin in twins:
                twin.grad = gradient.clone()
            together.step()
        run(param, comera.CAME([param], lr=1e-2, weight_decay=0.1))
        for other in (param, *twins):
            assert torch.equal(kernel, other)


def test_state_is_about_half_of_adamw_s_and_an_eighth_in_eight_bits():
    with torch.device("meta"):
        model = MaskedLanguageModel(Encoder(8000, 256, 2, 4, 1024), 8000)
    numbers = [(p.shape, p.numel()) for p in model.parameters()]
    adamw = sum(8 * n + 4 for _, n in numbers)

    def came(state_dtype):
        params = [nn.Parameter(torch.zeros(shape)) for shape, _ in numbers]
        for param in params:
            param.grad = torch.zeros_like(param)
        optimizer = comera.CAME(params, state_dtype=state_dtype)
        optimizer.step()
        return state_bytes(optimizer)

    assert came(None) < 0.51 * adamw
    assert came("8bit") < 0.14 * adamw


def test_small_tensors_stay_in_full():
    small, large = nn.Parameter(torch.randn(63, 65)), nn.Parameter(torch.randn(64, 64))
    optimizer = comera.CAME([small, large], state_dtype="8bit")
    for param in (small, large):
        param.grad = torch.randn_like(param)
    optimizer.step()
    assert optimizer.state[small]["exp_avg_update"].dtype == torch.float32
    assert optimizer.state[large]["exp_avg_update"].dtype == torch.int8
    assert optimizer.state[large]["exp_avg_update_scale"].shape == (16,)


def test_nothing_waits_for_the_device():
    with FakeTensorMode():  # raises on every read of a value
        for state_dtype in (None, "8bit"):
            params = [nn.Parameter(torch.randn(n, 80)) for n in (1, 2, 80, 80, 1000)]
            lr = torch.tensor(1e-3)
            optimizer = comera.CAME(
                params, lr, weight_decay=0.1, state_dtype=state_dtype, capturable=True
            )
            for _ in range(2):
                for param in params:
                    param.grad = torch.randn_like(param)
                optimizer.step()


def test_many_small_parameters_take_few_calls():
    shapes = [(8, 12, 8), (8, 8), (64,), (1, 8, 8)]
    params = [nn.Parameter(torch.randn(shapes[k % 4])) for k in range(480)]
    optimizer = comera.CAME(params)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    with Calls() as calls:
        optimizer.step()
    # each parameter's tensors are detached to be stacked, which costs no launch
    views = sum(len(optimizer.state[p]) + 2 for p in params)
    assert calls.count - views < 400


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_one_rounding_from_full(dtype, count):
    params = [nn.Parameter(torch.randn(16, 24).to(dtype)) for _ in range(count)]
    wide = [nn.Parameter(p.detach().float()) for p in params]
    one, other = (comera.CAME(p, lr=1e-2, weight_decay=0.1) for p in (params, wide))
    for low, full in zip(params, wide, strict=True):
        low.grad = torch.randn_like(low)
        full.grad = low.grad.float()
    one.step()
    other.step()
    assert all(torch.equal(p, q.to(dtype)) for p, q in zip(params, wide, strict=True))


def test_parameters_without_gradient_or_entries_are_skipped():
    params = [nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(3, 0))]
    params[1].grad = torch.ones(3, 0)
    optimizer = comera.CAME(params, weight_decay=1.0)
    optimizer.step()
    assert not optimizer.state
    assert torch.equal(params[0], torch.ones(8, 8))


@pytest.mark.parametrize("rows", [0, 3])
def test_rows_that_never_see_a_gradient_stay(rows):
    """However large other gradients are."""
    param = nn.Parameter(torch.ones(16, 16))
    optimizer = comera.CAME([param])
    for gradient in gradients(param, 3):
        gradient[rows:] = 0
        param.grad = gradient * 1e9
        optimizer.step()
    assert torch.equal(param[rows:], torch.ones(16, 16)[rows:])
    assert torch.isfinite(param).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, r"lr=-1.0 must be at least 0"),
        ({"lr": torch.ones(2)}, r"lr has shape \(2,\)"),
        ({"betas": (0.9, 0.999)}, r"betas=\(0.9, 0.999\) must be three"),
        ({"betas": (0.9, 0.999, 1.0)}, r"betas=\(0.9, 0.999, 1.0\)"),
        ({"eps": 1e-8}, "eps=1e-08 must be two"),
        ({"eps": (0.0, 1e-16)}, r"eps=\(0.0, 1e-16\)"),
        ({"clip_threshold": 0.0}, "clip_threshold=0.0 must be above 0"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 must be at least 0"),
        ({"state_dtype": "4bit"}, "state_dtype='4bit' must be None or \"8bit\""),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    params = [nn.Parameter(torch.ones(3))]
    with pytest.raises(ValueError, match=message):
        comera.CAME(params, **settings)
    with pytest.raises(ValueError, match=message):
        comera.CAME([{"params": params, **settings}])


MAKERS = {
    "CAME": comera.CAME,
    "GaLore": comera.GaLoreAdamW,
    "GaLore, Adafactor": lambda groups, **given: comera.GaLore(
        groups, torch.optim.Adafactor, **given
    ),
    "MuonAdamW": comera.MuonAdamW,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_keys_of_groups_that_others_need_are_kept_and_near_misses_refused(make):
    def group(**keys):
        return [{"params": [nn.Parameter(torch.ones(3, 4))], **keys}]

    kept = {"rho": 0.05, "adaptive": False, "lr_scale": 0.5, "name": "first", "initial_lr": 1e-3}
    kept |= {"weight_decay_mult": 1, "no_weight_decay": True, "step": 3, "k": 5}
    optimizer = make(group(**kept), lr=1e-3, foreach=False)
    assert optimizer.param_groups[0].items() >= kept.items()
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3, 4)
    optimizer.step()
    loaded = make(group(**kept), lr=1e-3)
    loaded.load_state_dict(optimizer.state_dict())
    assert loaded.param_groups[0].items() >= kept.items()
    for key, meant in {"weight_decy": "weight_decay", "weigth_decay": "weight_decay"}.items():
        with pytest.raises(TypeError, match=f"no setting '{key}': did you mean {meant}"):
            make(group(**{key: 0.1}))


def test_the_key_of_other_packages_for_muon_is_named():
    group = {"params": [nn.Parameter(torch.ones(3, 4))], "use_muon": True}
    with pytest.raises(TypeError, match="no setting 'use_muon': did you mean muon"):
        comera.MuonAdamW([group])


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation as it is usually written: its base has its groups."""

    def __init__(self, params, base, rho=0.05, adaptive=False, **settings):
        super().__init__(params, {"rho": rho, "adaptive": adaptive, **settings})
        self.base = base(self.param_groups, **settings)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure):
        params = [p for group in self.param_groups for p in group["params"]]
        ascents = [group["rho"] * p.grad for group in self.param_groups for p in group["params"]]
        torch._foreach_add_(params, ascents)
        with torch.enable_grad():
            loss = closure()
        torch._foreach_sub_(params, ascents)
        self.base.step()
        return loss


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_sam_steps_by_it(make):
    torch.manual_seed(0)
    target, x = torch.randn(8, 6), torch.randn(32, 8)
    weight = nn.Parameter(target + 1)
    optimizer = SAM([weight], make, lr=1e-2)

    def closure():
        optimizer.zero_grad()
        loss = (x @ weight - x @ target).square().mean()
        loss.backward()
        return loss

    losses = []
    for _ in range(60):
        closure()
        losses.append(optimizer.step(closure).item())
    assert losses[-1] < losses[0]


def test_unknown_settings_are_refused_by_name():
    with pytest.raises(TypeError, match=r"no setting 'beta': did you mean betas"):
        comera.CAME([{"params": [nn.Parameter(torch.ones(3))], "beta": 0.9}])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_steps_are_the_same():
    torch.compiler.reset()
    ends = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(12, 20)  # one factored parameter and one that is not
        optimizer = comera.CAME(model.parameters(), lr=torch.tensor(1e-3), weight_decay=0.1)
        step = torch.compile(optimizer.step) if compiled else optimizer.step
        for _ in range(3):
            model(torch.randn(5, 12)).square().mean().backward()
            step()
            optimizer.zero_grad()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(ends[1], ends[0])


@pytest.mark.parametrize("entries", [256, 4096, 5000])
def test_codes_are_within_half_a_step_of_the_block_s_largest(entries, monkeypatch):
    monkeypatch.setitem(came._BLOCK, "cpu", 4 * 3 * 256 * 5)
    values = torch.randn(3, entries) * torch.logspace(-9, 9, entries)
    values[1] = 0
    codes, scales = came.quantized(values)
    assert codes.shape == values.shape
    error = (came.dequantized(codes, scales) - values).abs()
    allowed = scales.repeat_interleave(256, 1)[:, :entries] / 127 * 0.501
    assert (error <= allowed).all()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_values_that_are_not_finite_are_not_hidden(bad):
    values = torch.ones(1, 512)
    values[0, 3] = bad
    back = came.dequantized(*came.quantized(values))
    assert not torch.isfinite(back[0, :256]).any()
    assert torch.equal(back[0, 256:], values[0, 256:])


def test_parameters_of_one_shape_may_be_kept_in_full_and_in_eight_bits():
    params = [nn.Parameter(torch.randn(64, 64)) for _ in range(2)]
    apart = [nn.Parameter(param.detach().clone()) for param in params]
    together = comera.CAME(params)
    alone = [comera.CAME([apart[0]]), comera.CAME([apart[1]], state_dtype="8bit")]
    params[0].grad = apart[0].grad = torch.randn(64, 64)
    together.step()
    alone[0].step()
    together.param_groups[0]["state_dtype"] = "8bit"  # for those that have no state yet
    for _ in range(3):
        for mine, theirs, optimizer in zip(params, apart, alone, strict=True):
            mine.grad = theirs.grad = torch.randn(64, 64)
            optimizer.step()
        together.step()
    for mine, theirs in zip(params, apart, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.slow
def test_a_transformer_learns_as_well():
    """Within the spread that other orders of the data give."""
    ends = {}
    for name, state_dtype, seed in (
        ("full", None, 0), ("other data", None, 1), ("more data", None, 2), ("8bit", "8bit", 0),
    ):  # fmt: skip
        torch.manual_seed(0)
        model = transformer()
        optimizer = comera.CAME(model.parameters(), lr=3e-4, state_dtype=state_dtype)
        start, *_ = losses = train(model, optimizer, batches(200, seed))
        ends[name] = sum(losses[-20:]) / 20
        assert ends[name] < 0.7 * start, (name, start, ends)
    spread = max(abs(ends[k] - ends["full"]) for k in ("other data", "more data"))
    assert abs(ends["8bit"] - ends["full"]) < min(spread, 0.06), ends


def test_a_loaded_state_is_a_copy_and_hooks_see_it():
    param = nn.Parameter(torch.randn(8, 8))
    optimizer = comera.CAME([param])
    run(param, optimizer)
    saved, seen = optimizer.state_dict(), []
    other = nn.Parameter(param.detach().clone())
    new = comera.CAME([other])
    new.register_load_state_dict_pre_hook(lambda _, given: copy.deepcopy(given))
    new.register_load_state_dict_post_hook(lambda o: seen.append(dict(o.state[other])))
    new.load_state_dict(saved)
    assert seen[0]["exp_avg_update"] is new.state[other]["exp_avg_update"]
    assert len(new._optimizer_load_state_dict_pre_hooks) == 1  # its own are gone
    assert len(new._optimizer_load_state_dict_post_hooks) == 1
    before = saved["state"][0]["exp_avg_update"].clone()
    run(other, new)
    assert torch.equal(saved["state"][0]["exp_avg_update"], before)


def test_what_was_loaded_has_the_keys_of_a_fresh_one():
    param = nn.Parameter(torch.randn(8, 8))
    fresh = comera.CAME([param])
    loaded = comera.CAME([param])
    loaded.load_state_dict(fresh.state_dict())
    for optimizer in (fresh, loaded):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert fresh.defaults == loaded.defaults
    assert fresh.state_dict() == loaded.state_dict()


def test_foreign_state_is_refused():
    param = nn.Parameter(torch.randn(8, 8))
    adam = torch.optim.Adam([param])
    run(param, adam)
    with pytest.raises(ValueError, match=r"\(8, 8\) has keys .*'exp_avg'.*another"):
        comera.CAME([param]).load_state_dict(adam.state_dict())
    came = comera.CAME([param])
    run(param, came)
    other = nn.Parameter(torch.randn(8, 6))
    run(other, new := comera.CAME([other]))
    before = new.state[other]["exp_avg_update"]
    with pytest.raises(ValueError, match=r"\(8, 6\) has a moment of shape \(8, 8\).*loaded first"):
        new.load_state_dict(came.state_dict())
    assert new.state[other]["exp_avg_update"] is before


@STATES
def test_the_synthetic_step_of_distributed_checkpoints_leaves_no_trace(state_dtype):
    start = transformer(32)
    ends = []
    for synthetic in (False, True):
        model = copy.deepcopy(start)
        optimizer = comera.CAME(
            model.parameters(), lr=1e-3, weight_decay=0.1, state_dtype=state_dtype
        )
        if synthetic:
            _init_optim_state(optimizer)
            assert all(map(torch.equal, model.parameters(), start.parameters()))
            assert all(not t.any() for s in optimizer.state.values() for t in s.values())
        train(model, optimizer, batches(3))
        ends.append((model, optimizer))
    (one, before), (other, after) = ends
    assert all(map(torch.equal, one.parameters(), other.parameters()))
    same_state(before, after)


def test_warming_up_from_zero_gathers_moments():
    param = nn.Parameter(torch.randn(8, 8))
    run(param, optimizer := comera.CAME([param], lr=0.0), steps=2)
    assert optimizer.state[param]["step"] == 2
    assert optimizer.state[param]["exp_avg_update"].all()


def trained(shape, state_dtype=None):
    param = nn.Parameter(torch.randn(shape))
    optimizer = comera.CAME([param], lr=1e-2, state_dtype=state_dtype)
    run(param, optimizer)
    return param, optimizer


def second_moment(optimizer, param, key="sq"):
    state = optimizer.state[param]
    view = matrix_view(param.shape)
    if view is None:
        return state[f"exp_avg_{key}"]
    return product(state[f"exp_avg_{key}_factors"][None], view[0]).view(param.shape)


@pytest.mark.parametrize(
    "keep",
    [{2: [0, 3, 4, 5, 8, 9, 11, 15]}, {0: [1, 2, 4, 5]}, {0: [0, 3, 2, 5], 2: [*range(1, 9)]}],
)
def test_moments_of_what_stays_are_kept(keep):
    param, optimizer = trained((6, 2, 16))
    keep = {dim: torch.tensor(rows) for dim, rows in keep.items()}
    want = [second_moment(optimizer, param, key) for key in ("sq", "res")]
    want.append(optimizer.state[param]["exp_avg_update"])
    for dim, rows in keep.items():
        want = [tensor.index_select(dim, rows) for tensor in want]
    slice_state_(param, keep, None, optimizer)
    got = [second_moment(optimizer, param, key) for key in ("sq", "res")]
    got.append(optimizer.state[param]["exp_avg_update"])
    torch.testing.assert_close(got, want)
    run(param, optimizer)
    assert torch.isfinite(param).all()


def test_moments_follow_the_units_of_the_parameter():
    """As training in the new units would have left them: m and the confidence have none."""
    scale = torch.tensor([0.5, 2.0, 4.0, 0.1, 1.0, 3.0, 9.0, 0.2])
    size = torch.rand(6, 9, 1) * torch.rand(8)  # a product, which factors hold exactly
    old, new = nn.Parameter(torch.ones(6, 9, 8)), nn.Parameter(torch.ones(6, 9, 8))
    one, other = comera.CAME([old], lr=1e-3), comera.CAME([new], lr=1e-3)
    for gradient in gradients(old, 3):
        new.grad = gradient.sign() * size
        old.grad = new.grad * scale
        one.step()
        other.step()
    slice_state_(old, {}, scale, one)
    torch.testing.assert_close(old.grad, new.grad)
    for key, want in other.state[new].items():
        torch.testing.assert_close(one.state[old][key], want, msg=key)


@STATES
@pytest.mark.parametrize("keep", [[], [3], [0, 2]])
def test_down_to_nothing(keep, state_dtype):
    param, optimizer = trained((16, 32, 20), state_dtype)
    slice_state_(param, {2: torch.tensor(keep, dtype=torch.int64)}, None, optimizer)
    run(param, optimizer)
    assert torch.isfinite(param).all()
    state = optimizer.state[param]
    assert state["exp_avg_update"].shape == param.shape
    assert state["exp_avg_update"].dtype == torch.float32  # below 4096 entries
    assert "exp_avg_res" not in state


def test_the_view_of_what_stays_is_its_own():
    param, optimizer = trained((10, 8, 9))
    before = second_moment(optimizer, param)
    assert optimizer.state[param]["exp_avg_sq_factors"].shape == (10 + 72,)
    slice_state_(param, {2: torch.arange(3)}, None, optimizer)
    assert optimizer.state[param]["exp_avg_sq_factors"].shape == (10 + 24,)
    after = second_moment(optimizer, param).view(10, 24)
    want = before[..., :3].reshape(10, 24)
    torch.testing.assert_close(after.mean(0), want.mean(0))
    torch.testing.assert_close(after.mean(1), want.mean(1))


@STATES
def test_a_compressed_model_shrinks_and_goes_on(state_dtype):
    torch.manual_seed(0)
    model = transformer()
    comera.tensorize_(model, comera.TTConfig(rank=8, target_modules=r".*(attention|fc).*"))
    groups = comera.param_groups(model, lr=1e-3, weight_decay=0.01)
    optimizer, data = comera.CAME(groups, state_dtype=state_dtype), list(batches(8))
    train(model, optimizer, data[:4])
    with torch.no_grad():
        for layer in (m for m in model.modules() if isinstance(m, comera.TTLinear)):
            for gate in layer.gates:
                gate[len(gate) // 2 :] = 0
    before = loss_of(model, data[4]).item()
    changed = comera.truncate_(model, optimizer)
    assert any(new < old for old, new in changed.values())
    assert math.isclose(loss_of(model, data[4]).item(), before, rel_tol=1e-4)
    for param in model.parameters():
        assert optimizer.state[param]["exp_avg_update"].shape == param.shape
    assert all(map(math.isfinite, train(model, optimizer, data[4:])))


def test_a_rate_that_is_too_high_for_the_first_steps_is_named(caplog):
    settings = [{"lr": 3e-3}, {"lr": 0.01, "bias_correction": True}, {"lr": 0.01}]
    for number, given in enumerate(settings):
        layer = comera.TTLinear(64, 64, rank=8)
        layer(torch.ones(1, 64)).sum().backward()
        comera.CAME(layer.parameters(), **given).step()
        assert ("up to 11 times lr=0.01" in caplog.text) == (number == 2)
    caplog.clear()
    gates = {"params": list(layer.gates), "lr": 0.02}  # as TwoStage advises
    comera.CAME([{"params": list(layer.cores)}, gates], lr=1e-3).step()
    assert not caplog.text
