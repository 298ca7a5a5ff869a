import pytest

from benchmarks.commands import main
from benchmarks.ranking import Case, summary


def case(thin, sequential, dense, linear, predicted):
    names = ("factorized", "sequential", "reconstructed", "nn.Linear")
    measured = dict(zip(names, (thin, sequential, dense, linear), strict=True))
    return Case("", dict(zip(names, predicted, strict=True)), measured)


def test_pairs_that_are_close_count_for_nothing():
    measured = case(1.0, 1.1, 2.0, 4.0, predicted=(1, 2, 3, 4))
    assert measured.pairs() == [True] * 5  # thin and sequential are even
    assert case(1.0, 1.1, 2.0, 4.0, predicted=(4, 3, 2, 1)).pairs() == [False] * 5


def test_the_cost_of_a_wrong_choice_is_told():
    wrong = case(3.0, 1.0, 2.0, 9.0, predicted=(1, 1, 2, 9))
    right = case(1.0, 1.0, 2.0, 9.0, predicted=(1, 1, 2, 9))
    assert wrong.loss() == pytest.approx(1.5)
    assert right.loss() == 1
    text = summary([wrong, right])
    assert "the faster one in 1 of 2 cases and is at most 1.50x slower" in text


def test_from_the_command_line(capsys):
    words = "ranking --widths 12:12,10:15 --rank 3 --tokens 4 --repeats 1 --threads 1"
    assert main(words.split()) == 0
    out = capsys.readouterr().out
    assert "12 -> 12, rank 3, 4 tokens" in out
    assert "10 -> 15, rank 3, 4 tokens" in out  # padded modes
    assert "predicted order right for" in out


def test_widths_that_are_no_pairs_are_named(capsys):
    assert main(["ranking", "--widths", "12", "--repeats", "1"]) == 1
    assert "widths='12' must be pairs of widths, such as 768:3072" in capsys.readouterr().err
