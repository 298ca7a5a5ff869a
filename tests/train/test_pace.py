import pytest
import torch

from comera.train.log import Pace, peak_memory, short

CPU = torch.device("cpu")


def test_speeds_are_those_since_the_last_time():
    pace = Pace(CPU, (4096, "tokens"), steps=100, seconds=50.0)
    assert pace.show(110, 52.0).startswith("5 steps/s, 20.5k tokens/s, peak ")
    assert pace.show(130, 53.0).startswith("20 steps/s, 81.9k tokens/s, peak ")
    assert pace.show(130, 53.0).startswith("peak ")  # nothing is new


def test_memory_is_that_of_the_process():
    before = peak_memory(CPU)
    assert before > 32 << 20  # torch alone
    assert peak_memory(CPU) >= before
    assert Pace(CPU).show(0, 0.0) == f"peak {peak_memory(CPU) / (1 << 20):,.0f} MiB"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.04217, "0.0422"), (1.5, "1.5"), (45.67, "45.7"), (789.4, "789"), (7890, "7,890"),
     (12345, "12.3k"), (2.5e6, "2.5M")],
)  # fmt: skip
def test_figures_are_short(value, text):
    assert short(value) == text
