"""Evaluate the model during a run. Evaluations measure the loss on held-out data, generate sample
texts and score the model on tasks.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from firstlight.console import counted
from firstlight.data.corpus import FIRST_REPLAY_SHARE, REPLAY_SHARES, Corpus
from firstlight.errors import DIVERGED_REMEDY, ModelError
from firstlight.evaluation.perplexity import Evaluation, evaluate_split, evaluation_rows
from firstlight.evaluation.scores import Task, change_text, perplexity_of
from firstlight.evaluation.tasks import ready_tasks
from firstlight.files.atomic import write_probe
from firstlight.generation.chat import ChatSession
from firstlight.generation.config import SamplingConfig
from firstlight.generation.engine import GenerationStream
from firstlight.lora.loading import LoadedModel
from firstlight.methods import autocast
from firstlight.methods.attention import choose_attention
from firstlight.models import Model
from firstlight.recipe import Recipe
from firstlight.tokenizer import Tokenizer
from firstlight.training.guard import DivergedError
from firstlight.training.processes import on_main
from firstlight.training.program import TrainingProgram
from firstlight.training.run import Run
from firstlight.training.time_budget import PROBE_BYTES, PROBE_TOKENS


def evaluate(run: Run, check: Callable[[], None]) -> None:
    """Run the evaluations of losses, sample texts and tasks that are due after this step. Before
    the first step, only losses are evaluated, unless the run has no steps.

    In a run with a time budget, the first evaluation of a process also generates two tokens as a
    warm-up. If no sample texts are due, it then generates two more short sequences, from which the
    duration of sample texts is predicted. All of these sequences are discarded.

    Args:
        run: the run. Metrics are added to `run.state.pending`, and sample texts to `run.samples`.
        check: called between batches and repeatedly while text is generated. It may raise an error.

    Raises:
        DivergedError: a loss or the model's output is not finite.
    """
    config = run.recipe.evaluation
    is_start = run.state.step == 0 and not run.is_last(0)
    losses_due, samples_due, tasks_due = evaluations_due(run)
    if not losses_due and not tasks_due and not samples_due:
        return
    check()
    run.program.model.eval()
    run.samples = []
    prompts = config.sample_prompts
    if (
        (losses_due or samples_due)
        and "first text" not in run.times.seconds
        and run.budget is not None
        and prompts
    ):
        # When a process generates text for the first time, the duration includes allocations and
        # imports that happen only once. Measure this separately, because it must not affect the
        # decided number of steps.
        with run.times.part("first text"):
            _sample(run, prompts[0], 2, check)
        if not samples_due:
            few, many = PROBE_TOKENS
            with run.times.part("short text"):
                _sample(run, prompts[0], few, check)
            with run.times.part("long text"):
                _sample(run, prompts[0], many, check)
    if is_start and run.budget is not None and run.checkpoint_bytes >= 4 * PROBE_BYTES:
        with run.times.part("file"):
            on_main(run.engine, lambda: write_probe(run.folder, PROBE_BYTES))
    if samples_due:
        with run.times.part("samples"):
            _write_samples(run, check)
    if losses_due:
        with run.times.part("evaluation"):
            _validate(run, check)
        if run.is_out_of_patience:  # Samples and tasks are then due as after any last step.
            had_samples, (_, samples_due, tasks_due) = samples_due, evaluations_due(run)
            if samples_due and not had_samples:
                _write_samples(run, check)
    if tasks_due:
        with run.times.part("tasks"):
            _score(run, check)


def evaluations_due(run: Run) -> tuple[bool, bool, bool]:
    """Return three booleans: whether losses, sample texts and task scores are due after the current
    step.
    """
    config, step = run.recipe.evaluation, run.state.step
    is_start = step == 0 and not run.is_last(0)
    is_regular = run.is_due(config.every_steps)
    # What is lost of kept text is always measured from the initial model on.
    losses_due = is_regular or run.decides_replay or (is_start and run.kept is not None)
    samples_due = is_regular and not is_start
    if config.samples_at == "epoch":
        samples_due = run.ends_epoch or run.is_last(step)
    tasks_due = bool(run.tasks) and run.is_due(config.tasks_every_steps or config.every_steps)
    return losses_due, samples_due, tasks_due and not is_start


def _write_samples(run: Run, check: Callable[[], None]) -> None:
    """Generate sample text for each prompt of the recipe's `evaluation` section."""
    config, step = run.recipe.evaluation, run.state.step
    for prompt in config.sample_prompts:
        text = _sample(run, prompt, config.sample_tokens, check)
        run.samples.append({"step": step, "prompt": prompt, "text": text})
        run.bar.sample(step, prompt, text)


