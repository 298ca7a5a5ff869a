import copy
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
import torch
from torch import nn

import comera
from comera.checkpoint.archive import Archive
from comera.checkpoint.chain import CheckpointChain
from comera.nn.module import tensor_trains
from tests.processes import in_a_process

from ..states import assert_equal

VOCABULARY = 400


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 32), nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, VOCABULARY)
    )


def train(model, optimizer, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens = torch.randint(0, VOCABULARY, (64,), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def chain_of(folder, count, **settings):
    """A model trained for ``count`` checkpoints, each saved; what was saved, and what is read."""
    model = make_model()
    optimizer = adamw(model)
    saved = []
    with CheckpointChain(folder, **settings) as chain:
        for k in range(1, count + 1):
            train(model, optimizer, 5, seed=k)
            chain.save(5 * k, model, optimizer, {"k": k})
            saved.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
    return model, optimizer, saved


def test_a_bare_state_of_other_parameters_has_no_names(tmp_path):
    """Their number, or their shapes, are not those of the weights."""
    model = make_model()
    params = list(model.parameters())
    for number, some in enumerate((params[:2], params[::-1])):
        optimizer = torch.optim.AdamW(some, lr=1e-3)
        train(model, optimizer, 3)
        with CheckpointChain(tmp_path / str(number)) as chain:
            chain.save(3, model.state_dict(), optimizer.state_dict())
            saved = chain.load()
        assert not saved.parameters
        optimizer.load_state_dict(saved.optimizer)


def distance(got, want):
    change = sum((a - want[n]).square().sum() for n, a in got.items())
    return float(change / sum(b.square().sum() for b in want.values())) ** 0.5


OPTIMIZERS = {
    "adamw": adamw,
    "amsgrad": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, amsgrad=True),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-2),
    "came": lambda m: comera.CAME(m.parameters(), lr=1e-3),
    "came 8 bit": lambda m: comera.CAME(m.parameters(), lr=1e-3, state_dtype="8bit"),
    "muon": lambda m: comera.MuonAdamW(comera.param_groups(m, lr=1e-3)),
    "galore": lambda m: comera.GaLoreAdamW(comera.galore_param_groups(m, lr=1e-3, rank=8)),
}


def interrupted(folder, kind, saves, **settings):
    """A trained model and its optimizer, and others that are read from the chain of its run."""
    model = make_model()
    optimizer = OPTIMIZERS[kind](model)
    with CheckpointChain(folder, **settings) as chain:
        for k in range(1, saves + 1):
            train(model, optimizer, 3, seed=k)
            chain.save(k, model, optimizer, {"rng": torch.get_rng_state(), "position": (k, 0.5)})
        saved = chain.load("latest")
    assert saved.step == saves
    assert_equal(saved.extra, {"rng": torch.get_rng_state(), "position": (saves, 0.5)})
    other = make_model()
    other.load_state_dict(saved.model)
    again = OPTIMIZERS[kind](other)
    again.load_state_dict(saved.optimizer)
    return (model, optimizer), (other, again)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("key_every", [1, 3])
def test_lossless_training_goes_on_bit_by_bit(tmp_path, kind, key_every):
    pairs = interrupted(tmp_path, kind, 5, mode="lossless", key_every=key_every)
    for model, optimizer in pairs:
        train(model, optimizer, 4, seed=99)
    assert_equal(*(dict(model.state_dict()) for model, _ in pairs))


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_lossy_training_goes_on(tmp_path, kind):
    pairs = (model, _), (other, _) = interrupted(tmp_path, kind, 3)
    assert distance(other.state_dict(), model.state_dict()) < 0.05
    for each, optimizer in pairs:
        train(each, optimizer, 3, seed=99)
    assert distance(other.state_dict(), model.state_dict()) < 0.1


