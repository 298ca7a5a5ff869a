"""Folders of chains in other hands: steps removed, moved, linked, and names that are no folders."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import comera
from comera.checkpoint.archive import Archive
from comera.checkpoint.chain import CheckpointChain
from comera.files import replacing


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(64, 64)


def save(chain, model, steps):
    for step in steps:
        with torch.no_grad():
            model.weight.add_(0.01 * torch.randn(64, 64))
        chain.save(step, model)
    chain.wait()


def remove(folder):
    shutil.rmtree(folder)


def of_another_step(folder):
    shutil.copy(folder.parent / "step-000000002" / "manifest.json", folder)


def cut(folder):
    (folder / "tensors.safetensors").write_bytes(b"")


@pytest.mark.parametrize("harm", [remove, of_another_step, cut])
@pytest.mark.parametrize("step", [3, 1], ids=["the last", "the key frame"])
def test_what_a_checkpoint_would_build_on_is_gone(tmp_path, model, harm, step, caplog):
    with CheckpointChain(tmp_path / "c") as chain:
        save(chain, model, [1, 2, 3])
        harm(tmp_path / "c" / f"step-{step:09d}")
        save(chain, model, [4, 5])
    damage = CheckpointChain(tmp_path / "c").verify()
    assert damage[4] is None
    assert damage[5] is None
    assert caplog.text.count("the checkpoint of step 4 is complete, as what it would build on") == 1
    assert "of step 5" not in caplog.text
    assert CheckpointChain(tmp_path / "c").load().step == 5


def test_a_step_may_be_a_link_to_another_disk(tmp_path, model):
    folder, other = tmp_path / "c", tmp_path / "other"
    with CheckpointChain(folder, key_every=2) as chain:
        save(chain, model, [1, 2, 3, 4])
    shutil.move(folder / "step-000000002", other)
    (folder / "step-000000002").symlink_to(other)
    with CheckpointChain(folder, key_every=2, keep_last=1) as chain:
        save(chain, model, [5, 6])
        assert chain.steps() == [5, 6]
    assert other.is_dir()
    assert not [*folder.glob(".partial-*")]


def test_what_an_interrupted_process_left_locks_nobody_out(tmp_path, model, monkeypatch, caplog):
    folder = tmp_path / "c"
    (folder / ".partial-000000001").mkdir(parents=True)
    (folder / ".partial-removed-000000002").symlink_to(tmp_path)

    def denied(path, **_):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", denied)
        with CheckpointChain(folder) as chain:
            chain.lock()
    assert tmp_path.is_dir()
    assert caplog.text.count("stays, which an interrupted process left: ") == 1
    with CheckpointChain(folder) as chain:
        save(chain, model, [1])
    assert CheckpointChain(folder).verify() == {1: None}


def test_steps_are_named_in_one_way(tmp_path, model):
    (tmp_path / "step-000000000000097").mkdir()
    with CheckpointChain(tmp_path) as chain:
        save(chain, model, [97, 10**9])
    assert CheckpointChain(tmp_path).steps() == [97, 10**9]
    assert CheckpointChain(tmp_path).verify() == {97: None, 10**9: None}


URLS = ["s3://bucket/run", "memory://run", "file:///tmp/x", Path("gs://bucket/run")]


@pytest.mark.parametrize("url", URLS, ids=str)
def test_a_url_is_no_folder(tmp_path, monkeypatch, model, url):
    monkeypatch.chdir(tmp_path)
    said = pytest.raises(ValueError, match=f"^{url} is a URL, and what is written goes to folders")
    with said:
        CheckpointChain(url)
    with said:
        comera.save_model(model, url)
    assert not [*tmp_path.iterdir()]


def test_what_has_the_folders_name(tmp_path, model):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name, said in {
        "file": r"/file is a file: name a folder",
        "file/deeper": r"/file is a file: name a folder",
        "link": r"/link is a link to .*/nowhere, which is not there: name a folder",
    }.items():
        with pytest.raises(NotADirectoryError, match=said):
            CheckpointChain(tmp_path / name).save(1, model)


def test_a_folder_that_is_gone_is_named(tmp_path, model):
    chain = CheckpointChain(tmp_path / "c", background=False)
    save(chain, model, [1])
    (tmp_path / "c").rename(tmp_path / "d")
    with pytest.raises(FileNotFoundError, match=r"/c is gone: it was removed or renamed"):
        chain.save(2, model)


@pytest.fixture
def done(monkeypatch):
    """Names of what is flushed and renamed, in that order."""
    done, flush, rename = [], os.fsync, Path.rename

    def fsync(handle):
        done.append(f"flushed {Path(os.readlink(f'/proc/self/fd/{handle}')).name}")
        flush(handle)

    def renamed(path, to):
        done.append(f"named {Path(to).name}")
        return rename(path, to)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(Path, "replace", renamed)
    return done


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_data_are_flushed_before_they_have_a_name_and_names_after(tmp_path, model, done):
    with CheckpointChain(tmp_path / "run" / "c", background=False) as chain:
        chain.save(1, model)
    assert done == [
        "flushed run", "flushed tensors.safetensors", "flushed manifest.json",
        "flushed .partial-000000001", "named step-000000001", "flushed c",
    ]  # fmt: skip
    done.clear()
    with replacing(tmp_path / "result.json") as temporary:
        temporary.write_text("{}")
    assert done == [f"flushed {temporary.name}", "named result.json", f"flushed {tmp_path.name}"]


def test_the_last_checkpoints_are_removed_first(tmp_path, model, done):
    with CheckpointChain(tmp_path / "c", background=False) as chain:
        save(chain, model, [1, 2, 3])
        done.clear()
        Archive(tmp_path / "c").remove([1, 2, 3])
    assert done == [f"named .partial-removed-{step:09d}" for step in (3, 2, 1)]
