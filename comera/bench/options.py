"""The options of every benchmark, and what is made of them."""

from collections.abc import Sequence

from jsonargparse import ArgumentParser, Namespace

from comera.bench.curve import DEFAULT_POINTS, POINTS
from comera.bench.encoders import FIRST_WORD, Encoders
from comera.bench.kernel_speed import OPERATORS
from comera.checkpoint.contents import Quality

_DTYPES = ["float32", "float64", "bfloat16", "float16"]
_PAPER_RANKS = ["12", "30", "30", "30", "16"]
_RANK_HELP = "a bound on all inner bonds, or each of them"


def add_linear(parser: ArgumentParser) -> None:
    """Of ``linear``."""
    _add_shape(parser)
    parser.add_argument(
        "--tokens",
        nargs="+",
        type=str,
        metavar="N",
        help="4096 if not given, 512 on the curve of widths; several make a curve",
    )
    parser.add_argument("--dtype", choices=_DTYPES, default="float32")
    parser.add_argument(
        "--curve", choices=list(DEFAULT_POINTS), help="time against this, comera beside dense"
    )
    parser.add_argument(
        "--points",
        nargs="+",
        type=str,
        metavar="N",
        help="of the curve; doubling steps if not given",
    )
    parser.add_argument("--plot", type=str, help="picture of the curve, .png, .svg or .pdf")
    _add_peers(parser)


def add_embedding(parser: ArgumentParser) -> None:
    """Of ``embedding``."""
    parser.add_argument("--rows", type=int, default=30522, help="of the table")
    parser.add_argument("--width", type=int, default=768, help="of a row")
    parser.add_argument("--indices", type=int, default=4096, help="of a batch")
    parser.add_argument("--bag", type=int, default=0, help="indices summed to one output; 0: none")
    parser.add_argument(
        "--curve", choices=list(POINTS), help="time against this, of uniform look-ups, comera alone"
    )
    parser.add_argument(
        "--points", nargs="+", type=str, metavar="N", help="of the curve; steps of four or ten"
    )
    parser.add_argument("--rank", nargs="+", type=str, metavar="N", default=["32"], help=_RANK_HELP)
    parser.add_argument(
        "--zipf", type=float, default=1.05, help="exponent of their distribution; 0: uniform"
    )
    parser.add_argument("--dtype", choices=_DTYPES[:2], default="float32")
    parser.add_argument(
        "--dense_limit",
        type=float,
        default=4.0,
        help="GiB that a dense table may take with gradient and moments",
    )
    _add_peers(parser)


def add_step(parser: ArgumentParser) -> None:
    """Of ``step``."""
    parser.add_argument(
        "--batch", nargs="+", type=str, metavar="N", default=["8"], help="sequences"
    )
    parser.add_argument(
        "--compile", action="store_true", help="comera under torch.compile beside it"
    )
    _add_encoders(parser)
    _add_peers(parser)


def add_memory(parser: ArgumentParser) -> None:
    """Of ``memory``."""
    parser.add_argument(
        "--batch", nargs="+", type=str, metavar="N", default=["1", "8", "32"], help="sequences"
    )
    _add_encoders(parser, ranks=False)
    parser.add_argument(
        "--layer", action="store_true", help="a linear layer instead of the encoders"
    )
    parser.add_argument(
        "--table",
        action="store_true",
        help="look-ups in a table of --shape ROWS WIDTH instead, beside the plain way to read it",
    )
    parser.add_argument(
        "--zipf", type=float, default=1.05, help="exponent of what is looked up; 0: uniform"
    )
    _add_shape(parser)
    parser.add_argument(
        "--tokens", type=int, default=4096, help="of the layer, or indices of the table"
    )


def add_objective(parser: ArgumentParser) -> None:
    """Of ``objective``."""
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    _add_encoders(parser)


def add_checkpoints(parser: ArgumentParser) -> None:
    """Of ``checkpoints``."""
    parser.add_argument("--parameters", type=int, default=16_777_216, help="of the model")
    parser.add_argument("--width", type=int, default=2048, help="of its weights")
    parser.add_argument("--bits", type=int, default=Quality.bits, help="of codes")
    parser.add_argument("--rate", type=float, default=Quality.rate, help="what a bit is worth")
    parser.add_argument(
        "--beta", type=float, default=Quality.beta, help="smallest moments, in means"
    )


def add_truncation(parser: ArgumentParser) -> None:
    """Of ``truncation``."""
    add_objective(parser)
    parser.add_argument("--keep", type=float, default=0.2, help="share of the cores that remains")


def add_ranking(parser: ArgumentParser) -> None:
    """Of ``ranking``: each option a list, all combinations are measured."""
    parser.add_argument(
        "--widths",
        nargs="+",
        type=str,
        metavar="IN:OUT",
        default=["256:256", "768:768", "768:3072", "2048:512"],
        help="pairs of widths",
    )
    parser.add_argument("--rank", nargs="+", type=str, metavar="N", default=["8,32,128,512"])
    parser.add_argument("--tokens", nargs="+", type=str, metavar="N", default=["8,128,2048"])


