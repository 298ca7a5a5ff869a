"""Ranks that two processes cut together, in loops of one's own."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer

import comera
from comera.nn.module import tensor_trains
from comera.params import wrappers_of
from tests.processes import in_two_processes, said
from tests.states import assert_equal

from .conftest import loss_fn, make_model, prune_some

FORMS = {
    "cut": lambda model, **settings: comera.ImportancePruning(model, 0.5, 8, **settings),
    "two stages": lambda model, **settings: comera.TwoStage(model, 0.5, 4, 8, **settings),
}
STEPS, MORE = {"cut": 8, "two stages": 12}, 5


def rows(rank, number):
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randint(0, 120, (16, 3), generator=generator)


def optimizer_for(model):
    return torch.optim.AdamW(comera.param_groups(model, 1e-2, gate_lr=0.1))


def loop(model, wrapped, ranks, batches, optimizer=None):
    """That of the README."""
    optimizer = optimizer or optimizer_for(model)
    found = {}
    for batch in batches:
        optimizer.zero_grad()
        with comera.BatchedContraction(model):
            loss = loss_fn(wrapped, batch)
            ranks.objective(loss).backward()
        optimizer.step()
        ranks.step(loss.detach(), optimizer)
        if ranks.due:
            found |= {"outcome": ranks.finish_(optimizer), "cut": snapshot(model)}
    return found | {"shapes": shapes(model), "weights": snapshot(model)}


def shapes(model):
    return {name: layer.ranks for name, layer in tensor_trains(model).items()}


def snapshot(model):
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def own_loops(rank):
    """Both forms, with either kind of wrapper, and with the wrapper given to the method."""
    found = {}
    for form, method in FORMS.items():
        for given, settings in (
            ("model", {}),
            ("model", {"find_unused_parameters": True}),
            ("model", {"gradient_as_bucket_view": True}),
            ("model", {"static_graph": True}),
            ("wrapper", {}),
        ):
            model = make_model()
            wrapped = nn.parallel.DistributedDataParallel(model, **settings)
            ranks = method(wrapped if given == "wrapper" else model)
            batches = [rows(rank, number) for number in range(STEPS[form] + MORE)]
            found[form, given, *settings] = loop(model, wrapped, ranks, batches)
    return found


def trained(rank, form):
    model = make_model()
    wrapped = nn.parallel.DistributedDataParallel(model)
    ranks = FORMS[form](model)
    optimizer = optimizer_for(model)
    loop(model, wrapped, ranks, [rows(rank, k) for k in range(STEPS[form] - 1)], optimizer)
    return model, wrapped, ranks, optimizer


@torch.no_grad()
def shift(model):
    model[1].gates[0].add_(0.3)


@torch.no_grad()
def close(model):
    model[1].gates[0][1] = 0


@torch.no_grad()
def other_cores(model):
    for layer in tensor_trains(model).values():
        for core in layer.cores:
            core.copy_(torch.randn(core.shape, generator=torch.Generator().manual_seed(5)))


@torch.no_grad()
def spoil(model):
    model[1].cores[0].fill_(torch.nan)


@torch.no_grad()
def restore(model, weights):
    for name, param in model.named_parameters():
        param.copy_(weights[name])


def refusals(rank):
    """The second process has changed its copy."""
    found = {}
    for form in FORMS:
        for change in (shift, close, other_cores, spoil):
            model, wrapped, ranks, optimizer = trained(rank, form)
            before = snapshot(model)
            if rank == 1:
                change(model)
            parted, said = snapshot(model), "nothing was raised"
            try:
                ranks.finish_(optimizer)
            except (ValueError, RuntimeError) as error:
                said = f"{type(error).__name__}: {error}"
            unchanged = said != "nothing was raised" and all(
                torch.equal(param.nan_to_num(7), parted[name].nan_to_num(7))
                for name, param in model.named_parameters()
            )
            if unchanged:  # and can be mended
                restore(model, before)
                ranks.finish_(optimizer)
            found[form, change.__name__] = {
                "said": said, "unchanged": unchanged, "shapes": shapes(model)
            }  # fmt: skip
            del wrapped
    return found


def of_its_own(rank):
    """No wrapper: each process trains by itself."""
    found = {}
    batches = [rows(rank, number) for number in range(10)]
    for name, settings in (("auto", {}), ("none", {"process_group": None})):
        model = make_model()
        with torch.no_grad():
            model[1].gates[0].sub_(0.2 * rank)
        ranks = comera.ImportancePruning(model, 0.5, 8, **settings)
        try:
            done = loop(model, model, ranks, batches)
            found[name] = done["outcome"], done["shapes"], ranks.steps_done
        except ValueError as error:
            found[name] = str(error), ranks.steps_done
    return found


def other_settings(rank):
    model = make_model()
    ranks = comera.TwoStage(model, 0.5 if rank else 0.4, 2, 2)
    try:
        ranks.finish_()
    except ValueError as error:
        return str(error), shapes(model)


def cut_by_hand(rank):
    """``truncate_`` in a loop of one's own."""
    model = make_model()
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = optimizer_for(model)
    for number in range(6):
        optimizer.zero_grad()
        loss_fn(wrapped, rows(rank, number)).backward()
        optimizer.step()
        if number == 2:
            with torch.no_grad():
                model[1].gates[1][3:] = 0
            comera.truncate_(model, optimizer)
    return snapshot(model)


