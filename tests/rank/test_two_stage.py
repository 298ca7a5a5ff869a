import copy
import functools
import logging

import pytest
import torch
from torch import nn

import comera
from comera.nn.module import tensor_trains
from tests.states import assert_equal

from .conftest import loss_fn, make_model

BOTH = pytest.mark.parametrize(
    "method",
    [lambda m: comera.ImportancePruning(m, 0.5, 8), lambda m: comera.TwoStage(m, 0.5, 4, 30)],
    ids=["importance", "two stages"],
)


def learn(model, batch, ranks, optimizer, steps):
    step = comera.TrainStep(model, loss_fn, optimizer, ranks)
    return [step(batch) for _ in range(steps)]


def optimizer_for(model, gate_lr=0.05):
    return torch.optim.AdamW(comera.param_groups(model, 1e-3, gate_lr=gate_lr))


def test_stages_follow_the_steps(model, batch):
    ranks = comera.TwoStage(model, 0.5, early_steps=2, late_steps=3)
    seen = []
    for _ in range(7):
        seen.append(ranks.stage)
        ranks.step(torch.ones(()))
    assert seen == ["early"] * 2 + ["late"] * 3 + ["done"] * 2


def test_early_objective_is_loss_plus_weighted_size_and_norm(model, batch):
    ranks = comera.TwoStage(model, 0.5, 5, 5, gamma=0.3, beta=0.2)
    loss = loss_fn(model, batch)
    cores = [c for layer in tensor_trains(model).values() for c in layer.cores]
    want = loss + 0.3 + 0.2 * sum(core.square().sum() for core in cores)
    torch.testing.assert_close(ranks.objective(loss), want)


def test_the_goal_of_the_late_stage_is_a_mean_that_looks_back_some_twenty_steps(model):
    ranks = comera.TwoStage(model, 0.5, 40, 9)
    for loss in (1.0, *[2.0] * 20):
        ranks.step(torch.tensor(loss))
    assert float(ranks.state_dict()["running_loss"]) == pytest.approx(2 - 0.95**20)


def in_late_stage(model, target, goal, **settings):
    """After an early stage of one step, whose loss is the goal from then on."""
    ranks = comera.TwoStage(model, target, 1, 9, **settings)
    ranks.step(torch.tensor(goal, dtype=torch.float64))
    assert ranks.stage == "late"
    return ranks


@pytest.mark.parametrize(
    ("goal", "loss_weight", "size_weight"), [(1e-6, 1.2, 0.0), (10.0, 0.2, 1.0)]
)
def test_late_stage_serves_what_is_further_from_its_goal(model, goal, loss_weight, size_weight):
    ranks = in_late_stage(model, 0.5, goal, rho_loss=0.2)
    got, size = gradients(ranks, model), size_gradient(ranks, model)
    torch.testing.assert_close(got[0], torch.tensor(loss_weight, dtype=torch.float64))
    torch.testing.assert_close(got[1], size_weight * 2.0 * size / ranks.start_size)


def gradients(ranks, model, value=2.0):
    """Of the objective: by the loss and by the first gate."""
    loss = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(ranks.objective(loss), [loss, first_gate(model)])


def size_gradient(ranks, model):
    return torch.autograd.grad(ranks.size.relaxed(), first_gate(model))[0]


def first_gate(model):
    return next(iter(tensor_trains(model).values())).gates[0]


def test_a_loss_whose_step_is_not_taken_is_no_goal(model, batch):
    """Raise as torch does where memory runs out in the backward pass of the first batch."""
    losses = []

    def with_an_accident(model, batch):
        losses.append(loss_fn(model, batch))
        if len(losses) > 1:
            return losses[1]
        losses[0].register_hook(lambda grad: [][0])
        return 10 * losses[0]

    ranks = comera.TwoStage(model, 0.5, 0, 9)
    step = comera.TrainStep(model, with_an_accident, optimizer_for(model), ranks)
    with pytest.raises(IndexError):
        step(batch)
    step(batch)
    assert float(ranks.state_dict()["late_goal"]) == pytest.approx(losses[1].item())


def test_the_late_stage_measures_a_size_against_the_present_size(model):
    """Not that at the start: a smaller model is regularised as much, in proportion."""
    ranks = in_late_stage(model, 0.2, 10.0)
    with torch.no_grad():
        for layer in tensor_trains(model).values():
            for gate in layer.gates[1:]:
                gate[3:] = 0
    assert ranks.size.exact() < 0.75 * ranks.start_size
    _, got = gradients(ranks, model)
    torch.testing.assert_close(got, 2.0 * size_gradient(ranks, model) / ranks.size.exact())


