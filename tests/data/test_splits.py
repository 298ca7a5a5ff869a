"""Data by which nothing is chosen: a test's rows are neither trained on nor evaluated."""

import pytest
import torch

from comera.data.clicks import Clicks
from comera.data.nli import NliPairs
from comera.data.text import CausalText, MaskedText, TextData, TextStreams, _split
from tests.texts import write_functions

from .test_clicks import settings as click_settings
from .test_clicks import table
from .test_nli import NliData, pairs, write_snli


@pytest.mark.parametrize("split", ["random", "last"])
def test_rows_of_a_log_are_in_one_part_each(tmp_path, split):
    path = tmp_path / "log.csv"
    table(400).to_csv(path, index=False)
    data = Clicks.prepare(click_settings(path, heldout=0.2, test=0.1, split=split))
    parts = list(data.splits.values())
    assert [len(part) for part in parts] == [280, 80, 40]
    assert sorted(int(row) for part in parts for row in part) == list(range(400))
    if split == "last":
        assert parts[2].min() > parts[1].max() > parts[0].max()
    else:  # each is spread over the log
        assert all(150 < part.mean() < 250 for part in parts)
    (batch,) = data.held_out("test", 40)
    assert torch.equal(batch["labels"], data._rows(data.splits["test"])["labels"])


def test_a_test_changes_no_category(tmp_path):
    """Categories are numbered by what training sees."""
    path = tmp_path / "log.csv"
    rows = table(400)
    rows.loc[380:, "user"] = 987654  # seen by the test alone
    rows.to_csv(path, index=False)
    data = Clicks.prepare(click_settings(path, heldout=0.2, test=0.05, split="last"))
    (batch,) = data.held_out("test", 20)
    assert (batch["fields"][:, data.field_names.index("user")] == 0).all()


@pytest.mark.parametrize("test", [0.9, -0.1, 1.5])
def test_a_log_keeps_rows_to_train_on(tmp_path, test):
    path = tmp_path / "log.csv"
    table(400).to_csv(path, index=False)
    said = f"clicks.test={test} (of 400 rows must be one|must be a share)"
    with pytest.raises(ValueError, match=said):
        Clicks.prepare(click_settings(path, heldout=0.1, test=test))


def test_pairs_of_a_test_have_files_of_their_own(tmp_path):
    rows = {name: pairs(count, seed) for seed, (name, count) in enumerate(
        {"train": 60, "dev": 20, "test": 12}.items()
    )}  # fmt: skip
    for name, some in rows.items():
        write_snli(tmp_path / f"{name}.jsonl", some)
    files = {name: str(tmp_path / f"{name}.jsonl") for name in rows}
    data = NliPairs.prepare(NliData(**files, vocab_size=120))
    (batch,) = data.held_out("test", 50)
    assert sorted(batch["labels"].tolist()) == sorted(label for *_, label in rows["test"])
    assert files["test"] in data.settings.digests()
    without = NliPairs.prepare(NliData(files["train"], files["dev"], vocab_size=120))
    assert without.held_out("test", 50) == []
    (mine,), (theirs,) = data.held_out("dev", 50), without.held_out("dev", 50)
    assert torch.equal(mine["tokens"], theirs["tokens"])


@pytest.mark.parametrize("files", [1, 12])
def test_text_is_in_one_part_each(tmp_path, files):
    write_functions(tmp_path / "text", files, 40 * 12 // files)
    settings = TextData(str(tmp_path / "text"), vocab_size=300, length=16, heldout=0.2, test=0.1)
    streams = TextStreams.prepare(settings)
    whole = TextStreams.prepare(TextData(**{**vars(settings), "test": 0.0}))
    assert not len(whole.test)
    assert len(streams.valid) == pytest.approx(len(whole.valid), rel=0.1)  # of another tokenizer
    total = sum(map(len, (streams.train, streams.valid, streams.test)))
    assert total == pytest.approx(len(whole.train) + len(whole.valid), rel=0.1)
    assert 0.05 < len(streams.test) / total < 0.15
    assert len(MaskedText(streams).held_out("test", 4, 3)) == 3
    assert not MaskedText(whole).held_out("test", 4, 3)
    seen = sum(batch["targets"].numel() for batch in CausalText(streams).held_out("test", 8))
    assert len(streams.test) - 16 <= seen < len(streams.test)
    assert not CausalText(whole).held_out("test", 8)


@pytest.mark.parametrize("count", [1, 12])
def test_no_text_is_in_two_parts(count):
    texts = ["".join(f"{text} {line}\n" for line in range(50)) for text in range(count)]
    parts = _split(texts, TextData(heldout=0.2, test=0.1))
    if count == 1:  # the end of the text is kept, and what is before it for a test
        assert ["".join("".join(parts[name]) for name in ("train", "test", "valid"))] == texts
    else:  # the first texts
        assert [*parts["valid"], *parts["test"], *parts["train"]] == texts


@pytest.mark.parametrize("test", [0.8, -0.1])
def test_text_keeps_some_to_train_on(tmp_path, test):
    write_functions(tmp_path / "text", 3, 40)
    settings = TextData(str(tmp_path / "text"), vocab_size=300, length=16, heldout=0.2, test=test)
    with pytest.raises(ValueError, match=f"test={test} must be a share of the text"):
        TextStreams.prepare(settings)
