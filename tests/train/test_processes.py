"""What processes agree on, and what one alone does."""

import pytest
import torch

from comera.train.processes import Processes, count_started, joined, rank_started
from tests.processes import in_two_processes, this_process

ROWS = {"x": torch.arange(8).view(4, 2), "nested": [torch.arange(4)], "padded": True}


def fails(number):
    raise ValueError(f"number {number} is wrong")


def outcome(call):
    try:
        return call()
    except Exception as problem:
        return type(problem).__name__, str(problem)


def _found(rank):
    here = this_process()
    order = []
    found = {
        "first": here.from_first(lambda: rank + 10),
        "first fails": outcome(lambda: here.from_first(lambda: fails(rank))),
        "together": here.together(lambda: rank),
        "second fails": outcome(lambda: here.together(lambda: fails(rank) if rank else rank)),
        "both fail": outcome(lambda: here.together(lambda: fails(rank))),
        "any": (here.any(rank == 1), here.any(False)),
        "sums": here.sums(rank + 0.5, 1.0),
        "gathered": here.gathered(torch.full((1 + rank, 2), rank)),
        "share": here.share_of(ROWS),
    }
    found["in turn"] = here.in_turn(lambda: order.append(rank) or rank)
    here.draw_(seed=3, step=5)
    found["drawn"] = torch.rand(3)
    here.draw_(seed=3, step=6)
    found["drawn next"] = torch.rand(3)
    here.draw_(seed=3, step=5)
    found["drawn again"] = torch.rand(3)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return in_two_processes(_found, tmp_path_factory.mktemp("processes"))


@pytest.mark.slow
def test_two_processes_agree(results):
    first, second = results
    for name in ("first", "any", "sums"):
        assert first[name] == second[name]
    assert (first["first"], first["any"], first["sums"]) == (10, (True, False), [2.0, 2.0])
    assert [found["together"] for found in results] == [0, 1]
    assert [found["in turn"] for found in results] == [0, 1]
    for found in results:
        assert found["gathered"].tolist() == [[0, 0], [1, 1], [1, 1]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "failed"), [("first fails", 0), ("second fails", 1), ("both fail", 0)]
)
def test_a_failure_is_raised_by_all_and_names_its_process(results, what, failed):
    text = f"number {failed} is wrong"
    for rank, found in enumerate(results):
        own = rank == failed
        expected = ("ValueError", text) if own else (
            "OtherProcessError", f"process {failed}: {text}"
        )  # fmt: skip
        assert found[what] == expected


@pytest.mark.slow
def test_a_batch_is_shared_out_by_rows(results):
    shares = [found["share"] for found in results]
    assert [share["x"].tolist() for share in shares] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert [share["nested"][0].tolist() for share in shares] == [[0, 2], [1, 3]]
    assert all(share["padded"] is True for share in shares)


@pytest.mark.slow
def test_random_numbers_follow_from_seed_step_and_process(results):
    first, second = results
    for found in results:
        assert torch.equal(found["drawn"], found["drawn again"])
        assert not torch.equal(found["drawn"], found["drawn next"])
    assert not torch.equal(first["drawn"], second["drawn"])


def test_one_process_alone_has_nobody_to_ask():
    alone = Processes()
    state = torch.get_rng_state()
    alone.draw_(0, 0)
    assert torch.equal(torch.get_rng_state(), state)
    assert alone.is_first
    assert alone.share_of(ROWS) is ROWS
    assert alone.sums(1.5) == [1.5]
    assert alone.from_first(lambda: 3) == alone.together(lambda: 3) == alone.in_turn(lambda: 3)
    assert not alone.any(False)


@pytest.mark.parametrize(
    ("environment", "count", "rank"),
    [
        ({}, 1, 0),
        ({"WORLD_SIZE": "8"}, 1, 0),
        ({"WORLD_SIZE": "8", "RANK": "3", "LOCAL_RANK": "1"}, 8, 3),
        ({"WORLD_SIZE": "x", "RANK": "0"}, 1, 0),
    ],
)
def test_what_a_launcher_has_started(environment, count, rank):
    assert (count_started(environment), rank_started(environment)) == (count, rank)


def test_processes_need_a_gpu_each(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with (
        pytest.raises(ValueError, match="2 GPUs for 4 processes of this machine: start one"),
        joined(cuda=True, minutes=1),
    ):
        raise AssertionError("it has not joined")


def test_a_lost_connection_is_said_in_one_line(monkeypatch, tmp_path):
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "WORLD_SIZE": "1", "RANK": "0"}
    for name, value in port.items():
        monkeypatch.setenv(name, value)
    try:
        with (
            pytest.raises(ConnectionError, match=r"another process is gone: .*gloo/transport"),
            joined(cuda=False, minutes=1),
        ):
            raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    finally:
        torch.distributed.destroy_process_group()


def test_a_restart_on_several_machines_needs_a_store_of_its_own(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with (
        pytest.raises(ValueError, match="set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every"),
        joined(cuda=False, minutes=1),
    ):
        raise AssertionError("it has not joined")