@torch.no_grad()
def reach_target(ranks, model):
    """As an optimizer step does that closes too many gates at once."""
    ranks.objective(torch.ones((), dtype=torch.float64))
    for layer in tensor_trains(model).values():
        for gate in layer.gates:
            gate[2:] = 0
    ranks.step(torch.ones((), dtype=torch.float64))


def test_a_size_that_has_reached_its_target_is_regularised_no_further(model):
    """What fell below was taken back, so that it is above again; ranks are chosen at the end."""
    ranks = in_late_stage(model, 0.5, 10.0)
    assert gradients(ranks, model)[1].any()
    reach_target(ranks, model)
    assert ranks.size.exact() > ranks.target_size
    for _ in range(2):  # and it stays so in the steps that follow
        for_loss, for_gate = gradients(ranks, model)
        assert for_loss == 2.0
        assert not for_gate.any()
        ranks.step(torch.ones((), dtype=torch.float64))


@pytest.mark.parametrize(
    ("second", "regularised"), [(3.0, False), (0.5, True)], ids=["worse", "better"]
)
def test_a_run_resumed_in_the_late_stage_keeps_its_goal(second, regularised):
    """That is the loss when the early stage ended, whatever it has become since."""
    model, twin = make_model(), make_model()
    ranks, others = (comera.TwoStage(m, 0.9, 1, 60) for m in (model, twin))
    ranks.step(torch.tensor(1.0, dtype=torch.float64))
    for _ in range(50):  # of the late stage
        ranks.objective(torch.tensor(second, dtype=torch.float64))
        ranks.step(torch.tensor(second, dtype=torch.float64))
    others.load_state_dict(copy.deepcopy(ranks.state_dict()))
    want, got = gradients(ranks, model, second), gradients(others, twin, second)
    assert all(map(torch.equal, want, got))
    assert got[1].any() == regularised


