"""Saving and restoring the states of the random-number generators of torch, Python and numpy."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from firstlight.parallel import gather_objects
from firstlight.parallel.engine import Engine
from firstlight.training.program import TrainingProgram

#: Prefix of the names of generator states among a checkpoint's tensors.
RNG_PREFIX = "rng."
#: Number of 32-bit words in the state of numpy's generator, MT19937.
_NUMPY_WORDS = 624


def torch_random_states() -> dict[str, Tensor]:
    """The states of torch's generators, from which dropout draws: uint8 [n] for each device."""
    states = {f"{RNG_PREFIX}cpu": torch.get_rng_state()}
    # Only if CUDA is in use: reading a state would otherwise make a context of hundreds of MB.
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states |= {f"{RNG_PREFIX}cuda.{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return states


def restore_torch_random_states(states: Mapping[str, Tensor]) -> None:
    """Restore the states of `torch_random_states`, except those of devices that are not here."""
    torch.set_rng_state(states[f"{RNG_PREFIX}cpu"])
    for name, tensor in states.items():
        _, kind, *index = name.split(".")
        if (
            kind == "cuda"
            and torch.cuda.is_available()
            and int(index[0]) < torch.cuda.device_count()
        ):
            torch.cuda.set_rng_state(tensor, int(index[0]))


def states_of_ranks(engine: Engine) -> dict[str, Tensor]:
    """`torch_random_states` of every `engine.rank`. A collective.

    Names are those of `torch_random_states` for rank 0, and have the rank in them for other ranks.
    Processes that share the same sequences (tensor parallelism, pipeline stages) have one rank, and
    the same states.
    """
    own = torch_random_states()
    if engine.size == 1:
        return own
    sent = {name: tensor.tolist() for name, tensor in own.items()}
    states = {}
    group = engine.world.size // engine.size
    for rank, received in enumerate(gather_objects(sent)[::group]):
        for name, values in received.items():
            place = name if rank == 0 else _name_of_rank(name, rank)
            states[place] = torch.tensor(values, dtype=torch.uint8)
    return states


def states_to_write(engine: Engine, words: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The states that this process writes into a sharded checkpoint: its part of `states_of_ranks`,
    and in the main process also the states of Python and numpy.

    Args:
        engine: the engine of the run.
        words: tensors of `python_random_states`.
    """
    own = torch_random_states()
    if engine.is_main:
        return {**own, **words}
    return {_name_of_rank(name, engine.rank): tensor for name, tensor in own.items()}


def _name_of_rank(name: str, rank: int) -> str:
    return f"{RNG_PREFIX}rank{rank}.{name.removeprefix(RNG_PREFIX)}"


def restore_own_states(states: Mapping[str, Tensor], program: TrainingProgram, step: int) -> None:
    """Restore the states of torch's generators of this rank. A rank without a saved state, in a run
    that is resumed with more processes, is seeded anew.

    Args:
        states: the checkpoint's tensors, see `states_of_ranks`.
        program: program of the run.
        step: step of the checkpoint.
    """
    rank = program.engine.rank
    prefix = _name_of_rank("", rank) if rank else RNG_PREFIX
    own = {
        RNG_PREFIX + name.removeprefix(prefix): tensor
        for name, tensor in states.items()
        if name.startswith(prefix) and not name.removeprefix(prefix).startswith("rank")
    }
    if rank and f"{RNG_PREFIX}cpu" not in own:
        # The seed depends on the step, so that numbers of earlier steps are not drawn again.
        torch.manual_seed(program.recipe.run.seed + rank + (step << 32))
        return
    restore_torch_random_states(own)


def python_random_states() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The states of Python's and numpy's global generators. Training does not draw from them, but
    `on_step` may.

    Returns:
        (words of the states as int64 tensors, the rest of the states as JSON values).
    """
    version, words, next_gauss = random.getstate()
    tensors = {f"{RNG_PREFIX}python": torch.tensor(words)}
    rest: dict[str, Any] = {"python": {"version": version, "next_gauss": next_gauss}}
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    if numpy["bit_generator"] == "MT19937":  # else the user has set another one, and keeps it
        keys = numpy["state"]["key"].astype(np.int64)
        tensors[f"{RNG_PREFIX}numpy"] = torch.from_numpy(keys)
        rest["numpy"] = {
            "position": int(numpy["state"]["pos"]),
            "has_gauss": int(numpy["has_gauss"]),
            "next_gauss": float(numpy["gauss"]),
        }
    return tensors, rest


def restore_python_random_states(words: Mapping[str, Tensor], rest: Mapping[str, Any]) -> None:
    """Restore the states of `python_random_states`. A generator without a saved state is left as it
    is.

    Raises:
        ValueError, KeyError, TypeError, OverflowError: the states are damaged.
    """
    for name in ("python", "numpy"):
        if (name in rest) != (f"{RNG_PREFIX}{name}" in words):
            raise ValueError(f"only a part of {name}'s state is there")
    if "python" in rest:
        python = tuple(words[f"{RNG_PREFIX}python"].tolist())
        found = rest["python"]
        # Checked here, since Python would raise an error only when a number is drawn.
        if type(found["next_gauss"]) not in (float, type(None)):
            raise ValueError(f"Python's next_gauss is {found['next_gauss']!r:.100}")
        # A state of zeros yields zeros for ever. The last entry is a position, not a word.
        if not any(python[:-1]):
            raise ValueError("Python's words are all zeros")
        random.setstate((found["version"], python, found["next_gauss"]))
    if "numpy" in rest:
        keys = words[f"{RNG_PREFIX}numpy"]
        found = rest["numpy"]
        # With a state of zeros numpy can loop for ever, and with a wrong position it reads beyond
        # the words.
        if len(keys) != _NUMPY_WORDS or (keys >> 32).any() or not keys.any():
            raise ValueError(f"numpy's state is not {_NUMPY_WORDS} words of 32 bits")
        if type(found["position"]) is not int or not 0 <= found["position"] <= len(keys):
            raise ValueError(f"numpy's position is {found['position']!r:.100}")
        legacy = (found["position"], found["has_gauss"], found["next_gauss"])
        np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *legacy))