def _sample(run: Run, prompt: str, tokens: int, check: Callable[[], None]) -> str:
    """Generate at most `tokens` tokens of text for a prompt.

    Raises:
        DivergedError: the model's output is not finite.
    """
    program = run.program
    # Use the same seed in all evaluations, so that only the weights cause differences between the
    # generated samples.
    sampling = SamplingConfig(tokens, run.recipe.evaluation.temperature, top_k=50, seed=0)
    loaded, text = _loaded(program.model, run.tokenizer, run.folder), ""
    try:
        with autocast(program.hardware.device, program.dtype), _any_attention(program):
            # If the model is trained on conversations, pass the prompt as a message that the model
            # answers. A blank prompt is continued as plain text.
            if run.dataset.has_examples and prompt.strip():
                pieces = ChatSession(loaded, settings=sampling).answer(prompt)
            else:
                pieces = iter(GenerationStream(loaded, prompt, sampling))
            for piece in pieces:
                text += piece
                check()
    except ModelError as error:
        raise DivergedError(f"{error}; {DIVERGED_REMEDY}") from None
    return text


def _validate(run: Run, check: Callable[[], None]) -> None:
    """Evaluate the losses on the validation split and on rows of the training split."""
    config, record = run.recipe.evaluation, _record(run)
    measured = functools.partial(evaluate_dataset, run.program, seq_len=run.seq_len, check=check)
    kept = None
    if run.kept is not None:
        kept, _ = measured(run.kept, key="kept/loss", max_rows=config.max_rows)
        record |= {"kept/loss": kept.loss, "kept/bits_per_byte": kept.bits_per_byte}
        if run.state.step == 0:
            run.state.kept_start = kept.bits_per_byte
        if run.decides_replay:
            _choose_replay(run, kept.bits_per_byte)
    if run.validation is not None:
        found, by_corpus = measured(run.validation, key="val/loss", max_rows=config.max_rows)
        record |= _take_validation(run, found, by_corpus, kept)
    if config.train_rows:
        found, by_corpus = measured(run.dataset, key="train_eval/loss", max_rows=config.train_rows)
        record |= {
            "train_eval/loss": found.loss,
            **run.program.preference_metrics("train_eval"),
            **{f"train_eval/loss/{name}": one.loss for name, one in by_corpus.items()},
        }
        run.bar.message(
            f"step {run.state.step}: train_eval/loss {found.loss:.4f} "
            f"({found.rows:,} of {found.total_rows:,} rows)"
        )


def _take_validation(
    run: Run, found: Evaluation, by_corpus: Mapping[str, Evaluation], kept: Evaluation | None
) -> dict[str, float]:
    """Store an evaluation as the run's latest evaluation, show it to the user, and return its
    metrics.

    Args:
        run: the run.
        found: result of the evaluation on the validation split.
        by_corpus: result for each corpus in a mix, keyed by the name of the corpus; empty without a
            mix.
        kept: result for the text that the model should not forget, or None.
    """
    state = run.state
    preferred = run.program.preference_metrics("val")
    rows, best = f"({found.rows:,} of {found.total_rows:,} rows)", state.best_val_loss
    score = found.loss
    if kept is not None:
        # Bits per byte are not defined for preference pairs.
        score = kept.bits_per_byte + (found.loss if preferred else found.bits_per_byte)
        rows = f"{rows}; kept text {kept.bits_per_byte:.4f} bits per byte"
    is_repeated = state.val_loss is not None  # by a run that was stopped during its evaluations
    run.evaluation, state.val_loss = found, score
    if state.step:  # Step 0 is ignored, because an untrained model can't be the best checkpoint.
        state.best_val_loss = score if best is None else min(best, score)
        if not is_repeated:
            _count_patience(run, is_better=best is None or score < best)
    if best is not None and score > best:
        rows = f"{rows}, lowest {'sum ' if kept else ''}so far {best:.4f}"
    if preferred:
        # Perplexity and bits per byte are not defined for the loss over preference pairs.
        run.evaluation = replace(found, perplexity=math.nan, bits_per_byte=math.nan)
        run.bar.message(
            f"step {state.step}: val/loss {found.loss:.4f}, "
            f"{preferred['val/reward_accuracy']:.1%} of pairs in the right order, reward "
            f"margin {preferred['val/reward_margin']:.3f} {rows}"
        )
        return {"val/loss": found.loss, **preferred}
    run.bar.message(
        f"step {state.step}: val/loss {found.loss:.4f}, perplexity {found.perplexity:.2f}, "
        f"{found.bits_per_byte:.4f} bits per byte {rows}"
    )
    return {
        "val/loss": found.loss,
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,
        **{f"val/loss/{name}": one.loss for name, one in by_corpus.items()},
    }


