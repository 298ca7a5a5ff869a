"""Uploads go through huggingface_hub, which is not talked to here."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import comera
from comera.extras import MissingPackageError


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
