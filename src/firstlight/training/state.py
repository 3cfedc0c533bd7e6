"""Save and restore the state of a run in its checkpoints, so that a resumed run is identical to an
uninterrupted one.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from firstlight.checkpoint.checkpoint import Checkpoint
from firstlight.checkpoint.sharded import restore_shards
from firstlight.errors import CheckpointError, ModelError
from firstlight.lora.layers import fill_adapter
from firstlight.models import Model
from firstlight.optim.dtensors import full_parameters
from firstlight.parallel import gather_objects
from firstlight.parallel.engine import Engine
from firstlight.training.program import TrainingProgram
from firstlight.weights.loading import file_name, file_tensors

#: Prefix of the names of the tensors in which a checkpoint stores the states of random generators.
RNG_PREFIX = "rng."
#: Number of 32-bit words in the state of numpy's generator, MT19937.
_NUMPY_WORDS = 624


def torch_random_states() -> dict[str, Tensor]:
    """Return the states of torch's random generators, which are used for dropout, as one uint8
    tensor of shape [n] per device.
    """
    states = {f"{RNG_PREFIX}cpu": torch.get_rng_state()}
    # Read the states of GPUs only if CUDA is already in use, because reading a state would create a
    # CUDA context of hundreds of MB.
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states |= {f"{RNG_PREFIX}cuda.{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return states


def restore_torch_random_states(states: Mapping[str, Tensor]) -> None:
    """Restore the states returned by `torch_random_states`, except those of unavailable devices."""
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
    """Return the states of the random generators of all ranks; see `torch_random_states`. The rank
    is `engine.rank`. This is a collective operation.

    The states of rank 0 have the names used by `torch_random_states`. The names of other states
    include the rank. Processes that share the same sequences (tensor parallelism, pipeline stages)
    share one rank and have the same states.
    """
    own = torch_random_states()
    if engine.size == 1:
        return own
    sent = {name: tensor.tolist() for name, tensor in own.items()}
    states = {}
    group = engine.world.size // engine.size
    for rank, received in enumerate(gather_objects(sent)[::group]):
        for name, values in received.items():
            place = name if rank == 0 else _rank_name(name, rank)
            states[place] = torch.tensor(values, dtype=torch.uint8)
    return states


def states_to_write(engine: Engine, words: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the states that this process writes into a sharded checkpoint: the states of torch's
    generators for its rank and, in the main process, also the states of Python's and numpy's
    generators.

    Args:
        engine: the engine of the run.
        words: tensors returned by `python_random_states`.
    """
    own = torch_random_states()
    if engine.is_main:
        return {**own, **words}
    return {_rank_name(name, engine.rank): tensor for name, tensor in own.items()}


def _rank_name(name: str, rank: int) -> str:
    return f"{RNG_PREFIX}rank{rank}.{name.removeprefix(RNG_PREFIX)}"


def restore_own_states(states: Mapping[str, Tensor], program: TrainingProgram, step: int) -> None:
    """Restore the states of this rank's torch generators. If a run is resumed with more processes,
    a rank without a saved state seeds its generators instead.

    Args:
        states: the checkpoint's tensors, see `states_of_ranks`.
        program: program of the run.
        step: step of the checkpoint.
    """
    rank = program.engine.rank
    prefix = _rank_name("", rank) if rank else RNG_PREFIX
    own = {
        RNG_PREFIX + name.removeprefix(prefix): tensor
        for name, tensor in states.items()
        if name.startswith(prefix) and not name.removeprefix(prefix).startswith("rank")
    }
    if rank and f"{RNG_PREFIX}cpu" not in own:
        # The seed depends on the step, so that the random numbers of earlier steps are not
        # repeated.
        torch.manual_seed(program.recipe.run.seed + rank + (step << 32))
        return
    restore_torch_random_states(own)


