"""Entry point of `python -m firstlight`, which is the same as the `firstlight` command."""

import sys

from firstlight.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
