"""Train with several processes.

`elastic` starts the processes. `world` reads rank and world size from the launcher's environment
variables, and `rendezvous` connects the processes and compares their recipes. `group` opens torch's
process group and detects failed or stopped processes by their heartbeats. It also provides the
collective operations, which do nothing in a world of one process. An engine distributes a model
over the processes. `engine`, `sharding`, `pipeline` and `deepspeed` contain the engines, and
`engine_choice` selects the engine of a run.
"""

from firstlight.parallel.group import (
    agree,
    all_reduce_sum,
    barrier,
    broadcast_object,
    gather_objects,
    own_device,
    process_group,
)
from firstlight.parallel.rendezvous import RankError
from firstlight.parallel.world import World, find_world

__all__ = [
    "RankError",
    "World",
    "agree",
    "all_reduce_sum",
    "barrier",
    "broadcast_object",
    "find_world",
    "gather_objects",
    "own_device",
    "process_group",
]
