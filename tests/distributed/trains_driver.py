"""`train_driver` for one run after another, in the same process."""

from __future__ import annotations

import json
import os
import sys

import train_driver

from firstlight.training.run import Run

if __name__ == "__main__":
    plain = {name: getattr(Run, name) for name in ("open", "begin_step")}
    for request in json.loads(sys.argv[1]):
        os.environ["MASTER_PORT"] = str(request["port"])
        train_driver.main(request)
        # It puts its own in their place.
        for name, method in plain.items():
            setattr(Run, name, method)
