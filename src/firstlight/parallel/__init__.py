"""Many processes as one run: who they are, how they meet, what they say to each other.

`world` reads from the launcher's variables which process this is; `group` has the processes
meet, checks that they are what was asked for, and watches them; `collectives` is what they say
to each other, and does nothing in a world of one; `elastic` starts them.
"""

from firstlight.parallel.collectives import (
    agree,
    all_reduce_sum,
    barrier,
    broadcast_object,
    gather_objects,
)
from firstlight.parallel.group import own_device, process_group
from firstlight.parallel.heartbeat import RankError
from firstlight.parallel.world import World, find_world, is_main, require_world

__all__ = [
    "RankError",
    "World",
    "agree",
    "all_reduce_sum",
    "barrier",
    "broadcast_object",
    "find_world",
    "gather_objects",
    "is_main",
    "own_device",
    "process_group",
    "require_world",
]