@pytest.mark.parametrize(
    ("value", "goal", "regularised"), [(-2.0, -1.0, True), (-2.0, -2.5, True), (-2.0, -9.0, False)]
)
def test_a_loss_may_be_negative(model, value, goal, regularised):
    """As the logarithm of a density is: the size is regularised in any case, and never up."""
    ranks = in_late_stage(model, 0.5, goal)
    got, size = gradients(ranks, model, value), size_gradient(ranks, model)
    torch.testing.assert_close(got[0], torch.tensor(2.0 - regularised, dtype=torch.float64))
    torch.testing.assert_close(got[1], regularised * 2.0 * size / ranks.start_size)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_loss_of_few_bits_is_enough(dtype):
    """A size above 65,504 is infinite in float16."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(comera.TTLinear(512, 512, rank=[8, 64, 64, 64, 8]))
    ranks = comera.TwoStage(model, 0.5, 0, 5)
    assert ranks.start_size > 65_504
    losses = [torch.tensor(2.0, dtype=kind, requires_grad=True) for kind in (torch.float32, dtype)]
    want, got = (torch.autograd.grad(ranks.objective(x), list(model[0].gates)) for x in losses)
    torch.testing.assert_close(got, want)
    assert want[0].any()


def test_the_running_loss_moves_in_more_bits_than_the_loss(model):
    ranks = comera.TwoStage(model, 0.5, 300, 5)
    for loss in [2.0] + 199 * [1.9]:
        ranks.objective(torch.tensor(loss, dtype=torch.bfloat16))
        ranks.step(torch.tensor(loss, dtype=torch.bfloat16))
    assert float(ranks._running_loss) == pytest.approx(1.9, abs=0.01)


def test_the_late_stage_prunes_and_the_target_is_guaranteed(model, batch):
    optimizer = optimizer_for(model)
    ranks = comera.TwoStage(model, 0.4, 10, 60)
    step = comera.TrainStep(model, loss_fn, optimizer, ranks)
    generator = torch.Generator().manual_seed(1)
    for _ in range(70):  # on ever new data: nothing is memorised
        step(torch.randint(0, 120, (16, 3), generator=generator))
    assert ranks.target_size <= ranks.size.exact() < ranks.start_size
    outcome = ranks.finish_(optimizer)
    assert outcome["forced"] == 0
    cores = sum(c.numel() for layer in tensor_trains(model).values() for c in layer.cores)
    assert cores == outcome["size"] <= outcome["target_size"] == ranks.target_size
    assert ranks.stage == "done"
    learn(model, batch, ranks, optimizer, 2)


@pytest.mark.slow
def test_a_memorising_model_is_still_regularised(model, batch):
    """Its loss falls to nothing, its optimizer remembers larger gradients."""
    optimizer = torch.optim.AdamW(comera.param_groups(model, 1e-2, gate_lr=0.02))
    ranks = comera.TwoStage(model, 0.4, 10, 150)
    losses = learn(model, batch, ranks, optimizer, 160)
    assert losses[-1] < 0.02 * losses[0]
    assert ranks.size.exact() < 0.8 * ranks.start_size


def test_what_was_forced_is_said(model, caplog):
    ranks = comera.TwoStage(model, 0.3, 1, 1)
    with caplog.at_level(logging.WARNING, "comera"):
        outcome = ranks.finish_()
    assert outcome["forced"] > 0
    assert f"{outcome['forced']} ranks that were still open" in caplog.text


@pytest.mark.parametrize(
    ("target", "late", "rate"),
    [(0.5, 1000, 3e-3), (0.9, 5000, 2e-3), (0.2, 100, 2e-2), (0.5, 10, 0.02)],
)
def test_an_advised_rate_lets_gates_close(model, target, late, rate):
    assert comera.TwoStage(model, target, 5, late).gate_lr == pytest.approx(rate)


def test_a_schedule_too_short_to_prune_is_warned_about(model, caplog):
    ranks = comera.TwoStage(model, 0.3, 50, 50)
    ranks.check_schedule(optimizer_for(model, gate_lr=0.011))
    (said,) = caplog.messages
    assert said.startswith("TwoStage: 50 late steps are few for gates to close in turn")
    caplog.clear()
    ranks.check_schedule(optimizer_for(model, gate_lr=0.001))
    assert "raise it above 0.01" in caplog.text
    caplog.clear()
    short = comera.TwoStage(model, 0.3, 10, 10)
    short.check_schedule(optimizer_for(model, gate_lr=short.gate_lr))
    assert "none can be pruned: give the stages more steps, or cut by comera.Imp" in caplog.text
    caplog.clear()
    for steps, kind in ((200, torch.optim.AdamW), (100, comera.MuonAdamW)):
        groups = comera.param_groups(model, 1e-3, gate_lr=0.02)
        comera.TwoStage(model, 0.3, 0, steps).check_schedule(kind(groups))
    assert not caplog.text
    caplog.clear()
    warmed_up = optimizer_for(model, gate_lr=0.011)
    torch.optim.lr_scheduler.LambdaLR(warmed_up, lambda step: (step + 1) / 100)
    ranks.check_schedule(warmed_up)
    assert not caplog.text
    with caplog.at_level(logging.WARNING, "comera"):
        ranks.check_schedule(torch.optim.SGD([model[4].weight], lr=1.0))
    assert "does not train the rank gates" in caplog.text


class KeepsItFlat(torch.optim.SGD):
    """Keeps a vector of each parameter, which says nothing of its ranks."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["flat"] = torch.zeros(param.numel())
        return super().step(closure)


def test_what_cannot_work_out_is_said_after_the_first_step(model, batch, caplog):
    def step_of(optimizer, ranks):
        loss = loss_fn(model, batch)
        ranks.objective(loss).backward()
        optimizer.step()
        ranks.step(loss.detach(), optimizer)

    ranks = comera.TwoStage(model, 0.3, 5, 5)
    with pytest.raises(ValueError, match=r"state 'flat' of KeepsItFlat has shape .* cannot be cut"):
        step_of(KeepsItFlat(comera.param_groups(model, 1e-3)), ranks)
    assert not ranks.steps_done
    caplog.clear()
    optimizer = optimizer_for(model, gate_lr=0.001)
    for _ in range(2):
        step_of(optimizer, ranks)
    assert caplog.text.count("none can be pruned") == 1


