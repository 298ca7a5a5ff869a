"""What is damaged, cut short or made up is found, named and not used."""

import hashlib
import json
import os
import random
import resource
import shutil
import signal

import numpy as np
import pytest
import torch
from torch import nn

from comera.checkpoint.archive import MANIFEST, TENSORS, Archive, packed
from comera.checkpoint.chain import CheckpointChain
from comera.checkpoint.streams import DamagedError, Streams
from tests.processes import in_a_process, killed

from .test_chain import chain_of

KILLS = int(os.environ.get("COMERA_KILLS", "6"))
"""How often a writing process is killed; 200 takes some minutes."""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A chain of three checkpoints of a few hundred bytes each."""
    folder = tmp_path_factory.mktemp("small")
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    with CheckpointChain(folder) as chain:
        for step in (1, 2, 3):
            with torch.no_grad():
                model.weight += 0.1 * torch.randn(16, 16)
            chain.save(step, model, None, {"step": step})
    return folder


@pytest.fixture
def chain(small, tmp_path):
    shutil.copytree(small, tmp_path / "chain")
    return CheckpointChain(tmp_path / "chain")


def files(folder):
    return sorted(path for path in folder.rglob("step-*/*") if path.is_file())


@pytest.mark.slow
def test_every_byte_flipped_in_turn_is_found_and_the_chain_falls_back(chain, caplog):
    rng = random.Random(0)
    checked = 0
    for path in files(chain.folder):
        sound = path.read_bytes()
        step = int(path.parent.name.removeprefix("step-"))
        for at in range(len(sound)):
            flipped = bytearray(sound)
            flipped[at] ^= 1 << rng.randrange(8)
            path.write_bytes(flipped)
            with pytest.raises(DamagedError, match=path.name):
                chain.load(step)
            if at % 97 == 0:  # the slower way round
                caplog.clear()
                if step == 1:  # the key frame: nothing is left
                    with pytest.raises(FileNotFoundError, match="is sound"):
                        chain.load()
                else:
                    assert chain.load().step == step - 1
                assert str(path) in caplog.text
                problems = chain.verify()
                assert [s for s, problem in problems.items() if problem] == list(range(step, 4))
            checked += 1
        path.write_bytes(sound)
    assert checked > 3000
    assert set(chain.verify().values()) == {None}


def test_training_goes_on_from_the_last_sound_one_and_keeps_the_damaged(chain, caplog):
    path = chain.folder / "step-000000003" / TENSORS
    path.write_bytes(path.read_bytes()[:100])
    chain.save(3, nn.Linear(16, 16))
    chain.close()
    assert "100 bytes long instead of" in caplog.text
    assert chain.verify() == {1: None, 2: None, 3: None}
    assert (chain.folder / "damaged-step-000000003" / TENSORS).stat().st_size == 100


def test_a_checkpoint_that_was_swapped_breaks_the_link(chain, small, tmp_path):
    torch.manual_seed(1)
    with CheckpointChain(tmp_path / "other") as other:
        for step in (1, 2):
            other.save(step, nn.Linear(16, 16))
    shutil.rmtree(chain.folder / "step-000000002")
    shutil.copytree(tmp_path / "other" / "step-000000002", chain.folder / "step-000000002")
    problems = chain.verify()
    assert problems[1] is None
    assert "builds on another checkpoint of step 1" in problems[2]
    assert "builds on another checkpoint of step 2" in problems[3]


def made_up(folder, index, **streams):
    """A checkpoint of step 9 with sound checksums and any contents."""
    writer = Streams()
    raw = index if isinstance(index, bytes) else json.dumps(index).encode()
    writer.write("index", np.frombuffer(len(raw).to_bytes(8, "little") + raw, np.uint8))
    for name, blob in streams.items():
        name = name.replace("_", "/", 1).replace("_", " ")
        writer.write(name, np.frombuffer(blob, np.uint8))
    writer.finish()
    file = packed(writer.done)
    archive = Archive(folder)
    archive.lock()
    archive.write(9, None, file, 0, writer.sizes, {})
    archive.unlock()


def index_of(*records):
    return {"skeleton": None, "records": list(records)}


def nested(levels):
    value = []
    for _ in range(levels - 1):
        value = [value]
    return value


EXACT = {"codec": "exact", "change": False, "names": ["model.w"], "dtypes": ["float32"]}
CHANGE = {"codec": "change", "names": ["model.w"], "dtypes": ["float32"], "shape": [4, 4]}
MOMENTS = {
    "codec": "moments", "names": ["m"], "dtypes": ["float32"], "shape": [4], "weight": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("index", "told"),
    [
        (b"[" * 100_000, "index is not readable"),
        (b"\xff\xfe", "index is not readable"),
        ([], "no skeleton and records"),
        (index_of(3), "no such tensor"),
        (
            index_of(EXACT | {"shape": [1 << 40]}),
            "would take 4398046511104 bytes of memory, more than the",
        ),
        (index_of(EXACT | {"shape": [1 << 60]}), "no such tensor"),
        (index_of(EXACT | {"shape": [-5]}), "no such tensor"),
        (index_of(EXACT | {"shape": [2.0]}), "no such tensor"),
        (index_of(EXACT | {"shape": [True]}), "no such tensor"),
        (index_of(EXACT | {"shape": [4], "dtypes": ["object"]}), "no such tensor"),
        (index_of(EXACT | {"shape": [4], "dtypes": [["float32"]]}), "no such tensor"),
        (index_of(EXACT | {"shape": [4], "names": ["a", "b"]}), "no such tensor"),
        (index_of(EXACT | {"shape": [4]}), "no stream"),
        (index_of(EXACT | {"shape": [4], "change": True}), "no stream"),
        (index_of(EXACT | {"shape": []}, EXACT | {"shape": []}), "names a tensor twice"),
        (index_of(CHANGE | {"kept": 17, "books": [1], "places": "all"}), "no such tensor"),
        (index_of(CHANGE | {"kept": 3, "books": [1], "places": "all"}), "no stream"),
        (index_of(CHANGE | {"kept": 3, "books": [1], "places": "some"}), "no such tensor"),
        (index_of(CHANGE | {"kept": 3, "books": [1], "places": 3}), "nothing before it"),
        (index_of(CHANGE | {"kept": 16, "books": [300], "places": "all"}), "no such tensor"),
        (index_of(CHANGE | {"kept": 16, "books": [0], "places": "all"}), "no stream"),
        (
            index_of(CHANGE | {"kept": 16, "books": [1], "places": "all", "dtypes": ["int64"]}),
            "no such tensor",
        ),
        (index_of(MOMENTS | {"kept": 1, "places": 10**9, "books": [1]}), "no such tensor"),
        (index_of(MOMENTS | {"kept": 1, "places": 1, "books": [1, 1]}), "no such tensor"),
        (index_of(MOMENTS | {"kept": 0, "places": 0, "books": [0], "weight": "x"}), "no changed"),
        (index_of(), "does not consist of model"),
        ({"skeleton": {"tensor": "../../etc/passwd"}, "records": []}, "no such value"),
        ({"skeleton": nested(600), "records": []}, "nested more than"),
        ({"skeleton": nested(150), "records": []}, "does not consist of model"),
        ({"skeleton": None, "records": [nested(600)]}, "nested more than"),
        (index_of(EXACT | {"shape": nested(600)}), "nested more than"),
    ],
)
def test_contents_that_are_made_up_are_refused(tmp_path, index, told):
    made_up(tmp_path, index)
    chain = CheckpointChain(tmp_path)
    with pytest.raises(DamagedError, match=told):
        chain.load(9)


def test_a_decompression_bomb_is_not_inflated(tmp_path):
    bomb = bytes(1 << 28)
    made_up(tmp_path, index_of(EXACT | {"shape": [4]}), **{"model_byte_0_of_4": bomb})
    chain = CheckpointChain(tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DamagedError, match="no stream"):
        chain.load(9)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


def test_an_index_that_says_it_is_huge_is_refused(tmp_path):
    writer = Streams()
    writer.write("index", np.frombuffer((1 << 40).to_bytes(8, "little"), np.uint8))
    writer.finish()
    file = packed(writer.done)
    Archive(tmp_path).write(9, None, file, 0, {}, {})
    with pytest.raises(DamagedError, match="index says that it is 1099511627776 bytes long"):
        CheckpointChain(tmp_path).load(9)


def resealed(fields):
    fields = {k: v for k, v in fields.items() if k != "checksum"}
    text = json.dumps(fields, indent=1, sort_keys=True) + "\n"
    fields["checksum"] = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps(fields, indent=1, sort_keys=True) + "\n"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"step": 4}, "manifest of step 4"),
        ({"step": "3"}, "lacks what a manifest has"),
        ({"previous": [3, "x"]}, "lacks what a manifest has"),  # a circle
        ({"previous": [-2, "x"]}, "not readable"),
        ({"previous": [2, "../../x"]}, "builds on another"),
        ({"size": {"../../../etc/passwd": 1}}, "lacks what"),
        ({"size": 10**15}, "bytes long instead of"),
        ({"more": 1}, "does not have the checksum"),
        ({"figures": {"x": nested(600)}}, "nested more than"),
        ({"more": nested(600)}, "nested more than"),
    ],
)
def test_manifests_that_are_made_up_are_refused(chain, change, told):
    path = chain.folder / "step-000000003" / MANIFEST
    path.write_text(resealed(json.loads(path.read_text()) | change))
    with pytest.raises(DamagedError, match=told):
        chain.load(3)


def test_a_newer_version_is_not_taken_for_damage(chain):
    path = chain.folder / "step-000000003" / MANIFEST
    path.write_text(resealed(json.loads(path.read_text()) | {"version": 2}))
    with pytest.raises(ValueError, match="has version 2; this program reads 1: update comera"):
        chain.load()
    assert path.is_file()
    path.write_text(path.read_text().replace('"version": 2', '"version": 3'))
    with pytest.raises(DamagedError, match="has version 3"):
        chain.load(3)


def test_random_manifests_and_files_are_refused(chain):
    rng = random.Random(0)
    for name in (MANIFEST, TENSORS):
        path = chain.folder / "step-000000003" / name
        sound = path.read_bytes()
        for _ in range(100):
            kind = rng.randrange(3)
            if kind == 0:
                raw = sound[: rng.randrange(len(sound))]
            elif kind == 1:
                raw = rng.randbytes(rng.randrange(2000))
            else:
                at = rng.randrange(len(sound))
                raw = sound[:at] + rng.randbytes(rng.randrange(1, 20)) + sound[at:]
            path.write_bytes(raw)
            with pytest.raises(DamagedError):
                chain.load(3)
        path.write_bytes(b"[" * 500_000)
        with pytest.raises(DamagedError):
            chain.load(3)
        path.write_bytes(sound)
    assert chain.load(3).step == 3


def _write(folder, background, ready):
    """Save without end, from what is there."""
    torch.set_num_threads(1)
    model = nn.Linear(64, 64)
    chain = CheckpointChain(
        folder, mode="lossless", key_every=4, keep_last=3, background=background
    )  # fmt: skip
    step = (chain.steps() or [0])[-1]
    if step:
        model.load_state_dict(chain.load().model)
    ready.send("ready")
    while True:
        step += 1
        torch.manual_seed(step)
        with torch.no_grad():
            model.weight += torch.randn(64, 64)
        chain.save(step, model, None, {"sum": float(model.weight.sum())})


@pytest.mark.slow
def test_killed_at_any_moment_the_last_checkpoint_is_there_and_right(tmp_path):
    rng = random.Random(0)
    last = 0
    for kill in range(KILLS):
        seconds = rng.random() * 0.3
        assert killed(_write, tmp_path, bool(kill % 2), after=seconds) == -signal.SIGKILL
        chain = CheckpointChain(tmp_path)
        if not chain.steps():
            continue
        saved = chain.load()
        assert saved.step == chain.steps()[-1] >= last
        assert set(chain.verify().values()) == {None}
        assert float(saved.model["weight"].sum()) == saved.extra["sum"]
        last = saved.step
    assert last > 0


def _fill_the_disk(folder):
    """A limit on the size of files stands for the disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    chain = CheckpointChain(folder)
    try:
        chain.save(15, nn.Linear(256, 256))
        chain.close()
    except OSError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.slow
def test_a_full_disk_leaves_what_there_was(tmp_path):
    chain_of(tmp_path, 2)
    said = in_a_process(_fill_the_disk, tmp_path)
    assert "[Errno 27] File too large; raise the limit" in said
    assert "step-000000015" in said
    chain = CheckpointChain(tmp_path)
    assert chain.verify() == {5: None, 10: None}
    assert not list(tmp_path.glob(".partial*"))
