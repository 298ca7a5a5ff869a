"""Read the words that options of benchmarks take."""

from collections.abc import Sequence

from jsonargparse import Namespace

from benchmarks.encoders import FIRST_WORD, Encoders


def encoders_of(options: Namespace) -> Encoders:
    """Return the transformer that the options describe."""
    if options.vocab <= FIRST_WORD:
        raise ValueError(
            f"vocab={options.vocab} must be above {FIRST_WORD}, the first word's number"
        )
    sizes = ("layers", "width", "ffn", "heads", "vocab", "length", "embedding_rank")
    for name in sizes:
        check_positive(name, options[name])
    return Encoders(**{name: options[name] for name in sizes}, rank=rank_of(options.rank))


def shape_of(words: Sequence[str]) -> tuple[int, int]:
    """Return the input and the output width in two words."""
    sizes = numbers_of("shape", words)
    if len(sizes) != 2:
        raise ValueError(f"shape={sizes} must be two numbers, width in and width out")
    return sizes[0], sizes[1]


def widths_of(words: Sequence[str]) -> list[tuple[int, int]]:
    """Return pairs such as ``768:3072``, which commas or spaces separate."""
    pairs = ",".join(words).replace(" ", ",").split(",")
    if not all(pair.count(":") == 1 for pair in pairs):
        raise ValueError(f"widths={','.join(pairs)!r} must be pairs of widths, such as 768:3072")
    return [shape_of(pair.split(":")) for pair in pairs]


def tables_of(words: Sequence[str]) -> list[tuple[int, int, int]]:
    """Return triples such as ``2000:256:48``, rows, width and rank."""
    found = []
    for word in ",".join(words).replace(" ", ",").split(","):
        parts = word.split(":")
        if word and len(parts) != 3:
            raise ValueError(f"hot_rows={word!r} must be rows, width and rank, such as 2000:256:48")
        if word:
            rows, width, rank = numbers_of("hot_rows", parts)
            found.append((rows, width, rank))
    return found


def rank_of(words: Sequence[str]) -> int | list[int]:
    """Return one bound on all ranks, or the list of them."""
    ranks = numbers_of("rank", words)
    return ranks[0] if len(ranks) == 1 else ranks


def numbers_of(name: str, words: Sequence[str]) -> list[int]:
    """Return whole numbers above zero, which commas or spaces separate."""
    listed = ",".join(words).replace(" ", ",")
    try:
        numbers = [int(word) for word in listed.split(",") if word]
    except ValueError:
        raise ValueError(f"{name}={listed!r} must be whole numbers, such as 1,8,64") from None
    if not numbers:
        raise ValueError(f"{name} needs at least one number")
    for number in numbers:
        check_positive(name, number)
    return numbers


def check_positive(name: str, value: int) -> None:
    """Raise ``ValueError`` for a number below one."""
    if value < 1:
        raise ValueError(f"{name}={value} must be at least 1")
