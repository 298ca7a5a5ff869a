import copy

import pytest
import torch
from torch import nn

import comera
from comera.nn.collection import TTEmbeddingBagCollection
from comera.ops.context import static_shapes
from comera.ops.table import tt_embedding
from tests.kernels import emulation

WIDTH = 16


def tables(**more):
    """Of unlike sizes, hot rows and ranks; all but ``more`` can be read together."""
    return TTEmbeddingBagCollection(
        {
            "plain": bag(50),
            "hot": bag(61, hot_rows=7),
            "mean": bag(40, mode="mean"),
            "padded": bag(33, padding_idx=3),
            "thin": bag(48, rank=3),
            **more,
        }
    ).double()


def bag(rows, mode="sum", rank=4, **settings):
    return comera.TTEmbeddingBag(rows, WIDTH, mode=mode, rank=rank, **settings)


def others():
    return {
        "dense": nn.EmbeddingBag(20, WIDTH, mode="sum"),
        "max": bag(30, mode="max"),
        "hot of a rank": bag(80, hot_rows=20, hot_rank=2),
    }


def ask(collection, bags=9, ragged=True, seed=1):
    """Bags of every table; some of them empty."""
    generator = torch.Generator().manual_seed(seed)
    asked = {}
    for name, table in collection.items():
        sizes = torch.randint(0 if ragged else 2, 5 if ragged else 3, (bags,), generator=generator)
        indices = torch.randint(table.num_embeddings, (int(sizes.sum()),), generator=generator)
        asked[name] = (indices, sizes.cumsum(0) - sizes)
    return asked


def one_by_one(collection, asked):
    return {name: table(*asked[name]) for name, table in collection.items()}


def loss(found):
    weights = torch.linspace(-1, 1, 9 * WIDTH, dtype=torch.float64).view(9, WIDTH)
    return sum((k + 1) * (vectors * weights).sum() for k, vectors in enumerate(found.values()))


def compare(collection, asked):
    got, want = collection(asked), one_by_one(collection, asked)
    assert list(got) == list(collection)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    params = list(collection.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(loss(got), params, retain_graph=True),
        torch.autograd.grad(loss(want), params),
        rtol=1e-9, atol=1e-12,
    )  # fmt: skip


def test_tables_of_which_slices_are_joined_beside_whole_ones(monkeypatch):
    monkeypatch.setattr(tt_embedding, "_WORTH_IT", 0)
    collection = tables(large=bag(5000), other=bag(4000, hot_rows=9))
    for seed in (1, 2):
        asked = ask(collection, seed=seed)
        got, want = collection(asked), one_by_one(collection, asked)
        monkeypatch.setattr(tt_embedding, "_WORTH_IT", 1 << 40)
        whole = one_by_one(collection, asked)
        monkeypatch.setattr(tt_embedding, "_WORTH_IT", 0)
        params = list(collection.parameters())
        grads = [
            torch.autograd.grad(loss(found), params, allow_unused=True)
            for found in (got, want, whole)
        ]
        for other, of_other in ((want, grads[1]), (whole, grads[2])):
            torch.testing.assert_close(got, other)
            torch.testing.assert_close(grads[0], of_other)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
def test_the_same_as_one_table_after_the_other(ragged, seed):
    collection = tables(**others())
    compare(collection, ask(collection, ragged=ragged, seed=seed))


def test_results_can_be_changed_in_place():
    collection = tables(**others())
    asked = ask(collection)
    want = {name: nn.functional.relu(vectors) for name, vectors in collection(asked).items()}
    got = {name: nn.functional.relu_(vectors) for name, vectors in collection(asked).items()}
    torch.testing.assert_close(got, want)
    params = list(collection.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(loss(got), params), torch.autograd.grad(loss(want), params)
    )


def test_with_sizes_fixed_for_a_graph():
    collection = tables(**others())
    with static_shapes():
        compare(collection, ask(collection))


def test_tables_alike_are_read_in_one_look_up(monkeypatch):
    calls = []
    together = comera.nn.collection.tt_embedding_bags

    def counted(parts, *others):
        calls.append(len(parts))
        return together(parts, *others)

    monkeypatch.setattr("comera.nn.collection.tt_embedding_bags", counted)
    collection = tables(**others())
    collection(ask(collection))
    assert calls == [5]


def test_weights_of_entries_and_their_gradients():
    collection = tables()
    asked = ask(collection)
    weights = torch.randn(len(asked["hot"][0]), dtype=torch.float64, requires_grad=True)
    asked["hot"] = (*asked["hot"], weights)
    got, want = (loss(f) for f in (collection(asked), one_by_one(collection, asked)))
    torch.testing.assert_close(
        torch.autograd.grad(got, weights), torch.autograd.grad(want, weights), rtol=1e-9, atol=1e-12
    )


def test_rows_that_were_moved():
    collection = tables()
    comera.update_hot_rows_(collection["hot"], torch.arange(61))
    assert collection["hot"].row_order is not None
    compare(collection, ask(collection))


def test_one_entry_a_bag_as_a_tensor_and_int32():
    collection = tables()
    entries = torch.randint(33, (9, 5), dtype=torch.int32)
    got = collection(entries)
    want = {n: t(entries[:, k : k + 1]) for k, (n, t) in enumerate(collection.items())}
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    in_order = collection([entries[:, k : k + 1] for k in range(5)])
    torch.testing.assert_close(got, in_order)