def given_up(rank):
    """A wrapper that is no more is not found, one of another model neither."""
    model = make_model()
    first = nn.parallel.DistributedDataParallel(model)
    other = nn.parallel.DistributedDataParallel(make_model())
    seen = [wrapper is first for wrapper in wrappers_of([model])]
    del first
    return seen, len(wrappers_of([model])), len(wrappers_of([other.module]))


def load_cut(wrapped):
    cut = make_model()
    prune_some(cut)
    comera.truncate_(cut)
    wrapped.module.load_state_dict(cut.state_dict())


def tensorize(wrapped):
    comera.densify_(wrapped)
    comera.tensorize_(wrapped, comera.TTConfig(rank=3, init="svd"))


CHANGES = {
    "load_state_dict": load_cut,
    "densify_": comera.densify_,
    "to_plain_": comera.to_plain_,
    "tensorize_": tensorize,
    "set_weight_": lambda wrapped: wrapped.module[3].set_weight_(
        wrapped.module[3].dense_weight(), tolerance=0.5
    ),
}
KINDS = ({}, {"find_unused_parameters": True}, {"static_graph": True})


def steps(wrapped, rank, count=4, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(wrapped.parameters(), 1e-2)
    for number in range(count):
        optimizer.zero_grad()
        loss_fn(wrapped, rows(rank, number)).backward()
        optimizer.step()
    return snapshot(wrapped)


def changed_inside(rank):
    """A wrapper whose model has other parameters now, or parameters of other shapes."""
    found = {}
    for name, change in CHANGES.items():
        for settings in KINDS:
            wrapped = nn.parallel.DistributedDataParallel(make_model(), **settings)
            change(wrapped)
            found[name, *settings] = steps(wrapped, rank)
    return found


def compressed_gradients(rank):
    """A cut under PowerSGD's hook, which remembers errors of each bucket."""
    wrapped = nn.parallel.DistributedDataParallel(make_model())
    state = PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.1)
    wrapped.register_comm_hook(state, powerSGD_hook)
    optimizer = optimizer_for(wrapped.module)
    steps(wrapped, rank, 4, optimizer)
    prune_some(wrapped.module)
    comera.truncate_(wrapped, optimizer)
    remembered = len(state.error_dict), state.iter
    return remembered, steps(wrapped, rank, 4, optimizer), len(state.error_dict)


def shared_state(rank):
    wrapped = nn.parallel.DistributedDataParallel(make_model())
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=1e-2)
    prune_some(wrapped.module)
    before = shapes(wrapped)
    cut = said(lambda: comera.truncate_(wrapped, optimizer))
    ranks = comera.ImportancePruning(wrapped, 0.5, 2)
    return cut, said(lambda: ranks.step(1.0, optimizer)), shapes(wrapped) == before


def observed(rank):
    """What ranks matter, as all rows tell it, and as one process that has them all sees it."""
    alone, together = make_model(), make_model()
    wrapped = nn.parallel.DistributedDataParallel(together)
    found = []
    for model, called, of in ((alone, alone, (0, 1)), (together, wrapped, (rank,))):
        ranks = comera.ImportancePruning(model, 0.5, 4, canonical=False)
        batches = [torch.cat([rows(each, number) for each in of]) for number in range(4)]
        loop(model, called, ranks, batches[:3])
        found.append(ranks.state_dict()["importance"])
    return found


