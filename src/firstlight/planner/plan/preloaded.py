"""Imports of the process from which workers are forked; no other module imports this one.

Python's garbage collector is off during the imports, which saves a tenth of the time. Afterwards
the imported objects are frozen, so that collections in workers neither visit them nor copy their
pages.
"""

import gc

gc.disable()

import torch._dynamo  # noqa: E402, F401

import firstlight.planner.memory.recipe  # noqa: E402, F401

gc.freeze()
gc.enable()
