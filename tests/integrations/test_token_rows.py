"""More tokens than a table had: what it knew is read as before, bit for bit."""

import copy

import pytest
import torch

import comera
from tests.integrations.test_pretrained import same, truncated, with_hot_rows
from tests.integrations.tiny import hf, llama, transformers

WORDS = torch.arange(128)

MADE = {
    "tied head": llama,
    "hot rows": with_hot_rows,
    "hot rows in a basis": lambda: truncated(with_hot_rows(hot_rank=6), 5),
    "truncated": lambda: truncated(llama(), 2),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_old_rows_stay_and_new_ones_are_their_mean(make, tmp_path):
    model = hf.attach_(make())
    table = model.get_input_embeddings()
    before = table(WORDS).clone()
    mean = table.weight.mean(0)
    for rows in (131, 140):  # twice
        assert model.resize_token_embeddings(rows) is table
        assert table.num_embeddings == model.config.vocab_size == rows
        assert torch.equal(table(WORDS), before)
        assert table.weight.shape == (rows, 32)
        # Whole tables are multiplied in another order than looked-up rows on some processors.
        torch.testing.assert_close(table.weight[:128], before, atol=1e-6, rtol=1e-5)
    found = table(torch.tensor([128, 130]))
    if table.hot_rank is None:
        torch.testing.assert_close(found, mean.expand(2, -1), atol=1e-6, rtol=1e-4)
    else:  # as near as the basis comes
        basis = table.hot.basis
        near = mean @ torch.linalg.pinv(basis) @ basis
        torch.testing.assert_close(found, near.expand(2, -1), atol=1e-5, rtol=1e-4)
    head = model.get_output_embeddings()
    if head is not None:
        assert head.out_features == 140
        assert torch.equal(head.weight, table.weight)
        assert head.bias is None or head.bias.shape == (140,)
    model.save_pretrained(tmp_path)
    again, said = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(said.values())
    assert same(model, again)


def test_every_row_has_its_gradient():
    """Beside a dense table of the same rows, which gets what each row does."""
    model = hf.attach_(with_hot_rows())
    model.resize_token_embeddings(133)
    table = model.get_input_embeddings()
    dense = copy.deepcopy(table).to_dense()
    words = torch.tensor([[5, 20, 127, 128], [132, 132, 0, 64]])
    torch.manual_seed(0)
    weights = torch.randn(2, 4, 32)
    (table(words) * weights).sum().backward()
    (dense(words) * weights).sum().backward()
    assert table.hot.grad.shape == (25, 32)
    torch.testing.assert_close(table.hot.grad[20:], dense.weight.grad[128:])
    torch.testing.assert_close(table.hot.grad[:20], dense.weight.grad[:20])


def test_it_is_padded_to_a_multiple_and_drawn_if_wanted():
    model = hf.attach_(llama())
    model.resize_token_embeddings(130, pad_to_multiple_of=16, mean_resizing=False)
    table = model.get_input_embeddings()
    assert model.config.vocab_size == 144
    assert table.hot.detach().std() == pytest.approx(0.02, rel=0.3)


@pytest.mark.parametrize(
    "settings", [{}, {"linear_format": "btt", "rank": 1, "embedding_rank": 6}], ids=["tt", "btt"]
)
def test_a_head_that_is_a_tensor_train_of_its_own_is_named(settings):
    model = llama(tied="untie", **settings)
    for table in (model.model.embed_tokens, torch.nn.Embedding(128, 32)):
        model.set_input_embeddings(table)
        with pytest.raises(ValueError, match="output layer is a tensor train of 128 rows"):
            model.resize_token_embeddings(130)
        assert table.num_embeddings == len(table.weight) == 128


def test_a_head_stays_tied_where_a_table_takes_the_place_of_others_on_its_cores(tmp_path):
    """Marian has three modules of one weight, and the first for all once it has grown."""
    config = transformers.MarianConfig(
        vocab_size=96, decoder_vocab_size=96, d_model=32, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64,
        decoder_ffn_dim=64, max_position_embeddings=16, pad_token_id=0, decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.MarianMTModel(config).eval()
    hf.attach_(comera.tensorize_(model, comera.TTConfig(rank=2, tied="share")))
    given = {"input_ids": WORDS[None, :8], "decoder_input_ids": WORDS[None, :8]}
    before = model(**given).logits
    model.resize_token_embeddings(106)
    torch.testing.assert_close(model(**given).logits[..., :96], before)
    assert model.lm_head.embedding is model.get_input_embeddings()
    model.save_pretrained(tmp_path)
    again, said = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(said.values())
    assert torch.equal(again(**given).logits, model(**given).logits)


def test_rows_of_another_width_are_refused():
    from comera.surgery.rows import append_rows_

    with pytest.raises(ValueError, match=r"takes \(more, 32\)"):
        append_rows_(comera.TTEmbedding(100, 32, rank=4), torch.zeros(2, 30))
