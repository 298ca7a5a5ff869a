import pytest
import torch
from torch.nn import functional as F

import comera
from comera.models.dlrm import DLRM
from comera.nn.module import tensor_trains

SIZES = {"user": 40, "item": 30, "genre": 5}


def model(num_continuous=3) -> DLRM:
    torch.manual_seed(0)
    return DLRM(SIZES, num_continuous, 8, bottom=(16,), top=(12,))


@pytest.mark.parametrize("num_continuous", [0, 3])
def test_products_are_those_of_the_paper(num_continuous):
    """Every pair of parts multiplied one by one."""
    dlrm = model(num_continuous)
    continuous = torch.randn(6, num_continuous) if num_continuous else None
    fields = torch.stack([torch.randint(size, (6,)) for size in SIZES.values()], 1)
    for row in range(6):
        parts = [dlrm.tables[name].weight[fields[row, k]] for k, name in enumerate(SIZES)]
        below = []
        if num_continuous:
            below = [dlrm.bottom(continuous[row])]
            parts = below + parts
        products = [
            parts[i].dot(parts[j]) for i in range(len(parts)) for j in range(i + 1, len(parts))
        ]
        want = dlrm.top(torch.cat([*below, torch.stack(products)]))
        torch.testing.assert_close(dlrm(continuous, fields)[row], want[0])


def test_bags_of_one_entry_are_the_same():
    dlrm = model()
    continuous = torch.randn(4, 3)
    fields = torch.stack([torch.randint(size, (4,)) for size in SIZES.values()], 1)
    bags = [(fields[:, k].contiguous(), torch.arange(4)) for k in range(3)]
    torch.testing.assert_close(dlrm(continuous, bags), dlrm(continuous, fields))


def test_tables_and_wide_layers_become_tensor_trains_and_learn():
    dlrm = model()
    config = comera.TTConfig(
        rank=3, embedding_rank=3, order=2, min_size=200, hot_pattern={r"tables\.user": [10, 2]}
    )
    comera.tensorize_(dlrm, config)
    assert set(tensor_trains(dlrm)) >= {"tables.user", "tables.item"}
    assert type(dlrm.tables["genre"]) is torch.nn.EmbeddingBag
    assert (dlrm.tables["user"].hot_rows, dlrm.tables["user"].hot_rank) == (10, 2)
    assert dlrm.tables["item"].hot_rows == 0
    optimizer = torch.optim.AdamW(comera.param_groups(dlrm, 1e-2))
    fields = torch.stack([torch.randint(size, (32,)) for size in SIZES.values()], 1)
    continuous, labels = torch.randn(32, 3), (torch.arange(32) % 2).float()
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(dlrm(continuous, fields), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_hot_rows_that_are_no_pair_are_named():
    with pytest.raises(ValueError, match=r"hot_pattern\['user'\]=\[3\] must be two numbers"):
        comera.TTConfig(hot_pattern={"user": [3]})
    with pytest.raises(ValueError, match="hot_pattern 'nobody' matches none of the targeted"):
        comera.tensorize_(model(), comera.TTConfig(rank=2, hot_pattern={"nobody": [3, None]}))


def test_layers_that_are_all_small_are_named():
    with pytest.raises(ValueError, match=r"matches no layer .* and has min_size=10000 entries"):
        comera.tensorize_(model(), comera.TTConfig(rank=2, min_size=10_000))


def test_made_without_memory_it_starts_as_a_converted_one_does():
    config = comera.TTConfig(rank=8, embedding_rank=8, order=2, target_modules=r"tables.*|top.0")
    sizes = {"user": 4000, "item": 900}
    with torch.device("meta"):
        lean = comera.tensorize_(DLRM(sizes, 3, 32, top=(64,)), config)
    lean.to_empty(device="cpu").reset_parameters("orthogonal")
    other = comera.tensorize_(DLRM(sizes, 3, 32, top=(64,)), config)
    wanted = dict(other.named_modules())
    assert tensor_trains(lean)
    for name, module in tensor_trains(lean).items():
        ours, theirs = (
            float(m.weight.detach().square().mean().sqrt()) for m in (module, wanted[name])
        )
        assert ours == pytest.approx(theirs, rel=0.1)
    assert all(param.isfinite().all() for param in lean.parameters())
    assert lean.top[0].bias.abs().max() > 0


def test_any_column_can_name_a_table():
    dlrm = DLRM({"type": 4, "keys": 3, "a.b": 5, "": 2}, 0, 8)
    assert list(dlrm.tables) == ["type_", "keys_", "a_b", "_"]
    assert dlrm(None, torch.zeros(2, 4, dtype=torch.int64)).shape == (2,)


def test_inputs_that_do_not_fit_are_named():
    dlrm, fields = model(), torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="takes 3 continuous features, got None"):
        dlrm(None, fields)
    with pytest.raises(ValueError, match=r"takes 3 continuous features, got \(2, 4\)"):
        dlrm(torch.zeros(2, 4), fields)
    with pytest.raises(ValueError, match=r"\(bags, 3\), got \(2, 2\)"):
        dlrm(torch.zeros(2, 3), fields[:, :2])
    with pytest.raises(ValueError, match="num_continuous=0 and one table leave nothing"):
        DLRM([10], 0, 8)
    with pytest.raises(ValueError, match=r"has \['a\.b', 'a_b'\], one name as modules"):
        DLRM({"a.b": 10, "c": 3, "a_b": 20}, 3, 8)
    with pytest.raises(ValueError, match="at least one table"):
        DLRM({}, 3)
    with pytest.raises(ValueError, match=r"embedding_dim=\[0\] must be at least 1"):
        DLRM(SIZES, 3, 0)
    with pytest.raises(ValueError, match=r"top=\[8, 0\] must be at least 1"):
        DLRM(SIZES, 3, 8, top=(8, 0))
