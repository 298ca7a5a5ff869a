import gzip
import lzma
import re

import pytest
import torch

from comera.data.text import CausalText, MaskedText, TextData, TextStreams
from comera.data.vocabulary import CLS, MASK, PAD, train_byte_pairs, train_word_pieces
from tests.texts import write_functions


@pytest.fixture
def streams(tmp_path) -> TextStreams:
    folder = tmp_path / "text"
    write_functions(folder, 12, 40)
    return TextStreams.prepare(TextData(str(folder), vocab_size=300, length=32, heldout=0.2))


@pytest.fixture
def data(streams) -> MaskedText:
    return MaskedText(streams)


def test_a_batch_depends_only_on_seed_and_step(data):
    again = MaskedText(TextStreams.prepare(data.streams.settings))  # from the cache
    assert torch.equal(again.streams.train, data.streams.train)
    for step in (0, 7):
        one, two = data.batch(step, 4, seed=1), again.batch(step, 4, seed=1)
        assert all(torch.equal(one[key], two[key]) for key in one)
    assert not torch.equal(data.batch(0, 4, 1)["tokens"], data.batch(1, 4, 1)["tokens"])
    assert not torch.equal(data.batch(0, 4, 1)["tokens"], data.batch(0, 4, 2)["tokens"])


def test_masking_follows_bert(data):
    batch = data.batch(0, 400, seed=0)
    tokens, positions, targets = batch["tokens"], batch["positions"], batch["targets"]
    assert tokens.shape == (400, 32)
    assert positions.shape == targets.shape == (400, round(0.15 * 31))
    assert (tokens[:, 0] == CLS).all()
    assert (positions >= 1).all()
    assert (positions.sort(1).values.diff(dim=1) > 0).all()  # no position twice
    shown = tokens.gather(1, positions)
    share_masked = float((shown == MASK).float().mean())
    share_kept = float((shown == targets).float().mean())
    assert abs(share_masked - 0.8) < 0.03
    assert abs(share_kept - 0.1) < 0.03
    assert (targets != MASK).all()
    assert (tokens != PAD).all()


def test_held_out_batches_are_fixed_and_from_other_files(data):
    one, two = data.held_out("valid", 4, 3), data.held_out("valid", 4, 3)
    assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(one, two, strict=True))
    assert len(data.streams.valid) < len(data.streams.train)


def test_causal_targets_are_the_next_tokens(streams):
    data = CausalText(streams)
    batch = data.batch(3, 4, seed=1)
    assert batch["tokens"].shape == batch["targets"].shape == (4, 32)
    assert torch.equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    again = data.batch(3, 4, seed=1)
    assert torch.equal(batch["tokens"], again["tokens"])
    assert not torch.equal(batch["tokens"], data.batch(4, 4, seed=1)["tokens"])


def test_causal_evaluation_sees_each_held_out_token_once(streams):
    data = CausalText(streams)
    batches = data.held_out("valid", 4, None)
    targets = torch.cat([batch["targets"].flatten() for batch in batches])
    rows = (len(streams.valid) - 1) // 32
    assert torch.equal(targets, streams.valid[1 : rows * 32 + 1].long())
    assert rows > 8
    two = data.held_out("valid", 4, 2)
    assert len(two) == 2
    assert torch.equal(two[1]["tokens"], batches[1]["tokens"])


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.xz"])
def test_one_file_compressed_or_not_gives_both_streams(tmp_path, name):
    text = "".join(f"the {k} words of line {k * k}\n" for k in range(400))
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(name[-3:], bytes)
    (tmp_path / name).write_bytes(pack(text.encode()))
    settings = TextData(str(tmp_path), "*.txt*", vocab_size=300, length=16, heldout=0.1)
    found = TextStreams.prepare(settings)
    assert 0.05 < len(found.valid) / len(found.train) < 0.2


@pytest.mark.slow
def test_the_standard_library_is_the_default_corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("COMERA_CACHE", str(tmp_path))
    data = TextStreams.prepare(TextData(max_megabytes=0.3, vocab_size=400, length=16))
    assert int(data.train.max()) < 400
    assert len(data.train) > 50_000


@pytest.mark.parametrize("train", [train_byte_pairs, train_word_pieces])
def test_a_vocabulary_is_as_large_as_asked_for(train):
    texts = [" ".join(str(k) for k in range(3000))]
    assert train(texts, 300).get_vocab_size() == 300


def test_too_little_or_no_text_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere"):
        TextStreams.prepare(TextData(str(tmp_path / "nowhere")))
    with pytest.raises(FileNotFoundError, match=r"no file matches '\*\.txt' under"):
        TextStreams.prepare(TextData(str(tmp_path), pattern="*.txt"))
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(ValueError, match="too little text"):
        TextStreams.prepare(TextData(str(tmp_path), pattern="*.txt", vocab_size=300))


@pytest.mark.parametrize("pattern", ["", "/*.py"])
def test_a_pattern_that_is_none_is_named(tmp_path, pattern):
    with pytest.raises(ValueError, match=f"pattern='{re.escape(pattern)}': "):
        TextData(str(tmp_path), pattern).find()


def test_a_vocabulary_without_room_for_every_byte_is_refused(tmp_path):
    write_functions(tmp_path / "text", 4, 10)
    with pytest.raises(ValueError, match="vocab_size=100 must be at least 261"):
        TextStreams.prepare(TextData(str(tmp_path / "text"), vocab_size=100))


@pytest.mark.parametrize(
    "content",
    [
        "".join(f"Für Größe {k} äußerst üblich. " for k in range(999)).encode("latin-1"),
        "".join(f"words {k} " for k in range(999)).encode("utf-16"),
        bytes(range(256)) * 40,
    ],
    ids=["latin-1", "utf-16", "binary"],
)
def test_what_is_no_text_is_named(tmp_path, content):
    (tmp_path / "a.txt").write_text("plain words " * 99)
    (tmp_path / "b.txt").write_bytes(content)
    with pytest.raises(ValueError, match=r"b\.txt must be text in UTF-8: .* characters"):
        TextData(str(tmp_path), "*.txt").digests()


def test_what_runs_have_written_is_no_text(tmp_path):
    folder = tmp_path / "text"
    write_functions(folder, 3, 5)
    data = TextData(str(folder), pattern="**/*")
    before = data.digests()
    assert len(before) == 3
    seed = folder / "sweep" / "a" / "seed-0"
    seed.mkdir(parents=True)
    (folder / "sweep" / ".lock").touch()
    (seed / "log.txt").write_text("what a run has said")
    assert data.digests() == before
    (folder / ".lock").touch()  # of the folder itself nothing is left out for that
    assert before.items() <= data.digests().items()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heldout": -0.5}, r"causal_text.heldout=-0.5 must be a share of the text, in"),
        ({"heldout": 1.0}, r"causal_text.heldout=1.0 must be a share"),
        ({"test": 0.95}, r"causal_text.test=0.95 must be .*, beside causal_text.heldout=0.05"),
    ],
)
def test_shares_of_a_text_are_checked_before_it_is_read(changes, message):
    with pytest.raises(ValueError, match=message):
        TextData("/there/is/none", **changes).check("causal_text")
