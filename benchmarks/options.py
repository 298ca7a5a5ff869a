"""The options of every benchmark."""

from jsonargparse import ArgumentParser

from benchmarks.curve import DEFAULT_POINTS, POINTS
from benchmarks.kernels import OPERATORS
from benchmarks.updates import OPTIMIZERS
from comera.checkpoint.contents import Quality

_DTYPES = ["float32", "float64", "bfloat16", "float16"]
_PAPER_RANKS = ["12", "30", "30", "30", "16"]
_RANK_HELP = "Ranks of the inner bonds: one bound on all of them, or each."


def add_linear(parser: ArgumentParser) -> None:
    """Add the options of ``linear``."""
    _add_shape(parser)
    _add_several(
        parser,
        "--tokens",
        None,
        "Rows that the layer is given at once; several make a curve (default: 4096, and 512 "
        "on the curve of widths).",
    )
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        default="float32",
        help="Type of the numbers of layers and inputs.",
    )
    parser.add_argument(
        "--curve",
        choices=list(DEFAULT_POINTS),
        help="Draw times against this quantity, comera beside dense.",
    )
    _add_several(
        parser,
        "--points",
        None,
        "Values of the curve's quantity at which times are taken (default: doubling steps).",
    )
    parser.add_argument(
        "--plot", type=str, help="Draw the curve into this file, which ends in .png, .svg or .pdf."
    )
    _add_peers(parser)


def add_embedding(parser: ArgumentParser) -> None:
    """Add the options of ``embedding``."""
    parser.add_argument("--rows", type=int, default=30522, help="Number of rows of the table.")
    parser.add_argument("--width", type=int, default=768, help="Width of a row of the table.")
    parser.add_argument("--indices", type=int, default=4096, help="Number of indices in a batch.")
    parser.add_argument(
        "--bag",
        type=int,
        default=0,
        help="Number of indices that are summed to one output; 0 sums none.",
    )
    parser.add_argument(
        "--curve",
        choices=list(POINTS),
        help="Draw times against this quantity, for uniform indices and comera alone.",
    )
    _add_several(
        parser,
        "--points",
        None,
        "Values of the curve's quantity at which times are taken (default: steps of four or ten).",
    )
    _add_several(parser, "--rank", ["32"], _RANK_HELP)
    parser.add_argument(
        "--zipf",
        type=float,
        default=1.05,
        help="Exponent of the Zipf distribution of the indices; 0 draws them uniformly.",
    )
    parser.add_argument(
        "--dtype", choices=_DTYPES[:2], default="float32", help="Type of the numbers of the table."
    )
    parser.add_argument(
        "--dense_limit",
        type=float,
        default=4.0,
        help="Time a dense table only if it takes no more GiB than this, gradient and moments "
        "included.",
    )
    _add_peers(parser)


def add_step(parser: ArgumentParser) -> None:
    """Add the options of ``step``."""
    _add_several(parser, "--batch", ["8"], "Numbers of sequences in a batch.")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="Time comera under torch.compile too, and on a GPU both, as CUDA graphs.",
    )
    _add_encoders(parser)
    _add_peers(parser)


def add_memory(parser: ArgumentParser) -> None:
    """Add the options of ``memory``."""
    _add_several(parser, "--batch", ["1", "8", "32"], "Numbers of sequences in a batch.")
    _add_encoders(parser, ranks=False)
    parser.add_argument(
        "--layer", action="store_true", help="Weigh a linear layer instead of the encoders."
    )
    parser.add_argument(
        "--table",
        action="store_true",
        help="Weigh lookups in a table of --shape ROWS WIDTH instead, beside the plain way to "
        "read it.",
    )
    parser.add_argument(
        "--zipf",
        type=float,
        default=1.05,
        help="Exponent of the Zipf distribution of the indices; 0 draws them uniformly.",
    )
    _add_shape(parser)
    parser.add_argument(
        "--tokens",
        type=int,
        default=4096,
        help="Number of rows that the layer is given, or of indices that are looked up in the "
        "table.",
    )


def add_objective(parser: ArgumentParser) -> None:
    """Add the options of ``objective``."""
    parser.add_argument("--batch", type=int, default=8, help="Number of sequences in a batch.")
    _add_encoders(parser)