@pytest.mark.parametrize("steps", [2, 5, 14])
def test_state_goes_on_where_it_was(batch, steps):
    """Early, late, and late with a target that has been reached."""
    first = make_model()
    ranks = comera.TwoStage(first, 0.7, 3, 30)
    optimizer = optimizer_for(first, gate_lr=0.1)
    learn(first, batch, ranks, optimizer, steps)
    assert bool(ranks.state_dict()["target_met"]) == (steps == 14)
    second = make_model()
    second.load_state_dict(first.state_dict())
    other_optimizer = optimizer_for(second, gate_lr=0.1)
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other = comera.TwoStage(second, 0.7, 3, 30)
    other.load_state_dict(copy.deepcopy(ranks.state_dict()))
    want = learn(first, batch, ranks, optimizer, 10)
    got = learn(second, batch, other, other_optimizer, 10)
    assert got == want
    assert_equal(second.state_dict(), first.state_dict())
    assert ranks.finish_(optimizer) == other.finish_(other_optimizer)
    assert_equal(second.state_dict(), first.state_dict())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": 0.0}, "target=0.0"),
        ({"target": 1.5}, "target=1.5"),
        ({"target": "0.3"}, "target='0.3' must be in"),
        ({"early_steps": -1}, "early_steps=-1"),
        ({"early_steps": 0.4}, "early_steps=0.4 must be a whole number of steps"),
        ({"late_steps": None}, "late_steps=None must be a whole number"),
        ({"late_steps": 0}, "late_steps=0 must be .* from 1; comera.ImportancePruning cuts ranks"),
        ({"min_rank": 3}, "min_rank=3"),
        ({"gamma": -1.0}, "gamma=-1.0 must be a number of at least 0"),
        ({"beta": None}, "beta=None must be a number"),
        ({"rho_loss": "1"}, "rho_loss='1' must be a number"),
    ],
)
def test_wrong_settings_are_named(model, settings, message):
    given = {"target": 0.5, "early_steps": 1, "late_steps": 1} | settings
    with pytest.raises(ValueError, match=message):
        comera.TwoStage(model, **given)


@BOTH
def test_a_state_that_is_not_of_the_method_is_refused(model, method):
    ranks = method(model)
    before = ranks.state_dict()
    other = {**before, "method": "Annealing", "steps_done": 3}
    with pytest.raises(ValueError, match=f"is a state of Annealing, not of {ranks.method}"):
        ranks.load_state_dict(other)
    del other["method"]
    with pytest.raises(ValueError, match=f"is a state of None, not of {ranks.method}"):
        ranks.load_state_dict(other)
    assert ranks.state_dict() == before


def test_ranks_of_another_model_are_refused(model):
    with pytest.raises(ValueError, match="ranks is a TwoStage of another model"):
        comera.TrainStep(
            model, loss_fn, optimizer_for(model), comera.TwoStage(make_model(), 0.5, 1, 1)
        )


@BOTH
@pytest.mark.parametrize("replace", [comera.densify_, comera.freeze_, comera.to_plain_])
def test_layers_that_were_replaced_have_no_ranks_to_cut(model, method, replace):
    ranks = method(model)
    replace(model)
    with pytest.raises(ValueError, match=r"ranks of 0, 0\.hot, 1, 3, which the model no longer"):
        ranks.finish_()
    assert ranks.forced is None


def test_groups_hold_every_parameter_once(model):
    groups = comera.param_groups(model, 1e-3, gate_lr=1e-2, core_lr=5e-4, weight_decay=0.1)
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    by_name = {g["name"]: g for g in groups}
    assert {n: (g["lr"], g["weight_decay"]) for n, g in by_name.items()} == {
        "cores": (5e-4, 0.0),
        "gates": (1e-2, 0.0),
        "dense": (1e-3, 0.1),
        "vectors": (1e-3, 0.0),
    }


