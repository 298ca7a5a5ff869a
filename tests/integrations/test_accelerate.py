"""Loops of one's own on accelerate: its optimizer is cut, its folders hold where ranks were."""

import pytest
import torch
from torch import nn

import comera

accelerate = pytest.importorskip("accelerate")


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    comera.tensorize_(model, comera.TTConfig(rank=8, order=2))
    optimizer = torch.optim.AdamW(comera.param_groups(model, 1e-3, gate_lr=0.1))
    accelerator = accelerate.Accelerator(cpu=True)
    ranks = comera.TwoStage(model, 0.5, early_steps=2, late_steps=2)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(ranks)
    return accelerator, model, optimizer, ranks


def train(made, first, last):
    accelerator, model, optimizer, ranks = made
    for step in range(first, last):
        torch.manual_seed(step)
        batch = torch.randn(16, 32)
        loss = nn.functional.mse_loss(model(batch), batch)
        accelerator.backward(ranks.objective(loss))
        optimizer.step()
        optimizer.zero_grad()
        ranks.step(loss.detach(), optimizer)
        if ranks.due:
            ranks.finish_(optimizer)


@pytest.mark.parametrize("at", [3, 5], ids=["late", "after the cut"])
def test_a_saved_state_goes_on_bit_for_bit(at, tmp_path):
    whole = parts()
    train(whole, 0, 8)
    broken = parts()
    train(broken, 0, at)
    broken[0].save_state(tmp_path)
    resumed = parts()
    resumed[0].load_state(tmp_path)
    train(resumed, at, 8)
    wanted, found = (made[1].state_dict() for made in (whole, resumed))
    assert all(torch.equal(wanted[key], found[key]) for key in wanted)
    assert whole[3].forced is not None


def test_the_state_of_its_optimizer_is_cut_with_the_ranks():
    made = parts()
    train(made, 0, 5)
    optimizer = made[2]
    assert type(optimizer) is accelerate.optimizer.AcceleratedOptimizer
    for param, state in optimizer.state.items():
        assert state["exp_avg"].shape == param.shape


LAYERS = {
    "TTLinear": (lambda: comera.TTLinear(16, 16, rank=4), lambda: torch.randn(32, 16)),
    "BTTLinear": (lambda: comera.BTTLinear(16, 16, rank=1), lambda: torch.randn(32, 16)),
    "TTEmbedding": (lambda: comera.TTEmbedding(64, 16, rank=4), lambda: torch.arange(9)),
    "TTEmbeddingBag": (
        lambda: comera.TTEmbeddingBag(64, 16, rank=4), lambda: torch.arange(9)[None],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", LAYERS)
def test_offloaded_weights_come_back_or_are_missed(kind):
    make, batch = LAYERS[kind]
    x, on_cpu = batch(), {"execution_device": torch.device("cpu")}
    model = nn.Sequential(make())
    accelerate.cpu_offload(model, **on_cpu)
    with pytest.raises(RuntimeError, match=rf"preload_module_classes=.*{kind}"):
        model(x)
    model = nn.Sequential(make())
    want = model(x)
    accelerate.cpu_offload(model, **on_cpu, preload_module_classes=[kind])
    torch.testing.assert_close(model(x), want)


@pytest.mark.parametrize("kind", LAYERS)
def test_files_are_loaded_by_a_device_map(kind, tmp_path):
    make, batch = LAYERS[kind]
    saved, loaded, x = nn.Sequential(make()), nn.Sequential(make()), batch()
    accelerate.Accelerator(cpu=True).save_model(saved, tmp_path)
    accelerate.load_checkpoint_and_dispatch(loaded, tmp_path, device_map={"": "cpu"}, strict=True)
    assert torch.equal(loaded(x), saved(x))


def test_a_model_converted_without_memory_is_loaded_to_the_disk(tmp_path):
    def build():
        model = nn.Sequential(nn.Embedding(60, 32), nn.BatchNorm1d(32))
        config = comera.TTConfig(rank=4, init="orthogonal", target_modules=["0"])
        return comera.tensorize_(model, config).eval()

    saved, x = build(), torch.arange(60)
    accelerate.Accelerator(cpu=True).save_model(saved, tmp_path / "saved")
    with accelerate.init_empty_weights():
        loaded = build()
    accelerate.load_checkpoint_and_dispatch(
        loaded, tmp_path / "saved", device_map={"0": "disk", "1": "cpu"},
        offload_folder=tmp_path / "disk", preload_module_classes=["TTEmbedding"],
    )  # fmt: skip
    assert torch.equal(loaded(x), saved(x))


def test_rows_that_a_file_keeps_elsewhere_are_missed(tmp_path):
    saved, loaded = (
        nn.Sequential(comera.TTEmbedding(64, 16, rank=4, scatter_rows=there))
        for there in (True, False)
    )
    accelerate.Accelerator(cpu=True).save_model(saved, tmp_path)
    with pytest.raises(ValueError, match="not have a parameter or a buffer named rows_scattered"):
        accelerate.load_checkpoint_and_dispatch(
            loaded, tmp_path, device_map={"": "cpu"}, strict=True
        )
