import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from comera.compress.layer_moments import add_square_, gather_moments


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3, bias=False)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.second(self.drop(torch.tanh(self.first(x))))


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def batches(sizes=(4, 2, 6)):
    return [(torch.randn(n, 3, 5), torch.randint(0, 3, (n, 3))) for n in sizes]


def layers(net):
    return {"first": net.first, "second": net.second}


def test_moments_are_those_of_single_rows():
    net, data = Net(), batches()
    found = gather_moments(net, layers(net), data, loss_fn)
    net.eval()
    xs = torch.cat([x.flatten(0, 1) for x, _ in data])
    ys = torch.cat([y.flatten() for _, y in data])
    inputs = {"first": [], "second": []}
    grads = {"first": [], "second": []}
    for x, y in zip(xs, ys, strict=True):  # a row and its own loss at a time
        hidden = net.first(x)
        active = torch.tanh(hidden)
        logits = net.second(active)
        of_hidden, of_logits = torch.autograd.grad(F.cross_entropy(logits, y), [hidden, logits])
        for name, a, g in (("first", x, of_hidden), ("second", active.detach(), of_logits)):
            inputs[name].append(torch.outer(a, a))
            grads[name].append(torch.outer(g, g))
    for name, moments in found.items():
        assert moments.rows == len(xs) == 36
        torch.testing.assert_close(moments.inputs_II, torch.stack(inputs[name]).mean(0))
        torch.testing.assert_close(moments.grads_OO, torch.stack(grads[name]).mean(0))


def test_the_model_is_left_as_it_was():
    net = Net().train()
    net.second.eval()
    net.first.bias.requires_grad_(False)
    net.first.weight.grad = torch.ones_like(net.first.weight)
    gather_moments(net, layers(net), batches(), loss_fn)
    assert [net.training, net.first.training, net.second.training] == [True, True, False]
    assert [p.requires_grad for p in net.parameters()] == [True, False, True]
    assert net.first.weight.grad.eq(1).all()
    assert net.second.weight.grad is None
    assert not net.first._forward_hooks


def test_a_layer_that_is_called_twice_counts_twice():
    net = Net()
    net.first = nn.Linear(5, 5)
    net.second = nn.Linear(5, 3)
    net.forward = lambda x: net.second(net.first(net.first(x)))
    found = gather_moments(net, layers(net), batches(), loss_fn)
    assert (found["first"].rows, found["second"].rows) == (72, 36)


def test_layers_of_other_numbers_of_rows_compare():
    net, seen = Net(), {"first": [], "extra": [], "second": []}
    net.extra = nn.Linear(7, 7)

    def forward(x, extra=True):  # the second layer has a row for three rows of the first
        first = net.first(x)
        more = net.extra(first) if extra else first.new_zeros(())
        second = net.second(torch.tanh((first + more).sum(1)))
        return {"first": first, "extra": more, "second": second}

    def own_loss(model, batch):
        return F.cross_entropy(forward(batch[0], batch[2])["second"], batch[1])

    data = [(x, y[:, 0], len(x) < 6) for x, y in batches()]  # of all layers one may not be called
    found = gather_moments(net, layers(net) | {"extra": net.extra}, data, own_loss)
    for xs, ys, extra in data:
        for x, y in zip(xs[:, None], ys[:, None], strict=True):  # an example and its own loss
            made = forward(x, extra)
            loss = F.cross_entropy(made["second"], y)
            for name in seen if extra else ("first", "second"):
                (grad,) = torch.autograd.grad(loss, made[name], retain_graph=True)
                seen[name].append(grad.flatten(0, -2))
    for name, moments in found.items():
        grads = torch.cat(seen[name])
        torch.testing.assert_close(moments.grads_OO, grads.T @ grads / 12)


@pytest.mark.parametrize(
    "change",
    [torch.relu_, lambda h: h.add_(1), lambda h: h[..., 2:].mul_(3), lambda h: h[0].zero_()],
)
def test_an_output_that_is_changed_in_place_counts(change):
    data = batches()
    found = []
    for apart in (torch.clone, lambda hidden: hidden):
        net = Net()
        net.load_state_dict({key: torch.ones_like(p) for key, p in net.state_dict().items()})

        def forward(x, net=net, apart=apart):
            hidden = apart(net.first(x))
            change(hidden)
            return net.second(hidden) * torch.tensor([1.0, 2, 3])

        net.forward = forward
        found.append(gather_moments(net, layers(net), data, loss_fn)["first"])
    assert found[1].grad_rows == 36
    assert found[1].grads_OO.any()
    torch.testing.assert_close(found[1].grads_OO, found[0].grads_OO)


