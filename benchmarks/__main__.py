import sys

from benchmarks.commands import main

sys.exit(main())
