"""What is loaded is what was saved, bit for bit, and so is what is uploaded."""

import copy
import json
import logging
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import comera
from comera.extras import MissingPackageError
from comera.nn.embedding import TiedTTLinear
from comera.saved.model_folder import _DTYPES
from tests.mixtures import CONFIGS, DTYPES, ROWS, TIES, Mixture, draw_mixture


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.ERROR, "comera")


def check_equal(loaded: nn.Module, saved: nn.Module) -> None:
    before, after = saved.state_dict(), loaded.state_dict()
    assert list(before) == list(after)
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype, name
        assert torch.equal(tensor, after[name]), name
    assert ties_of(loaded) == ties_of(saved)
    trained = [(n, p.requires_grad) for n, p in saved.named_parameters()]
    assert [(n, p.requires_grad) for n, p in loaded.named_parameters()] == trained
    assert repr(loaded) == repr(saved)


def described_in(folder):
    return json.loads((folder / "comera.json").read_text())


def ties_of(model: nn.Module) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def test_every_tensor_is_aligned_to_its_dtype_in_the_file(tmp_path):
    model = comera.tensorize_(nn.Sequential(nn.Linear(8, 8)), comera.TTConfig(rank=2))
    for k, dtype in enumerate((torch.bool, torch.float64, torch.int8, torch.bfloat16)):
        model.register_buffer(f"a{k}", torch.ones(3).to(dtype))
    raw = (comera.save_model(model, tmp_path) / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    for name, tensor in model.state_dict().items():
        assert (8 + length + header[name]["data_offsets"][0]) % tensor.itemsize == 0, name


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_a_buffer_of_each_dtype_comes_back(dtype, tmp_path):
    model = comera.tensorize_(nn.Sequential(nn.Linear(8, 8)), comera.TTConfig(rank=2))
    model.register_buffer("other", torch.tensor([[0, 1], [3, 2]]).to(dtype))
    comera.save_model(model, tmp_path)
    given = nn.Sequential(nn.Linear(8, 8))
    given.register_buffer("other", torch.zeros(2, 2).to(dtype))
    loaded = comera.load_model(tmp_path, given).other
    assert loaded.dtype == dtype
    assert torch.equal(loaded.view(torch.uint8), model.other.view(torch.uint8))


@settings(max_examples=40, deadline=None)
@given(
    config=CONFIGS,
    tie=TIES,
    dtype=DTYPES,
    frozen=st.booleans(),
    data=st.data(),
)
@pytest.mark.slow
def test_any_mixture_comes_back(tmp_path_factory, config, tie, dtype, frozen, data):
    model = draw_mixture(data, config, tie, dtype)
    if frozen:
        comera.freeze_(model)
    folder = comera.save_model(model, tmp_path_factory.mktemp("model"), config=config)

    with torch.device(data.draw(st.sampled_from(["cpu", "meta"]), label="device")):
        dense = Mixture(data.draw(st.sampled_from(["none", tie]), label="tie given"), dtype)
    loaded = comera.load_model(folder, dense.eval())
    check_equal(loaded, model)
    indices = torch.randint(ROWS, (2, 5))
    assert torch.equal(loaded(indices), model(indices))
    assert comera.TTConfig.from_dict(described_in(folder)["tensorized"]) == config


def test_a_dense_model_is_one_too(tmp_path):
    model = Mixture("all", torch.float32)
    loaded = comera.load_model(
        comera.save_model(model, tmp_path), lambda: Mixture("none", torch.float64)
    )
    check_equal(loaded, model)


@pytest.mark.parametrize(
    "layer",
    [nn.Linear(32, 64), nn.Embedding(200, 32), nn.EmbeddingBag(200, 32, mode="max")],
    ids=["linear", "embedding", "bag"],
)
def test_a_layer_alone_is_a_model(tmp_path, layer):
    model = comera.tensorize_(copy.deepcopy(layer), comera.TTConfig(rank=3))
    check_equal(comera.load_model(comera.save_model(model, tmp_path), layer), model)


def test_a_model_that_is_compressed_already_takes_what_the_file_has(tmp_path):
    def make(rank: int) -> nn.Module:
        return comera.tensorize_(
            Mixture("head", torch.float32), comera.TTConfig(rank=rank, tied="share")
        )

    model = make(5)
    check_equal(comera.load_model(comera.save_model(model, tmp_path), make(2)), model)


def test_layers_on_shared_cores_stay_one(tmp_path):
    config = comera.TTConfig(rank=4, hot_rows=7, hot_rank=2, tied="share")
    model = comera.tensorize_(Mixture("all", torch.float32), config)
    loaded = comera.load_model(
        comera.save_model(model, tmp_path), lambda: Mixture("none", torch.float32)
    )
    assert isinstance(loaded.head, TiedTTLinear)
    assert loaded.head.embedding is loaded.embed
    assert loaded.again.cores is loaded.bag.cores is loaded.embed.cores
    assert set(loaded.again.twins) == {loaded.embed, loaded.bag}
    comera.update_hot_rows_(loaded.bag, torch.arange(ROWS))
    assert loaded.embed.row_order is loaded.again.row_order is loaded.bag.row_order


def test_training_goes_on_as_if_nothing_had_been_saved(tmp_path):
    model = comera.tensorize_(Mixture("all", torch.float32), comera.TTConfig(rank=4, tied="share"))
    loaded = comera.load_model(
        comera.save_model(model, tmp_path), lambda: Mixture("all", torch.float32)
    )
    indices = torch.randint(ROWS, (4, 5))
    for each in (model, loaded):
        optimizer = torch.optim.SGD(comera.param_groups(each, lr=0.1))
        for _ in range(3):
            optimizer.zero_grad()
            each(indices).square().mean().backward()
            optimizer.step()
    check_equal(loaded, model)


@pytest.mark.slow
def test_wrappers_are_saved_as_the_model_inside(tmp_path):
    model = comera.tensorize_(nn.Sequential(nn.Linear(32, 64)), comera.TTConfig(rank=3))
    folder = comera.save_model(torch.compile(model), tmp_path)
    check_equal(comera.load_model(folder, nn.Sequential(nn.Linear(32, 64))), model)


def test_the_description_is_for_people_too(tmp_path):
    config = comera.TTConfig(rank=3, target_modules=["0"])
    model = comera.tensorize_(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 8)), config)
    comera.save_model(model, tmp_path, config=config)
    described = described_in(tmp_path)
    assert described["model"] == {"class": "torch.nn.modules.container.Sequential"}
    assert described["tensorized"]["rank"] == 3
    assert list(described["layers"]) == ["0"]
    assert described["layers"]["0"]["ranks"] == list(model[0].ranks)
    assert '"ranks": [3, 3, 3, 3]' in (tmp_path / "comera.json").read_text()