@pytest.mark.slow
def test_errors_do_not_add_up_over_ten_links(tmp_path):
    """And no moment explodes: beside key frames of the same states."""
    chain_of(tmp_path / "chain", 10, key_every=10)
    _, _, saved = chain_of(tmp_path / "keys", 10, key_every=1)
    chain, keys = (CheckpointChain(tmp_path / name) for name in ("chain", "keys"))
    errors = []
    for step, (weights, states) in zip(chain.steps(), saved, strict=True):
        linked, key = chain.load(step), keys.load(step)
        errors.append(distance(linked.model, weights))
        longest = {}
        for name, state in (("true", states), ("linked", linked.optimizer), ("key", key.optimizer)):
            entries = state["state"].values()
            longest[name] = max(
                float((e["exp_avg"].abs() / (e["exp_avg_sq"].sqrt() + 1e-8)).max()) for e in entries
            )
        assert longest["linked"] < 2 * longest["true"]
        assert longest["key"] < 2 * longest["true"]
    assert max(errors) < 1.1 * errors[0]  # that of the key frame


def test_a_chain_is_much_smaller_than_what_it_holds(tmp_path):
    model, _, _ = chain_of(tmp_path / "lossy", 4)
    chain_of(tmp_path / "lossless", 4, mode="lossless")
    raw = sum(t.nbytes for t in model.state_dict().values()) * 3

    def size(name):
        return sum(f.stat().st_size for f in (tmp_path / name / "step-000000020").iterdir())

    assert size("lossy") < raw / 15  # a small model: its vectors and names weigh a lot
    assert size("lossless") < 0.95 * raw


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, "meta"])
def test_other_defaults_of_torch_change_nothing(tmp_path, default):
    torch.manual_seed(0)
    model = nn.ParameterList([torch.randn(800, 800), torch.randn(40, 30)])
    states, optimizer = [], torch.optim.AdamW(model, lr=1e-3)
    for _ in range(2):
        for param in model:
            param.grad = torch.randn_like(param)
        optimizer.step()
        states.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))

    def written(folder):
        with CheckpointChain(folder, background=False) as chain:
            for step, state in enumerate(states):
                chain.save(step, *state)
            return chain.load()

    here, dtype = written(tmp_path / "here"), torch.get_default_dtype()
    try:
        if default == "meta":
            torch.set_default_device(default)
        else:
            torch.set_default_dtype(default)
        elsewhere = written(tmp_path / "elsewhere")
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(dtype)
    assert_equal((elsewhere.model, elsewhere.optimizer), (here.model, here.optimizer))
    for file in (tmp_path / "here").glob("*/*.safetensors"):
        assert (
            file.read_bytes()
            == (tmp_path / "elsewhere" / file.parent.name / file.name).read_bytes()
        )


def test_a_changed_shape_starts_anew_for_that_tensor(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, 64), nn.Linear(64, 256), nn.Linear(256, VOCABULARY)
    )
    comera.tensorize_(model, comera.TTConfig(rank=12, target_modules="all"))
    optimizer = adamw(model)
    with CheckpointChain(tmp_path) as chain:
        train(model, optimizer, 3)
        chain.save(1, model, optimizer)
        with torch.no_grad():
            for layer in tensor_trains(model).values():
                layer.gates[1][::2] = 0
        assert comera.truncate_(model, optimizer)
        train(model, optimizer, 3)
        chain.save(2, model, optimizer)
        train(model, optimizer, 3)
        chain.save(3, model, optimizer)
        saved = chain.load(3)
    assert saved.model.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert saved.model[name].shape == tensor.shape
        assert torch.allclose(saved.model[name], tensor, atol=0.02), name
    model.load_state_dict(saved.model)
    optimizer.load_state_dict(saved.optimizer)
    train(model, optimizer, 1)