def add_traffic(parser: ArgumentParser) -> None:
    """Add the options of ``traffic``."""
    parser.add_argument(
        "--batch", type=int, default=2, help="Number of sequences in a batch; changes no bytes."
    )
    _add_several(
        parser,
        "--processes",
        [],
        "Also time steps of so many processes on this CPU, with --batch sequences each.",
    )
    _add_encoders(parser)


def add_checkpoints(parser: ArgumentParser) -> None:
    """Add the options of ``checkpoints``."""
    parser.add_argument(
        "--parameters", type=int, default=16_777_216, help="Number of parameters of the model."
    )
    parser.add_argument("--width", type=int, default=2048, help="Width of the weight matrices.")
    parser.add_argument(
        "--bits",
        type=int,
        default=Quality.bits,
        help="Bits of the code of a changed entry, 2 to 8.",
    )
    parser.add_argument(
        "--rate",
        type=float,
        default=Quality.rate,
        help="Error that is accepted to save one bit, as a share of the variance.",
    )
    parser.add_argument(
        "--beta",
        type=float,
        default=Quality.beta,
        help="Leave out first moments smaller than this many times their mean.",
    )


def add_truncation(parser: ArgumentParser) -> None:
    """Add the options of ``truncation``."""
    add_objective(parser)
    parser.add_argument(
        "--keep", type=float, default=0.2, help="Share of the entries of the cores that remains."
    )


def add_ranking(parser: ArgumentParser) -> None:
    """Add the options of ``ranking``, lists whose combinations are all measured."""
    _add_several(
        parser,
        "--widths",
        ["256:256", "768:768", "768:3072", "2048:512"],
        "Pairs of input and output width; all combinations with ranks and tokens are measured.",
        metavar="IN:OUT",
    )
    _add_several(parser, "--rank", ["8,32,128,512"], "Bounds on the ranks, with commas.")
    _add_several(
        parser,
        "--tokens",
        ["8,128,2048"],
        "Numbers of rows that a layer is given at once, with commas.",
    )


def add_kernels(parser: ArgumentParser) -> None:
    """Add the options of ``kernels``."""
    _add_several(
        parser,
        "--only",
        list(OPERATORS),
        f"Time only these of {', '.join(OPERATORS)}.",
        metavar="NAME",
    )
    _add_several(
        parser, "--tokens", ["4096"], "Numbers of rows that linear layers are given at once."
    )
    _add_several(
        parser, "--indices", ["4096", "16384"], "Numbers of indices that are looked up at once."
    )
    _add_several(
        parser,
        "--widths",
        ["768:768", "768:3072", "3072:768"],
        "Pairs of input and output width of the linear layers.",
        metavar="IN:OUT",
    )
    parser.add_argument("--rank", type=int, default=32, help="Rank of all tensor trains.")
    parser.add_argument(
        "--layers",
        type=int,
        default=12,
        help="Number of layers of each width that are contracted together.",
    )
    parser.add_argument(
        "--table",
        nargs=2,
        type=int,
        metavar="N",
        default=[30522, 768],
        help="Number of rows and width of the table.",
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="Type of the numbers of layers and inputs.",
    )
    parser.add_argument("--markdown", type=str, help="Write a dated table into this file.")


def _add_decoder(parser: ArgumentParser, *, layers: int, width: int, ffn: int, heads: int) -> None:
    """Add the shape of a language model."""
    parser.add_argument("--layers", type=int, default=layers, help="Number of blocks of the model.")
    parser.add_argument("--width", type=int, default=width, help="Width of the model.")
    parser.add_argument(
        "--ffn", type=int, default=ffn, help="Hidden width of the feed-forward parts."
    )
    parser.add_argument(
        "--heads", type=int, default=heads, help="Number of attention heads of a block."
    )
    parser.add_argument(
        "--vocab", type=int, default=32000, help="Number of tokens of the vocabulary."
    )


