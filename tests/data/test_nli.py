import dataclasses
import gzip
import json
import sys
import types

import numpy as np
import pytest
import torch

from comera.data.nli import LABELS, NliData, NliPairs, joined, read_pairs
from comera.data.vocabulary import CLS, PAD, SEP, SPECIAL

WORDS = (
    "a man woman dog runs sits sleeps outside inside quickly happily on the grass".split()  # noqa: SIM905
)


def pairs(count: int, seed: int = 0) -> list[tuple[str, str, int]]:
    rng = np.random.default_rng(seed)

    def sentence() -> str:
        return " ".join(rng.choice(WORDS, rng.integers(3, 9)))

    return [(sentence(), sentence(), int(rng.integers(3))) for _ in range(count)]


def write_snli(path, rows):
    lines = [
        json.dumps({"gold_label": LABELS[y], "sentence1": p, "sentence2": h, "pairID": str(k)})
        for k, (p, h, y) in enumerate(rows)
    ]
    lines.insert(1, json.dumps({"gold_label": "-", "sentence1": "x", "sentence2": "y"}))
    path.write_text("\n".join(lines) + "\n")


def write_mnli(path, rows):
    lines = ["index\tsentence1\tsentence2\tlabel1\tgold_label"]
    lines += [f'{k}\t{p} "quoted\t{h}\tneutral\t{LABELS[y]}' for k, (p, h, y) in enumerate(rows)]
    path.write_text("\n".join(lines) + "\n")


def write_plain(path, rows):
    with gzip.open(path, "wt") as file:
        for p, h, y in rows:
            file.write(json.dumps({"premise": p, "hypothesis": h, "label": y}) + "\n")


@pytest.fixture
def settings(tmp_path) -> NliData:
    write_snli(tmp_path / "train.jsonl", pairs(200))
    write_plain(tmp_path / "dev.jsonl.gz", pairs(40, seed=1))
    files = [str(tmp_path / "train.jsonl")], [str(tmp_path / "dev.jsonl.gz")]
    return NliData(*files, vocab_size=120, length=16)


def test_files_are_read_as_they_are_distributed(tmp_path):
    rows = pairs(20)
    write_snli(tmp_path / "snli_1.0_train.jsonl", rows)
    write_plain(tmp_path / "plain.jsonl.gz", rows)
    write_mnli(tmp_path / "train.tsv", rows)
    assert list(read_pairs(str(tmp_path / "snli_1.0_train.jsonl"))) == rows
    assert list(read_pairs(str(tmp_path / "plain.jsonl.gz"))) == rows
    quoted = [(f'{p} "quoted', h, y) for p, h, y in rows]
    assert list(read_pairs(str(tmp_path / "train.tsv"))) == quoted


def test_hub_data_sets_are_read_by_name(monkeypatch):
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        return [{"premise": "p", "hypothesis": "h", "label": k} for k in (2, -1)]

    fake = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert list(read_pairs("datasets:stanfordnlp/snli@validation")) == [("p", "h", 2)]
    assert asked == [("stanfordnlp/snli", "validation")]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"comera\[hf\]"):
        list(read_pairs("datasets:snli"))


def test_a_batch_depends_only_on_seed_and_step(settings):
    first, second = NliPairs.prepare(settings), NliPairs.prepare(settings)
    first.batch(0, 16, seed=3)
    for step in (5, 40, 6):
        one, two = first.batch(step, 16, seed=3), second.batch(step, 16, seed=3)
        assert all(torch.equal(one[key], two[key]) for key in one)
    assert not torch.equal(first.batch(5, 16, 4)["labels"], first.batch(5, 16, 3)["labels"])


