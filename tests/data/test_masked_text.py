import pytest
import torch

from comera.data.masked_text import MaskedText, MaskedTextData
from comera.data.vocabulary import CLS, MASK, PAD
from tests.texts import write_functions


@pytest.fixture
def data(tmp_path, monkeypatch) -> MaskedText:
    monkeypatch.setenv("COMERA_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "text"
    write_functions(folder, 12, 40)
    settings = MaskedTextData(str(folder), vocab_size=300, length=32, heldout=0.2)
    return MaskedText.prepare(settings)


def test_a_batch_depends_only_on_seed_and_step(data):
    again = MaskedText.prepare(data.settings)  # from the cache
    assert torch.equal(again.train, data.train)
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
    one, two = data.valid_batches(3, 4), data.valid_batches(3, 4)
    assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(one, two, strict=True))
    assert len(data.valid) < len(data.train)


def test_the_standard_library_is_the_default_corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("COMERA_CACHE", str(tmp_path))
    data = MaskedText.prepare(MaskedTextData(max_megabytes=0.3, vocab_size=400, length=16))
    assert int(data.train.max()) < 400
    assert len(data.train) > 50_000


def test_too_little_or_no_text_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file matches '\*\.txt' under"):
        MaskedText.prepare(MaskedTextData(str(tmp_path), pattern="*.txt"))
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(ValueError, match="too little text"):
        MaskedText.prepare(MaskedTextData(str(tmp_path), pattern="*.txt", vocab_size=300))
