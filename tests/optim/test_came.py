import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import comera
from comera.models.transformer import Encoder, MaskedLanguageModel
from comera.optim.came import matrix_view
from tests.peers import peer

from .training import (
    batches,
    gradients,
    loss_of,
    run,
    state_bytes,
    transformer,
)


class TestAgainstTheAuthors:
    @pytest.fixture
    def authors(self):
        return peer("came_pytorch").CAME

    def test_fifty_steps_of_a_transformer_are_the_same(self, authors):
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

    def test_corrected_means_are_those_of_a_constant_gradient_at_once(self):
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

    def test_long_runs_need_no_correction(self):
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

    def test_their_factors_of_a_core_are_as_large_as_the_core(self, authors):
        core = nn.Parameter(torch.randn(30, 64, 1))
        counts = []
        for kind in (comera.CAME, authors):
            optimizer = kind([core], lr=1e-3)
            run(core, optimizer)
            counts.append(state_bytes(optimizer) // 4 - core.numel())  # without the first moment
        ours, theirs = counts
        assert theirs >= 2 * core.numel()
        assert ours == 2 * (30 + 64) + 1  # and the step

    def test_theirs_loses_the_moments_of_bfloat16_parameters_when_loading(self, authors):
        kept = []
        for kind in (comera.CAME, authors):
            param = nn.Parameter(torch.randn(16, 16, dtype=torch.bfloat16))
            optimizer = kind([param], lr=1e-3)
            run(param, optimizer)
            before = [t.clone() for t in optimizer.state[param].values() if torch.is_tensor(t)]
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            after = [t for t in optimizer.state[param].values() if torch.is_tensor(t)]
            kept.append(all(torch.equal(a, b) for a, b in zip(before, after, strict=True)))
        assert kept == [True, False]


class TestViews:
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
    def test_a_tensor_is_factored_as_its_most_balanced_matrix(self, shape, view):
        assert matrix_view(shape) == view

    def test_factors_are_those_of_the_view(self):
        core = nn.Parameter(torch.randn(6, 8, 5))
        optimizer = comera.CAME([core], lr=1e-3, betas=(0.9, 0.0, 0.9999))
        run(core, optimizer, steps=1)
        matrix = core.grad.view(6, 40).square()
        want = torch.cat([matrix.mean(1), matrix.mean(0)])
        torch.testing.assert_close(optimizer.state[core]["exp_avg_sq_factors"], want)

    def test_a_core_steps_like_its_matrix(self):
        core = nn.Parameter(torch.randn(6, 8, 5))
        matrix = nn.Parameter(core.detach().reshape(6, 40).clone())
        for param in (core, matrix):
            run(param, comera.CAME([param], lr=1e-2), steps=5)
        assert torch.equal(core.flatten(), matrix.flatten())

    @pytest.mark.parametrize("shape", [(6, 40), (700, 2000)])
    def test_blocks_of_rows_and_stacks_change_nothing(self, shape, monkeypatch):
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

    def test_layouts_and_strides_change_nothing(self):
        kernel = nn.Parameter(torch.randn(16, 8, 3, 3))
        strided = nn.Parameter(kernel.detach().clone(memory_format=torch.channels_last))
        transposed = nn.Parameter(
            kernel.detach().permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
        )
        for param in (kernel, strided, transposed):
            run(param, comera.CAME([param], lr=1e-2, weight_decay=0.1))
        assert torch.equal(kernel, strided)
        assert torch.equal(kernel, transposed)


class TestMemory:
    def test_state_is_about_half_of_adamw_s_and_an_eighth_in_eight_bits(self):
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

    def test_small_tensors_stay_in_full(self):
        small, large = nn.Parameter(torch.randn(63, 65)), nn.Parameter(torch.randn(64, 64))
        optimizer = comera.CAME([small, large], state_dtype="8bit")
        for param in (small, large):
            param.grad = torch.randn_like(param)
        optimizer.step()
        assert optimizer.state[small]["exp_avg_update"].dtype == torch.float32
        assert optimizer.state[large]["exp_avg_update"].dtype == torch.int8
        assert optimizer.state[large]["exp_avg_update_scale"].shape == (16,)


class Calls(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


class TestCost:
    def test_nothing_waits_for_the_device(self):
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

    def test_many_small_parameters_take_few_calls(self):
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


class TestInterface:
    def test_a_tensor_lr_is_the_same_and_can_change(self):
        ends = []
        for lr in (1e-2, torch.tensor(1e-2), torch.tensor([1e-2])):
            params = [nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8))]
            optimizer = comera.CAME(params, lr=lr, weight_decay=0.1)
            for param in params:
                run(param, optimizer)
            ends.append(torch.cat([p.detach().flatten() for p in params]))
        torch.testing.assert_close(ends[1], ends[0])
        torch.testing.assert_close(ends[2], ends[0])

    @pytest.mark.parametrize("shape", [(8, 8), (8,)])
    def test_maximize_is_descent_of_the_negative(self, shape):
        up, down = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.ones(shape))
        climb, descend = comera.CAME([up], maximize=True), comera.CAME([down])
        for gradient in gradients(up, 3):
            up.grad, down.grad = gradient, -gradient
            climb.step()
            descend.step()
        assert torch.equal(up, down)

    @pytest.mark.parametrize("count", [1, 3])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_low_precision_is_one_rounding_from_full(self, dtype, count):
        params = [nn.Parameter(torch.randn(16, 24).to(dtype)) for _ in range(count)]
        wide = [nn.Parameter(p.detach().float()) for p in params]
        one, other = (comera.CAME(p, lr=1e-2, weight_decay=0.1) for p in (params, wide))
        for low, full in zip(params, wide, strict=True):
            low.grad = torch.randn_like(low)
            full.grad = low.grad.float()
        one.step()
        other.step()
        assert all(torch.equal(p, q.to(dtype)) for p, q in zip(params, wide, strict=True))

    def test_parameters_without_gradient_or_entries_are_skipped(self):
        params = [nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(3, 0))]
        params[1].grad = torch.ones(3, 0)
        optimizer = comera.CAME(params, weight_decay=1.0)
        optimizer.step()
        assert not optimizer.state
        assert torch.equal(params[0], torch.ones(8, 8))

    @pytest.mark.parametrize("rows", [0, 3])
    def test_rows_that_never_see_a_gradient_stay(self, rows):
        """However large other gradients are."""
        param = nn.Parameter(torch.ones(16, 16))
        optimizer = comera.CAME([param])
        for gradient in gradients(param, 3):
            gradient[rows:] = 0
            param.grad = gradient * 1e9
            optimizer.step()
        assert torch.equal(param[rows:], torch.ones(16, 16)[rows:])
        assert torch.isfinite(param).all()

    def test_closure(self):
        param = nn.Parameter(torch.ones(4))
        optimizer = comera.CAME([param])

        def closure():
            loss = param.square().sum()
            loss.backward()
            return loss

        assert optimizer.step(closure) == 4
        assert (param < 1).all()

    def test_gradients_that_cannot_be_used_are_refused(self):
        table = nn.Embedding(10, 3, sparse=True)
        table(torch.tensor([1])).sum().backward()
        with pytest.raises(
            RuntimeError, match=r"sparse gradient .* shape \(10, 3\): .*sparse=False"
        ):
            comera.CAME(table.parameters()).step()
        param = nn.Parameter(torch.ones(2, 5, dtype=torch.complex64))
        param.grad = torch.ones_like(param)
        with pytest.raises(RuntimeError, match=r"complex gradient .* shape \(2, 5\)"):
            comera.CAME([param]).step()

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
    def test_settings_out_of_range_are_refused(self, settings, message):
        params = [nn.Parameter(torch.ones(3))]
        with pytest.raises(ValueError, match=message):
            comera.CAME(params, **settings)
        with pytest.raises(ValueError, match=message):
            comera.CAME([{"params": params, **settings}])

    def test_unknown_settings_are_refused_by_name(self):
        with pytest.raises(TypeError, match=r"no setting 'beta'; .* betas"):
            comera.CAME([{"params": [nn.Parameter(torch.ones(3))], "beta": 0.9}])

    def test_a_schedule_drives_it(self):
        param = nn.Parameter(torch.ones(8, 8))
        optimizer = comera.CAME([param], lr=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10)
        for gradient in gradients(param, 5):
            param.grad = gradient
            optimizer.step()
            schedule.step()
        assert torch.isfinite(param).all()

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore")
    def test_compiled_steps_are_the_same(self):
        torch.compiler.reset()
        ends = []
        for compiled in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 12))
            optimizer = comera.CAME(model.parameters(), lr=torch.tensor(1e-3), weight_decay=0.1)
            step = torch.compile(optimizer.step) if compiled else optimizer.step
            for _ in range(3):
                model(torch.randn(5, 12)).square().mean().backward()
                step()
                optimizer.zero_grad()
            ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        torch.testing.assert_close(ends[1], ends[0])
