"""A model of one's own, trained in compressed form: ranks are learned, then cut to a target.

    python examples/own_loop.py

The task is made up here: does a row of 16 words hold more words from the upper half of the
vocabulary than from the lower half?
"""

import torch
from torch import nn

import comera

WORDS, LENGTH, WIDTH = 512, 16, 128


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.layers = nn.Sequential(up, nn.GELU(), down, nn.GELU())
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(words).mean(1)))


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(WORDS, (rows, LENGTH))
    return words, ((words >= WORDS // 2).sum(1) > LENGTH // 2).long()


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    words, labels = batch
    return nn.functional.cross_entropy(model(words), labels)


torch.manual_seed(0)
model = Classifier()
config = comera.TTConfig(rank=8, target_modules=r"words|layers\..*", init="orthogonal")
comera.tensorize_(model, config)
print(comera.compression_report(model))

optimizer = comera.MuonAdamW(comera.param_groups(model, lr=3e-3, gate_lr=5e-2))
ranks = comera.TwoStage(model, target=0.5, early_steps=150, late_steps=100)
step = comera.TrainStep(model, loss_fn, optimizer, ranks)
for number in range(400):
    loss = step(batch(64))
    if ranks.due:  # once: from here on the model is small
        print("ranks are cut:", ranks.finish_(optimizer))
    if number % 100 == 99:
        print(f"step {number + 1}: loss {loss:.3f}")

comera.save_model(model, "small-model")
words, labels = batch(2000)
again = comera.load_model("small-model", model=Classifier()).eval()
print(f"accuracy {(again(words).argmax(-1) == labels).float().mean():.3f}")
