"""Models of torch's layers alone compute what compressed ones do, where comera is not."""

import copy
import io
import json
import logging
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import comera
from tests.mixtures import CONFIGS, ROWS, TIES, draw_mixture
from tests.peers import peer

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.ERROR, "comera")


def check_plain(model: nn.Module) -> None:
    """No class of this package is left in a pickle of it."""
    file = io.BytesIO()
    torch.save(model, file)
    assert b"comera" not in file.getvalue()
    file.seek(0)
    for name, part in torch.load(file, weights_only=False).named_modules():
        assert type(part).__module__.startswith(("torch.", "tests.")), name


def scripted(plain: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said inside the compiler
        return torch.jit.script(copy.deepcopy(plain))


def check_same(model: nn.Module, plain: nn.Module, *inputs: torch.Tensor) -> None:
    before, after = model(*inputs), plain(*inputs)
    scale = before.detach().abs().max().clamp(min=1)
    torch.testing.assert_close(after / scale, before / scale, **CLOSE)


@settings(max_examples=40, deadline=None)
@given(
    config=CONFIGS, tie=TIES, dtype=st.sampled_from([torch.float32, torch.float64]), data=st.data()
)
@pytest.mark.slow
def test_any_mixture_becomes_plain(config, tie, dtype, data):
    model = draw_mixture(data, config, tie, dtype)
    plain = copy.deepcopy(model)
    if data.draw(st.booleans(), label="frozen before"):
        comera.freeze_(plain)
    plain = comera.to_plain_(plain)
    check_plain(plain)
    check_same(model, plain, torch.arange(ROWS).view(4, 10))


class Exported(nn.Module):
    """Tied lookups and an output layer, bags with padding, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, 48, padding_idx=2)
        self.bag = nn.EmbeddingBag(500, 48, mode="mean", padding_idx=1)
        self.layers = nn.Sequential(nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 48))
        self.head = nn.Linear(48, 500)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, bags: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(tokens) + self.bag(bags)[:, None]))


SETTINGS = {
    "scattered": {},
    "hot rows": {"hot_rows": 50},
    "hot rows in a basis": {"hot_rows": 50, "hot_rank": 4},
}


def compressed(**more) -> nn.Module:
    config = comera.TTConfig(rank=6, tied="share", init="orthogonal", **more)
    model = comera.tensorize_(Exported(), config).eval()
    if more:
        comera.update_hot_rows_(model.embed, torch.randperm(500))
    return model


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    tokens, bags = torch.randint(500, (3, 7)), torch.randint(500, (3, 4))
    tokens[0, 0], bags[0, 0], bags[1] = 2, 1, 1
    return tokens, bags


@pytest.mark.parametrize("more", SETTINGS.values(), ids=SETTINGS)
def test_gradients_are_those_of_the_factors(more):
    """By way of the dense weight: its gradient gives those of all that it is made of."""
    model = compressed(**more).double()
    plain = comera.to_plain_(copy.deepcopy(model))
    dense = comera.densify_(copy.deepcopy(model))
    given = inputs()
    for each in (plain, dense):
        each(*given).square().sum().backward()
    thin = plain.layers[0]
    weight = dense.layers[0].weight.grad
    torch.testing.assert_close(thin[0].weight.grad, thin[1].weight.T @ weight)
    torch.testing.assert_close(thin[1].weight.grad, weight @ thin[0].weight.T)
    torch.testing.assert_close(plain.head.bias.grad, dense.head.bias.grad)


@pytest.mark.parametrize("more", SETTINGS.values(), ids=SETTINGS)
def test_ties_are_kept(more):
    model = comera.to_plain_(compressed(**more))
    tied = {id(param) for param in model.embed.parameters()}
    assert {id(p) for name, p in model.head.named_parameters() if name != "bias"} == tied
    check_plain(model)


def test_a_bias_of_two_layers_stays_one():
    model = nn.Sequential(comera.TTLinear(32, 48, rank=4), comera.TTLinear(48, 48, rank=4))
    bias = model[1].bias = model[0].bias
    plain = comera.to_plain_(model)
    assert isinstance(plain[0], nn.Sequential)
    assert plain[0].bias is plain[1].bias is bias


@pytest.mark.parametrize("hot", [{}, {"hot_rows": 9}, {"hot_rows": 9, "hot_rank": 3}])
def test_what_was_frozen_is_frozen(hot):
    table = comera.TTEmbedding(300, 32, rank=4, **hot)
    model = nn.Sequential(table, comera.TTLinear(32, 48, rank=4))
    for name, param in model.named_parameters():
        param.requires_grad_(name == "1.bias" or "hot" in name)
    plain = comera.to_plain_(model)
    trained = {name for name, param in plain.named_parameters() if param.requires_grad}
    assert all(name.endswith("bias") or "hot" in name or "basis" in name for name in trained)
    assert len(trained) == 1 + len(hot)


def test_a_table_that_two_factors_would_not_make_smaller_is_one_of_torch():
    table = nn.Embedding(40, 12)
    head = nn.Linear(12, 40)
    head.weight = table.weight
    model = nn.ModuleDict({"table": table, "head": head, "bag": nn.EmbeddingBag(40, 12)})
    config = comera.TTConfig(rank=4, embedding_order=4, tied="share", init="orthogonal")
    config.shape_pattern = {"table|bag": [[2, 2, 2, 5], [1, 2, 2, 3]]}
    config.embedding_rank = [2, 8, 8]
    model = comera.tensorize_(model, config)
    before = copy.deepcopy(model)
    plain = comera.to_plain_(model)
    assert type(plain["table"]) is nn.Embedding
    assert type(plain["head"]) is nn.Linear
    assert plain["head"].weight is plain["table"].weight
    torch.testing.assert_close(plain["table"].weight, before["table"].dense_weight(), **CLOSE)


@pytest.mark.parametrize("layer", ["embed", "bag"])
@pytest.mark.parametrize("index", [500, -1, 10**9])
@pytest.mark.parametrize("more", SETTINGS.values(), ids=SETTINGS)
def test_an_index_that_is_no_row_is_refused(layer, index, more):
    plain = comera.to_plain_(compressed(**more))
    with pytest.raises(IndexError):
        getattr(plain, layer)(torch.tensor([[3, index]]))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 1])
@pytest.mark.parametrize("include_last_offset", [False, True])
def test_bags_are_asked_as_those_of_torch(mode, padding_idx, include_last_offset):
    table = comera.TTEmbeddingBag(
        90, 24, mode=mode, padding_idx=padding_idx, rank=3, include_last_offset=include_last_offset
    )
    plain = comera.to_plain_(copy.deepcopy(table))
    check_plain(plain)
    flat = torch.tensor([1, 1, 5, 7, 1, 80, 2])
    for offsets in ([0, 2, 2, 5, 7], [0, 0, 7]):
        offsets = torch.tensor(offsets if include_last_offset else offsets[:-1])
        torch.testing.assert_close(plain(flat, offsets), table(flat, offsets), **CLOSE)
    torch.testing.assert_close(plain(flat[None]), table(flat[None]), **CLOSE)
    torch.testing.assert_close(scripted(plain)(flat[None]), table(flat[None]), **CLOSE)
    if include_last_offset:
        offsets = torch.tensor([0, 2, 5])
        torch.testing.assert_close(plain(flat, offsets), table(flat, offsets), **CLOSE)
        padded = torch.tensor([1, 1, 5, 7, 1, 0, 0])
        torch.testing.assert_close(plain(padded, offsets), plain(flat, offsets), **CLOSE)
    if mode == "sum":
        weights = torch.rand(1, 7)
        torch.testing.assert_close(
            plain(flat[None], None, weights), table(flat[None], None, weights), **CLOSE
        )


@pytest.mark.parametrize("convert", [comera.to_plain_, comera.freeze_])
def test_a_weight_can_be_read_and_lies_as_that_of_torch(convert):
    model = compressed()
    before = copy.deepcopy(model)
    after = copy.deepcopy(convert(model))
    for name in ("embed", "bag", "layers.0", "head"):
        new, old = (each.get_submodule(name) for each in (after, before))
        assert torch.allclose(new.weight, old.weight, **CLOSE)
        assert new.weight.is_contiguous()
        assert old.weight.is_contiguous()
    x = torch.randn(2, 48)
    found = nn.functional.linear(x, after.layers[0].weight, after.layers[0].bias)
    torch.testing.assert_close(found, before.layers[0](x), **CLOSE)
    if convert is comera.to_plain_:
        given = inputs()
        torch.testing.assert_close(scripted(after)(*given), before(*given), **CLOSE)


def test_encoder_layers_of_torch_call_their_layers():
    layer = nn.TransformerEncoderLayer(48, 4, 96, batch_first=True, dropout=0)
    config = comera.TTConfig(rank=4, init="orthogonal")
    model = comera.tensorize_(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), config)
    plain = comera.to_plain_(copy.deepcopy(model).eval())
    with torch.no_grad():
        check_same(model.eval(), plain, torch.randn(2, 5, 48))


# ── in a process without comera ──────────────────────────────────────────────────────────────────

WITHOUT = """
import json, os, sys
sys.modules["comera"] = None
import torch
said = []
for folder, code in json.loads(sys.stdin.read()):
    os.chdir(folder)
    inputs, y = torch.load("io.pt")
    try:
        found = {"torch": torch, "inputs": inputs}
        exec(code, found)
        torch.testing.assert_close(found["made"], y, rtol=1e-5, atol=1e-5)
        said.append("")
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")
print(json.dumps(said))
"""


def run_without_comera(codes: list[tuple[Path, str]]) -> list[str]:
    """Run code that computes ``made`` in a folder, all in one process; returns what is wrong."""
    given = json.dumps([(str(folder), code) for folder, code in codes])
    command = [sys.executable, "-c", WITHOUT]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


BATCH = torch.export.Dim("batch")
DYNAMIC = ({0: BATCH}, {0: BATCH})


def export(model, given, folder):
    program = torch.export.export(model, given, dynamic_shapes=DYNAMIC)
    torch.export.save(program, folder / "model.pt2")


def trace(model, given, folder):
    torch.jit.trace(model, given).save(folder / "model.ts")


def pickle_parts(model, given, folder):
    torch.save(dict(model.named_children()), folder / "parts.pt")


def export_onnx(model, given, folder):
    path = folder / "model.onnx"
    torch.onnx.export(model, given, path, dynamo=True, dynamic_shapes=DYNAMIC, verbose=False)


FORMS = {
    "exported": (export, "made = torch.export.load('model.pt2').module()(*inputs)"),
    "traced": (trace, "made = torch.jit.load('model.ts')(*inputs)"),
    "pickled layers": (
        pickle_parts,
        "m = torch.load('parts.pt', weights_only=False)\n"
        "tokens, bags = inputs\n"
        "made = m['head'](m['layers'](m['embed'](tokens) + m['bag'](bags)[:, None]))\n",
    ),
    "onnx": (
        export_onnx,
        "import onnxruntime\n"
        "session = onnxruntime.InferenceSession('model.onnx')\n"
        "names = [each.name for each in session.get_inputs()]\n"
        "arrays = [part.numpy() for part in inputs]\n"
        "made = torch.from_numpy(session.run(None, dict(zip(names, arrays)))[0])\n",
    ),
}
"""How a plain model is written into a folder, and how it is run there."""


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict[tuple[str, str], str]:
    """Models in every form, asked for more rows than traced with: what is wrong, by settings."""
    codes = {}
    for name, more in SETTINGS.items():
        folder = tmp_path_factory.mktemp("forms")
        found = write_forms(more, folder)
        codes |= {(name, form): (folder, code) for form, code in found.items()}
    return dict(zip(codes, run_without_comera(list(codes.values())), strict=True))


def write_forms(more: dict, folder: Path) -> dict[str, str]:
    """Write a model in every form; returns how each is run."""
    torch.manual_seed(0)
    model = compressed(**more)
    later = tuple(torch.cat([part, part.flip(1)]) for part in inputs())
    with torch.no_grad():
        made = model(*later)
    torch.save((later, made), folder / "io.pt")
    plain, codes = comera.to_plain_(model), {}
    for form, (write, code) in FORMS.items():
        if form != "onnx" or all(map(find_spec, ("onnxscript", "onnxruntime"))):
            with warnings.catch_warnings():
                if form == "onnx":  # said inside the exporter
                    warnings.simplefilter("ignore")
                write(copy.deepcopy(plain), inputs(), folder)
            codes[form] = code
    return codes


@pytest.mark.parametrize("convert", [comera.freeze_, comera.to_plain_])
@pytest.mark.parametrize("hot", [{}, {"hot_rows": 9, "hot_rank": 2}], ids=str)
def test_a_model_without_memory_is_converted_as_one_with(convert, hot):
    shapes = []
    for device in ("cpu", "meta"):
        layers = nn.Linear(64, 64, device=device), nn.Embedding(200, 64, device=device)
        model = nn.Sequential(*layers)
        convert(comera.tensorize_(model, comera.TTConfig(rank=4, init="orthogonal", **hot)))
        shapes.append({name: value.shape for name, value in model.state_dict().items()})
        assert {value.device.type for value in model.state_dict().values()} == {device}
    if convert is comera.to_plain_:  # the other one measures which layers are faster
        assert shapes[0] == shapes[1]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("more", SETTINGS)
def test_programs_of_every_form(said, more, form):
    if form == "onnx":
        for package in ("onnxscript", "onnxruntime"):
            peer(package)
    assert said[more, form] == ""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # said inside the compiler
def test_ahead_of_time_compiled_programs(tmp_path):
    model = compressed(**SETTINGS["hot rows in a basis"])
    given = inputs()
    with torch.no_grad():
        torch.save((given, model(*given)), tmp_path / "io.pt")
        program = torch.export.export(comera.to_plain_(model), given)
        path = str(tmp_path / "model.pt2")
        torch._inductor.aoti_compile_and_package(program, package_path=path)
    code = "made = torch._inductor.aoti_load_package('model.pt2')(*inputs)"
    assert run_without_comera([(tmp_path, code)]) == [""]


def test_a_plain_form_is_made_where_meta_is_the_default_device():
    with torch.device("meta"):
        layer = comera.to_plain_(comera.TTLinear(32, 32, rank=4))
    assert all(param.is_meta for param in layer.parameters())
