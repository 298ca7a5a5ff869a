"""Folders that are damaged, of other programs or other models are refused, and say why."""

import json
import logging
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import comera
from comera.nn.linear import TTLinear
from comera.saved.description import register_kind
from comera.saved.model_folder import DESCRIPTION, WEIGHTS, load_model, save_model


def dense() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(60, 32), nn.Linear(32, 64), nn.Linear(64, 8))


@pytest.fixture(name="folder")
def _folder(tmp_path):
    model = comera.tensorize_(dense(), comera.TTConfig(rank=3, init="orthogonal"))
    return save_model(model, tmp_path / "model")


def rewrite(folder, change, keep_header=True):
    """Write the weights anew with another description in their header."""
    path = folder / WEIGHTS
    with safe_open(path, "pt") as file:
        described = json.loads(file.metadata()["comera"])
    change(described)
    header = {"comera": json.dumps(described)} if keep_header else {}
    save_file(load_file(path), path, header)
    (folder / DESCRIPTION).write_text(json.dumps(described))


def refused(folder, message, model=dense, error=ValueError):
    before = model if isinstance(model, nn.Module) else model()
    kinds = [type(module) for module in before.modules()]
    values = {name: value.clone() for name, value in before.state_dict().items()}
    with pytest.raises(error, match=message) as raised:
        load_model(folder, before)
    assert [type(module) for module in before.modules()] == kinds
    assert all(torch.equal(value, values[name]) for name, value in before.state_dict().items())
    return str(raised.value)


def test_no_folder_and_no_model_in_it(tmp_path):
    refused(tmp_path / "none", "none is no folder; comera.save_model", error=FileNotFoundError)
    refused(tmp_path, "holds no model.safetensors", error=FileNotFoundError)


def test_weights_of_another_program(tmp_path):
    save_file(dense().state_dict(), tmp_path / WEIGHTS)
    refused(tmp_path, "says nothing of its layers, and there is no comera.json")


def test_a_description_beside_weights_that_others_wrote_counts(folder):
    rewrite(folder, lambda described: described.pop("tensors"), keep_header=False)
    assert isinstance(load_model(folder, dense())[1], TTLinear)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2, "comera": "9.1"}, r"version 2 of the format, written by comera 9\.1"),
        ({"version": "1"}, "version='1' is no version"),
        ({"format": "other"}, "no description of a model by comera.save_model"),
        ({"layers": []}, "layers must be a dict"),
        ({"layers": {"1": 3}}, "every layer must be a dict"),
        ({"layers": {"1": {"kind": "TTConv"}}}, "kind 'TTConv' are not known here, only TTLinear"),
        ({"layers": {"1": {"kind": ["TTLinear"]}}}, "are not known here"),
        ({"served": [3]}, "served must be names"),
        ({"served": ["nope"]}, "served names nope, not there"),
        ({"frozen": ["nope"]}, "frozen names nope, not there"),
        ({"frozen": [1, {}]}, "frozen must be names"),
        ({"tied": {"a": "b"}}, "'b' is tied and not there"),
        ({"tied": {"a": 3}}, "tied must be names"),
        ({"tied": {"a": ["b"]}}, "tied must be names"),
        ({"tensors": {}}, "does not hold the tensors that it says"),
    ],
)
def test_descriptions_that_say_something_else(folder, change, message):
    rewrite(folder, lambda described: described.update(change))
    refused(folder, message)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("in_modes", [2, 2], "1: TTLinear is described wrongly: ValueError: the modes 2 x 2"),
        ("in_modes", "os.system", "'str' object cannot be interpreted as an integer"),
        ("ranks", [1, -1, 2, 3], "every rank must be at least 1"),
        ("ranks", [10**30] * 4, "described wrongly"),
        ("dtype", "__loader__", "dtype='__loader__' is none of torch's"),
        ("in_features", None, "described wrongly"),
        ("in_features", 10**30, f"in_features={10**30} must be at most"),
        ("start_ranks", [3], r"join at 4 bonds, but 1 ranks were given: \(3,\)"),
        ("works_on", "1", "1: it works on '1', which is no other layer"),
        ("works_on", "nobody", "1: it works on 'nobody', which is no other layer"),
        ("works_on", "0", "1: TTLinear is described wrongly"),
        ("bias", False, "the bias of 1: the saved model has none, the one given one"),
    ],
)
def test_layers_that_cannot_be(folder, key, value, message):
    rewrite(folder, lambda described: described["layers"]["1"].update({key: value}))
    refused(folder, message)


def test_an_edited_description_is_not_what_was_saved(folder):
    path = folder / WEIGHTS
    for file in (path, folder / DESCRIPTION):
        edited = file.read_bytes().replace(b'prune_below\\": 0.01', b'prune_below\\": 0.81')
        file.write_bytes(edited.replace(b'prune_below": 0.01', b'prune_below": 0.81'))
    refused(folder, "model.safetensors is damaged: the description in it is not what was saved")


def test_whole_numbers_are_no_weights(folder):
    tensors = load_file(folder / WEIGHTS)
    tensors["1.cores.0"] = tensors["1.cores.0"].long()
    save_file(tensors, folder / WEIGHTS)
    described = json.loads((folder / DESCRIPTION).read_text())
    del described["tensors"]
    (folder / DESCRIPTION).write_text(json.dumps(described))
    refused(folder, r"1\.cores\.0 is .* torch\.int64, in the file")


