"""Fine-tune a small BERT on sentence pairs, make it four times smaller, and set it beside dense.

Three models of one seed: dense; dense for some steps more; and the first of them made smaller
(linear layers by ``comera.compress_``, the table of words by the rows that the training pairs
read), trained on for as many steps with the dense one as its teacher. Prints and
writes to ``results.jsonl`` what each has on two parts of the dev set: settings were chosen on the
first. A dense model that is in the folder already is not trained again.

    python docs/benchmarks/minilm.py FOLDER_OF_WEIGHTS FOLDER_OF_SNLI --out runs/minilm --seed 0
"""

import argparse
import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import comera

CHOOSE = 1000
"""Dev pairs on which settings were chosen; the others are for the report."""
BATCH = 32


class PairClassifier(transformers.BertPreTrainedModel):
    """Says how two sentences relate by the means of their words."""

    def __init__(self, config: transformers.BertConfig) -> None:
        super().__init__(config)
        self.bert = transformers.BertModel(config, add_pooling_layer=False)
        self.head = nn.Linear(4 * config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor):
        """Return logits and the states between layers."""
        found = self.bert(input_ids, attention_mask, token_type_ids, output_hidden_states=True)
        second = (attention_mask * token_type_ids).unsqueeze(-1)
        first = attention_mask.unsqueeze(-1) - second
        states = found.last_hidden_state
        u, v = ((states * side).sum(1) / side.sum(1) for side in (first, second))
        return self.head(torch.cat([u, v, (u - v).abs(), u * v], -1)), found.hidden_states


class LowRankTable(nn.Module):
    """A table whose rows are coordinates in one basis, best where rows are read often."""

    def __init__(self, table: nn.Embedding, counts_V: Tensor, rank: int) -> None:
        super().__init__()
        weight = table.weight.detach().double()
        often = (counts_V.double() + 0.1).sqrt()[:, None]  # a row that is never read counts a bit
        _, vectors = torch.linalg.eigh((often * weight).T @ (often * weight))
        basis = vectors.flip(1)[:, :rank].float()
        self.rows = nn.Embedding.from_pretrained(table.weight.detach() @ basis, freeze=False)
        self.basis = nn.Parameter(basis.T.contiguous())

    def forward(self, tokens: Tensor) -> Tensor:
        """Read rows."""
        return self.rows(tokens) @ self.basis


