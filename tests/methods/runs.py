"""Short training runs of tiny models, and the difference between two runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from switches import CPU, Combination, of_kinds, recipe_of, switches
from torch import Tensor

from firstlight.data.corpus import TokenDataset
from firstlight.data.loader import TokenLoader, rows_to_batch
from firstlight.hardware.device import Hardware
from firstlight.methods.precision import weights_distance
from firstlight.models import empty_model
from firstlight.optim.schedule import Schedule
from firstlight.recipe import ResolvedRecipe
from firstlight.training.program import TrainingProgram
from firstlight.training.starting_model import attach

STEPS, SEED = 20, 7


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: for models this small a second thread costs time, especially on a
    busy machine.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
        losses: losses of each step, and of the validation rows after the last step.
        start, weights: the trained parameters before the first step and after the last, on the CPU.
        skipped: number of steps skipped by the fp16 loss scaler.
        graphs: number of graphs that torch.compile created.
    """

    losses: list[float]
    start: dict[str, Tensor]
    weights: dict[str, Tensor]
    skipped: int
    graphs: int


class Runs:
    """Runs over one data folder. Each combination runs only once.

    Args:
        data: the folder with prepared data.
        hardware: the hardware of the runs.
        further: settings of all runs, by `section.key`.

    Attributes:
        measured: the difference from the plain run, keyed by method name and model name.
    """

    def __init__(
        self, data: Path, hardware: Hardware = CPU, further: Mapping[str, object] | None = None
    ) -> None:
        self.data, self.hardware, self.further = data, hardware, further or {}
        self._done: dict[Combination, Outcome] = {}
        self.measured: dict[tuple[str, str], Difference] = {}

    def of(self, combination: Combination) -> Outcome:
        """Train 20 steps of a combination, on the same rows for every combination."""
        wanted = frozenset((s.factor, s.value) for s in switches(combination))
        if wanted not in self._done:
            self._done[wanted] = train_recipe(self.recipe(wanted), hardware=self.hardware)
        return self._done[wanted]

    def recipe(
        self, combination: Combination, further: Mapping[str, object] | None = None
    ) -> ResolvedRecipe:
        """Return the recipe of a combination, with settings by `section.key` in addition to those
        of all runs.
        """
        return recipe_of(combination, str(self.data), {**self.further, **(further or {})})

    def plain(self, combination: Combination) -> Outcome:
        """Train the plain fp32 run, with the combination's values of kind "mathematics" only."""
        return self.of(of_kinds(combination, "mathematics"))


def train_recipe(recipe: ResolvedRecipe, seed: int = SEED, hardware: Hardware = CPU) -> Outcome:
    """Train 20 steps of a recipe. The seed determines the order of the rows and dropout."""
    # Earlier compilations count towards Dynamo's limit.
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(seed)
    program = make_program(recipe, hardware)
    start = _trained(program)
    losses, skipped = _steps(program, seed)
    return Outcome(
        [*losses, _validation_loss(program)],
        start,
        _trained(program),
        skipped,
        torch._dynamo.utils.counters["stats"]["unique_graphs"],
    )


def make_program(recipe: ResolvedRecipe, hardware: Hardware = CPU) -> TrainingProgram:
    """Apply a recipe's methods to a model on a device. All runs start from the same weights."""
    model = empty_model(recipe.model, recipe.efficiency.vocab_multiple)
    model.init_weights(torch.Generator().manual_seed(SEED))
    attach(model, recipe, hardware)
    program = TrainingProgram(recipe, model, hardware)
    if program.scaler is not None:
        # A real run skips some of its first steps to find a suitable scale; a comparison can't.
        program.scaler.scale = 2.0**8
    return program


def _steps(program: TrainingProgram, seed: int) -> tuple[list[float], int]:
    recipe, device = program.recipe, program.hardware.device
    assert recipe.data.dir is not None
    assert recipe.data.seq_len is not None
    dataset = TokenDataset(recipe.data.dir, "train", verify=False)
    losses, skipped = [], 0
    pinned = recipe.data.pin_memory
    with TokenLoader(
        dataset,
        recipe.data.seq_len,
        recipe.batch.rows,
        seed,
        document_masking=recipe.data.document_masking,
        workers=recipe.data.workers,
        prefetch=recipe.data.prefetch,
        pin_memory=device.type == "cuda" if pinned is None else pinned,
    ) as loader:
        for step in range(STEPS):
            count = recipe.batch.accumulation(recipe.data.seq_len)
            batches = [loader.next_batch() for _ in range(count)]
            on_device = (batch.to(device) for batch in batches)
            result = program.step(on_device, Schedule(STEPS, 4, STEPS, 0.1).lr_scale(step))
            losses.append(result.loss)
            skipped += result.skipped
    return losses, skipped


@torch.no_grad()
def _validation_loss(program: TrainingProgram) -> float:
    recipe = program.recipe
    assert recipe.data.dir is not None
    assert recipe.data.seq_len is not None
    dataset = TokenDataset(recipe.data.dir, "val", verify=False)
    batch = rows_to_batch(
        dataset, [0, 1, 2], recipe.data.seq_len, 0, document_masking=recipe.data.document_masking
    ).to(program.hardware.device)
    program.model.eval()
    loss = program.evaluation_loss(batch.input_ids, batch.labels, batch.document_ids)
    return float(loss) / batch.num_valid


def _trained(program: TrainingProgram) -> dict[str, Tensor]:
    with program.optimizer.master_weights():
        return {
            name: p.detach().to("cpu", copy=True)
            for name, p in program.model.named_parameters()
            if p.requires_grad
        }


@dataclass(frozen=True)
class Difference:
    """The difference between two runs, in the units of `Switch.loss` and `Switch.weights`."""

    loss: float
    weights: float


def difference(run: Outcome, plain: Outcome) -> Difference:
    """Return the largest difference of the losses, and the distance between the trained weights.

    Rows that pad the vocabulary exist in one run only and must still be zero.
    """
    assert run.weights.keys() == plain.weights.keys()
    names = list(plain.weights)
    found = [run.weights[name][: len(plain.weights[name])] for name in names]
    assert not any(run.weights[name][len(plain.weights[name]) :].any() for name in names)
    losses = [abs(a - b) for a, b in zip(run.losses, plain.losses, strict=True)]
    exact, start = ([values[name] for name in names] for values in (plain.weights, plain.start))
    return Difference(max(losses), weights_distance(found, exact, start))


def same_bits(run: Outcome, other: Outcome) -> bool:
    """Return True if two runs have bitwise identical losses and weights."""
    return run.losses == other.losses and _equal(run.weights, other.weights)


def _equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
