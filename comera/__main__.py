"""Start the command ``comera``, as a console script or by ``python -m comera``."""

import signal
import sys

from comera._command import end_now
from comera.extras import MissingPackageError, needed_by


def main() -> int:
    """Run the command and return its exit status."""
    try:
        with needed_by("the command comera"):
            from comera.recipes.cli import main as run
    except MissingPackageError as missing:
        print(f"error: {missing}", file=sys.stderr)
        return 1
    if signal.getsignal(signal.SIGINT) is end_now:  # running code can handle KeyboardInterrupt
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


if __name__ == "__main__":
    sys.exit(main())
