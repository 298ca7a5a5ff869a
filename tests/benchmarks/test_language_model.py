import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks import language_model
from benchmarks.language_model import METHODS, Bench, main, perplexity


class Model(nn.Module):
    """Predicts the next token, and answers as models of Hugging Face do."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.body = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 16))
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids, labels=None):
        hidden = self.embed(input_ids)
        logits = self.head(hidden + self.body(hidden))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return type("Output", (), {"logits": logits, "loss": loss})


def encode(text):
    return [ord(letter) % 20 for letter in text]


@pytest.fixture
def texts(tmp_path):
    told, tested = tmp_path / "told.txt", tmp_path / "tested.txt"
    told.write_text("abcabdabe" * 200)
    tested.write_text("abeabcabd" * 40)
    return told, tested


@pytest.fixture
def trained(texts):
    torch.manual_seed(0)
    model = Model()
    rows = torch.tensor(encode(texts[0].read_text())).view(-1, 36)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        model(rows, rows).loss.backward()
        optimizer.step()
    return model


def run(texts, out, *more):
    told, tested = map(str, texts)
    return main(
        ["--model=.", f"--calibrate={told}", f"--test={tested}", f"--out={out}", "--length=36",
         "--sequences=8", "--heal_sequences=8", "--test_sequences=4", *more]
    )  # fmt: skip


def test_all_points_are_measured_once_and_written(texts, trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(language_model, "_load", lambda *_: (trained, encode))
    out = tmp_path / "found"
    run(texts, out, "--shares", "0.5")
    points = json.loads((out / "points.json").read_text())
    assert [point["method"] for point in points] == ["dense", *METHODS]
    table = capsys.readouterr().out
    assert all(text in table for text in (*METHODS.values(), "50% fewer"))
    before = (out / "points.json").stat().st_mtime_ns
    run(texts, out, "--shares", "0.5")
    assert (out / "points.json").stat().st_mtime_ns == before


def test_a_point_is_what_the_method_says(trained, tmp_path):
    batches = [
        {"input_ids": row[None], "labels": row[None]} for row in torch.randint(0, 20, (6, 30))
    ]
    bench = Bench(trained, batches[:3], batches[3:5], batches[5:], tmp_path)
    dense = {name: layer.weight for name, layer in bench.layers.items()}
    assert set(dense) == {"body.0", "body.2"}
    for method in ("svd", "whitened"):
        _, small = getattr(bench, method)(0.5)
        for name, weight in dense.items():
            cut = small.get_submodule(name).weight
            assert torch.linalg.matrix_rank(cut) == int(0.5 * weight.numel() / sum(weight.shape))
    weight = dense["body.0"].detach()
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    plain = bench.svd(0.5)[1].body[0].weight
    torch.testing.assert_close(plain, u[:, :6] * s[:6] @ v[:6], rtol=1e-4, atol=1e-4)
    x = bench.moments["body.0"].inputs_II
    error = {
        method: weight - getattr(bench, method)(0.5)[1].body[0].weight.detach()
        for method in ("svd", "whitened")
    }
    outputs = {name: torch.trace(one @ x @ one.T) for name, one in error.items()}
    assert outputs["whitened"] < outputs["svd"]
    for method in ("comera", "healed"):
        about, small = getattr(bench, method)(0.5)
        linears = sum(weight.numel() for weight in dense.values())
        whole = sum(param.numel() for param in trained.parameters())
        assert sum(param.numel() for param in small.parameters()) <= whole - 0.5 * linears
    assert about["steps"] == 2
    with torch.no_grad():
        losses = torch.stack([trained(**batch).loss for batch in batches])
    assert perplexity(trained, batches) == pytest.approx(float(losses.mean().exp()), rel=1e-5)


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("--methods=magic", "invalid choice: 'magic' (choose from svd, tt"),
        ("--shares=1.5", "1.5 must be between 0 and 1"),
    ],
)
def test_wrong_options_are_named(texts, tmp_path, option, problem, capsys):
    with pytest.raises(SystemExit):
        run(texts, tmp_path / "found", option)
    assert problem in capsys.readouterr().err.replace("'svd', 'tt'", "svd, tt")


def test_a_text_that_is_too_short_is_named(texts, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(language_model, "_load", lambda *_: (trained, encode))
    with pytest.raises(ValueError, match=r"told\.txt has 1,800 tokens, and 16 x 512 are asked for"):
        run(texts, tmp_path / "found", "--length=512")