def test_configurations_come_back_from_plain_text():
    config = comera.TTConfig(
        rank=[3, 4], rank_pattern={"a": [1, 2]}, shape_pattern={"b": [[4, 8], [8, 4]]},
        hot_pattern={"c": [10, None]}, target_modules=["x"], compression=None,
    )  # fmt: skip
    assert comera.TTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ValueError, match="'rnak' is not a setting of TTConfig: did you mean rank"):
        comera.TTConfig.from_dict({"rnak": 3})


def test_a_model_saved_twice_is_the_same_bytes(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), comera.TTLinear(16, 16, rank=2))
    model.register_buffer("größe", torch.ones(2))
    files = [comera.save_model(model, tmp_path / f"{k}") / "model.safetensors" for k in range(6)]
    assert len({file.read_bytes() for file in files}) == 1


# ── uploads go through huggingface_hub, which is not talked to here ──────────────────────────────


def test_a_model_is_uploaded_as_its_folder(monkeypatch, tmp_path):
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    model = comera.tensorize_(nn.Linear(64, 64), comera.TTConfig(rank=2, init="orthogonal"))
    seen = {}

    class Api:
        def __init__(self, token):
            seen["token"] = token

        def create_repo(self, repo_id, private, exist_ok):
            seen["private"] = private
            assert exist_ok
            return SimpleNamespace(repo_id=f"me/{repo_id}")

        def upload_folder(self, repo_id, folder_path, commit_message, revision):
            seen.update(repo=repo_id, message=commit_message, revision=revision)
            seen["model"] = comera.load_model(folder_path, nn.Linear(64, 64))
            return "the address"

    monkeypatch.setattr(hub, "HfApi", Api)
    address = comera.push_to_hub(model, "small", private=True, token="t", revision="next")
    assert address == "the address"
    assert torch.equal(seen.pop("model").weight, model.weight)
    assert seen == {
        "token": "t", "private": True, "repo": "me/small", "message": "Upload model",
        "revision": "next",
    }  # fmt: skip


def test_without_huggingface_hub_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingPackageError, match=r"push_to_hub\(\) needs huggingface_hub: pip"):
        comera.push_to_hub(nn.Linear(2, 2), "me/small")
