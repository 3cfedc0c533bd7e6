"""A launcher of a test: `python launch_driver.py OPTIONS COMMAND...`, both as JSON."""

from __future__ import annotations

import json
import sys

from firstlight.console import say
from firstlight.errors import FirstlightError
from firstlight.parallel.elastic import Launch, launch

if __name__ == "__main__":
    try:
        options = Launch(**json.loads(sys.argv[1]))
        sys.exit(launch(json.loads(sys.argv[2]), options, ["--resume"]))
    except FirstlightError as error:
        say(f"firstlight: error: {error}")
        sys.exit(error.exit_code)
