"""Compiled steps against eager ones: losses and every parameter, also where something changes.

Most go through the compiler up to its code, which takes far longer to make; one goes all the way.
"""

import functools
import re

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

import comera
from comera.models.decoder import CausalLanguageModel, Decoder
from comera.models.transformer import Encoder, SequenceClassifier
from comera.ops.context import static_shapes
from comera.train import step as step_module
from tests.train import test_launches
from tests.train.counting import attention_as_on_a_card

pytestmark = pytest.mark.slow


def classifier(norm="post", layers=1):
    encoder = Encoder(60, 32, layers, 2, 48, 8, 0.0, num_segments=2, norm=norm)
    return SequenceClassifier(encoder, 3, dropout=0.0)


def classify(model, batch):
    logits = model(batch["tokens"], batch["segments"], batch["padded"])
    return F.cross_entropy(logits.double(), batch["labels"])


def pairs(number, rows=4, padded=True):
    random = torch.Generator().manual_seed(number)
    tokens = torch.randint(1, 60, (rows, 8), generator=random)
    if padded:
        tokens[0, 5:] = 0
    return {
        "tokens": tokens,
        "segments": (tokens > 30).long(),
        "labels": torch.randint(0, 3, (rows,), generator=random),
        "padded": padded,
    }


def decoder():
    return CausalLanguageModel(Decoder(60, 32, 1, 2, 48), 60)


def predict(model, batch):
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["tokens"].flatten())


def make(compile, model=classifier, loss_fn=classify, dtype=torch.float64, rank=4, **settings):
    torch.manual_seed(0)
    made = model()
    if rank:
        config = comera.TTConfig(rank=rank, exclude_modules=["output", "lm_head"])
        comera.tensorize_(made, config)
    made.to(dtype)
    optimizer = torch.optim.AdamW(comera.param_groups(made, 1e-2, gate_lr=0.2))
    ranks = comera.TwoStage(made, 0.5, 3, 3) if rank else None
    settings = {"clip_norm": 1.0, **settings}
    return comera.TrainStep(made, loss_fn, optimizer, ranks, compile=compile, **settings)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def quick(monkeypatch):
    """Compiled without making code."""
    quick = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(step_module.torch, "compile", quick)


def assert_equal_steps(steps, batches, tolerance=1e-9):
    for batch in batches:
        got, want = (step(batch) for step in steps)
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    compiled, eager = (step.model.state_dict() for step in steps)
    torch.testing.assert_close(compiled, eager, rtol=tolerance, atol=tolerance)


def assert_graphs(count):
    """So many, and no break in any."""
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == count


def test_all_the_way_to_code():
    """Both stages of rank learning: one graph, no break in it."""
    steps = [make(True), make(False)]
    assert_equal_steps(steps, [pairs(k) for k in range(6)])
    assert_graphs(1)


def test_a_whole_model_under_torchs_own_compiler(recwarn):
    """In any loop, and with CUDA graphs of torch's, where there is a card."""
    torch.manual_seed(0)
    model = comera.tensorize_(classifier(), comera.TTConfig(rank=4, exclude_modules=["output"]))
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    batch = pairs(0, padded=False)
    found = []
    for called in (compiled, model):
        loss = F.cross_entropy(called(batch["tokens"], batch["segments"]), batch["labels"])
        grads = torch.autograd.grad(loss, list(model.parameters()))
        found.append([loss, *grads])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    assert not [each for each in recwarn if "comera" in str(each.filename) + str(each.message)]


class _Enough(Exception):
    pass


