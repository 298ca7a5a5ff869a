"""Files appear whole or not at all; a full disk is named with what to do."""

import contextlib
import errno
import os
import subprocess

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from comera.checkpoint.chain import CheckpointChain
from comera.files import naming_a_full_disk, replacing


def write_much(kind, path):
    if kind == "text":
        path.write_text("x" * 1_000_000)
    elif kind == "safetensors":
        save_file({"x": torch.zeros(250_000)}, path)
    else:
        with path.open("wb") as file:
            np.save(file, np.zeros(125_000))


def save_many(chain):
    for step in range(2, 100):
        chain.save(step, nn.Linear(64, 64))


@pytest.fixture
def small_disk(tmp_path):
    """A folder that is a file system of 128 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "none", str(folder)]
    with contextlib.suppress(FileNotFoundError):
        if subprocess.run(mount, capture_output=True).returncode == 0:
            yield folder
            subprocess.run(["umount", str(folder)], check=True)
            return
    pytest.skip("file systems cannot be mounted here")


@pytest.mark.parametrize("kind", ["text", "safetensors", "numpy"])
def test_a_full_disk_is_named_and_the_file_there_stays(small_disk, kind):
    path = small_disk / "result.json"
    with replacing(path) as temporary:
        temporary.write_text("before")
    told = pytest.raises(OSError, match="free some space there, or choose another folder")
    with told as caught, replacing(path) as temporary:
        write_much(kind, temporary)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(path)
    assert str(caught.value).startswith("[Errno 28] No space left on device; ")
    assert str(path) in str(caught.value)
    assert path.read_text() == "before"
    assert os.listdir(small_disk) == ["result.json"]


def test_a_chain_on_a_full_disk_says_which_checkpoint_and_what_to_do(small_disk):
    with CheckpointChain(small_disk, mode="lossless", background=False) as chain:
        chain.save(1, nn.Linear(64, 64))
        with pytest.raises(OSError, match=r"free some space .*keep_last.* sound") as caught:
            save_many(chain)
        steps = chain.steps()
        assert 2 <= len(steps) < 30
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.filename == str(small_disk / f"step-{steps[-1] + 1:09d}")
        assert set(chain.verify().values()) == {None}
    assert not list(small_disk.glob(".partial*"))


@pytest.mark.parametrize(
    ("number", "told"),
    [(errno.ENOSPC, "free some"), (errno.EDQUOT, "quota"), (errno.EFBIG, "ulimit")],
)
def test_what_a_disk_says_is_kept_beside_what_to_do(number, told):
    with pytest.raises(OSError, match=told) as caught, naming_a_full_disk("a/b", "wait"):
        raise OSError(number, os.strerror(number))
    assert str(caught.value).startswith(f"[Errno {number}] {os.strerror(number)}; ")
    assert str(caught.value).endswith("or wait: 'a/b'")
    assert caught.value.__cause__.errno == number


@pytest.mark.parametrize(
    "problem",
    [
        PermissionError(errno.EACCES, "no", "x"),
        OSError("odd"),
        ValueError("28"),
        KeyError("k"),
        RuntimeError("I/O error: Permission denied (os error 13)"),
    ],
    ids=repr,
)
def test_other_errors_pass_through(problem):
    with pytest.raises(type(problem)) as caught, naming_a_full_disk("a/b"):
        raise problem
    assert caught.value is problem


def test_a_full_disk_says_which_file_and_what_to_do(tmp_path):
    told = pytest.raises(OSError, match=r"No space left .*free some space.*result.json")
    with told as caught, replacing(tmp_path / "result.json"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.errno == errno.ENOSPC


def test_a_background_save_names_the_checkpoint_at_the_next_call(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    chain = CheckpointChain(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        chain.save(7, nn.Linear(4, 4))
        with pytest.raises(OSError, match=r"No space left on device; .*step-000000007"):
            chain.wait()
    chain.save(8, nn.Linear(4, 4))
    chain.close()
    assert chain.steps() == [8]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_files_have_the_mode_that_is_asked_for(tmp_path, mask):
    before = os.umask(mask)
    try:
        with replacing(tmp_path / "file") as temporary:
            temporary.write_text("x")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o666 & ~mask
