"""Public data sets as they are distributed, where they lie beside the checkout."""

import os
from pathlib import Path

import pytest

from comera.data.nli import NliData, NliPairs, read_pairs
from comera.data.vocabulary import load_word_pieces

DATA = Path(os.environ.get("COMERA_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
VOCAB = DATA / "vocab" / "bert_base_uncased_vocab.txt"


def real(path: Path) -> Path:
    if not path.is_file():
        pytest.skip("public data sets are not here; set COMERA_TEST_DATA to a folder of them")
    return path


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("snli/dev.jsonl.gz", 9842),
        ("mnli/dev_matched_public.jsonl.gz", 3202),
        ("mnli_litl/val_public.jsonl.gz", 3671),
        ("rte/train.jsonl.gz", 2490),
    ],
)
def test_every_row_is_read(name, rows):
    pairs = list(read_pairs(str(real(DATA / name))))
    assert len(pairs) == rows
    assert {label for _, _, label in pairs} <= {0, 1, 2}
    assert all(premise and hypothesis for premise, hypothesis, _ in pairs)


@pytest.mark.slow
def test_a_real_vocabulary_covers_real_sentences(tmp_path, monkeypatch):
    monkeypatch.setenv("COMERA_CACHE", str(tmp_path))
    assert load_word_pieces(real(VOCAB)).get_vocab_size() == 30522
    dev = str(real(DATA / "snli" / "dev.jsonl.gz"))
    data = NliPairs.prepare(NliData(dev, dev, vocab=str(VOCAB)))
    assert data.vocab_size == 30522
    assert (data.train.tokens == 1).mean() < 0.001  # unknown
    assert data.train.lengths.max() <= 128