def add_optimizers(parser: ArgumentParser) -> None:
    """Add the options of ``optimizers``: a language model of 58 million parameters."""
    _add_decoder(parser, layers=8, width=512, ffn=1376, heads=8)
    parser.add_argument("--length", type=int, default=128, help="Number of tokens of a sequence.")
    parser.add_argument("--batch", type=int, default=4, help="Number of sequences in a batch.")
    parser.add_argument("--rank", type=int, default=128, help="Rank of the subspaces of GaLore.")
    parser.add_argument(
        "--gap", type=int, default=200, help="Number of updates from one subspace to the next."
    )
    _add_several(
        parser,
        "--only",
        [],
        "Beside AdamW time only optimizers whose names contain one of these words.",
        metavar="NAME",
    )
    _add_peers(parser)


def add_serve(parser: ArgumentParser) -> None:
    """Add the options of ``serve``: a language model of 134 million parameters."""
    _add_decoder(parser, layers=12, width=768, ffn=2048, heads=12)
    parser.add_argument("--rank", type=int, default=64, help="Bound on the ranks.")
    parser.add_argument(
        "--prompt", type=int, default=64, help="Number of tokens that the model is given."
    )
    parser.add_argument("--tokens", type=int, default=32, help="Number of tokens it generates.")


def add_updates(parser: ArgumentParser) -> None:
    """Add the options of ``updates``, lists whose combinations are all measured."""
    _add_several(
        parser,
        "--widths",
        ["256:256", "768:768", "768:3072", "3072:768"],
        "Pairs of input and output width of linear layers.",
        metavar="IN:OUT",
    )
    _add_several(parser, "--order", ["1,2,3,4"], "Modes a side, with commas.")
    _add_several(parser, "--rank", ["8,32,128"], "Bounds on the ranks, with commas.")
    parser.add_argument(
        "--optimizer", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS),
        help="What steps the cores.",
    )  # fmt: skip
    parser.add_argument("--lr", type=float, default=7e-4, help="Learning rate of the cores.")
    parser.add_argument(
        "--hot_rows",
        nargs="*",
        type=str,
        metavar="ROWS:WIDTH:RANK",
        default=["2000:256:48", "4000:512:48"],
        help="Tables of hot rows; none after the bare option.",
    )


def _add_several(
    parser: ArgumentParser, name: str, default: list[str] | None, help: str, metavar: str = "N"
) -> None:
    """Add an option of several words, which commas may separate, too."""
    parser.add_argument(name, nargs="+", type=str, metavar=metavar, default=default, help=help)


def _add_shape(parser: ArgumentParser) -> None:
    _add_several(parser, "--shape", ["768", "3072"], "Input and output width of the layer.")
    _add_several(parser, "--rank", _PAPER_RANKS, _RANK_HELP)


def _add_encoders(parser: ArgumentParser, ranks: bool = True) -> None:
    parser.add_argument("--layers", type=int, default=6, help="Number of encoder blocks.")
    parser.add_argument("--width", type=int, default=768, help="Width of the model.")
    parser.add_argument(
        "--ffn", type=int, default=3072, help="Hidden width of the feed-forward parts."
    )
    parser.add_argument(
        "--heads", type=int, default=12, help="Number of attention heads of a block."
    )
    parser.add_argument(
        "--vocab", type=int, default=30522, help="Number of rows of the token table."
    )
    parser.add_argument("--length", type=int, default=128, help="Number of tokens of a sequence.")
    parser.add_argument("--embedding_rank", type=int, default=30, help="Rank of the token table.")
    if ranks:
        _add_several(parser, "--rank", _PAPER_RANKS, _RANK_HELP)


def _add_peers(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--peers",
        choices=["all", "none"],
        default="all",
        help="Whether other packages are timed beside comera, where they are installed.",
    )


def add_common(parser: ArgumentParser, name: str) -> None:
    """Add the options of every benchmark; ``memory`` and ``updates`` repeat nothing."""
    if name not in ("memory", "updates"):
        parser.add_argument(
            "--repeats", type=int, default=9, help="Number of rounds that are timed."
        )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="Where everything runs."
    )
    parser.add_argument(
        "--threads", type=int, help="Number of CPU threads (default: what torch chooses)."
    )
    parser.add_argument(
        "--malloc",
        choices=["keep", "default"],
        default="keep",
        help="Keep freed memory in the process for everything that is timed, or leave it to the "
        "C library's default.",
    )
    parser.add_argument("--json", type=str, help="Write all results into this file.")