def test_an_output_that_a_hook_keeps_counts():
    net, kept = Net(), []
    net.first.register_forward_hook(lambda *call: kept.append(call[-1]))
    data = batches((4,))
    found = gather_moments(
        net, {"first": net.first}, data, lambda m, b: m(b[0]).sum() * 0 + kept[0].square().mean()
    )
    assert found["first"].grads_OO.any()


class Config:
    """Settings as those of transformers' models, which cannot be assigned."""

    use_cache = True
    __setattr__ = None


def test_caches_are_off_meanwhile():
    net = Net()
    net.first.config = Config()

    def asking(model, batch):
        assert not net.first.config.use_cache
        return loss_fn(model, batch)

    gather_moments(net, layers(net), batches(), asking)
    assert net.first.config.use_cache


def test_what_is_wrong_is_named():
    net = Net()
    with pytest.raises(ValueError, match="calibration has no batch"):
        gather_moments(net, layers(net), [], loss_fn)
    with pytest.raises(ValueError, match="loss_fn gave nan for batch 0"):
        gather_moments(net, layers(net), batches(), lambda m, b: loss_fn(m, b) * float("nan"))
    net.spare, seen = nn.Linear(2, 2), []
    many = (seen.append(batch) or batch for batch in [*batches()] * 3)
    with pytest.raises(ValueError, match="the loss depends on no output of spare, in the first"):
        gather_moments(net, {"spare": net.spare}, many, loss_fn)
    assert len(seen) == 1