def test_dense_layers_can_be_stepped_by_muon(model):
    groups = comera.param_groups(
        model, 1e-3, core_lr=5e-4, weight_decay=0.1, muon_modules="all-linear"
    )
    (group,) = [g for g in groups if g["name"] == "matrices"]
    assert [id(p) for p in group["params"]] == [id(model[4].weight)]
    assert (group["lr"], group["weight_decay"], group["muon"]) == (5e-4, 0.1, True)
    held = [id(p) for g in groups for p in g["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    muon = {g["name"]: g["muon"] for g in comera.MuonAdamW(groups).param_groups}
    assert muon == {"cores": True, "gates": False, "matrices": True, "vectors": False}
    with pytest.raises(ValueError, match="muon_modules='fc' names no dense layer"):
        comera.param_groups(model, 1e-3, muon_modules="fc")


def test_a_size_that_met_its_target_is_left_alone(model):
    ranks = in_late_stage(model, 1.0, 10.0, rho_loss=0.5)
    loss = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    gate = next(iter(tensor_trains(model).values())).gates[0]
    for_loss, for_gate = torch.autograd.grad(ranks.objective(loss), [loss, gate])
    assert for_loss == 1.5
    assert (for_gate == 0).all()


def test_a_target_below_the_smallest_model_is_refused_at_once(model):
    with pytest.raises(
        ValueError, match=r"target=0.001 leaves .* the smallest target is (0\.\d+)"
    ) as e:
        comera.TwoStage(model, 0.001, 1, 1)
    smallest = float(str(e.value).rsplit(" ", 1)[1])
    comera.TwoStage(model, smallest, 1, 1).finish_()
    comera.TwoStage(make_model(), 0.001, 1, 1, min_rank=0)


@pytest.mark.parametrize("weights_first", [True, False])
@BOTH
def test_after_the_cut_weights_and_rank_learning_resume_in_either_order(
    model, batch, method, weights_first
):
    ranks = method(model)
    with torch.no_grad():  # one rank of each bond is left, and no smaller target is in reach
        for layer in tensor_trains(model).values():
            for gate in layer.gates:
                gate[1:] = 0
    ranks.finish_()
    again = make_model()
    if weights_first:
        again.load_state_dict(model.state_dict())
    resumed = method(again)
    if weights_first:
        with pytest.raises(ValueError, match="the smallest target is 1"):
            resumed.objective(torch.ones(()))
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(ranks.state_dict())
    assert (resumed.stage, resumed.objective(torch.ones(()))) == ("done", 1)
    assert resumed.target_size == ranks.target_size


def test_an_average_of_weights_begins_again_from_the_small_model(model, batch):
    how = torch.optim.swa_utils.get_ema_multi_avg_fn(0.75)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=how)
    average.update_parameters(model)
    comera.ImportancePruning(model, 0.4, 3).finish_()
    average.module.load_state_dict(model.state_dict())
    torch.testing.assert_close(average(batch), model(batch))
    with torch.no_grad():
        model[4].bias += 1
    average.update_parameters(model)
    torch.testing.assert_close(average(batch), model(batch) - 0.75)


@BOTH
def test_what_is_frozen_keeps_its_ranks_and_is_not_counted(model, batch, method, caplog):
    model[1].requires_grad_(False)
    before = copy.deepcopy(model[1].state_dict())
    ranks = method(model)
    assert "leaves the ranks of 1 as they are: their gates are frozen" in caplog.text
    others = [layer for name, layer in tensor_trains(model).items() if name != "1"]
    assert ranks.start_size == sum(core.numel() for layer in others for core in layer.cores)
    optimizer = optimizer_for(model)
    learn(model, batch, ranks, optimizer, ranks.steps_left)
    assert ranks.finish_()["size"] == sum(c.numel() for layer in others for c in layer.cores)
    assert sum(c.numel() for layer in others for c in layer.cores) <= 0.5 * ranks.start_size
    torch.testing.assert_close(model[1].state_dict(), before, rtol=0, atol=0)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"rank gates of 0, 0\.hot, 1, 3 are frozen.*no others"):
        method(model)


def test_gates_of_frozen_cores_are_learned(model, batch):
    """To choose among the ranks of a model that is trained already."""
    for layer in tensor_trains(model).values():
        layer.cores.requires_grad_(False)
    ranks = comera.ImportancePruning(model, 0.5, 5)
    learn(model, batch, ranks, optimizer_for(model), 5)
    assert ranks.finish_()["size"] <= 0.5 * ranks.start_size


@BOTH
def test_a_schedule_that_is_over_is_not_warned_about(model, batch, method, caplog):
    ranks = method(model)
    optimizer = optimizer_for(model)
    learn(model, batch, ranks, optimizer, ranks.steps_left)
    ranks.finish_()
    caplog.clear()
    again = method(model)
    again.load_state_dict(ranks.state_dict())
    comera.TrainStep(model, loss_fn, optimizer_for(model, gate_lr=1e-3), again)
    assert not caplog.text


@BOTH
def test_an_optimizer_built_before_the_conversion_is_refused(model, method):
    old = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    with pytest.raises(ValueError, match="holds none of the model's tensor-train cores"):
        method(model).step(torch.ones(()), old)


