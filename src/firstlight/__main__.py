"""Entry point of `python -m firstlight`, which is equivalent to the `firstlight` command."""

import sys

from firstlight.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
