"""How a run's model does in between: the loss on held-out text, and texts of its own."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from firstlight.data.corpus import TokenDataset
from firstlight.efficiency import autocast
from firstlight.efficiency.attention import choose_attention
from firstlight.errors import ModelError
from firstlight.evaluation.perplexity import Evaluation, evaluate_split, evaluation_rows
from firstlight.evaluation.results import Task, TaskResult
from firstlight.evaluation.tasks import ready_tasks
from firstlight.generation.chat import ChatSession
from firstlight.generation.config import SamplingConfig
from firstlight.generation.engine import GenerationStream
from firstlight.models import Model
from firstlight.recipe import Recipe
from firstlight.tokenizer import Tokenizer
from firstlight.training.guard import DIVERGED, DivergedError
from firstlight.training.program import TrainingProgram
from firstlight.weights.huggingface import LoadedModel


def split_loss(
    program: TrainingProgram,
    dataset: TokenDataset,
    seq_len: int,
    check: Callable[[], None],
    *,
    key: str,
    max_rows: int,
) -> Evaluation:
    """The loss of a run's model on a split, or on the same rows of it each time.

    Args:
        program: its model is in evaluation mode.
        dataset: the split.
        seq_len: tokens a row.
        check: called after each batch; may raise.
        key: name of the loss in the metrics.
        max_rows: evaluated rows, spread evenly over the split; 0 is all.

    Raises:
        DivergedError: the loss is not finite.
    """
    recipe = program.recipe
    found = evaluate_split(
        program.evaluation_loss,
        dataset,
        seq_len=seq_len,
        batch_size=recipe.batch.rows,
        device=program.hardware.device,
        document_masking=recipe.data.document_masking,
        rows=evaluation_rows(dataset.num_rows(seq_len), max_rows),
        on_rows=lambda *_: check(),
        rank=program.engine.rank,
        processes=program.engine.size,
    )
    if not math.isfinite(found.loss):
        raise DivergedError(f"{key} is {found.loss}; {DIVERGED}")
    return found


def sample_texts(
    program: TrainingProgram,
    tokenizer: Tokenizer,
    run_folder: Path,
    check: Callable[[], None],
    *,
    answered: bool = False,
) -> Iterator[tuple[str, str]]:
    """Each prompt of the recipe's `evaluation` section, and what the model makes of it.

    Args:
        program: its model is in evaluation mode.
        check: called after each piece of text; may raise.
        answered: prompts are messages, laid out by the tokenizer's chat template and answered;
            but blank ones are texts.

    Raises:
        DivergedError: the weights are of no use.
    """
    config = program.recipe.evaluation
    sampling = SamplingConfig(config.sample_tokens, config.temperature, top_k=50, seed=0)
    loaded = _loaded(program.model, tokenizer, run_folder)
    for prompt in config.sample_prompts:
        text = ""
        try:
            with autocast(program.hardware.device, program.dtype):
                if answered and prompt.strip():
                    pieces = ChatSession(loaded, settings=sampling).answer(prompt)
                else:
                    pieces = iter(GenerationStream(loaded, prompt, sampling))
                for piece in pieces:
                    text += piece
                    check()
        except ModelError as error:
            raise DivergedError(f"{error}; {DIVERGED}") from None
        yield prompt, text


def tasks_of(recipe: Recipe, model: Model, tokenizer: Tokenizer) -> list[Task]:
    """The tasks of a recipe's `evaluation` section, read and checked.

    Args:
        model: whose context they must fit; its weights are not looked at.

    Raises:
        ConfigError, InputError, MissingDependencyError: see `ready_tasks`.
    """
    config = recipe.evaluation
    return ready_tasks(
        config.tasks,
        _loaded(model, tokenizer, Path(recipe.run.dir or "")),
        items=config.task_items or None,
        task_folder=config.task_folder,
    )


def task_results(
    program: TrainingProgram,
    tokenizer: Tokenizer,
    run_folder: Path,
    tasks: Sequence[Task],
    check: Callable[[], None],
) -> Iterator[TaskResult]:
    """How a run's model does in tasks.

    Args:
        program: its model is in evaluation mode.
        tasks: from `tasks_of`.
        check: called after each batch; may raise.

    Raises:
        DivergedError: the weights are of no use.
    """
    loaded = _loaded(program.model, tokenizer, run_folder)
    # The endings of an item are short, and nothing is kept for a backward pass.
    texts = 4 * program.recipe.batch.rows
    for task in tasks:
        try:
            with autocast(program.hardware.device, program.dtype), _masked_attention(program):
                found = task.evaluate(loaded, batch_size=texts, on_texts=lambda *_: check())
        except ModelError as error:
            raise DivergedError(f"{error}; {DIVERGED}") from None
        yield from found


@contextlib.contextmanager
def _masked_attention(program: TrainingProgram) -> Iterator[None]:
    """Attention that takes a mask, which texts that go on from a stored context need and some
    kernels of GPUs do not have."""
    way = program.recipe.efficiency.attention
    if way not in ("flash", "cudnn"):
        yield
        return
    choose_attention(program.model, "sdpa")
    try:
        yield
    finally:
        choose_attention(program.model, way)


def _loaded(model: Model, tokenizer: Tokenizer, run_folder: Path) -> LoadedModel:
    eos = tokenizer.eos_token_id
    return LoadedModel(model, tokenizer, () if eos is None else (eos,), run_folder)