def test_models_that_were_made_otherwise(folder):
    refused(folder, "has a TTEmbedding at '0', where the model given has nothing", nn.Sequential())
    model = dense()
    model[1] = nn.Linear(32, 60)
    refused(folder, r"1 is a TTLinear of size \(64, 32\) .* and a Linear of size \(60, 32\)", model)
    model[1] = nn.Embedding(64, 32)
    refused(folder, "1 is a TTLinear .* and a Embedding of size", model)
    model[1] = nn.Linear(32, 64)
    model.extra = nn.Linear(4, 4)
    refused(folder, "the saved one has no extra.bias, extra.weight", model)
    del model.extra
    model[2] = nn.Identity()
    refused(folder, r"the bias of 2: the saved model has one, the one given none", model)
    one = nn.Linear(32, 64)
    twice = nn.Sequential(nn.Embedding(60, 32), one, nn.Linear(64, 8))
    twice.add_module("2", one)
    refused(folder, "two layers of the saved model and one of the model given", twice)


def test_something_that_is_no_model(folder):
    with pytest.raises(TypeError, match=r"must be the dense model or make it; .*\.Sequential"):
        load_model(folder, 3)
    with pytest.raises(TypeError, match="must be the dense model or make it"):
        load_model(folder, lambda: "model")


def test_a_buffer_that_no_file_has_must_have_been_made(tmp_path):
    def with_buffer():
        model = dense()
        model.register_buffer("scale", torch.ones(3), persistent=False)
        return model

    folder = save_model(with_buffer(), tmp_path)
    with torch.device("meta"):
        model = with_buffer()
    with pytest.raises(ValueError, match="scale is on the meta device"):
        load_model(folder, model)
    assert type(model[1]) is nn.Linear  # it is unchanged


@pytest.mark.parametrize("content", [b'{"prune_below": 0.02}', b"", b"\xff", None])
def test_a_description_that_does_not_repeat_the_header_is_named(folder, caplog, content):
    path = folder / DESCRIPTION
    path.unlink() if content is None else path.write_bytes(content)
    with caplog.at_level(logging.WARNING, "comera"):
        assert load_model(folder, dense())[1].prune_below == 0.01
    assert "does not repeat the header of model.safetensors, which counts" in caplog.text


@pytest.mark.parametrize("name", [WEIGHTS, DESCRIPTION])
def test_files_that_end_early(folder, name):
    path = folder / name
    whole = path.read_bytes()
    if name == DESCRIPTION:
        rewrite(folder, lambda described: None, keep_header=False)
        whole = path.read_bytes()
    for length in [*range(0, len(whole), max(1, len(whole) // 60)), len(whole) - 1]:
        path.write_bytes(whole[:length])
        refused(folder, "is damaged|no description|says nothing")


@pytest.mark.slow
def test_any_byte_that_changed(folder, tmp_path):
    path = folder / WEIGHTS
    whole = path.read_bytes()
    reference = load_model(folder, dense())
    for place in range(0, len(whole), max(1, len(whole) // 1500)):
        for flip in (1, 128):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
            try:
                loaded = load_model(folder, dense())
            except ValueError:
                continue
            # Some bytes say how the model was made, or spell white space.
            for name, value in loaded.state_dict().items():
                assert torch.equal(value, reference.state_dict()[name]), (place, name)


class Counting(nn.Module):
    def get_extra_state(self) -> dict[str, int]:
        return {"steps": 3}


def test_what_cannot_be_saved_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"_extra_state is a dict, .* has to be a tensor"):
        save_model(Counting(), tmp_path)
    with torch.device("meta"):
        model = dense()
    with pytest.raises(ValueError, match=r"0\.weight is on the meta device"):
        save_model(model, tmp_path)
    model = dense()
    model.register_buffer("thin", torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match="thin is sparse"):
        save_model(model, tmp_path)
    assert not list(tmp_path.iterdir())
    head = comera.tensorize_(tied(), comera.TTConfig(rank=2, tied="share"))["head"]
    with pytest.raises(ValueError, match="head works on the parameters of a TTEmbedding"):
        save_model(nn.ModuleDict({"head": head}), tmp_path)


def tied() -> nn.ModuleDict:
    model = nn.ModuleDict({"embed": nn.Embedding(60, 32), "head": nn.Linear(32, 60, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


class Scaled(TTLinear):
    """A layer that somebody else has written."""


def test_layers_of_others_can_be_registered(tmp_path):
    model = nn.Sequential(Scaled(32, 64, rank=3))
    message = (
        "Scaled has no form in a file: give it one with comera.saved.description.register_kind"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        save_model(model, tmp_path)
    register_kind("tests.Scaled", Scaled)
    folder = save_model(model, tmp_path)
    loaded = load_model(folder, nn.Sequential(nn.Linear(32, 64)))
    assert type(loaded[0]) is Scaled
    assert torch.equal(loaded[0].weight, model[0].weight)
    with pytest.raises(ValueError, match=r"'tests\.Scaled' is the name of Scaled"):
        register_kind("tests.Scaled", nn.Linear)