def _count_patience(run: Run, *, is_better: bool) -> None:
    """Count the evaluations since the lowest loss, and record if they end the run."""
    state = run.state
    state.worse_evaluations = 0 if is_better else state.worse_evaluations + 1
    if run.is_out_of_patience:
        evaluations = state.worse_evaluations
        run.add_event("early stop", state.step, evaluations=evaluations)
        run.bar.message(
            f"step {state.step}: no new lowest validation loss in "
            f"{counted(evaluations, 'evaluation')}, so the run ends"
        )


#: Share of kept text in the rest of a run.
_USUAL_SHARE = 0.25
#: Smaller share that is used if the bits per byte of the kept text have fallen by at least the
#: fraction _TAUGHT after a tenth of the run, because the new text then teaches the kept text as
#: well. See "Keep what the model knows" in docs/finetuning.md for the measurements.
_SHARE_IF_TAUGHT, _TAUGHT = 0.1, 0.01
#: Maximum number of passes over the kept text. With more passes, it would be memorised.
_MOST_KEPT_EPOCHS = 4.0


def replay_share(rise: float, passes: float) -> float:
    """Return the share of kept text in the rest of a run, one of `REPLAY_SHARES`.

    Args:
        rise: relative change of the kept text's bits per byte in the first tenth of the run.
        passes: number of passes over the kept text if all of the remaining rows were kept text.
    """
    wanted = _SHARE_IF_TAUGHT if rise <= -_TAUGHT else _USUAL_SHARE
    return max(s for s in REPLAY_SHARES if s <= wanted and s * passes <= _MOST_KEPT_EPOCHS)


def _choose_replay(run: Run, kept: float) -> None:
    start, dataset = run.state.kept_start, run.dataset
    if start is None:  # The run began with the steps of another run, so there is no comparison.
        run.take_replay(FIRST_REPLAY_SHARE)
        return
    left = max(run.batch.before(run.replay_steps) - run.rows_read, 0)
    share = replay_share(kept / start - 1, left / dataset.parts[1].dataset.num_rows(run.seq_len))
    run.take_replay(share)
    then = f" so far; {100 * share:.0f}% of the following rows are kept text"
    if run.is_last(run.state.step):
        then = ""
    elif not share:
        then = " so far; it is too short to be replayed in the rest of the run"
    run.bar.message(f"step {run.state.step}: {change_text(start, kept)} for the kept text{then}")


def _score(run: Run, check: Callable[[], None]) -> None:
    """Score the model on the tasks of the recipe's `evaluation` section."""
    program, record = run.program, _record(run)
    loaded = _loaded(program.model, run.tokenizer, run.folder)
    # Use a larger batch than in training, because the sequences of tasks are short and no
    # activations are stored for a backward pass.
    texts = 4 * run.recipe.batch.rows
    for task in run.tasks:
        try:
            with autocast(program.hardware.device, program.dtype), _any_attention(program):
                scores = task.evaluate(loaded, batch_size=texts, on_texts=lambda *_: check())
        except ModelError as error:
            raise DivergedError(f"{error}; {DIVERGED_REMEDY}") from None
        for score in scores:
            run.bar.message(f"step {run.state.step}: {score}")
            record |= {f"{score.task}/{name}": x for name, x in score.figures().items()}


def _record(run: Run) -> dict[str, Any]:
    """Return the metrics of the current step, to which the evaluations add their results."""
    assert run.state.pending is not None
    return run.state.pending