def test_a_weight_that_is_also_given_as_extra_stays_exact_there(tmp_path):
    weight = torch.randn(64, 64)
    with CheckpointChain(tmp_path, background=False) as chain:
        chain.save(1, {"weight": weight}, extra={"best": weight})
    saved = CheckpointChain(tmp_path).load()
    assert torch.equal(saved.extra["best"], weight)
    assert not torch.equal(saved.model["weight"], weight)


def test_tied_weights_are_kept_once_and_come_back_tied(tmp_path):
    model = make_model()
    model.add_module("again", model[3])
    with CheckpointChain(tmp_path) as chain:
        chain.save(1, model)
        saved = chain.load()
    assert saved.model["again.weight"] is saved.model["3.weight"]
    assert saved.optimizer is None


def test_weights_that_are_not_finite_come_back_as_they_are(tmp_path):
    model = make_model()
    optimizer = adamw(model)
    train(model, optimizer, 1)
    with torch.no_grad():
        model[1].weight[0, 0] = torch.nan
        optimizer.state[model[3].weight]["exp_avg"][0, 0] = torch.inf
    with CheckpointChain(tmp_path) as chain:
        for step in (1, 2):
            chain.save(step, model, optimizer)
        saved = chain.load()
        with torch.no_grad():
            model[1].weight[0, 0] = 0  # mended
        chain.save(3, model, optimizer)
        mended = chain.load()
    assert int(saved.model["1.weight"].isnan().sum()) == 1
    assert torch.allclose(mended.model["1.weight"], model[1].weight, atol=0.02)
    assert any(torch.isinf(e["exp_avg"]).any() for e in saved.optimizer["state"].values())


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({"keep_last": 2}, [7, 8, 9]),  # 8 builds on 7
        ({"keep_last": 1, "keep_every": 2}, [1, 2, 4, 5, 6, 7, 8, 9]),
    ],
    ids=str,
)
def test_old_checkpoints_go_when_nothing_builds_on_them(tmp_path, settings, left):
    with CheckpointChain(tmp_path, key_every=3, **settings) as chain:
        for step in range(1, 10):
            chain.save(step, {"w": step * torch.ones(20, 20)})
    assert chain.steps() == left
    assert set(chain.verify().values()) == {None}


def test_a_chain_goes_on_where_another_process_left_it(tmp_path):
    model, optimizer, _ = chain_of(tmp_path, 3, key_every=10)
    with CheckpointChain(tmp_path, key_every=10) as chain:
        train(model, optimizer, 5)
        chain.save(20, model, optimizer)
        chain.wait()
        links = Archive(tmp_path).links(20)
    assert [link.step for link in links] == [5, 10, 15, 20]
    assert distance(chain.load().model, model.state_dict()) < 0.03


def test_steps_are_whole_numbers_from_zero(tmp_path):
    model = make_model()
    with CheckpointChain(tmp_path) as chain:
        for wrong in (-1, 1.5, "3"):
            with pytest.raises(ValueError, match=f"step={wrong!r} must be"):
                chain.save(wrong, model)
        chain.save(torch.tensor(3), model)
        chain.save(4, model)
        assert chain.load(torch.tensor(3)).step == 3
        with pytest.raises(ValueError, match=r"step=50\.0 must be"):
            chain.load(50.0)
    assert chain.steps() == [3, 4]


def test_what_is_no_model_is_named(tmp_path):
    model = make_model()
    for wrong in (adamw(model), None):
        with (
            CheckpointChain(tmp_path) as chain,
            pytest.raises(TypeError, match=f"the model is a {type(wrong).__name__}"),
        ):
            chain.save(1, wrong)


def test_steps_only_go_forwards_unless_rewound(tmp_path):
    model, optimizer, _ = chain_of(tmp_path, 3)
    chain = CheckpointChain(tmp_path)
    with pytest.raises(ValueError, match=r"step 15, so that of step 7 cannot .*rewind\(6\)"):
        chain.save(7, model, optimizer)
    for step in ("latest", True):
        with pytest.raises(ValueError, match=f"step={step!r} must be a whole number"):
            chain.rewind(step)
    chain.rewind(5)
    assert chain.steps() == [5]
    chain.save(7, model, optimizer)
    chain.close()
    assert chain.steps() == [5, 7]
    assert chain.verify() == {5: None, 7: None}