def test_a_layer_that_plays_no_part_stays_dense(tmp_path, caplog):
    net = Net()
    net.spare = nn.Linear(2, 2)
    given, keep = {**layers(net), "spare": net.spare}, tmp_path / "moments.safetensors"
    found = gather_moments(net, given, batches(), loss_fn, keep)
    assert found.keys() == layers(net).keys()
    assert "leaves spare dense: the loss depends on none of their outputs" in caplog.text
    again = gather_moments(net, given, [], loss_fn, keep)  # reads the file, and no batch
    assert again.keys() == found.keys()

    class Step(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sign()

        @staticmethod
        def backward(ctx, grad):
            return None

    stepped = nn.Sequential(nn.Linear(2, 2), nn.Identity(), nn.Linear(2, 2))
    stepped[1].forward = Step.apply
    pair = {"0": stepped[0], "2": stepped[2]}
    assert [*gather_moments(stepped, pair, [torch.ones(3, 2)], lambda m, b: m(b).sum())] == ["2"]


def test_an_interrupted_calibration_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr("comera.compress.layer_moments._SAVE_EVERY", 0.0)
    net, data, file = Net(), batches((4, 2, 6, 3)), tmp_path / "moments.safetensors"
    whole = gather_moments(net, layers(net), data, loss_fn)

    def breaks_off():
        yield from data[:2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gather_moments(net, layers(net), breaks_off(), loss_fn, file)
    asked = []

    def counting(model, batch):
        asked.append(len(batch[0]))
        return loss_fn(model, batch)

    found = gather_moments(net, layers(net), data, counting, file)
    assert asked == [6, 3]
    for name, moments in found.items():
        assert moments.rows == whole[name].rows
        torch.testing.assert_close(moments.inputs_II, whole[name].inputs_II)
        torch.testing.assert_close(moments.grads_OO, whole[name].grads_OO)
    again = gather_moments(net, layers(net), [], counting, file)  # complete: nothing is asked for
    assert asked == [6, 3]
    assert torch.equal(again["first"].inputs_II, found["first"].inputs_II)


def test_a_file_of_other_moments_is_refused(tmp_path):
    net, file = Net(), tmp_path / "moments.safetensors"
    gather_moments(net, layers(net), batches(), loss_fn, file)
    net.second.weight.data[0, 0] += 1
    with pytest.raises(ValueError, match=r"moments of other layers or weights \(second\)"):
        gather_moments(net, layers(net), batches(), loss_fn, file)
    file.write_bytes(b"something else")
    with pytest.raises(ValueError, match="is no file of moments"):
        gather_moments(net, layers(net), batches(), loss_fn, file)


def test_the_bar_counts_batches(capsys):
    net = Net()
    gather_moments(net, layers(net), batches(), loss_fn, progress=True)
    assert "calibration" in capsys.readouterr().out


def test_a_square_is_that_of_the_whole_matrix_at_any_width():
    for width in (7, 300, 513, 1300):
        rows, total = torch.randn(9, width), torch.randn(width, width)
        total = total + total.T
        expected = 0.25 * total + 0.5 * rows.T @ rows
        add_square_(total, rows, beta=0.25, alpha=0.5)
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


class Alike(nn.Module):
    """Two layers with one input, which is then overwritten for a third."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(5, 5) for _ in range(3))

    def forward(self, x):
        x = x.clone()
        both = self.q(x) + self.k(x)
        return both + self.v(x.mul_(2))


def test_inputs_of_neighbours_are_told_apart_where_they_differ():
    net, (x,) = Alike(), [torch.randn(20, 5)]
    layers = dict(net.named_children())
    found = gather_moments(net, layers, [x], lambda m, b: m(b).square().mean())
    square = x.T @ x / 20
    for name, scale in (("q", 1), ("k", 1), ("v", 4)):
        torch.testing.assert_close(found[name].inputs_II, scale * square)


def test_of_a_table_it_is_how_often_rows_are_read():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(6, 3, padding_idx=1), nn.Linear(3, 2))
    indices = torch.tensor([[0, 2, 2, 1], [5, 2, 1, 0]])
    found = gather_moments(
        net, {"0": net[0]}, [indices[:1], indices[1:]], lambda m, b: m(b).square().sum(-1).mean()
    )["0"]
    torch.testing.assert_close(found.inputs_II, torch.tensor([2, 0, 3, 0, 0, 1]) / 8)
    rows = [r for r in indices.flatten().tolist() if r != 1]
    grads = 2 * (net[1](net[0](torch.tensor(rows)))) @ net[1].weight
    torch.testing.assert_close(found.grads_OO, (grads.T @ grads / 8).detach())


def test_models_that_write_into_what_layers_return_have_the_same_moments():
    torch.manual_seed(0)
    first, second = nn.Linear(5, 7), nn.Linear(7, 3)
    data = [(torch.randn(n, 5), torch.randint(0, 3, (n,))) for n in (4, 6)]
    found = []
    for inplace in (False, True):
        net = nn.Sequential(first, nn.ReLU(inplace), second, nn.ReLU(inplace))
        watched = {"first": first, "second": second}
        found.append(
            gather_moments(net, watched, data, lambda m, b: F.cross_entropy(m(b[0]), b[1]))
        )
    for name, moments in found[0].items():
        torch.testing.assert_close(found[1][name].inputs_II, moments.inputs_II, rtol=0, atol=0)
        torch.testing.assert_close(found[1][name].grads_OO, moments.grads_OO, rtol=0, atol=0)


def test_a_damaged_file_of_moments_is_refused(tmp_path):
    net, keep = Net(), tmp_path / "moments.safetensors"
    gather_moments(net, layers(net), batches(), loss_fn, keep)
    whole = keep.read_bytes()
    draw = random.Random(0)
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        keep.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"is damaged|is no file of moments|of other layers"):
            gather_moments(net, layers(net), batches(), loss_fn, keep)
    keep.write_bytes(whole)
    gather_moments(net, layers(net), batches(), loss_fn, keep)


def test_moments_of_other_batches_are_named(tmp_path, caplog):
    net, keep, data = Net(), tmp_path / "moments.safetensors", batches()
    first = gather_moments(net, layers(net), data, loss_fn, keep)
    gather_moments(net, layers(net), data, loss_fn, keep)
    assert "other batches" not in caplog.text
    again = gather_moments(net, layers(net), data[::-1], loss_fn, keep)
    assert "has the moments of other batches, as the first one tells" in caplog.text
    assert torch.equal(again["first"].inputs_II, first["first"].inputs_II)