def fused_kernels(layers, monkeypatch):
    """Names of what the compiler makes of a forward pass as on a card, in mixed precision."""
    code = []

    def keep(text):
        code.append(text)
        raise _Enough  # before a C++ compiler sees it

    made = "torch._inductor.graph.GraphLowering.save_output_code"
    monkeypatch.setattr(made, staticmethod(keep))
    step = test_launches.make_step(layers, compile=True, precision="bf16")
    failed = pytest.raises(torch._dynamo.exc.BackendCompilerFailed)
    with attention_as_on_a_card(), static_shapes(), failed:
        step(test_launches.batch())
    return re.findall(r"^ +cpp_fused_(\w+)\(", code[0].partition("def call(")[2], re.MULTILINE)


def test_residuals_dropout_norms_and_casts_are_one_kernel(monkeypatch):
    one = fused_kernels(1, monkeypatch)
    torch._dynamo.reset()
    two = fused_kernels(2, monkeypatch)
    norms = [name for name in two if "native_layer_norm" in name]
    assert len(norms) == 2 * 2 + 1  # the first one behind the embeddings
    assert all("native_dropout" in name and "to_copy" in name for name in norms)
    # Three others are parts of an attention on a CPU, of which a card has one kernel.
    assert len(two) - len(one) == 2 + 3


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "settings",
    [
        {"model": functools.partial(classifier, "pre", layers=2)},
        {"rank": 12},
        {"rank": None},
        {"accumulate": 2},
        {"model": decoder, "loss_fn": predict},
    ],
    ids=["two layers, pre-norm", "heads of their own", "dense", "accumulate", "decoder"],
)
def test_models_and_settings(settings):
    assert_equal_steps([make(True, **settings), make(False, **settings)], map(pairs, range(4)))
    assert_graphs(1)


@pytest.mark.usefixtures("quick")
def test_mixed_precision():
    steps = [make(c, dtype=torch.float32, precision="bf16") for c in (True, False)]
    assert_equal_steps(steps, [pairs(0)], 1e-2)
    for k in range(1, 4):
        got, want = (step(pairs(k)) for step in steps)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert_graphs(1)


@pytest.mark.usefixtures("quick")
def test_what_changes_is_compiled_anew():
    """Batches without padding, shorter ones, and cut ranks."""
    steps = [make(True), make(False)]
    batches = [pairs(0), pairs(1, padded=False), pairs(2, rows=3), pairs(3)]
    assert_equal_steps(steps, batches)
    for step in steps:
        step.ranks.finish_(step.optimizer)
    assert_equal_steps(steps, [pairs(4), pairs(5, rows=2)])
    assert_graphs(4)  # of any number of rows from the third on


def test_compiling_products_of_float32_on_a_card_does_not_fail_tests(monkeypatch):
    """torch advises tf32 there, once a process."""
    from torch._inductor import compile_fx  # with it come seconds of other imports

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    compile_fx._warn_tf32_disabled.__wrapped__()


def torchs_encoder():
    layer = nn.TransformerEncoderLayer(32, 2, 48, batch_first=True, activation="gelu")
    return nn.Sequential(nn.Embedding(60, 32), nn.TransformerEncoder(layer, 1, None, False))


_TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 60}


def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**_TINY, num_attention_heads=2, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config)


def bert():
    """Its feed-forward part is one operation in eager mode."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(**_TINY, num_attention_heads=2)
    return transformers.BertForSequenceClassification(config)


@pytest.mark.parametrize("linear_format", ["tt", "btt"])
@pytest.mark.parametrize("make", [classifier, decoder, torchs_encoder, llama, bert])
def test_batches_of_other_sizes_compile_a_converted_model_once_more(make, linear_format):
    """Linear layers, blocks, tables and feed-forward parts: no graph has a break."""
    rank = 4 if linear_format == "tt" else 1
    config = comera.TTConfig(rank=rank, linear_format=linear_format, init="orthogonal", min_size=0)
    counter = CompileCounter()
    model = comera.tensorize_(make(), config)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for rows in (4, 3, 5, 2):
        out = compiled(torch.randint(1, 60, (rows, 8)))
        (out if isinstance(out, torch.Tensor) else out.logits).sum().backward()
    assert counter.frame_count <= 2