def evaluate_dataset(
    program: TrainingProgram,
    dataset: Corpus,
    seq_len: int,
    check: Callable[[], None],
    *,
    key: str,
    max_rows: int,
) -> tuple[Evaluation, dict[str, Evaluation]]:
    """Evaluate a run's model on a split of a corpus or of a mix. It uses either all rows or a
    subset of rows that is the same each time.

    For a mix, `max_rows` applies to each corpus, and the loss is the weighted mean of the corpora's
    losses; see `mixed_evaluation`.

    Args:
        program: the run's program, with its model in evaluation mode.
        dataset: the split.
        seq_len: number of tokens per row.
        check: called after each batch. It may raise an error.
        key: name of the loss in the metrics, used in an error message.
        max_rows: maximum number of rows to evaluate, which are spread evenly over the split; 0 for
            all rows.

    Returns: The result for the split, and a dict with the result for each corpus in a mix, keyed by
    the name of the corpus. The dict is empty without a mix.

    Raises:
        DivergedError: a loss is not finite.
    """
    masking = program.recipe.data.document_masking
    found: dict[str, Evaluation] = {}
    for part in dataset.parts:
        is_text = part.dataset.kind != "preference"
        one = evaluate_split(
            program.text_loss if is_text else program.evaluation_loss,
            part.dataset,
            seq_len=seq_len,
            batch_size=program.recipe.batch.rows,
            device=program.hardware.device,
            document_masking=masking,
            rows=evaluation_rows(part.dataset.num_rows(seq_len), max_rows),
            # Check between batches, so that a request to stop does not have to wait for the end of
            # a long evaluation.
            on_rows=lambda *_: check(),
            rank=program.engine.rank,
            processes=program.engine.size,
        )
        if not math.isfinite(one.loss):
            raise DivergedError(f"{key} is {one.loss}; {DIVERGED_REMEDY}")
        found[part.name] = one
    if dataset.kind != "mix":
        return found[""], {}
    together = mixed_evaluation(
        [part.weight for part in dataset.parts],
        list(found.values()),
        [part.dataset.bits_a_nat(document_masking=masking) for part in dataset.parts],
    )
    return together, found


def mixed_evaluation(
    parts: Sequence[int], found: Sequence[Evaluation], bits_a_nat: Sequence[float]
) -> Evaluation:
    """Combine the evaluations of the corpora in a mix.

    The loss is the mean of the corpora's losses weighted by `parts`, regardless of the sizes of
    their splits. This is the expected loss of a token drawn from the mix, as in training. The bits
    per byte are obtained by converting this loss to bits and dividing it by the mean number of text
    bytes per token of the mix.

    Args:
        parts: weight of each corpus.
        found: result for each corpus. All results must have the same split, seq_len and
            document_masking.
        bits_a_nat: value of `TokenDataset.bits_a_nat` for each corpus.
    """
    total = sum(parts)
    loss = math.fsum(p * one.loss for p, one in zip(parts, found, strict=True)) / total
    # Mean bytes per token of the mix, multiplied by ln 2 because the loss is in nats. The weights
    # can't be applied to the corpora's bits per byte, because the weights are fractions of the
    # tokens, not of the bytes.
    bytes_a_bit = math.fsum(p / bits for p, bits in zip(parts, bits_a_nat, strict=True)) / total
    return Evaluation(
        loss=loss,
        perplexity=perplexity_of(loss),
        bits_per_byte=loss / bytes_a_bit,
        gzip_bits_per_byte=None,
        tokens=sum(one.tokens for one in found),
        rows=sum(one.rows for one in found),
        total_rows=sum(one.total_rows for one in found),
        split=found[0].split,
        seq_len=found[0].seq_len,
        document_masking=found[0].document_masking,
    )


def tasks_of(recipe: Recipe, model: Model, tokenizer: Tokenizer) -> list[Task]:
    """Read and check the tasks of a recipe's `evaluation` section.

    Args:
        recipe: the recipe.
        model: the model. The tasks must fit into its context. Its weights are not used.
        tokenizer: tokenizer of the data.

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


@contextlib.contextmanager
def _any_attention(program: TrainingProgram) -> Iterator[None]:
    """Use the sdpa attention backend instead of flash or cudnn. The flash and cudnn backends do not
    support the masks that are needed when text continues a cached context. In addition, cuDNN would
    create a plan for each text length (see `varying_lengths`).
    """
    backend = program.recipe.efficiency.attention
    if backend not in ("flash", "cudnn"):
        yield
        return
    choose_attention(program.model, "sdpa")
    try:
        yield
    finally:
        choose_attention(program.model, backend)


def _loaded(model: Model, tokenizer: Tokenizer, run_folder: Path) -> LoadedModel:
    eos = tokenizer.eos_token_id
    return LoadedModel(model, tokenizer, () if eos is None else (eos,), run_folder)