def test_a_missing_step_is_named_with_those_there_are(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        CheckpointChain(tmp_path).load()
    chain_of(tmp_path, 2)
    with pytest.raises(FileNotFoundError, match=r"of step 7 in .*; there are 5, 10"):
        CheckpointChain(tmp_path).load(7)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"mode": "best"}, "mode is 'best'"),
        ({"bits": 9}, "bits is 9; it can be 2 to 8"),
        ({"key_bits": 1}, "key_bits is 1"),
        ({"bits": 4.5}, r"bits=4\.5 must be a whole number"),
        ({"rate": -1}, "rate is -1"),
        ({"beta": float("nan")}, "beta is nan"),
        ({"key_every": 0}, "key_every=0 must be at least 1"),
        ({"policy": {"a(": "exact"}}, r"policy 'a\(' is no regular expression"),
        ({"policy": {"a": "drop"}}, "policy 'a': 'drop' is not one of"),
    ],
)
def test_settings_that_make_no_sense_are_named(tmp_path, settings, told):
    with pytest.raises(ValueError, match=told):
        CheckpointChain(tmp_path, **settings)


def test_a_bare_state_has_exact_buffers_and_lossy_weights(tmp_path):
    """Parameters are the entries that the optimizer names, as in the state of several processes."""
    model = nn.Sequential(nn.Linear(32, 32))
    model.register_buffer("places", torch.randn(32, 32))
    optimizer = adamw(model)
    model[0](torch.randn(4, 32)).sum().backward()
    optimizer.step()
    names = {k: name for k, (name, _) in enumerate(model.named_parameters())}
    with CheckpointChain(tmp_path) as chain:
        chain.save(1, model.state_dict(), optimizer.state_dict(), parameters=names)
    saved = CheckpointChain(tmp_path).load().model
    assert torch.equal(saved["places"], model.places)
    assert not torch.equal(saved["0.weight"], model[0].weight)


def test_a_policy_that_treats_nothing_is_named_once(tmp_path, caplog):
    with CheckpointChain(tmp_path, policy={r"0\..*": "exact", r"model\.0.*": "exact"}) as chain:
        for step in (1, 2):
            chain.save(step, make_model())
    assert caplog.text.count(r"policy 0\..* treats no tensor of step 1") == 1


def test_a_reader_meets_a_writer_that_removes_what_it_was_to_read(tmp_path, monkeypatch):
    model, optimizer, _ = chain_of(tmp_path, 1, keep_last=1, key_every=1)
    reader = CheckpointChain(tmp_path)
    links = reader._archive.links

    def late(step):
        if step == 5:
            with CheckpointChain(tmp_path, keep_last=1, key_every=1) as writer:
                writer.save(10, model, optimizer)
        return links(step)

    monkeypatch.setattr(reader._archive, "links", late)
    assert reader.load().step == 10


def test_a_checkpoint_that_cannot_be_read_now_is_not_set_aside(tmp_path, monkeypatch):
    model, optimizer, _ = chain_of(tmp_path, 2)

    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.read_bytes", refused)
        chain = CheckpointChain(tmp_path)
        with pytest.raises(PermissionError, match=r"tensors\.safetensors"):
            chain.save(15, model, optimizer)
        chain.close()
    assert CheckpointChain(tmp_path).load().step == 10


def test_an_error_in_the_background_is_raised_by_the_next_call(tmp_path, monkeypatch):
    model, optimizer, _ = chain_of(tmp_path, 2)
    chain = CheckpointChain(tmp_path)

    def full(path, raw):
        path.write_bytes(raw[: len(raw) // 2])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("comera.checkpoint.archive._write_through", full)
        chain.save(15, model, optimizer)
        with pytest.raises(OSError, match="No space left"):
            chain.wait()
    assert chain.verify() == {5: None, 10: None}
    chain.save(20, model, optimizer)  # there is space again
    chain.close()
    assert chain.steps() == [5, 10, 20]
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".partial")] == []