def test_nothing_is_asked():
    collection = tables(**others())
    none, starts = torch.zeros(0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    found = collection(dict.fromkeys(collection, (none, starts)))
    assert all(torch.equal(f, torch.zeros(2, WIDTH, dtype=f.dtype)) for f in found.values())


def test_ranks_may_change_between_calls():
    collection = tables()
    asked = ask(collection)
    collection(asked)
    with torch.no_grad():
        collection["thin"].gates[0][2:] = 0
    comera.truncate_(collection)
    assert collection["thin"].ranks[0] == 2
    compare(collection, asked)


def test_a_dense_collection_is_tensorised_and_keeps_its_names():
    collection = TTEmbeddingBagCollection(
        {name: nn.EmbeddingBag(200, WIDTH, mode="sum") for name in ("user", "item")}
    )
    comera.tensorize_(collection, comera.TTConfig(rank=4))
    assert isinstance(collection["user"], comera.TTEmbeddingBag)
    again = copy.deepcopy(collection)
    again.load_state_dict(collection.state_dict())
    assert "user.cores.0" in collection.state_dict()
    entries = torch.randint(200, (4, 2))
    torch.testing.assert_close(again(entries), collection(entries))


def test_a_table_of_billions_of_rows_beside_a_small_one():
    collection = TTEmbeddingBagCollection(
        {
            name: comera.TTEmbeddingBag(rows, 4, mode="sum", rank=2)
            for name, rows in (("huge", 3_000_000_000), ("small", 10), ("large", 10**9))
        }
    )
    asked = {
        "huge": (torch.tensor([2_999_999_999, 0, 1 << 31]), torch.tensor([0, 2])),
        "small": (torch.tensor([9, 0]), torch.tensor([0, 1])),
        "large": (torch.tensor([10**9 - 1]), torch.tensor([0, 1])),
    }
    torch.testing.assert_close(collection(asked), one_by_one(collection, asked))


def test_bad_input_is_named():
    collection = tables()
    asked = ask(collection)
    with pytest.raises(ValueError, match=r"\(bags, 5\), got \(9, 4\)"):
        collection(torch.zeros(9, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="there are 5 tables, got bags of 2"):
        collection([asked["hot"], asked["plain"]])
    with pytest.raises(ValueError, match=r"the tables are \['hot', .*, got bags of \['colour'\]"):
        collection({"colour": asked["hot"]})
    asked["thin"] = (torch.tensor([48]), torch.tensor([0]))
    with pytest.raises(IndexError, match=r"table 'thin': index 48 at 0 is out of range .* 48 rows"):
        collection(asked)
    asked["thin"] = (torch.tensor([1.5]), torch.tensor([0]))
    with pytest.raises(TypeError, match=r"table 'thin': indices are torch.float32; they must be"):
        collection(asked)


def test_kernels_join_the_cores_of_all_tables_at_once(monkeypatch):
    if emulation.find_gxx() is None:
        pytest.skip("no g++, which the emulation of CUDA needs")
    collection = tables(**others()).float()
    asked = ask(collection)
    want = collection(asked)
    grads = torch.autograd.grad(loss(want), list(collection.parameters()))
    emulation.emulate_kernels(monkeypatch)
    calls = []
    together = tt_embedding.contract_groups
    monkeypatch.setattr(
        tt_embedding,
        "contract_groups",
        lambda groups: calls.append(len(groups)) or together(groups),
    )
    got = collection(asked)
    assert calls == [5, 1, 1]  # those read together, then max and that with a hot rank
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    again = torch.autograd.grad(loss(got), list(collection.parameters()))
    torch.testing.assert_close(again, grads, rtol=1e-4, atol=1e-4)


def test_hooks_of_a_table_are_called():
    collection = tables()
    asked, called = ask(collection), []
    want = collection(asked)
    handle = collection["mean"].register_forward_hook(lambda *_: called.append("mean"))
    torch.testing.assert_close(collection(asked), want)
    assert called == ["mean"]
    handle.remove()
    collection(asked)
    assert called == ["mean"]


class Halved(comera.TTEmbeddingBag):
    def forward(self, *bags):
        return super().forward(*bags) / 2


def test_a_pass_of_a_table_of_ones_own_is_called(monkeypatch):
    plain = [bag(50), bag(60), Halved(50, WIDTH, mode="sum", rank=4)]
    collection = TTEmbeddingBagCollection(
        {f"t{k}": table.double() for k, table in enumerate(plain)}
    )
    asked = ask(collection)
    compare(collection, asked)
    forward, before = comera.TTEmbeddingBag.forward, collection(asked)
    monkeypatch.setattr(comera.TTEmbeddingBag, "forward", lambda *args: 2 * forward(*args))
    compare(collection, asked)
    torch.testing.assert_close(collection(asked)["t0"], 2 * before["t0"])


def test_a_table_asked_by_a_mask_is_named():
    names = ("user", "item")
    tables = comera.TTEmbeddingBagCollection(
        {name: comera.TTEmbeddingBag(50, 24, rank=4) for name in names}
    )
    rows, mask = torch.tensor([[1], [0]]), torch.tensor([[True], [False]])
    with pytest.raises(TypeError, match=r"table 'item': indices are torch\.bool"):
        tables({"user": rows, "item": mask})