UNCUT = {
    "a vector": lambda p: (KeepsItFlat(p, 1e-3), "state 'flat' of KeepsItFlat has shape"),
    "it in GaLore": lambda p: (
        comera.GaLore(p, KeepsItFlat, lr=1e-3), "state 'flat' of GaLore has shape"
    ),
    "projected cores": lambda p: (
        comera.GaLoreAdamW([{"params": [each for each in p if each.dim() > 1], "rank": 2}]),
        r"GaLoreAdamW projects a core of shape \(.*in a group without rank",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", UNCUT.values(), ids=UNCUT)
@BOTH
def test_state_that_cannot_be_cut_leaves_everything_as_it_was(method, how):
    model = comera.tensorize_(nn.Sequential(nn.Linear(64, 64)), comera.TTConfig(rank=8))
    ranks = method(model)
    optimizer, why = how(list(model.parameters()))
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(model.state_dict())
    truncate = functools.partial(comera.truncate_, model)
    for cut in (ranks.finish_, truncate, functools.partial(ranks.step, 1.0)):
        with pytest.raises(ValueError, match=why):
            cut(optimizer)
        assert_equal(model.state_dict(), before)
        assert ranks.forced is None


@pytest.mark.parametrize("method", [comera.ImportancePruning, comera.TwoStage])
def test_a_target_may_change_between_runs(model, method, caplog):
    """Like all settings it is that of the object, a share of the size that training began with."""
    steps = (8,) if method is comera.ImportancePruning else (4, 30)
    state = method(model, 0.5, *steps).state_dict() | {"target_met": torch.tensor(True)}
    smaller, same = method(model, 0.3, *steps), method(model, 0.5, *steps)
    start = smaller.start_size
    comera.ImportancePruning(model, 0.7, 8).finish_()
    smaller.load_state_dict(state)
    same.load_state_dict(state)
    assert (smaller.start_size, smaller.target_size) == (start, int(0.3 * start))
    assert (bool(smaller._target_met), bool(same._target_met)) == (False, True)
    assert f"goes on with a target of {int(0.3 * start)} entries" in caplog.text
    assert smaller.finish_()["size"] <= int(0.3 * start)


def test_a_target_that_cannot_be_reached_is_refused_and_nothing_changes(model):
    state = comera.TwoStage(model, 0.5, 4, 30).state_dict() | {"steps_done": 3, "start_size": 10}
    ranks = comera.TwoStage(model, 0.5, 4, 30)
    with pytest.raises(ValueError, match="leaves 5 of 10 entries"):
        ranks.load_state_dict(state)
    assert (ranks.steps_done, ranks.start_size > 10) == (0, True)


@BOTH
def test_a_loss_may_be_a_number(model, method):
    ranks, numbers = method(model), method(model)
    for loss in (2.0, 1.0):
        ranks.step(torch.tensor(loss))
        numbers.step(loss)
    assert_equal(ranks.state_dict(), numbers.state_dict())


def test_steps_without_the_objective_are_said_once(model, batch, caplog):
    ranks = comera.TwoStage(model, 0.5, 2, 2)
    ranks.objective(loss_fn(model, batch)).backward()
    ranks.step(1.0)
    assert "without its objective" not in caplog.text
    ranks = comera.TwoStage(model, 0.5, 2, 2)
    for _ in range(5):
        ranks.step(1.0)
    assert caplog.text.count("without its objective") == 1


def test_the_target_is_met_where_someone_else_has_closed_a_whole_bond():
    """At ``min_rank=1`` the layer keeps a rank of that bond, and all of its others."""
    model = nn.Sequential(comera.TTLinear(64, 64, rank=8), comera.TTLinear(64, 64, rank=8))
    ranks = comera.TwoStage(model, 0.3, 1, 1)
    with torch.no_grad():
        model[0].gates[1].zero_()
    outcome = ranks.finish_()
    cores = sum(core.numel() for m in tensor_trains(model).values() for core in m.cores)
    assert cores == outcome["size"] <= outcome["target_size"]


@pytest.mark.parametrize("fast", [False, True])
def test_the_cut_says_where_the_loss_was_to_be_and_whether_gates_fell_too_fast(
    model, batch, caplog, fast
):
    optimizer = optimizer_for(model, gate_lr=0.2 if fast else 1e-3)
    ranks = comera.TwoStage(model, 0.5, 2, 15, gamma=50.0 if fast else 0.0)
    learn(model, batch, ranks, optimizer, 17)
    outcome = ranks.finish_(optimizer)
    assert outcome["came_to"] > 0
    assert outcome["goal"] > 0
    assert ("answer next to nothing" in caplog.text) == fast