def _found(rank):
    found = {
        "loops": own_loops(rank),
        "refusals": refusals(rank),
        "own": of_its_own(rank),
        "settings": other_settings(rank),
        "by hand": cut_by_hand(rank),
        "given up": given_up(rank),
        "changed": changed_inside(rank),
        "compressed": compressed_gradients(rank),
        "shared state": shared_state(rank),
        "observed": observed(rank),
    }
    gc.collect()
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each of two processes found; starting them takes longer than all they do."""
    return in_two_processes(_found, tmp_path_factory.mktemp("processes"))


WRAPPERS = [
    ("model",),
    ("model", "find_unused_parameters"),
    ("model", "gradient_as_bucket_view"),
    ("model", "static_graph"),
    ("wrapper",),
]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wrapper", WRAPPERS, ids=" ".join)
def test_loops_of_ones_own_cut_the_same_and_train_on_together(results, form, wrapper):
    mine, theirs = (result["loops"][form, *wrapper] for result in results)
    for found in (mine, theirs):  # each weighs its own loss
        found["outcome"] = {
            k: v for k, v in found["outcome"].items() if k not in ("came_to", "goal")
        }
    assert_equal(mine, theirs)
    assert mine["outcome"]["size"] <= mine["outcome"]["target_size"]
    assert mine["shapes"] != shapes(make_model())
    assert not any(torch.equal(mine["weights"][name], was) for name, was in mine["cut"].items())


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("change", ["shift", "close"])
def test_copies_with_other_gates_are_not_cut(results, form, change):
    mine, theirs = (result["refusals"][form, change] for result in results)
    for found in (mine, theirs):
        assert found["said"].startswith("ValueError: processes 0 and 1 do not hold copies of one")
        assert "gates of 1 differ by up to" in found["said"]
        assert found["said"].endswith(
            "where each trains a model of its own, give TwoStage or ImportancePruning "
            "process_group=None"
        )
        assert found["unchanged"]
    assert mine["shapes"] == theirs["shapes"] != shapes(make_model())  # once it was mended


@pytest.mark.slow
def test_copies_that_would_cut_other_ranks_are_not_cut(results):
    """Of equal gates, but other cores: they tell how much a rank carries."""
    for found in (result["refusals"]["two stages", "other_cores"] for result in results):
        assert found["said"].startswith("ValueError: processes 0 and 1 would cut other ranks")
        assert found["unchanged"]
    # Where gradients choose, and these are summed over all processes, cores have no say.
    chosen = [result["refusals"]["cut", "other_cores"] for result in results]
    assert chosen[0]["said"] == chosen[1]["said"] == "nothing was raised"
    assert chosen[0]["shapes"] == chosen[1]["shapes"]


@pytest.mark.slow
def test_where_one_process_cannot_cut_no_other_does(results):
    mine, theirs = (result["refusals"]["two stages", "spoil"] for result in results)
    assert mine["said"].startswith(
        "RuntimeError: process 1 cannot cut its ranks, so that no other does: ValueError: the "
        "cores of 1 hold numbers that are not finite"
    )
    assert theirs["said"].startswith("ValueError: the cores of 1 hold numbers that are not finite")
    assert mine["unchanged"]
    assert theirs["unchanged"]
    assert mine["shapes"] == theirs["shapes"] != shapes(make_model())


@pytest.mark.slow
def test_processes_that_train_models_of_their_own_say_so(results):
    """Else nobody would know why the second one's weights became those of the first."""
    for text, done in (result["own"]["auto"] for result in results):
        assert "processes 0 and 1 do not hold copies of one model: gates of " in text
        assert done == 4  # when ranks would have been brought into canonical form
    (mine, my_shapes, _), (theirs, their_shapes, _) = (result["own"]["none"] for result in results)
    assert my_shapes != their_shapes
    assert mine["size"] <= mine["target_size"] == theirs["target_size"] >= theirs["size"]


@pytest.mark.slow
def test_settings_that_differ_are_named(results):
    for text, left in (result["settings"] for result in results):
        assert "target_size is 751 and 939" in text
        assert left == shapes(make_model())


@pytest.mark.slow
def test_ranks_cut_by_hand_are_known_to_the_wrapper(results):
    assert_equal(results[0]["by hand"], results[1]["by hand"])


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("settings", KINDS, ids=list)
def test_wrappers_know_of_what_has_changed_inside(results, change, settings):
    mine, theirs = (result["changed"][change, *settings] for result in results)
    assert_equal(mine, theirs)


@pytest.mark.slow
def test_a_hook_that_compresses_gradients_begins_anew_after_a_cut(results):
    for remembered, weights, memories in (result["compressed"] for result in results):
        assert remembered == (0, 0)
        assert memories > 0
        assert_equal(weights, results[0]["compressed"][1])


@pytest.mark.slow
def test_a_cut_of_an_optimizer_whose_state_is_shared_out_is_refused(results):
    for cut, learned, unchanged in (result["shared state"] for result in results):
        assert cut.startswith("ZeroRedundancyOptimizer steps each parameter in one process")
        assert learned == cut
        assert unchanged


@pytest.mark.slow
def test_importance_is_that_of_the_rows_of_all(results):
    for alone, together in (result["observed"] for result in results):
        torch.testing.assert_close(together, alone)


@pytest.mark.slow
def test_only_wrappers_of_the_model_that_are_still_there_are_found(results):
    assert [result["given up"] for result in results] == [([True], 0, 1)] * 2


def test_a_group_that_is_none_is_named(model):
    with pytest.raises(ValueError, match=r"process_group=.gloo. must be a group of torch\.distr"):
        comera.TwoStage(model, 0.5, 5, 5, process_group="gloo")


@pytest.mark.parametrize(("given", "copied"), [("auto", "auto"), (None, None), (object(), "auto")])
def test_copies_find_their_own_processes(model, given, copied):
    ranks = comera.ImportancePruning(model, 0.5, 5, process_group=given)
    assert copy.deepcopy(ranks).process_group == copied
    assert pickle.loads(pickle.dumps(ranks)).process_group == copied


def test_a_process_that_is_alone_leaves_its_gates_where_ranks_cannot_be_cut(model):
    """All or nothing there, too."""
    ranks = comera.TwoStage(model, 0.5, 1, 1)
    before = snapshot(model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    optimizer.state[next(model.parameters())]["func_evals"] = 1
    with pytest.raises(ValueError, match="LBFGS has one history"):
        ranks.finish_(optimizer)
    assert_equal(snapshot(model), before)
    assert ranks.finish_()["size"] <= ranks.target_size
