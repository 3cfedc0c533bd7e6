"""Imports of the process that workers are forked from; no other module imports this one.

Python's garbage collector is off meanwhile, which saves a tenth of the time. Afterwards the
imported objects are frozen, so that workers neither visit them again nor copy their pages.
"""

import gc

gc.disable()

import torch._dynamo  # noqa: E402, F401

import firstlight.planner.memory.recipe  # noqa: E402, F401

gc.freeze()
gc.enable()