def test_saving_returns_once_the_state_is_copied(tmp_path, monkeypatch):
    release = threading.Event()
    original = CheckpointChain._write

    def slow(self, *args):
        assert release.wait(30)
        original(self, *args)

    monkeypatch.setattr(CheckpointChain, "_write", slow)
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    with CheckpointChain(tmp_path, mode="lossless") as chain:
        chain.save(1, model)  # returns
        assert chain.steps() == []
        torch.nn.init.zeros_(model[1].weight)  # training goes on
        release.set()
    assert_equal(chain.load().model, dict(before))


@pytest.mark.parametrize("fused", [False, True])
def test_a_model_that_is_trained_while_another_is_saved(tmp_path, fused):
    model, other = make_model(), nn.Linear(4, 4)
    other.weight.grad = torch.ones_like(other.weight)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, fused=fused)

    class Slow(dict):
        def items(self):
            optimizer.step()
            return super().items()

    with CheckpointChain(tmp_path) as chain:
        chain.save(1, model, extra=Slow(a=1))
        chain.wait()
        assert chain.steps() == [1]


@pytest.mark.parametrize("fused", [False, True])
def test_a_model_that_is_trained_while_it_is_copied(tmp_path, fused):
    model = make_model()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer = torch.optim.SGD([model[0].weight], lr=0.1, fused=fused)

    class Slow(dict):
        def items(self):
            optimizer.step()
            return super().items()

    with CheckpointChain(tmp_path) as chain:
        with pytest.raises(RuntimeError, match=r"being saved: 0\.weight"):
            chain.save(1, model, extra=Slow(a=1))
        assert chain.steps() == []


@pytest.mark.parametrize("background", [False, True])
def test_threads_save_to_one_chain_and_any_of_them_closes_it(tmp_path, background):
    chain, numbers = CheckpointChain(tmp_path, mode="lossless", background=background), count(2)
    chain.save(1, {"w": torch.full((20, 20), 1.0)})

    def save():
        for _ in range(6):
            step = next(numbers)
            try:
                chain.save(step, {"w": torch.full((20, 20), float(step))})
            except ValueError as problem:  # another has saved a later step meanwhile
                if f"that of step {step} cannot be added" not in str(problem):
                    raise
        chain.wait()

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(save) for _ in range(4)]:
            done.result()
        pool.submit(chain.close).result()
    with CheckpointChain(tmp_path) as other:
        other.lock()
        assert len(other.steps()) > 1
        assert set(other.verify().values()) == {None}
        assert all((other.load(step).model["w"] == step).all() for step in other.steps())


def _try_to_save(folder):
    try:
        CheckpointChain(folder).save(99, make_model())
    except RuntimeError as problem:
        return str(problem)


@pytest.mark.slow
def test_a_second_writer_is_refused(tmp_path):
    with CheckpointChain(tmp_path) as chain:
        chain.save(1, make_model())
        for said in (_try_to_save(tmp_path), in_a_process(_try_to_save, tmp_path)):
            assert "being written to by another process" in said
        assert CheckpointChain(tmp_path).load().step == 1  # reading needs no lock
    with CheckpointChain(tmp_path) as other:
        other.save(2, make_model())


def test_a_state_without_its_model_is_matched_in_order(tmp_path):
    """As when a series of torch files is compressed."""
    model = make_model()
    optimizer = adamw(model)
    with CheckpointChain(tmp_path / "a") as a, CheckpointChain(tmp_path / "b") as b:
        for step in (1, 2):
            train(model, optimizer, 2, seed=step)
            a.save(step, model, optimizer)
            b.save(step, model.state_dict(), optimizer.state_dict())
    assert_equal(vars(a.load()), vars(b.load()))


