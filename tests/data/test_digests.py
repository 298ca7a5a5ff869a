"""Prepared data are found again by the content of the files, and by nothing else."""

import gzip
import lzma
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from comera.data import click_files, clicks, vocabulary
from comera.data.clicks import ClickData, Clicks
from comera.data.nli import NliPairs
from comera.data.text import TextData, TextStreams
from comera.data.vocabulary import content_digest
from tests.data.test_clicks import criteo_lines, table
from tests.data.test_nli import settings as nli_settings  # noqa: F401
from tests.texts import write_functions


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """Names of the files whose content is read for a digest."""
    found, real = [], vocabulary.read_blocks
    monkeypatch.setattr(
        vocabulary, "read_blocks", lambda path: found.append(path.name) or real(path)
    )
    return found


def settled(path: Path, monkeypatch) -> None:
    """Let the file have changed long ago."""
    later = time.time() + 60
    monkeypatch.setattr(vocabulary.time, "time", lambda: later)


def rewritten(path: Path, data: bytes) -> None:
    """Write as many bytes as were there, and set the time of modification back."""
    times = path.stat()
    assert times.st_size == len(data)
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_packing_makes_no_other_content(tmp_path):
    data = bytes(range(256)) * 9000
    for name, pack in (("a.txt", bytes), ("b.gz", gzip.compress), ("c.xz", lzma.compress)):
        (tmp_path / name).write_bytes(pack(data))
    assert len({content_digest(tmp_path / name) for name in ("a.txt", "b.gz", "c.xz")}) == 1


@pytest.mark.parametrize("name", ["a.gz", "a.xz"])
def test_what_cannot_be_decompressed_is_named(tmp_path, name):
    pack = gzip.compress if name == "a.gz" else lzma.compress
    whole = pack(os.urandom(10_000))
    for data in (b"plain text", whole[:5000], whole[:40] + b"damaged" + whole[47:]):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=rf"{name} cannot be decompressed"):
            content_digest(tmp_path / name)


def test_a_large_file_is_hashed_once_until_it_changes(tmp_path, monkeypatch, reads):
    monkeypatch.setattr(vocabulary, "LARGE", 10)
    path = tmp_path / "a.csv"
    path.write_bytes(b"one two three")
    content_digest(path)
    content_digest(path)
    assert len(reads) == 2  # so soon after it was written its times do not tell
    settled(path, monkeypatch)
    one = content_digest(path)
    assert content_digest(path) == one
    assert len(reads) == 3
    rewritten(path, b"one two tree!")
    assert content_digest(path) != one
    assert len(reads) == 4


