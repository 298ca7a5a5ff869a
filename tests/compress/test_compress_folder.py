import copy
import json
import os
import subprocess
import sys
import zlib
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import comera
from comera.compress import compress_folder as module
from comera.compress.layer_moments import gather_moments
from comera.compress.whitened import whitened_svd
from comera.nn.linear import TTLinear

ROOT = Path(comera.__file__).parents[1]
WIDTH, DEPTH = 16, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x, mask, scale=1.0):
        x = x + scale * self.down(F.gelu(self.up(self.norm(x)))) * mask
        return x, None


class Model(nn.Module):
    def __init__(self, in_a_row=True):
        super().__init__()
        self.in_a_row = in_a_row
        self.words = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("place", torch.arange(WIDTH) / (WIDTH - 1), persistent=False)
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, tokens):
        x = self.words(tokens) + self.place + self.shift
        mask = (tokens > 3)[..., None].to(x.dtype)
        for layer in self.layers:
            x = layer(x if self.in_a_row else x + 1, mask, scale=0.5)[0]
        return self.head(x)


def shard(model, folder, count=2):
    """Write a model as Hugging Face does, tied names once."""
    folder.mkdir(parents=True)
    state = {k: v.contiguous() for k, v in model.state_dict().items() if k != "head.weight"}
    names = sorted(state)
    file_of = {}
    for k in range(count):
        file = f"model-{k + 1:05d}-of-{count:05d}.safetensors"
        save_file({name: state[name] for name in names[k::count]}, folder / file)
        file_of |= dict.fromkeys(names[k::count], file)
    index = {"metadata": {}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    model = Model()
    model.shift.fill_(0.3)
    with torch.no_grad():
        for layer in model.layers:
            layer.norm.weight.mul_(torch.logspace(0, -2, WIDTH))
    return model, [torch.randint(50, (4, 12)) for _ in range(3)]


def in_memory(model, batches, budget, seed=0):
    """The same by hooks in the whole model, and a weight of each rank."""
    model = copy.deepcopy(model).eval()
    calls = [[] for _ in model.layers]
    handles = [
        layer.register_forward_pre_hook(
            lambda _, args, kwargs, k=k: calls[k].append((args, kwargs)), with_kwargs=True
        )
        for k, layer in enumerate(model.layers)
    ]
    with torch.no_grad():
        for batch in batches:
            model(batch)
    for handle in handles:
        handle.remove()
    for k, layer in enumerate(model.layers):

        def projected(block, row, k=k):
            number, (args, kwargs) = row
            output = block(*args, **kwargs)[0]
            generator = torch.Generator().manual_seed(zlib.crc32(repr((seed, k, number)).encode()))
            return (output * torch.randn(output.shape, generator=generator)).sum() / 48

        linears = {"up": layer.up, "down": layer.down}
        moments = gather_moments(layer, linears, list(enumerate(calls[k])), projected)
        losses = {name: whitened_svd(linears[name].weight, moments[name]) for name in linears}
        size = sum(param.numel() for param in layer.parameters())
        # What is cheapest to leave out, direction by direction: all are of one size here.
        each = 4 * WIDTH + 1
        room = int(budget * size) - (size - 2 * 3 * WIDTH * WIDTH)
        order = sorted(
            ((float(loss), name) for name in linears for loss in losses[name].losses_K),
            reverse=True,
        )
        kept = [name for _, name in order[: room // each]]
        with torch.no_grad():
            for name in linears:
                left, right = losses[name].factors(kept.count(name))
                linears[name].weight.copy_(left @ right)
    return model


@pytest.mark.parametrize("how", ["a function", "on meta"])
def test_it_is_what_the_whole_model_in_memory_gives(trained, how, tmp_path):
    model, batches = trained
    source = shard(model, tmp_path / "large")
    if how == "on meta":
        with torch.device("meta"):
            empty = Model()
        empty.place = model.place  # of which no file has the numbers
    done = comera.compress_folder(
        source, tmp_path / "small", Model if how == "a function" else empty, batches, budget=0.6
    )
    small = comera.load_model(tmp_path / "small", Model)
    assert small.head.weight is small.words.weight
    assert small.shift[0] == pytest.approx(0.3)
    assert done.params == sum(param.numel() for param in small.parameters())
    assert done.dense_params == sum(param.numel() for param in model.parameters())
    assert [layer.name for layer in done.layers][:2] == ["layers.0.up", "layers.0.down"]
    for layer in done.layers:
        assert isinstance(small.get_submodule(layer.name), TTLinear)
        assert small.get_submodule(layer.name).ranks == (layer.rank,)
    for block in small.layers:
        assert sum(param.numel() for param in block.parameters()) <= 0.6 * 1648
    wanted = in_memory(model, batches, 0.6)
    with torch.no_grad():
        torch.testing.assert_close(small(batches[0]), wanted(batches[0]), rtol=1e-4, atol=1e-4)
    assert not (tmp_path / "small" / "unfinished").exists()


class WritingBlock(Block):
    def forward(self, x, mask, scale=1.0):
        x += scale * self.down(F.gelu(self.up(self.norm(x)))) * mask
        return x, None


def test_blocks_may_write_into_what_they_are_given(trained, tmp_path):
    model, batches = trained
    source = shard(model, tmp_path / "large")

    def writing():
        made = Model()
        made.layers = nn.ModuleList(WritingBlock() for _ in range(DEPTH))
        return made

    small = []
    for number, make in enumerate((Model, writing)):
        folder = tmp_path / f"small-{number}"
        comera.compress_folder(source, folder, make, batches, budget=0.6)
        small.append(comera.load_model(folder, make).state_dict())
    assert all(torch.equal(tensor, small[1][name]) for name, tensor in small[0].items())


def test_only_one_block_has_its_numbers_at_a_time(trained, tmp_path):
    model, batches = trained
    held = []

    class Watched(Model):
        def __init__(self):
            super().__init__()
            for part in self.modules():
                if isinstance(part, nn.Linear | nn.Embedding):
                    part.register_forward_hook(lambda *_: held.append(size_in_memory(self)))

    def size_in_memory(model):
        return sum(param.numel() for param in model.parameters() if not param.is_meta)

    comera.compress_folder(
        shard(model, tmp_path / "large"), tmp_path / "small", Watched, batches, budget=0.6
    )
    block = sum(param.numel() for param in model.layers[0].parameters())
    assert len(held) > 30
    assert max(held) <= block + model.words.weight.numel()
    assert min(held[10:]) > 0
    assert sorted(set(held))[-2] <= block  # the words are there for the first block alone


def test_it_goes_on_where_it_was(trained, tmp_path, monkeypatch):
    model, batches = trained
    source = shard(model, tmp_path / "large")
    whole = comera.compress_folder(source, tmp_path / "whole", Model, batches, budget=0.6)
    real, done = module._compress_block_, []

    def breaks(block, k, *rest):
        if k == 2 and not done.count(2):
            done.append(k)
            raise KeyboardInterrupt
        done.append(k)
        real(block, k, *rest)

    monkeypatch.setattr(module, "_compress_block_", breaks)
    made = []
    with pytest.raises(KeyboardInterrupt):
        comera.compress_folder(
            source, tmp_path / "small", lambda: made.append(Model()) or made[0], batches, budget=0.6
        )
    assert made[0].training
    assert all(block.training for block in made[0].layers)
    with pytest.raises(ValueError, match="is of a call with another budget"):
        comera.compress_folder(source, tmp_path / "small", Model, batches, budget=0.7)
    (states,) = tmp_path.rglob("states.safetensors")
    sound = states.read_bytes()
    for damaged in (sound[:-9], sound.replace(b'"{\\"about', b'"?\\"about')):
        assert damaged != sound
        states.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"states\.safetensors is damaged: remove"):
            comera.compress_folder(source, tmp_path / "small", Model, batches, budget=0.6)
    states.write_bytes(sound)
    for file in (states, states.with_name("block-0000.safetensors")):
        sound = file.read_bytes()
        header = 8 + int.from_bytes(sound[:8], "little")
        for place in (header + 5, len(sound) - 3, sound.index(b"checksums") + 16):
            damaged = bytearray(sound)
            damaged[place] ^= 1
            file.write_bytes(damaged)
            with pytest.raises(ValueError, match="is damaged: remove"):
                comera.compress_folder(source, tmp_path / "small", Model, batches, budget=0.6)
        file.write_bytes(sound)
    shards = {file: file.stat() for file in source.glob("*.safetensors")}
    for file in shards:
        file.write_bytes(file.read_bytes())  # of other numbers, as far as anyone knows
    with pytest.raises(ValueError, match="is of a call with another source"):
        comera.compress_folder(source, tmp_path / "small", Model, batches, budget=0.6)
    for file, was in shards.items():
        os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    again = comera.compress_folder(source, tmp_path / "small", Model, batches, budget=0.6)
    assert done == [0, 1, 2, 2]
    assert again.layers == whole.layers
    for file in ("model.safetensors", "comera.json"):
        assert (tmp_path / "small" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


class Again(Model):
    """Blocks are called twice, as ALBERT calls its one."""

    def forward(self, tokens):
        x, mask = self.words(tokens), (tokens > 3)[..., None].float()
        for layer in [*self.layers, *self.layers]:
            x = layer(x, mask)[0]
        return self.head(x)


def test_blocks_that_are_called_twice_are_refused(trained, tmp_path):
    model, batches = trained
    with pytest.raises(ValueError, match="blocks that a model calls several times"):
        comera.compress_folder(
            shard(model, tmp_path / "large"), tmp_path / "s", Again, batches, budget=0.6
        )


def test_files_that_do_not_fit_are_named(trained, tmp_path):
    model, batches = trained
    source = shard(model, tmp_path / "large")

    def call(**options):
        given = {"source": source, "model": Model, "budget": 0.6} | options
        comera.compress_folder(folder=tmp_path / "s", calibration=batches, **given)

    with pytest.raises(ValueError, match=r"budget=50 must be between .* kept; 50 % is budget=0\.5"):
        call(budget=50)
    with pytest.raises(FileNotFoundError, match=r"is no folder with model\.safetensors"):
        call(source=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="is the source: the result needs one of its own"):
        comera.compress_folder(source, source, Model, batches, budget=0.6)
    with pytest.raises(TypeError, match="model=3 must be a model on the meta device, or make one"):
        call(model=3)
    with pytest.raises(ValueError, match="have numbers already"):
        call(model=Model())
    with pytest.raises(ValueError, match=r"blocks='head' is no nn\.ModuleList"):
        call(blocks="head")
    with pytest.raises(ValueError, match=r"layers\.0 is itself a linear layer"):
        call(model=Bare, source=shard(Bare(), tmp_path / "bare"))
    with pytest.raises(ValueError, match="block 1 is not given what block 0 returns"):
        call(model=lambda: Model(in_a_row=False))
    with torch.device("meta"):
        empty = Model()
    with pytest.raises(ValueError, match="place: buffers without numbers"):
        call(model=empty)
    with pytest.raises(ValueError, match=r"no tensor for 0.weight, 0.bias; it has layers"):
        call(model=lambda: nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(ValueError, match=r"words.weight is \(50, 16\) in model-0000"):
        call(model=lambda: Other(40))
    (source / "model-00002-of-00002.safetensors").rename(source / "elsewhere")
    with pytest.raises(
        FileNotFoundError, match=r"names model-00002-of-00002.safetensors, which is"
    ):
        call()
    (source / "model-00002-of-00002.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match=r"model-00002-of-00002.safetensors is damaged"):
        call()


def named():
    parts = {name: nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16)) for name in "ab"}
    return nn.Sequential(OrderedDict(body=nn.Sequential(OrderedDict(parts))))


def test_blocks_may_have_names(tmp_path):
    torch.manual_seed(0)
    source = shard(named(), tmp_path / "large", count=1)
    done = comera.compress_folder(
        source, tmp_path / "small", named, [torch.randn(32, 16)], budget=0.5, blocks="body"
    )
    assert [layer.name for layer in done.layers] == ["body.a.0", "body.a.2", "body.b.0", "body.b.2"]
    small = comera.load_model(tmp_path / "small", named)
    assert done.params == sum(param.numel() for param in small.parameters())


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))


class Other(Model):
    def __init__(self, words):
        super().__init__()
        self.words = nn.Embedding(words, WIDTH)
        self.head.weight = self.words.weight


def test_models_of_transformers_are_loaded_by_their_own_loader(tmp_path):
    transformers = pytest.importorskip("transformers")
    import comera.integrations.transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    dense = transformers.LlamaForCausalLM(config)
    dense.save_pretrained(tmp_path / "large", max_shard_size="20KB")
    assert len(list((tmp_path / "large").glob("*.safetensors"))) > 1
    tokens = torch.randint(64, (2, 16))
    batches = [{"input_ids": tokens, "labels": tokens}]
    done = comera.compress_folder(
        tmp_path / "large", tmp_path / "small", lambda: transformers.LlamaForCausalLM(config),
        batches, budget=0.7,
    )  # fmt: skip
    small = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    ours = comera.load_model(tmp_path / "small", lambda: transformers.LlamaForCausalLM(config))
    assert sum(param.numel() for param in small.parameters()) == done.params
    with torch.no_grad():
        assert torch.equal(small(tokens).logits, ours.eval()(tokens).logits)


MEASURE = """
import resource, sys, torch
from torch import nn
import comera
sys.path.insert(0, {root!r})
from tests.compress.test_compress_folder import Wide
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
comera.compress_, comera.compress_folder, comera.TTLinear  # imported
nn.Linear(512, 512)(torch.randn(2, 512)).sum().backward()
torch.linalg.eigh(torch.eye(512).double())
before = peak()
few = r"layers\\.[0-3]\\.0"  # which take most of the memory, and of the time
comera.compress_folder(
    {source!r}, {folder!r}, Wide, [torch.randn(4, 512)], budget=0.5, target_modules=few
)
print(peak() - before)
"""


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(512, 512)) for _ in range(64))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.slow
def test_resident_memory_does_not_grow_with_the_model(tmp_path):
    with torch.device("meta"):
        large = sum(param.nbytes for param in Wide().parameters())
    (tmp_path / "large").mkdir()
    state = {name: torch.randn(tensor.shape) / 22 for name, tensor in empty_state().items()}
    save_file(state, tmp_path / "large" / "model.safetensors")
    code = MEASURE.format(
        root=str(ROOT), source=str(tmp_path / "large"), folder=str(tmp_path / "small")
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert int(done.stdout) < large / 2


def empty_state():
    with torch.device("meta"):
        return Wide().state_dict()
