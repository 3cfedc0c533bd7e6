"""Imports of the process that workers are forked from; no other module imports this one.

Python's garbage collector rests meanwhile, which is a tenth of the time, and afterwards leaves
alone what was imported: workers neither look through it again nor copy its pages by that.
"""

import gc

gc.disable()

import torch._dynamo  # noqa: E402, F401

import firstlight.planner.memory.recipe  # noqa: E402, F401

gc.freeze()
gc.enable()
