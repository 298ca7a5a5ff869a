"""The whole step on every device: what it computes must not depend on where."""

import torch

import comera
from comera.models.transformer import Encoder, SequenceClassifier


def losses(device, precision="fp32", steps=3):
    torch.manual_seed(0)
    model = SequenceClassifier(Encoder(300, 64, 2, 2, 128, 16, 0.0, 0, "post"), 3, dropout=0.0)
    comera.tensorize_(model, comera.TTConfig(rank=6, exclude_modules=["output"]))
    tokens, labels = torch.randint(0, 300, (4, 16)), torch.randint(0, 3, (4,))
    tokens[:, 0] = 1  # something to attend to
    model.to(device)
    optimizer = torch.optim.AdamW(comera.param_groups(model, 1e-2), fused=True)
    ranks = comera.TwoStage(model, 0.5, 100, 100)

    def loss_fn(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]).float(), batch[1])

    step = comera.TrainStep(model, loss_fn, optimizer, ranks, precision=precision)
    batch = tokens.to(device), labels.to(device)
    return [float(step(batch)) for _ in range(steps)]


def test_losses_are_those_of_the_cpu(device):
    torch.testing.assert_close(losses(device), losses("cpu"), rtol=1e-3, atol=1e-4)


def test_mixed_precision_follows_float32(device):
    torch.testing.assert_close(losses(device, "bf16"), losses("cpu"), rtol=0.05, atol=0.02)
