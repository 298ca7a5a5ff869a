"""The widths that matrix products are fastest at."""

FAST_MULTIPLE = 8


def padded_rank(rank: int, bias: bool) -> int:
    """Width of the bond between the halves of a linear layer, as products see it.

    One column more for a bias, then rounded up: a product of width 32 takes half the time of one
    of width 30.
    """
    # int: a size that torch's compiler leaves open does not add to a truth value.
    return -(-(rank + int(bias)) // FAST_MULTIPLE) * FAST_MULTIPLE
