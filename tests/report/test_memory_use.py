import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import comera
from comera.models.decoder import CausalLanguageModel, Decoder
from comera.models.transformer import Encoder, SequenceClassifier
from comera.optim.state_layout import stored_bytes
from comera.report.memory_use import state_bytes
from tests.peers import peer

KINDS = {
    "adamw": lambda g: torch.optim.AdamW(g, fused=True),
    "amsgrad": lambda g: torch.optim.AdamW(g, amsgrad=True, foreach=True),
    "adafactor": lambda g: torch.optim.Adafactor(g, lr=1e-2),
    "sgd": lambda g: torch.optim.SGD(g, lr=0.1),
    "momentum": lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9),
    "rmsprop": lambda g: torch.optim.RMSprop(g, lr=0.1, centered=True),
    "nadam": lambda g: torch.optim.NAdam(g, lr=0.1),
    "came": comera.CAME,
    "came8bit": lambda g: comera.CAME(g, state_dtype="8bit"),
}
GALORE = {
    "galore_adamw": comera.GaLoreAdamW,
    "galore_adafactor": comera.GaLoreAdafactor,
    "galore_came": lambda g: comera.GaLore(g, comera.CAME, state_dtype="8bit"),
    "galore_sgd": lambda g: comera.GaLore(g, torch.optim.SGD, lr=0.1, momentum=0.9),
}


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    encoder = Encoder(300, 64, 2, 2, 128, 16, 0.0, 2, "post")
    model = SequenceClassifier(encoder, 3, 0.0)
    comera.tensorize_(model, comera.TTConfig(rank=8, target_modules=["fc1", "query"]))
    model.encoder.blocks[0].fc2.weight.requires_grad_(False)
    model.register_buffer("mask", torch.ones(7))
    return model.to(dtype)


def backward(model):
    tokens, labels = torch.randint(1, 300, (8, 16)), torch.randint(0, 3, (8,))
    segments = torch.zeros_like(tokens)
    F.cross_entropy(model(tokens, segments).float(), labels).backward()


def groups(model, galore, proj_type="std"):
    if galore:
        return comera.galore_param_groups(model, 1e-3, 8, proj_type=proj_type)
    return comera.param_groups(model, 1e-3)


def held(optimizer, group):
    """Bytes of what is really kept of a group's parameters."""
    total = 0
    for param in group["params"]:
        states = [optimizer.state.get(param, {})]
        if isinstance(optimizer, comera.GaLore) and optimizer.stand_ins.get(param) is not None:
            states.append(optimizer.inner.state.get(optimizer.stand_ins.get(param), {}))
        total += sum(stored_bytes(value) for state in states for value in state.values())
    return total


def check(model, optimizer):
    weights = copy.deepcopy(model.state_dict())
    report = comera.memory_report(model, optimizer)
    assert not optimizer.state_dict()["state"]
    for key, value in model.state_dict().items():
        assert torch.equal(value, weights[key])
    backward(model)
    optimizer.step()
    lines = {line.name: line for line in report.groups}
    for group in optimizer.param_groups:
        line = lines.pop(group["name"])
        assert line.entries == sum(p.numel() for p in group["params"])
        assert line.weights == sum(p.numel() * p.element_size() for p in group["params"])
        assert line.gradients == sum(
            p.grad.numel() * p.grad.element_size() for p in group["params"]
        )
        assert line.state == held(optimizer, group)
    rest = lines.pop("not trained")
    assert rest.entries == 64 * 128 + 7
    assert (rest.gradients, rest.state, lines) == (0, 0, {})
    assert comera.memory_report(model, optimizer) == report  # of what is there now
    return report


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)],
    ids=["torch.float32", "torch.bfloat16"],
)
@pytest.mark.parametrize("name", [*KINDS, *GALORE])
def test_what_is_counted_is_what_a_step_allocates(name, dtype):
    model = make_model(dtype)
    optimizer = {**KINDS, **GALORE}[name](groups(model, name in GALORE))
    check(model, optimizer)


def test_projections_of_both_sides_are_counted():
    model = make_model()
    check(model, comera.GaLoreAdamW(groups(model, True, "full")))


