import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    _init_optim_state,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import comera
from comera.optim import came
from comera.optim.came import matrix_view, product
from comera.surgery.truncate import slice_state_

from .training import (
    STATES,
    batches,
    gradients,
    loss_of,
    run,
    same_state,
    train,
    transformer,
)


class TestEightBits:
    @pytest.mark.parametrize("entries", [256, 4096, 5000])
    def test_codes_are_within_half_a_step_of_the_block_s_largest(self, entries, monkeypatch):
        monkeypatch.setitem(came._AT_A_TIME, "cpu", 3 * 256 * 5)
        values = torch.randn(3, entries) * torch.logspace(-9, 9, entries)
        values[1] = 0
        codes, scales = came.quantized(values)
        assert codes.shape == values.shape
        error = (came.dequantized(codes, scales) - values).abs()
        allowed = scales.repeat_interleave(256, 1)[:, :entries] / 127 * 0.501
        assert (error <= allowed).all()

    @pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
    def test_values_that_are_not_finite_are_not_hidden(self, bad):
        values = torch.ones(1, 512)
        values[0, 3] = bad
        back = came.dequantized(*came.quantized(values))
        assert not torch.isfinite(back[0, :256]).any()
        assert torch.equal(back[0, 256:], values[0, 256:])

    def test_parameters_of_one_shape_may_be_kept_in_full_and_in_eight_bits(self):
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
    def test_a_transformer_learns_as_well(self):
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


class TestState:
    @STATES
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    def test_a_run_resumed_from_a_file_is_the_same_bit_for_bit(self, tmp_path, dtype, state_dtype):
        start = transformer(32).to(dtype)
        data = list(batches(8))

        def build(model):
            optimizer = comera.CAME(model.parameters(), lr=1e-3, state_dtype=state_dtype)
            return model, optimizer

        whole, through = build(copy.deepcopy(start))
        losses = train(whole, through, data)
        first, before = build(copy.deepcopy(start))
        train(first, before, data[:4])
        torch.save([first.state_dict(), before.state_dict()], tmp_path / "run.pt")
        second, after = build(copy.deepcopy(start))
        weights, state = torch.load(tmp_path / "run.pt", weights_only=True)
        second.load_state_dict(weights)
        after.load_state_dict(state)
        same_state(before, after)
        assert train(second, after, data[4:]) == losses[4:]
        same_state(through, after)
        assert all(map(torch.equal, whole.parameters(), second.parameters()))
        wide = torch.promote_types(dtype, torch.float32)
        assert {t.dtype for s in after.state.values() for t in s.values()} <= {
            wide, torch.float32, torch.int8,
        }  # fmt: skip

    def test_a_loaded_state_is_a_copy_and_hooks_see_it(self):
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

    def test_foreign_state_is_refused(self):
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
        with pytest.raises(ValueError, match=r"\(8, 6\) has a moment of shape \(8, 8\)"):
            new.load_state_dict(came.state_dict())
        assert new.state[other]["exp_avg_update"] is before

    @STATES
    def test_the_synthetic_step_of_distributed_checkpoints_leaves_no_trace(self, state_dtype):
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

    @STATES
    def test_distributed_checkpoints_bring_it_back(self, state_dtype):
        model = transformer(32).to(torch.bfloat16)
        optimizer = comera.CAME(model.parameters(), state_dtype=state_dtype)
        train(model, optimizer, batches(2))
        twin = copy.deepcopy(model)
        other = comera.CAME(twin.parameters(), state_dtype=state_dtype)
        set_optimizer_state_dict(twin, other, get_optimizer_state_dict(model, optimizer))
        same_state(optimizer, other)
        assert train(twin, other, batches(2, seed=1)) == train(model, optimizer, batches(2, seed=1))

    def test_warming_up_from_zero_gathers_moments(self):
        param = nn.Parameter(torch.randn(8, 8))
        run(param, optimizer := comera.CAME([param], lr=0.0), steps=2)
        assert optimizer.state[param]["step"] == 2
        assert optimizer.state[param]["exp_avg_update"].all()

    def test_copies_and_pickles(self):
        model = transformer(32)
        optimizer = comera.CAME(model.parameters(), lr=1e-3)
        train(model, optimizer, batches(2))
        twin, other = copy.deepcopy((model, optimizer))
        for m, o in ((model, optimizer), (twin, other)):
            train(m, o, batches(2, seed=1))
        assert all(map(torch.equal, model.parameters(), twin.parameters()))