class Pairs:
    """Sentence pairs, in batches of about the same length."""

    def __init__(self, path: Path, tokenizer, count: int | None = None) -> None:
        with gzip.open(path, "rt") as lines:
            rows = [json.loads(line) for line, _ in zip(lines, range(count or 10**9))]  # noqa: B905
        self.read = tokenizer(
            [row["premise"] for row in rows], [row["hypothesis"] for row in rows],
            truncation=True, max_length=64,
        )  # fmt: skip
        self.labels = [row["label"] for row in rows]
        self.pad = tokenizer.pad

    def batch(self, numbers: list[int]) -> tuple[dict[str, Tensor], Tensor]:
        """Return inputs and labels of pairs."""
        rows = [{key: values[k] for key, values in self.read.items()} for k in numbers]
        return dict(self.pad(rows, return_tensors="pt")), torch.tensor(
            [self.labels[k] for k in numbers]
        )

    def batches(self, seed: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Go through all pairs in random order, again and again."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(self.labels), generator=generator).tolist()
            for start in range(0, len(order) - 16 * BATCH, 16 * BATCH):
                near = self._sorted(order[start : start + 16 * BATCH])
                for k in torch.randperm(16, generator=generator).tolist():
                    yield self.batch(near[k * BATCH : (k + 1) * BATCH])

    def counts(self, vocabulary: int) -> Tensor:
        """Return how often each token is read."""
        tokens = [token for row in self.read["input_ids"] for token in row]
        return torch.bincount(torch.tensor(tokens), minlength=vocabulary)

    def _sorted(self, numbers: list[int]) -> list[int]:
        return sorted(numbers, key=lambda k: len(self.read["input_ids"][k]))

    @torch.no_grad()
    def accuracy(self, model: nn.Module, numbers: range) -> float:
        """Return the share of these pairs that a model gets right, in per cent."""
        model.eval()
        right, order = 0, self._sorted(list(numbers))
        for start in range(0, len(order), 100):
            inputs, labels = self.batch(order[start : start + 100])
            right += int((model(**inputs)[0].argmax(-1) == labels).sum())
        return 100 * right / len(order)


def loss_of(model: nn.Module, batch: tuple[dict[str, Tensor], Tensor]) -> Tensor:
    """Return the mean loss by the labels."""
    return F.cross_entropy(model(**batch[0])[0], batch[1])


def taught_loss(model: nn.Module, dense: nn.Module, batch: tuple[dict[str, Tensor], Tensor]):
    """Return the loss by labels, by the teacher's answers, and by its states between layers."""
    inputs, labels = batch
    with torch.no_grad():
        wanted, their_states = dense(**inputs)
    logits, states = model(**inputs)
    mask = inputs["attention_mask"][..., None]
    apart = [
        ((a - b).square() * mask).sum() / (b.square() * mask).sum()
        for a, b in zip(states, their_states, strict=True)
    ]
    answers = F.kl_div(
        F.log_softmax(logits / 2, -1), F.log_softmax(wanted / 2, -1),
        reduction="batchmean", log_target=True,
    )  # fmt: skip
    return 0.5 * F.cross_entropy(logits, labels) + 4 * answers + torch.stack(apart).mean()


def train(model: nn.Module, batches, steps: int, lr: float, loss_fn) -> float:
    """Train all parameters by AdamW; returns the processor seconds."""
    begun = time.process_time()
    gates = {id(gate) for module in model.modules() for gate in getattr(module, "gates", ())}
    params = [param for param in model.parameters() if id(param) not in gates]
    optimizer = torch.optim.AdamW(params, lr, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    for step in range(steps):
        done = step / steps
        optimizer.param_groups[0]["lr"] = lr * min((done + 1e-3) / 0.1, (1 - done) / 0.9)
        loss = loss_fn(model, next(batches))
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 24:
            print(f"  step {step + 1}: loss {float(loss):.3f}", flush=True)
    return time.process_time() - begun


def main() -> None:
    """Read the options and make the models that are missing."""
    parser = argparse.ArgumentParser()
    parser.add_argument("weights")
    parser.add_argument("snli", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/minilm"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=500, help="of 32 pairs, dense")
    parser.add_argument("--more", type=int, default=500, help="for each of the two others")
    parser.add_argument("--lr", type=float, default=1e-4, help="of dense models")
    parser.add_argument("--small_lr", type=float, default=5e-4, help="of the small model")
    parser.add_argument("--keep", type=float, default=0.25, help="share of all parameters")
    parser.add_argument("--table_rank", type=int, default=64)
    parser.add_argument("--name", default="small", help="of the small model")
    parser.add_argument("--models", nargs="+", default=["dense", "dense-again", "small"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.weights)
    data = Pairs(options.snli / "train.jsonl.gz", tokenizer)
    dev = Pairs(options.snli / "dev.jsonl.gz", tokenizer)
    seed, steps, more = options.seed, options.steps, options.more

    def say(name: str, model: nn.Module, seconds: float, final: bool = True) -> None:
        row = {
            "model": name, "seed": seed, "steps": f"{steps} + {more}",
            "params": sum(param.numel() for param in model.parameters()),
            "choose": dev.accuracy(model, range(CHOOSE)),
            "report": dev.accuracy(model, range(CHOOSE, len(dev.labels))) if final else None,
            "processor_seconds": seconds,
        }  # fmt: skip
        with (options.out / "results.jsonl").open("a") as file:
            print(json.dumps(row), file=file)
        print(json.dumps(row), flush=True)

    def fresh() -> PairClassifier:
        torch.manual_seed(seed)
        return PairClassifier.from_pretrained(
            options.weights, num_labels=3,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip

    dense, file = fresh(), options.out / f"dense-{seed}-{steps}.pt"
    if file.exists():
        dense.load_state_dict(torch.load(file))
    else:
        spent = train(dense, data.batches(seed), steps, options.lr, loss_of)
        torch.save(dense.state_dict(), file)
        say("dense", dense, spent)
    dense.eval()
    if "dense-again" in options.models:
        again = fresh()
        again.load_state_dict(dense.state_dict())
        spent = train(again, data.batches(seed + 1000), more, options.lr, loss_of)
        say("dense-again", again, spent)
    if "small" not in options.models:
        return
    small = fresh()
    small.load_state_dict(dense.state_dict())
    whole = sum(param.numel() for param in small.parameters())
    table = small.bert.embeddings.word_embeddings
    small.bert.embeddings.word_embeddings = LowRankTable(
        table, data.counts(table.num_embeddings), options.table_rank
    )
    say(f"{options.name}: table", small, 0.0, final=False)
    left = sum(param.numel() for param in small.parameters())
    batches = data.batches(seed + 1000)
    begun = time.process_time()
    done = comera.compress_(
        small, [next(batches) for _ in range(16)], budget=options.keep * whole / left,
        loss_fn=loss_of, target_modules=r"bert\.encoder\..*",
    )  # fmt: skip
    print(done)
    say(f"{options.name}: not trained", small, time.process_time() - begun, final=False)

    def taught(model: nn.Module, batch: tuple[dict[str, Tensor], Tensor]) -> Tensor:
        return taught_loss(model, dense, batch)

    spent = train(small, batches, more, options.small_lr, taught)
    torch.save(small.state_dict(), options.out / f"{options.name}-{seed}-{steps}-{more}.pt")
    say(options.name, small, spent)


if __name__ == "__main__":
    main()
