"""A ``Trainer`` of transformers that learns ranks: as our own loop does, and resumed exactly."""

import json
from contextlib import suppress

import pytest
import torch

import comera
from tests.integrations.tiny import MODELS, bert, data, hf, llama, trainer, transformers

each = pytest.mark.parametrize("name", ["bert", pytest.param("llama", marks=pytest.mark.slow)])


def learning(model, folder, target=0.5, early=3, late=3, **settings):
    made = trainer(model, folder, **settings)
    ranks = comera.TwoStage(model, target, early_steps=early, late_steps=late)
    return made, hf.learn_ranks_(made, ranks, gate_lr=0.3)


def rows_of(model):
    return [{key: torch.as_tensor(value) for key, value in row.items()} for row in data(model)]


@pytest.mark.parametrize("parts", [1, 3])
@each
def test_it_trains_as_our_own_step_does(name, parts, tmp_path):
    """In float64: under Adam, what has no gradient but rounding would go its own way."""
    ours, theirs = (MODELS[name]().double() for _ in range(2))
    for model in (ours, theirs):
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    settings = {"gradient_accumulation_steps": parts, "per_device_train_batch_size": 12 // parts}
    made, callback = learning(theirs, tmp_path, max_steps=8, save_strategy="no", **settings)
    if name == "bert":  # its loss is the mean of a batch, whatever is handed over
        made.loss_is_scaled_for_ga = False
    made.get_train_dataloader = lambda: torch.utils.data.DataLoader(rows_of(theirs), 12 // parts)
    made.train()

    groups = comera.param_groups(ours, 1e-3, gate_lr=0.3, weight_decay=0.1)
    optimizer = torch.optim.AdamW(groups)
    ranks = comera.TwoStage(ours, 0.5, early_steps=3, late_steps=3)
    step = comera.TrainStep(
        ours, lambda m, rows: m(**rows).loss, optimizer, ranks, accumulate=parts, clip_norm=1.0
    )
    batches = list(torch.utils.data.DataLoader(rows_of(ours), 12)) * 2
    losses = []
    for batch in batches:
        losses.append(float(step(batch)))
        if ranks.due:
            outcome = ranks.finish_(optimizer)

    assert callback.outcome == pytest.approx(outcome, rel=1e-5)
    logged = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    assert logged == pytest.approx(losses, rel=1e-4)  # without the size
    for (key, mine), other in zip(
        ours.state_dict().items(), theirs.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(other, mine, rtol=1e-5, atol=1e-7, msg=key)


def test_gates_have_the_advised_rate(tmp_path):
    model = bert()
    made = trainer(model, tmp_path)
    ranks = comera.TwoStage(model, 0.5, early_steps=3, late_steps=500)
    hf.learn_ranks_(made, ranks)
    gate = ranks.size.gates[0]
    groups = made.create_optimizer().param_groups
    [rate] = [group["lr"] for group in groups if any(param is gate for param in group["params"])]
    assert rate == ranks.gate_lr == pytest.approx(1.5 / (0.5 * 500))


class Killed(Exception):
    pass


def killed_at(step):
    class Kill(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == step:
                raise Killed

    return Kill()


@pytest.mark.parametrize("step", [2, 5, 7], ids=["early", "late", "after the cut"])
@each
def test_a_run_that_was_killed_goes_on_bit_for_bit(name, step, tmp_path):
    whole, _ = learning(MODELS[name](), tmp_path / "whole", max_steps=9, save_strategy="no")
    whole.train()

    broken, _ = learning(MODELS[name](), tmp_path / "broken", max_steps=9, save_steps=1)
    broken.add_callback(killed_at(step))
    with suppress(Killed):
        broken.train()
    resumed, _ = learning(MODELS[name](), tmp_path / "broken", max_steps=9, save_strategy="no")
    resumed.train(resume_from_checkpoint=True)

    assert resumed.state.log_history[-1]["step"] == 9
    wanted, found = whole.model.state_dict(), resumed.model.state_dict()
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[key], found[key]) for key in wanted)


def test_gates_have_a_group_and_nothing_of_a_tensor_train_is_decayed(tmp_path):
    model = bert()
    made, _ = learning(model, tmp_path)
    made.create_optimizer()
    layers = comera.nn.module.tensor_trains(model).values()
    kind = {id(gate): "gate" for layer in layers for gate in layer.gates}
    kind |= {id(core): "core" for layer in layers for core in layer.cores}
    seen = []
    for group in made.optimizer.param_groups:
        kinds = {kind.get(id(param), "other") for param in group["params"]}
        seen += [id(param) for param in group["params"]]
        assert len(kinds) == 1
        assert group["lr"] == (0.3 if kinds == {"gate"} else 1e-3)
        assert kinds == {"other"} or group["weight_decay"] == 0
    assert sorted(seen) == sorted(id(param) for param in model.parameters())


def test_an_optimizer_that_was_handed_over_stays_as_it_is(tmp_path):
    model = bert()
    optimizer = torch.optim.SGD(comera.param_groups(model, 1e-3))
    groups = [dict(group) for group in optimizer.param_groups]
    made, _ = learning(model, tmp_path)
    made.optimizer = optimizer
    assert made.create_optimizer() is optimizer
    assert optimizer.param_groups == groups


def test_the_best_model_is_one_with_its_ranks_cut(tmp_path):
    settings = {
        "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss", "greater_is_better": True,  # it falls
    }  # fmt: skip
    made, callback = learning(llama(), tmp_path, max_steps=10, learning_rate=1e-2, **settings)
    made.train()
    assert made.state.best_global_step >= 6
    layers = comera.nn.module.tensor_trains(made.model).values()
    size = sum(core.numel() for layer in layers for core in layer.cores)
    assert size == callback.outcome["size"]


def test_the_state_in_a_checkpoint_is_the_state(tmp_path):
    made, callback = learning(bert(), tmp_path, max_steps=5, save_steps=5)
    made.train()
    saved = json.loads((tmp_path / "checkpoint-5" / "trainer_state.json").read_text())
    state = saved["stateful_callbacks"]["RankCallback"]["attributes"]["ranks"]
    mine = callback.ranks.state_dict()
    assert state["steps_done"] == 5
    value = torch.tensor(state["running_loss"]["values"], dtype=torch.float32)
    assert torch.equal(value, mine["running_loss"])


def test_importance_pruning_is_resumed_too(tmp_path):
    def made_by(folder, **settings):
        model = bert()
        made = trainer(model, folder, max_steps=8, **settings)
        hf.learn_ranks_(made, comera.ImportancePruning(model, 0.5, steps=6))
        return made

    whole = made_by(tmp_path, save_steps=5)
    whole.train()
    resumed = made_by(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    wanted, found = whole.model.state_dict(), resumed.model.state_dict()
    assert all(torch.equal(wanted[key], found[key]) for key in wanted)


# ── what is refused, and what is said ────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("settings", "rate", "message"),
    [
        ({}, 0, "gate_lr="),
        ({}, -1.0, "gate_lr="),
        ({}, "fast", "gate_lr="),
        ({"restore_callback_states_from_checkpoint": True}, 0.3, "restore_callback_states_from"),
    ],
)
def test_settings_with_which_no_ranks_are_learned(settings, rate, message, tmp_path):
    model = bert()
    made, ranks = trainer(model, tmp_path, **settings), comera.TwoStage(model, 0.5, 3, 3)
    with pytest.raises(ValueError, match=message):
        hf.learn_ranks_(made, ranks, gate_lr=rate)


def test_a_trainer_learns_the_ranks_of_its_own_model_once(tmp_path):
    made, callback = learning(bert(), tmp_path)
    with pytest.raises(ValueError, match="already"):
        hf.learn_ranks_(made, callback.ranks)
    with pytest.raises(ValueError, match="another model"):
        hf.learn_ranks_(trainer(bert(), tmp_path), callback.ranks)


def test_a_checkpoint_without_ranks_is_refused(tmp_path):
    without = trainer(bert(), tmp_path, max_steps=4)
    hf.set_optimizer_groups_(without)
    without.train()
    made, _ = learning(bert(), tmp_path)
    with pytest.raises(ValueError, match="no state of rank learning"):
        made.train(resume_from_checkpoint=True)


def test_training_that_ends_before_the_cut_is_named(tmp_path, caplog):
    made, _ = learning(bert(), tmp_path, max_steps=4, save_strategy="no")
    made.train()
    assert "takes 6 more steps and the trainer 4" in caplog.text
    assert "no rank was cut" in caplog.text