class TestTruncation:
    def trained(self, shape, state_dtype=None):
        param = nn.Parameter(torch.randn(shape))
        optimizer = comera.CAME([param], lr=1e-2, state_dtype=state_dtype)
        run(param, optimizer)
        return param, optimizer

    @staticmethod
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
    def test_moments_of_what_stays_are_kept(self, keep):
        param, optimizer = self.trained((6, 2, 16))
        keep = {dim: torch.tensor(rows) for dim, rows in keep.items()}
        want = [self.second_moment(optimizer, param, key) for key in ("sq", "res")]
        want.append(optimizer.state[param]["exp_avg_update"])
        for dim, rows in keep.items():
            want = [tensor.index_select(dim, rows) for tensor in want]
        slice_state_(param, keep, None, optimizer)
        got = [self.second_moment(optimizer, param, key) for key in ("sq", "res")]
        got.append(optimizer.state[param]["exp_avg_update"])
        torch.testing.assert_close(got, want)
        run(param, optimizer)
        assert torch.isfinite(param).all()

    def test_moments_follow_the_units_of_the_parameter(self):
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
    def test_down_to_nothing(self, keep, state_dtype):
        param, optimizer = self.trained((16, 32, 20), state_dtype)
        slice_state_(param, {2: torch.tensor(keep, dtype=torch.int64)}, None, optimizer)
        run(param, optimizer)
        assert torch.isfinite(param).all()
        state = optimizer.state[param]
        assert state["exp_avg_update"].shape == param.shape
        assert state["exp_avg_update"].dtype == torch.float32  # below 4096 entries
        assert "exp_avg_res" not in state

    def test_the_view_of_what_stays_is_its_own(self):
        param, optimizer = self.trained((10, 8, 9))
        before = self.second_moment(optimizer, param)
        assert optimizer.state[param]["exp_avg_sq_factors"].shape == (10 + 72,)
        slice_state_(param, {2: torch.arange(3)}, None, optimizer)
        assert optimizer.state[param]["exp_avg_sq_factors"].shape == (10 + 24,)
        after = self.second_moment(optimizer, param).view(10, 24)
        want = before[..., :3].reshape(10, 24)
        torch.testing.assert_close(after.mean(0), want.mean(0))
        torch.testing.assert_close(after.mean(1), want.mean(1))

    @STATES
    def test_a_compressed_model_trains_stops_resumes_shrinks_and_goes_on(
        self, tmp_path, state_dtype
    ):
        data = list(batches(12))

        def build():
            torch.manual_seed(0)
            model = transformer()
            config = comera.TTConfig(rank=8, target_modules=r".*(attention|fc).*")
            comera.tensorize_(model, config)
            groups = comera.param_groups(model, lr=1e-3, weight_decay=0.01)
            return model, comera.CAME(groups, state_dtype=state_dtype)

        model, optimizer = build()
        train(model, optimizer, data[:4])
        torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "run.pt")
        again, resumed = build()
        weights, state = torch.load(tmp_path / "run.pt", weights_only=True)
        again.load_state_dict(weights)
        resumed.load_state_dict(state)
        assert train(again, resumed, data[4:8]) == train(model, optimizer, data[4:8])
        layers = [m for m in model.modules() if isinstance(m, comera.TTLinear)]
        with torch.no_grad():
            for layer in layers:
                for gate in layer.gates:
                    gate[len(gate) // 2 :] = 0
        before = loss_of(model, data[8]).item()
        changed = comera.truncate_(model, optimizer)
        assert any(new < old for old, new in changed.values())
        assert math.isclose(loss_of(model, data[8]).item(), before, rel_tol=1e-4)
        for param in model.parameters():
            assert optimizer.state[param]["exp_avg_update"].shape == param.shape
        assert all(map(math.isfinite, train(model, optimizer, data[8:])))