def test_batches_of_one_length_differ_in_padding_alone(settings):
    data = NliPairs.prepare(settings)
    for step in range(4):
        short, full = data.batch(step, 8, 0), data.batch(step, 8, 0, length=16)
        width = short["tokens"].shape[1]
        assert full["tokens"].shape == full["segments"].shape == (8, 16)
        assert torch.equal(full["labels"], short["labels"])
        for name in ("tokens", "segments"):
            assert torch.equal(full[name][:, :width], short[name])
            assert (full[name][:, width:] == PAD).all()


def test_an_epoch_sees_every_row_once(settings):
    data = NliPairs.prepare(settings)
    steps = len(data.train.labels) // 16
    labels = torch.cat([data.batch(step, 16, 0)["labels"] for step in range(steps)])
    assert len(labels) == 192  # the incomplete last batch is left out
    whole = torch.bincount(torch.from_numpy(data.train.labels.astype(np.int64)))
    assert (torch.bincount(labels) <= whole).all()


def test_rows_hold_both_sentences_between_their_marks(settings):
    data = NliPairs.prepare(settings)
    for batch in [*data.held_out("dev", 8), data.batch(0, 16, 0)]:
        tokens, segments = batch["tokens"], batch["segments"]
        assert tokens.shape == segments.shape
        assert tokens.shape[1] <= settings.length
        assert (tokens[:, 0] == CLS).all()
        assert ((tokens == SEP).sum(1) == 2).all()
        first_end = (tokens == SEP).int().argmax(1)
        assert (segments.argmax(1) == first_end + 1).all()
        assert ((tokens == PAD) <= (segments == 0)).all()
    assert sum(len(batch["labels"]) for batch in data.held_out("dev", 8)) == 40
    assert sum(len(batch["labels"]) for batch in data.held_out("dev", 8, limit=12)) == 12


def test_token_numbers_are_sorted_by_frequency(settings):
    settings.length = 40  # nothing is cut
    counts = np.bincount(NliPairs.prepare(settings).train.tokens)[5:]
    assert (np.diff(counts) <= 0).all()


def test_a_given_vocabulary_is_used_and_checked(settings, tmp_path):
    vocab = tmp_path / "vocab.txt"
    settings.vocab = str(vocab)
    with pytest.raises(FileNotFoundError, match=r"vocab\.txt.*one WordPiece token a line"):
        NliPairs.prepare(settings)
    vocab.write_text("\n".join(["[PAD]", "[UNK]", *WORDS]))
    with pytest.raises(ValueError, match=r"lacks \[CLS\], \[SEP\], \[MASK\]"):
        NliPairs.prepare(settings)
    vocab.write_text("\n".join(["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    assert NliPairs.prepare(settings).vocab_size == 6 + len(WORDS)


@pytest.mark.parametrize("capital", [False, True])
def test_a_vocabulary_with_capitals_is_cased(settings, tmp_path, capital):
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL, *WORDS, "\u2028", *["Ulm"] * capital]))
    settings.vocab = str(tmp_path / "vocab.txt")
    tokenizer = NliPairs.prepare(settings).tokenizer
    assert tokenizer.token_to_id("\u2028") is not None
    found = tokenizer.encode("Dog Ulm").tokens
    assert found == (["[UNK]", "Ulm"] if capital else ["dog", "[UNK]"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"premise": "a", "label": 0}',
            r"row 1 .* has no hypothesis \(its fields: premise, label",
        ),
        ('{"premise": "a", "hypothesis": "b", "label": 7}', "label '7'"),
        ('{"premise": "a"', r"^line 1 of \S+ is no JSON: Expecting ',' delimiter at character 16$"),
        (
            '{"premise": "a", "hypothesis": "b", "label": 2}\n[3]\n',
            "line 2 .* JSON object, not .3.",
        ),
        (
            '{"premise": "a", "hypothesis": "b", "label": 2, "premise": "c"}',
            r"^line 1 of \S+ has 'premise' twice$",
        ),
        ("premise\thypothesis\tpremise\tlabel\n", "has the column 'premise' twice"),
        ("", "holds no rows"),
        (
            '{"premise": "a", "hypothesis": "b", "label": "-"}\n' * 2,
            r"x\.jsonl has no label but '-' in 2 rows",
        ),
    ],
)
def test_bad_rows_are_named(tmp_path, text, message):
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        list(read_pairs(str(tmp_path / "x.jsonl")))


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize(
    "text",
    [
        '\n{"premise": "a", "hypothesis": "b", "label": 2}\n\n',
        "\r\nsentence1\tsentence2\tlabel\r\na\tb\t2\tmore\r\n\r\n",
    ],
)
def test_marks_of_order_and_empty_lines_are_no_part_of_the_data(tmp_path, mark, text):
    (tmp_path / "x.txt").write_text(mark + text, encoding="utf-8")
    assert list(read_pairs(str(tmp_path / "x.txt"))) == [("a", "b", 2)]