@pytest.mark.slow
@pytest.mark.parametrize("galore", [False, True])
def test_eight_bits_of_torchao_are_counted(galore):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torchao's own making
        ao = peer("torchao.optim")
        with torch.compiler.set_stance("force_eager"):
            model = make_model()
            kind = comera.GaLoreAdamW8bit if galore else ao.AdamW8bit
            report = check(model, kind(groups(model, galore)))
    assert report.total.state < report.total.weights


def share(optimizer):
    """State over that of AdamW, which keeps two float32 moments."""
    states = state_bytes(optimizer)
    return sum(states.values()) / (8 * sum(param.numel() for param in states))


def llama(layers):
    with torch.device("meta"):
        return CausalLanguageModel(Decoder(32_000, 4096, layers, 32, 11_008), 32_000)


@pytest.mark.slow
def test_galore_keeps_a_third_of_adam_of_llama_7b():
    model = llama(32)
    assert sum(p.numel() for p in model.parameters()) == 6_738_415_616
    assert share(comera.GaLoreAdamW(comera.galore_param_groups(model, 1e-2, 1024))) < 0.35


@pytest.mark.slow
def test_galore_in_eight_bits_keeps_a_sixth():
    peer("torchao.optim")
    assert share(comera.GaLoreAdamW8bit(comera.galore_param_groups(llama(2), 1e-2, 1024))) < 0.18


def test_came_keeps_half_and_an_eighth():
    params = list(llama(2).parameters())
    assert share(comera.CAME(params)) < 0.51
    assert share(comera.CAME(params, state_dtype="8bit")) < 0.13


def test_another_default_dtype_changes_no_count():
    torch.set_default_dtype(torch.float64)
    try:
        model = make_model(torch.float64)
        check(model, torch.optim.AdamW(groups(model, False)))
    finally:
        torch.set_default_dtype(torch.float32)


def test_shared_parameters_count_once_and_after_truncation_less():
    layer = comera.TTLinear(64, 64, rank=8)
    model = nn.Sequential(layer, layer)
    optimizer = comera.CAME(comera.param_groups(model, lr=1e-3))
    report = comera.memory_report(model, optimizer)
    assert report.total.weights == 4 * sum(p.numel() for p in layer.parameters())
    model(torch.randn(3, 64)).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        for gate in layer.gates:
            gate[4:] = 0
    comera.truncate_(model, optimizer)
    after = comera.memory_report(model, optimizer)
    assert after.total.state == sum(held(optimizer, group) for group in optimizer.param_groups)
    assert after.total.state < report.total.state


def test_a_model_without_memory_can_be_counted():
    with torch.device("meta"):
        model = nn.Linear(40_000, 40_000)
    report = comera.memory_report(model, torch.optim.Adafactor(model.parameters()))
    assert report.total.weights == 4 * (40_000**2 + 40_000)
    assert report.total.state == 4 * (2 * 40_000 + 1 + 40_000 + 1)


def test_an_optimizer_from_before_the_conversion_is_named(caplog):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    comera.memory_report(model, optimizer)
    assert "none of the model's" not in caplog.text
    comera.tensorize_(model, comera.TTConfig(rank=2, target_modules=["0"], init="orthogonal"))
    comera.memory_report(model, optimizer)
    assert "counts 1 parameters of the optimizer that are none of the model's" in caplog.text


def test_an_optimizer_that_cannot_be_tried_is_named():
    model = nn.Linear(3, 4)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ValueError, match="the state of LBFGS cannot be counted before its first"):
        comera.memory_report(model, optimizer)


def test_the_table_has_a_line_for_each_group():
    model = make_model()
    optimizer = comera.GaLoreAdamW(groups(model, True))
    report = comera.memory_report(model, optimizer, "memory of <this>")
    text = str(report)
    assert "memory of <this>, bytes" in text
    for name in ("cores", "gates", "dense", "vectors", "galore", "not trained", "total"):
        assert f"│ {name} " in text
    assert f"{report.total.total:,}" in text
    assert "GaLoreAdamW keeps" in text
    page = report._repr_html_()
    assert page.count("<tr>") == len(report.groups) + 2
    assert "&lt;this&gt;" in page
    assert repr(report) == text
