"""One table: optimizers under the requirements of torch's tests of optimizers."""

import copy
import functools
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, optimizer

import comera

from . import conforms, harness, table

exactly = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


def matrices_with(make, **settings):
    """Return a maker of optimizers that gives these settings to matrices."""

    def made(params, **more):
        if all(isinstance(each, nn.Parameter) for each in params):
            params = [{"params": [p], **(settings if p.dim() > 1 else {})} for p in params]
        return make(params, **more)

    return made


def in_backward(params, **settings):
    return comera.OptimizerInBackward(torch.optim.AdamW(params, **settings)).optimizer


OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "Adafactor": torch.optim.Adafactor,
    "CAME": comera.CAME,
    "CAME, 8 bits": functools.partial(comera.CAME, state_dtype="8bit"),
    "GaLore around AdamW": matrices_with(comera.GaLoreAdamW, rank=4, update_proj_gap=3),
    "GaLore around Adafactor": matrices_with(comera.GaLoreAdafactor, rank=4),
    "GaLore around CAME": matrices_with(
        lambda params, **more: comera.GaLore(params, comera.CAME, **more), rank=4
    ),
    "MuonAdamW": matrices_with(comera.MuonAdamW, muon=True),
    "AdamW in backward": in_backward,
}


@functools.cache
def info(name):
    """Return torch's kind of entry: how the optimizer is made, and of which settings."""
    torchs, kind = harness(), OPTIMIZERS[name]
    theirs = [entry for entry in torchs.optim_db if entry.optim_cls is kind]
    settings = {"lr": 1e-3}, {"lr": 1e-2}, {"weight_decay": 0.1}, {"lr": torch.tensor(1e-3)}
    ours = [torchs.OptimizerInput(None, each) for each in settings]
    inputs = lambda device, dtype=None: ours  # noqa: E731
    if theirs:
        return theirs[0]
    flags = () if "CAME" in name else ("foreach", "differentiable", "maximize", "capturable")
    return torchs.OptimizerInfo(kind, optim_inputs_func=inputs, not_og_supported_flags=flags)


def problems(name, apart=False):
    """Yield parameters, an optimizer of them for each of its settings, and their loss."""
    entry = info(name)
    for one in entry.optim_inputs_func("cpu"):
        torch.manual_seed(0)
        x, *both = torch.randn(16, 64), torch.randn(80, 64, 2), torch.randn(80, 2)
        params = [nn.Parameter(x[..., 0] if apart else x[..., 0].clone()) for x in both]
        sign = -1 if one.kwargs.get("maximize") else 1

        def loss(params=params, x=x, sign=sign):
            return sign * (x @ params[0].T + params[1]).square().mean()

        yield params, entry.optim_cls(params, **one.kwargs), loss


def train(optimizer, loss, steps=5):
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def clones(params):
    return [param.detach().clone() for param in params]


def loss_falls(name):
    for apart in (False, True):
        for params, of_them, loss in problems(name, apart):
            schedules = lr_scheduler.StepLR(of_them, 3), lr_scheduler.ReduceLROnPlateau(of_them)
            before = loss(sign=1).item()
            for _ in range(4):
                train(of_them, loss, 2)
                schedules[0].step()
                schedules[1].step(1.0)
            assert loss(sign=1).item() < before
            assert all(of_them.state[param] for param in params)


def nothing_to_do(name):
    for params, of_them, loss in problems(name):
        for group in of_them.param_groups:
            group["weight_decay"] = 0.0
        before = clones(params)
        of_them.step()
        (0 * loss()).backward()
        of_them.step()
        assert all(map(torch.equal, before, params))
    of_none = info(name).optim_cls([empty := nn.Parameter(torch.empty(0, 4))])
    empty.sum().backward()
    of_none.step()


def states_resume(name):
    for one, other in zip(problems(name), problems(name), strict=True):
        (params, of_them, loss), (others, of_others, again) = one, other
        train(of_them, loss)
        torch.save((clones(params), of_them.state_dict()), file := io.BytesIO())
        train(of_them, loss)
        file.seek(0)
        saved, state = torch.load(file, weights_only=True)
        for group in state["param_groups"]:  # as an older torch has written it
            for key in info(name).not_og_supported_flags:
                if not group.get(key, True):
                    del group[key]
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(saved), others)
        of_others.load_state_dict(state)
        train(of_others, again)
        exactly(others, params)


def state_hooks(name):
    _, of_them, loss = next(problems(name))
    train(of_them, loss)
    called, kinds = [], ("state_dict_pre", "state_dict_post", "load_state_dict_pre")
    for kind in (*kinds, "load_state_dict_post"):
        getattr(of_them, f"register_{kind}_hook")(lambda *_, kind=kind: called.append(kind))
    of_them.load_state_dict(of_them.state_dict())
    assert called == [*kinds, "load_state_dict_post"]


def step_hooks(name):
    _, of_them, loss = next(problems(name))
    called, handles = [], []
    for kind in ("pre", "post"):
        everywhere = getattr(optimizer, f"register_optimizer_step_{kind}_hook")
        for register in (everywhere, getattr(of_them, f"register_step_{kind}_hook")):
            handles.append(register(lambda *_, kind=kind: called.append(kind)))
    train(of_them, loss, 1)
    for handle in handles:
        handle.remove()
    assert called == ["pre", "pre", "post", "post"], "hooks run twice"


def copies(name):
    for steps in (0, 5):
        params, of_them, loss = next(problems(name))
        train(of_them, loss, steps)
        torch.save(pair := (params, of_them), file := io.BytesIO())
        file.seek(0)
        read = torch.load(file, weights_only=False)
        twins = copy.deepcopy(pair), pickle.loads(pickle.dumps(pair)), read
        train(of_them, loss)
        for others, of_others in twins:
            assert repr(of_others) == repr(of_them)
            held = [param for group in of_others.param_groups for param in group["params"]]
            assert {*map(id, held)} == {*map(id, others)}.difference(map(id, params))
            train(of_others, functools.partial(loss, others))
            exactly(others, params)
            exactly(of_others.state_dict()["state"], of_them.state_dict()["state"])


def groups_and_closures(name):
    (weight, bias), *_, loss = next(problems(name))
    weight, bias = params = [nn.Parameter(param) for param in clones((weight, bias))]
    of_them = info(name).optim_cls([{"params": [weight], "lr": 0.0}, {"params": [bias]}], lr=1e-2)
    before = clones(params)

    def closure():
        of_them.zero_grad()
        value = loss(params)
        value.backward()
        return value

    assert of_them.step(closure) == loss(before)
    assert list(map(torch.equal, before, params)) == [True, False]
    of_them.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert len(of_them.param_groups) == 3


def wrong_parameters(name):
    for error in harness().get_error_inputs_for_all_optims("cpu", torch.float32):
        wrong = error.optimizer_error_input.params
        if error.error_type is not UserWarning and wrong is not None:
            with pytest.raises(error.error_type, match=error.error_regex):
                info(name).optim_cls(wrong)


CANNOT = [
    (".*Adafactor", nothing_to_do, "division by zero", "torch's own takes no empty parameters"),
    ("AdamW in b", step_hooks, "would find no gradients", "they are gone after backward"),
]
REQUIREMENTS = (
    loss_falls, nothing_to_do, states_resume, state_hooks, step_hooks, copies,
    groups_and_closures, wrong_parameters,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@table(OPTIMIZERS, REQUIREMENTS)
def test_optimizers(name, requirement):
    conforms(name, requirement, CANNOT)