def test_sentences_may_be_long(tmp_path):
    (tmp_path / "x.tsv").write_text(f"premise\thypothesis\tlabel\n{'a ' * 70_000}\tb\t0\n")
    ((premise, *_),) = read_pairs(str(tmp_path / "x.tsv"))
    assert len(premise) == 140_000


def test_files_that_are_no_text_are_named(settings, tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'{"premise": "caf\xe9"}')
    with pytest.raises(ValueError, match=r"x\.jsonl must be text in UTF-8: the byte 0xe9"):
        list(read_pairs(str(tmp_path / "x.jsonl")))
    (tmp_path / "vocab.txt").write_bytes(b"[PAD]\ncaf\xe9\n")
    settings.vocab = str(tmp_path / "vocab.txt")
    with pytest.raises(ValueError, match=r"vocab\.txt must be text in UTF-8"):
        NliPairs.prepare(settings)


def test_missing_files_are_named_with_the_expected_format(settings):
    settings.dev = ["/nowhere/dev.jsonl"]
    with pytest.raises(FileNotFoundError, match=r"/nowhere/dev\.jsonl; expected JSON lines"):
        NliPairs.prepare(settings)
    with pytest.raises(ValueError, match=r"nli\.train names no file"):
        NliPairs.prepare(NliData())


def test_a_broken_cache_is_made_anew(settings, tmp_path, caplog):
    want = NliPairs.prepare(settings).train.tokens
    (cache,) = (tmp_path / "cache").glob("nli-*.npz")
    cache.write_bytes(b"half a file")
    assert np.array_equal(NliPairs.prepare(settings).train.tokens, want)
    assert "unreadable" in caplog.text


def test_a_vocabulary_that_characters_exceed_is_refused(settings):
    few = dataclasses.replace(settings, vocab_size=10)
    with pytest.raises(ValueError, match=r"nli.vocab_size=10 must be at least \d\d with these"):
        NliPairs.prepare(few)


def test_pairs_that_are_not_kept_apart_are_noticed(settings, tmp_path, caplog):
    NliPairs.prepare(settings)
    assert not caplog.text
    (tmp_path / "copy.jsonl.gz").write_bytes((tmp_path / "dev.jsonl.gz").read_bytes())
    test = str(tmp_path / "copy.jsonl.gz")
    NliPairs.prepare(dataclasses.replace(settings, test=test))
    assert f"nli.test={test} is what nli.dev={settings.dev[0]} is" in caplog.text


@pytest.mark.parametrize("length", range(5, 14))
def test_pairs_that_are_too_long_lose_the_ends_of_the_longer_sentence(length):
    for left in range(1, 8):
        for right in range(1, 8):
            premise, hypothesis = np.arange(100, 100 + left), np.arange(200, 200 + right)
            kept = [list(premise), list(hypothesis)]
            while len(kept[0]) + len(kept[1]) + 3 > length:
                kept[len(kept[0]) < len(kept[1])].pop()
            tokens, start = joined(premise, hypothesis, length)
            assert tokens.tolist() == [CLS, *kept[0], SEP, *kept[1], SEP]
            assert start == len(kept[0]) + 2