def test_nothing_is_said_when_all_is_well(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        chain_of(tmp_path, 3)
        CheckpointChain(tmp_path).load()
    assert caplog.text == ""


def test_cores_of_tensor_trains_are_kept_finer(tmp_path):
    """Their errors add up in the weight that they make."""
    torch.manual_seed(0)
    first = torch.randn(96, 96)
    last = first + 0.1 * torch.randn(96, 96)
    names = ("layer.weight", "layer.cores.1")
    with CheckpointChain(tmp_path, background=False) as chain:
        for step, weight in enumerate((first, last)):
            chain.save(step, {name: weight.clone() for name in names})
        for step, weight in enumerate((first, last)):
            read = chain.load(step).model
            dense, core = (float((read[name] - weight).norm()) for name in names)
            assert core < 0.5 * dense


UNREADABLE = {
    "packed": lambda: torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "halves": lambda: torch.zeros(4, dtype=torch.complex32),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.empty(3, device="meta"),
    "dtype": lambda: torch.complex32,
}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", UNREADABLE)
def test_what_could_not_be_read_again_is_refused(name, tmp_path):
    """Unless it is skipped; checkpoints before and after stay readable."""
    model, extra = make_model(), {name: UNREADABLE[name]()}
    with CheckpointChain(tmp_path / "strict") as chain:
        chain.save(1, model)
        with pytest.raises(TypeError, match=rf"^extra\.{name} is (of|on) .*(checkpoints|saved)"):
            chain.save(2, model, extra=extra)
        chain.save(3, model)
        chain.wait()
        assert chain.steps() == [1, 3]
        chain.load(3)
    if name != "dtype":
        with CheckpointChain(tmp_path / "skipping", policy={rf"extra\.{name}": "skip"}) as chain:
            chain.save(1, model, extra=extra)
            assert chain.load(1).extra == {}


@pytest.mark.parametrize("keys", [("exp_avg", "momentum_buffer"), ("momentum_buffer", "exp_avg")])
def test_two_first_moments_beside_one_second(keys, tmp_path):
    model = nn.Linear(32, 32)
    state = {0: {**{key: torch.randn(32, 32) for key in keys}, "exp_avg_sq": torch.rand(32, 32)}}
    states = {"state": state, "param_groups": [{"params": [0, 1]}]}
    with CheckpointChain(tmp_path) as chain:
        for step in (1, 2):
            nn.init.normal_(model.weight)
            chain.save(step, model, states)
            read = chain.load(step).optimizer["state"][0]
            assert read.keys() == state[0].keys()
            assert all(tensor.isfinite().all() for tensor in read.values())


def test_a_conjugate_is_not_taken_for_its_original(tmp_path):
    x = torch.randn(4, 4, dtype=torch.complex64)
    extra = {"x": x, "conjugate": x.conj(), "part": x.imag, "negative": x.conj().imag}
    with CheckpointChain(tmp_path) as chain:
        chain.save(1, nn.Linear(2, 2), extra=extra)
        read = chain.load(1).extra
    assert all(torch.equal(read[name], tensor) for name, tensor in extra.items())


def test_a_checkpoint_after_canonicalize_computes_the_same(tmp_path):
    """Cores change by their own size there, and errors of all of them multiply."""

    def make():
        return nn.Sequential(
            comera.TTLinear(64, 128, rank=24), nn.GELU(), comera.TTLinear(128, 64, rank=24)
        )

    model, read, x = make(), make(), torch.randn(256, 64)
    with CheckpointChain(tmp_path, background=False) as chain:
        chain.save(0, model)
        comera.canonicalize_(model)
        chain.save(1, model)
        read.load_state_dict(chain.load().model)
    with torch.no_grad():
        assert float((read(x) - model(x)).norm() / model(x).norm()) < 0.08