def test_a_cache_that_may_only_be_read_is_enough(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    table().to_csv(path, index=False)
    data = ClickData(str(path), label="rating")
    prepared = Clicks.prepare(data).prepared

    def refused(*_, **__):
        raise OSError(30, "read-only")  # EROFS

    monkeypatch.setattr(vocabulary, "LARGE", 10)
    settled(path, monkeypatch)
    monkeypatch.setattr(vocabulary, "write_text", refused)
    monkeypatch.setattr(Path, "mkdir", refused)
    monkeypatch.setattr(clicks, "FileLock", refused)
    assert Clicks.prepare(data).prepared == prepared


def test_a_small_file_is_always_read(tmp_path, monkeypatch, reads):
    path = tmp_path / "a.csv"
    path.write_bytes(b"one two three")
    settled(path, monkeypatch)
    content_digest(path)
    content_digest(path)
    assert len(reads) == 2


def test_a_file_that_is_written_meanwhile_is_named(tmp_path, monkeypatch):
    path, real = tmp_path / "a.csv", vocabulary.read_blocks
    path.write_bytes(b"one")

    def growing(path):
        yield from real(path)
        path.write_bytes(b"one two")

    monkeypatch.setattr(vocabulary, "read_blocks", growing)
    with pytest.raises(ValueError, match=r"a\.csv changed while it was read: run the same command"):
        content_digest(path)


def test_text_changed_in_place_is_prepared_anew(tmp_path):
    write_functions(tmp_path / "text", 6, 30)
    data = TextData(str(tmp_path / "text"), vocab_size=300, length=16, heldout=0.2)
    before = TextStreams.prepare(data)
    path = sorted((tmp_path / "text").iterdir())[1]
    rewritten(path, path.read_bytes()[::-1])
    after = TextStreams.prepare(data)
    assert not (torch.equal(before.train, after.train) and torch.equal(before.valid, after.valid))
    assert before.prepared != after.prepared
    assert before.digests[path.name] != after.digests[path.name]


def test_pairs_changed_in_place_are_prepared_anew(nli_settings, tmp_path):  # noqa: F811
    before = NliPairs.prepare(nli_settings)
    path = tmp_path / "train.jsonl"
    text = path.read_text()
    rewritten(path, text.replace("happily", "yppahil").encode())
    assert NliPairs.prepare(nli_settings).prepared != before.prepared
    path.write_text(text)
    assert NliPairs.prepare(nli_settings).prepared == before.prepared


def test_clicks_changed_in_place_are_prepared_anew(tmp_path):
    path = tmp_path / "a.csv"
    table().to_csv(path, index=False)
    data = ClickData(str(path), label="rating")
    before, text = Clicks.prepare(data), path.read_text()
    assert "Bonn" in text
    rewritten(path, text.replace("Bonn", "Linz", 40).encode())
    assert Clicks.prepare(data).prepared != before.prepared
    path.write_text(text)
    assert Clicks.prepare(data).prepared == before.prepared


def test_prepared_data_are_found_wherever_the_files_lie(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    table().to_csv(path, index=False)
    Clicks.prepare(ClickData(str(path), label="rating"))
    monkeypatch.setattr(clicks, "_prepare", None)
    (tmp_path / "elsewhere").mkdir()
    moved = path.rename(tmp_path / "elsewhere" / "a.csv")
    assert len(Clicks.prepare(ClickData(str(moved), label="rating")).splits["train"]) == 360


def test_chunks_of_a_file_that_changes_are_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(click_files, "CHUNK", 10)
    path = tmp_path / "train.txt"
    text = "\n".join(criteo_lines()) + "\n"
    path.write_text(text)
    real, parsed = click_files._text_frame, []

    def changing(*args):
        parsed.append(args[2])
        if len(parsed) == 3:
            path.write_text(text.replace("00000001", "00000002"))
        return real(*args)

    monkeypatch.setattr(click_files, "_text_frame", changing)
    with pytest.raises(ValueError, match=r"train\.txt changed while it was read"):
        Clicks.prepare(ClickData(str(path), "criteo"))
    assert len(list((tmp_path / "cache").rglob("chunks/*.npz"))) == 2
    path.write_text(text)
    again = Clicks.prepare(ClickData(str(path), "criteo"))
    assert parsed == [1, 11, 21, 21, 31, 41, 51]
    monkeypatch.setenv("COMERA_CACHE", str(tmp_path / "other"))
    assert again.prepared == Clicks.prepare(ClickData(str(path), "criteo")).prepared


def test_text_that_changes_while_it_is_encoded_is_not_kept(tmp_path, monkeypatch):
    from comera.data import text

    write_functions(tmp_path / "text", 6, 30)
    data = TextData(str(tmp_path / "text"), vocab_size=300, length=16, heldout=0.2)
    real = text._encode

    def changing(*args):
        (tmp_path / "text" / "new.py").write_text("x = 1\n")
        return real(*args)

    monkeypatch.setattr(text, "_encode", changing)
    with pytest.raises(ValueError, match="text changed while it was read"):
        TextStreams.prepare(data)
    assert not list((tmp_path / "cache").glob("text-*"))


def test_two_runs_prepare_the_same_clicks_once(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    table().to_csv(path, index=False)
    data = ClickData(str(path), label="rating")
    real, prepared, found = clicks._prepare, [], []

    def slow(*args):
        prepared.append(1)
        time.sleep(0.2)
        real(*args)

    monkeypatch.setattr(clicks, "_prepare", slow)
    both = [threading.Thread(target=lambda: found.append(Clicks.prepare(data))) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert len(prepared) == 1
    assert [len(one.splits["train"]) for one in found] == [360, 360]


@pytest.mark.parametrize("share", [0.2, 0.6, 0.99])
def test_a_torn_cache_is_made_anew(tmp_path, caplog, share):
    write_functions(tmp_path / "text", 6, 30)
    data = TextData(str(tmp_path / "text"), vocab_size=300, length=16, heldout=0.2)
    want = TextStreams.prepare(data).train
    (cache,) = (tmp_path / "cache").glob("text-*.npz")
    whole = cache.read_bytes()
    cache.write_bytes(whole[: int(share * len(whole))])
    assert np.array_equal(TextStreams.prepare(data).train, want)
    assert "unreadable" in caplog.text