def python_random_states() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the states of Python's and numpy's global generators. Training does not use them, but
    `on_step` may.

    Returns: The words of the states as int64 tensors, and the rest of the states as JSON values.
    """
    version, words, next_gauss = random.getstate()
    tensors = {f"{RNG_PREFIX}python": torch.tensor(words)}
    rest: dict[str, Any] = {"python": {"version": version, "next_gauss": next_gauss}}
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    if numpy["bit_generator"] == "MT19937":  # Other generators, set by the user, are not saved.
        keys = numpy["state"]["key"].astype(np.int64)
        tensors[f"{RNG_PREFIX}numpy"] = torch.from_numpy(keys)
        rest["numpy"] = {
            "position": int(numpy["state"]["pos"]),
            "has_gauss": int(numpy["has_gauss"]),
            "next_gauss": float(numpy["gauss"]),
        }
    return tensors, rest


def restore_python_random_states(words: Mapping[str, Tensor], rest: Mapping[str, Any]) -> None:
    """Restore the states returned by `python_random_states`. A generator without a saved state is
    left unchanged.

    Raises:
        ValueError, KeyError, TypeError, OverflowError: the states are damaged.
    """
    for name in ("python", "numpy"):
        if (name in rest) != (f"{RNG_PREFIX}{name}" in words):
            raise ValueError(f"only a part of {name}'s state is present")
    if "python" in rest:
        python = tuple(words[f"{RNG_PREFIX}python"].tolist())
        found = rest["python"]
        # Check the value here, because Python would raise an error only when a number is drawn.
        if type(found["next_gauss"]) not in (float, type(None)):
            raise ValueError(f"Python's next_gauss is {found['next_gauss']!r:.100}")
        # A generator whose words are all zero returns only zeros. The last entry of the state is a
        # position, not a word.
        if not any(python[:-1]):
            raise ValueError("Python's words are all zeros")
        random.setstate((found["version"], python, found["next_gauss"]))
    if "numpy" in rest:
        keys = words[f"{RNG_PREFIX}numpy"]
        found = rest["numpy"]
        # Check the state first. If it consists of zeros, numpy can loop forever. If its position is
        # invalid, numpy reads out of bounds.
        if len(keys) != _NUMPY_WORDS or (keys >> 32).any() or not keys.any():
            raise ValueError(f"numpy's state is not {_NUMPY_WORDS} words of 32 bits")
        if type(found["position"]) is not int or not 0 <= found["position"] <= len(keys):
            raise ValueError(f"numpy's position is {found['position']!r:.100}")
        legacy = (found["position"], found["has_gauss"], found["next_gauss"])
        np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *legacy))


#: Largest count that a valid trainer state can contain. A float can represent every integer up to
#: this count.
_MOST_COUNTED = 2**53
#: Numeric keys that the metrics of every step contain in all versions.
_RECORDED = ("learning_rate", "tokens_per_second", "memory_bytes")


@dataclass
class TrainState:
    """State of a run between two steps.

    Attributes:
        step: number of completed optimizer steps.
        tokens_seen: number of valid tokens on which the model was trained.
        initial_tokens: number of tokens that the initial model had read; None if it is unknown.
        rows_seen: number of data rows used so far, including those of rolled-back steps.
        skipped: True if the last step was skipped.
        skipped_steps: number of skipped steps so far.
        micro_batch_rows: micro-batch size in rows, reduced after memory ran out; 0 to use the
            recipe's value.
        val_loss: validation loss after the last step; None if it was not measured. In a run with
            kept text, the sum of the bits per byte of the new and the kept text; for preference
            pairs, of their loss and the kept text's bits per byte.
        best_val_loss: lowest `val_loss` measured after any step; None before the first one.
        worse_evaluations: number of evaluations since `best_val_loss` was measured.
        kept_start: bits per byte of the kept text before the first step; None without kept text.
        replay: first row and share of kept text, once a run has chosen its share; None before.
        pending: metrics of the last step if they have not been written to the logs yet, for example
            because the evaluation after the step has not ended; None once they are written.
        events: lines of events.jsonl in order, such as divergences, rollbacks and out-of-memory
            events.
    """

    step: int = 0
    tokens_seen: int = 0
    initial_tokens: int | None = 0
    rows_seen: int = 0
    skipped: bool = False
    skipped_steps: int = 0
    micro_batch_rows: int = 0
    val_loss: float | None = None
    best_val_loss: float | None = None
    pending: dict[str, Any] | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    kept_start: float | None = None
    replay: tuple[int, float] | None = None
    worse_evaluations: int = 0

    @property
    def tokens_read(self) -> int | None:
        """Number of tokens that the model has read, including its initial model."""
        return None if self.initial_tokens is None else self.initial_tokens + self.tokens_seen


def restore(checkpoint: Checkpoint, program: TrainingProgram) -> TrainState:
    """Restore a checkpoint's weights, moments, loss scale and random states. Return the state of
    its run.

    Raises:
        CheckpointError: the checkpoint does not match the model or optimizer, or is incomplete.
    """
    state = _saved_state(checkpoint.trainer_state)
    # If all steps were skipped, there are no moments yet.
    has_moments = state.skipped_steps < state.step
    folder = checkpoint.sharded_folder
    if folder is None:
        randoms = _restore_tensors(checkpoint, program, has_moments)
    else:
        if program.recipe.distributed.pipeline > 1:
            raise CheckpointError(
                f"{folder} is sharded, which distributed.pipeline does not support: resume "
                "without distributed.pipeline"
            )
        if program.recipe.lora is not None:
            raise CheckpointError(
                f"{folder} contains all weights as shards, but the recipe has a lora section: "
                "remove the section, or convert the checkpoint with `firstlight convert` and "
                "start a new run from the result"
            )
        randoms = restore_shards(
            folder,
            program.model,
            program.optimizer,
            program.recipe.efficiency.vocab_multiple,
            other_prefix=RNG_PREFIX,
            has_moments=has_moments,
        )
    saved = checkpoint.trainer_state
    try:
        restore_own_states(randoms, program, state.step)
        restore_python_random_states(randoms, saved.get("random", {}))
    except (KeyError, IndexError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(
            f"the checkpoint's random-number states are damaged: {error}".splitlines()[0]
        ) from error
    # A checkpoint contains a loss scale only if the run uses fp16.
    if program.scaler is not None and saved.get("loss_scale") is not None:
        program.scaler.load_state_dict(saved["loss_scale"])
    return state


def _restore_tensors(
    checkpoint: Checkpoint, program: TrainingProgram, has_moments: bool
) -> dict[str, Tensor]:
    """Restore weights and moments. Return the states of random-number generators, keyed by name."""
    elsewhere = program.engine.absent_parameters(program.model)
    if program.recipe.lora is not None:
        try:
            # Modules that are fully trained in addition to the adapters may have master weights.
            with (
                program.optimizer.master_weights(changed=True),
                full_parameters(program.model, changed=True),
            ):
                fill_adapter(program.model, checkpoint.model, "the checkpoint's adapter")
        except ModelError as error:
            raise CheckpointError(str(error)) from error
    else:
        set_weights(program, checkpoint.model)
    randoms = {n: t for n, t in checkpoint.optimizer.items() if n.startswith(RNG_PREFIX)}
    moments = {
        name: tensor
        for name, tensor in checkpoint.optimizer.items()
        if name not in randoms and name.rpartition(".")[0] not in elsewhere
    }
    # If the checkpoint has no moments and none are expected, the optimizer's state remains empty.
    if moments or has_moments:
        program.optimizer.load_state_tensors(moments)
    return randoms


def _saved_state(saved: Mapping[str, Any]) -> TrainState:
    """Read the run's state from the trainer state of a checkpoint.

    Raises:
        CheckpointError: a key is missing, or a value is invalid.
    """
    try:
        state = TrainState(
            step=saved["step"],
            tokens_seen=saved["tokens_seen"],
            initial_tokens=saved.get("initial_tokens", None if saved.get("init_from") else 0),
            rows_seen=saved["loader"]["rows_seen"],
            skipped=saved.get("skipped", False),
            skipped_steps=saved.get("skipped_steps", 0),
            micro_batch_rows=saved.get("micro_batch_rows", 0),
            val_loss=saved.get("val_loss"),
            best_val_loss=saved.get("best_val_loss"),
            pending=saved.get("pending"),
            events=list(saved.get("events", [])),
            kept_start=saved.get("kept_start"),
            replay=_share_from(saved.get("replay")),
            worse_evaluations=saved.get("worse_evaluations", 0),
        )
    except KeyError as error:
        raise CheckpointError(f"trainer_state.json lacks {error}") from error
    except TypeError as error:
        raise CheckpointError(f"trainer_state.json is damaged: {error}") from error
    counts = [
        "step",
        "tokens_seen",
        "rows_seen",
        "skipped_steps",
        "micro_batch_rows",
        "worse_evaluations",
    ]
    counts += [] if state.initial_tokens is None else ["initial_tokens"]
    for name in counts:
        count = getattr(state, name)
        # Compare the exact type, because isinstance would accept JSON's true as an int.
        if type(count) is not int or not 0 <= count <= _MOST_COUNTED:
            raise CheckpointError(f"trainer_state.json is damaged: {name} is {count!r:.100}")
    if state.skipped_steps > state.step:
        raise CheckpointError(
            f"trainer_state.json is damaged: {state.skipped_steps} of {state.step} steps were "
            "skipped"
        )
    for name in ("best_val_loss", "kept_start"):
        if type(value := getattr(state, name)) not in (float, type(None)):
            raise CheckpointError(f"trainer_state.json is damaged: {name} is {value!r:.100}")
    if not all(map(_is_event, state.events)):
        raise CheckpointError("trainer_state.json is damaged: an event has no name or no step")
    if state.pending is not None and not _is_record(state.pending, state.step):
        raise CheckpointError(
            f"trainer_state.json is damaged: pending does not contain metrics of step {state.step}"
        )
    return state


def _share_from(saved: Any) -> tuple[int, float] | None:
    """Return the value of `TrainState.replay`, which JSON stores as a list.

    Raises:
        TypeError: the value is damaged.
    """
    if saved is None:
        return None
    if not isinstance(saved, list) or [type(x) for x in saved] not in ([int, float], [int, int]):
        raise TypeError(f"replay is {saved!r:.100}")
    return saved[0], saved[1]


def _is_event(line: Any) -> bool:
    """Return True if a value is a line of events.jsonl with all keys that readers require."""
    is_named = isinstance(line, dict) and isinstance(line.get("event"), str)
    return is_named and type(line.get("step")) is int


def _is_record(pending: Any, step: int) -> bool:
    """Return True if a value contains the metrics of `step` with all keys that readers require."""
    return (
        isinstance(pending, dict)
        and pending.get("step") == step
        and all(type(value) in (int, float, bool, type(None)) for value in pending.values())
        # Reject an int that is larger than the largest float, because formatting it would raise an
        # error.
        and all(abs(value or 0) <= sys.float_info.max for value in pending.values())
        # Step 0 is the evaluation before the first step. Its record does not contain the metrics of
        # a step.
        and (step == 0 or all(type(pending.get(key)) in (int, float) for key in _RECORDED))
        and (step == 0 or "train/loss" in pending)
    )


def set_weights(program: TrainingProgram, weights: Mapping[str, Tensor]) -> None:
    """Copy weights from a checkpoint into the parameters and master weights of a program's model.

    Args:
        program: the program.
        weights: full tensors, keyed by their names in a model file.

    Raises:
        CheckpointError: the weights don't match the model.
    """
    elsewhere = program.engine.absent_parameters(program.model)
    with (
        program.optimizer.master_weights(changed=True),
        full_parameters(program.model, changed=True),
    ):
        _fill_weights(weights, program.model, elsewhere)


@torch.no_grad()
def _fill_weights(weights: Mapping[str, Tensor], model: Model, elsewhere: Iterable[str]) -> None:
    places = file_tensors(model)
    others = {file_name(model, name) for name in elsewhere}
    own = {n: t for n, t in weights.items() if n not in others}
    for name in sorted(places.keys() ^ own.keys()):
        raise CheckpointError(
            f"the checkpoint's weights do not match the model: '{name}' is in only one of them"
        )
    for name, tensor in own.items():
        if tensor.shape != places[name].shape:
            raise CheckpointError(
                f"the checkpoint's tensor '{name}' has shape {list(tensor.shape)}, but the "
                f"model's has {list(places[name].shape)}"
            )
        places[name].copy_(tensor)