def add_kernels(parser: ArgumentParser) -> None:
    """Of ``kernels``."""
    parser.add_argument(
        "--only", nargs="+", type=str, metavar="NAME", default=list(OPERATORS),
        help=f"some of {', '.join(OPERATORS)}",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", nargs="+", type=str, metavar="N", default=["4096"], help="of linear layers"
    )
    parser.add_argument(
        "--indices", nargs="+", type=str, metavar="N", default=["4096", "16384"], help="of look-ups"
    )
    parser.add_argument(
        "--widths",
        nargs="+",
        type=str,
        metavar="IN:OUT",
        default=["768:768", "768:3072", "3072:768"],
        help="of linear layers",
    )
    parser.add_argument("--rank", type=int, default=32, help="of all tensor trains")
    parser.add_argument("--layers", type=int, default=12, help="of each width, joined together")
    parser.add_argument(
        "--table", nargs=2, type=int, metavar="N", default=[30522, 768], help="rows and width"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--markdown", type=str, help="file for a dated table")


def add_optimizers(parser: ArgumentParser) -> None:
    """Of ``optimizers``: a causal language model, by default that of 58 million parameters."""
    parser.add_argument("--layers", type=int, default=8, help="of the model")
    parser.add_argument("--width", type=int, default=512, help="of the model")
    parser.add_argument("--ffn", type=int, default=1376, help="width of the feed-forward part")
    parser.add_argument("--heads", type=int, default=8, help="of the attention")
    parser.add_argument("--vocab", type=int, default=32000, help="tokens")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences")
    parser.add_argument("--rank", type=int, default=128, help="of the subspaces of GaLore")
    parser.add_argument(
        "--gap", type=int, default=200, help="updates from one subspace to the next"
    )
    parser.add_argument(
        "--only", nargs="+", type=str, metavar="NAME", default=[],
        help="those beside AdamW whose names contain one of these",
    )  # fmt: skip
    _add_peers(parser)


def _add_shape(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--shape",
        nargs="+",
        type=str,
        metavar="N",
        default=["768", "3072"],
        help="width in and out",
    )
    parser.add_argument(
        "--rank", nargs="+", type=str, metavar="N", default=_PAPER_RANKS, help=_RANK_HELP
    )


def _add_encoders(parser: ArgumentParser, ranks: bool = True) -> None:
    parser.add_argument("--layers", type=int, default=6, help="encoder blocks")
    parser.add_argument("--width", type=int, default=768, help="of the model")
    parser.add_argument("--ffn", type=int, default=3072, help="hidden width of feed-forward parts")
    parser.add_argument("--heads", type=int, default=12, help="of the attention")
    parser.add_argument("--vocab", type=int, default=30522, help="rows of the token table")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--embedding_rank", type=int, default=30, help="of the token table")
    if ranks:
        parser.add_argument(
            "--rank", nargs="+", type=str, metavar="N", default=_PAPER_RANKS, help=_RANK_HELP
        )


def _add_peers(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--peers", choices=["all", "none"], default="all", help="other packages beside comera"
    )


def add_common(parser: ArgumentParser, name: str) -> None:
    """Of all benchmarks; ``memory`` repeats nothing."""
    if name != "memory":
        parser.add_argument("--repeats", type=int, default=9, help="rounds that are timed")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, help="CPU threads; torch's choice if not given")
    parser.add_argument(
        "--malloc",
        choices=["keep", "default"],
        default="keep",
        help="keep freed memory in the process, for all that is timed, or leave the C library be",
    )
    parser.add_argument("--json", type=str, help="file for all results")


def encoders_of(options: Namespace) -> Encoders:
    """The transformer that was asked for."""
    if options.vocab <= FIRST_WORD:
        raise ValueError(
            f"vocab={options.vocab} must be above {FIRST_WORD}, the first word's number"
        )
    sizes = ("layers", "width", "ffn", "heads", "vocab", "length", "embedding_rank")
    for name in sizes:
        check_positive(name, options[name])
    return Encoders(**{name: options[name] for name in sizes}, rank=rank_of(options.rank))


def shape_of(words: Sequence[str]) -> tuple[int, int]:
    """Width in and width out."""
    sizes = numbers_of("shape", words)
    if len(sizes) != 2:
        raise ValueError(f"shape={sizes} must be two numbers, width in and width out")
    return sizes[0], sizes[1]


def widths_of(words: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs such as ``768:3072``, separated by commas or spaces."""
    pairs = ",".join(words).replace(" ", ",").split(",")
    if not all(pair.count(":") == 1 for pair in pairs):
        raise ValueError(f"widths={','.join(pairs)!r} must be pairs of widths, such as 768:3072")
    return [shape_of(pair.split(":")) for pair in pairs]


def rank_of(words: Sequence[str]) -> int | list[int]:
    """One bound, or all ranks."""
    ranks = numbers_of("rank", words)
    return ranks[0] if len(ranks) == 1 else ranks


def numbers_of(name: str, words: Sequence[str]) -> list[int]:
    """Whole numbers above zero, separated by commas or spaces."""
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
