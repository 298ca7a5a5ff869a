"""Times of operators on one H100, which stand in for a card that nothing was measured on.

Microseconds of forward and backward pass in a CUDA graph, over several sets of inputs, as
``docs/benchmarks/h100-operators.md`` has them. What is not in that table is not here, nor is what
was measured forward alone, as look-ups by warps.
"""

WHAT = "an H100 80GB HBM3, torch 2.11, 2026-11-22"

Times = tuple[str, str, tuple[int | str, ...], dict[str, float]]
"""Group of operators, dtype, sizes and microseconds by way, as in ``way_times.Timing``."""

LEAST: dict[str, tuple[int, ...]] = {"feed_forward": (1024, 0, 0, 0)}
"""Sizes of a group below which these times say nothing: fewer rows were not measured."""

MICROSECONDS: tuple[Times, ...] = (
    # layers, rank; dtype of the factors that are made, of float32 cores
    ("contract_cores", "float32", (36, 30), {"kernel": 162, "torch": 584}),
    ("contract_cores", "bfloat16", (36, 30), {"kernel": 151, "torch": 614}),
    ("contract_cores", "bfloat16", (36, 31), {"kernel": 154, "torch": 673}),
    # rows, widths in and hidden, rank
    ("feed_forward", "bfloat16", (1024, 768, 3072, 32), {"kernel": 77, "torch": 95}),
    ("feed_forward", "bfloat16", (4096, 768, 3072, 32), {"kernel": 118, "torch": 196}),
    ("feed_forward", "bfloat16", (16384, 768, 3072, 32), {"kernel": 318, "torch": 659}),
    ("feed_forward", "bfloat16", (4096, 4096, 11008, 32), {"kernel": 387, "torch": 647}),
    ("feed_forward", "bfloat16", (4096, 768, 3072, 64), {"kernel": 189, "torch": 198}),
    ("feed_forward", "bfloat16", (4096, 4096, 11008, 64), {"kernel": 627, "torch": 625}),
    # positions, rank, width of a head; "heads" with a mask, "ranks" with expanded keys and a mask
    ("attention_space", "bfloat16", (128, 32, 64), {"heads": 134, "ranks": 90}),
    ("attention_space", "bfloat16", (512, 32, 64), {"heads": 189, "ranks": 144}),
    ("attention_space", "float32", (128, 32, 64), {"heads": 436, "ranks": 282}),
    ("attention_space", "float32", (512, 32, 64), {"heads": 938, "ranks": 727}),
)
