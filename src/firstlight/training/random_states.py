"""States of the random-number generators of torch, Python and numpy, saved and put back."""

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

#: Beginning of the names of generators' states among a checkpoint's tensors.
RNG_PREFIX = "rng."
#: Words of the state of numpy's generator, MT19937.
_NUMPY_WORDS = 624


def torch_random_states() -> dict[str, Tensor]:
    """The states of torch's generators, which dropout draws from: bytes [n] for each device."""
    states = {f"{RNG_PREFIX}cpu": torch.get_rng_state()}
    # On a GPU that nothing has used, asking would make a context of hundreds of MB.
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states |= {f"{RNG_PREFIX}cuda.{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return states


def restore_torch_random_states(states: Mapping[str, Tensor]) -> None:
    """Put back what `torch_random_states` gave, as far as the devices are there."""
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
    """`torch_random_states` of every `engine.rank`: of 0 by their own names, of others with theirs.

    Processes that compute the same rows draw the same.
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
    """This process' part of `states_of_ranks`; in the main one also the states all ranks share."""
    own = torch_random_states()
    if engine.is_main:
        return {**own, **words}
    return {_name_of_rank(name, engine.rank): tensor for name, tensor in own.items()}


def _name_of_rank(name: str, rank: int) -> str:
    return f"{RNG_PREFIX}rank{rank}.{name.removeprefix(RNG_PREFIX)}"


def restore_own_states(states: Mapping[str, Tensor], program: TrainingProgram, step: int) -> None:
    """Put back the states of torch's generators that this rank had; of a rank that was not there,
    new ones."""
    rank = program.engine.rank
    prefix = _name_of_rank("", rank) if rank else RNG_PREFIX
    own = {
        RNG_PREFIX + name.removeprefix(prefix): tensor
        for name, tensor in states.items()
        if name.startswith(prefix) and not name.removeprefix(prefix).startswith("rank")
    }
    if rank and f"{RNG_PREFIX}cpu" not in own:
        # Another seed for each step, so that earlier random numbers are not drawn again.
        torch.manual_seed(program.recipe.run.seed + rank + (step << 32))
        return
    restore_torch_random_states(own)


def python_random_states() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The states of Python's and numpy's generators, which nothing here draws from but `on_step`
    may: the words as tensors, and the rest as JSON values."""
    version, words, next_gauss = random.getstate()
    tensors = {f"{RNG_PREFIX}python": torch.tensor(words)}
    rest: dict[str, Any] = {"python": {"version": version, "next_gauss": next_gauss}}
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    if numpy["bit_generator"] == "MT19937":  # else the person has put in another, and keeps it
        keys = numpy["state"]["key"].astype(np.int64)
        tensors[f"{RNG_PREFIX}numpy"] = torch.from_numpy(keys)
        rest["numpy"] = {
            "position": int(numpy["state"]["pos"]),
            "has_gauss": int(numpy["has_gauss"]),
            "next_gauss": float(numpy["gauss"]),
        }
    return tensors, rest


def restore_python_random_states(words: Mapping[str, Tensor], rest: Mapping[str, Any]) -> None:
    """Restore the states from `python_random_states`; a missing state stays as it is."""
    for name in ("python", "numpy"):
        if (name in rest) != (f"{RNG_PREFIX}{name}" in words):
            raise ValueError(f"only a part of {name}'s state is there")
    if "python" in rest:
        python = tuple(words[f"{RNG_PREFIX}python"].tolist())
        found = rest["python"]
        # Python would notice a wrong one when the next number is drawn.
        if type(found["next_gauss"]) not in (float, type(None)):
            raise ValueError(f"Python's next_gauss is {found['next_gauss']!r:.100}")
        # From zeros Python draws nothing but zeros; the last entry is a position.
        if not any(python[:-1]):
            raise ValueError("Python's words are all zeros")
        random.setstate((found["version"], python, found["next_gauss"]))
    if "numpy" in rest:
        keys = words[f"{RNG_PREFIX}numpy"]
        found = rest["numpy"]
        # From zeros numpy draws for ever, and it reads beyond the words for any other position.
        if len(keys) != _NUMPY_WORDS or (keys >> 32).any() or not keys.any():
            raise ValueError(f"numpy's state is not {_NUMPY_WORDS} words of 32 bits")
        if type(found["position"]) is not int or not 0 <= found["position"] <= len(keys):
            raise ValueError(f"numpy's position is {found['position']!r:.100}")
        legacy = (found["position"], found["has_gauss"], found["next_gauss"])
        np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *legacy))
