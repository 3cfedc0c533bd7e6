"""Scores models in the tasks of lm-evaluation-harness (Gao et al. 2024).

The harness reads the tasks, formats the prompts and computes the metrics. This module implements
the harness' model interface: log-likelihoods of texts, and generated continuations. Texts are
encoded in the same way as by the harness' own transformers backend (`HFLM`).
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from firstlight.errors import ConfigError, InputError, MissingDependencyError, nearest
from firstlight.evaluation.scores import (
    Likelihood,
    Metric,
    Progress,
    TaskResult,
    TokenPair,
    likelihoods,
)
from firstlight.generation.batch import BatchDecoder
from firstlight.generation.config import SamplingConfig
from firstlight.generation.continuation import Continuation
from firstlight.generation.engine import continuation, pieces_of_many, tokenizer_of
from firstlight.lora.loading import LoadedModel

#: Default seeds of `lm_eval.simple_evaluate`: for Python's random; for numpy, torch and few-shot
#: examples.
_RANDOM_SEED, _OTHER_SEED = 0, 1234
#: Bootstrap samples for standard errors that have no formula; the harness' default of 100,000 takes
#: minutes.
_BOOTSTRAP_ITERATIONS = 1_000


@dataclass(frozen=True)
class HarnessTasks:
    """Tasks that the harness has loaded; implements `scores.Task`.

    Attributes:
        loaded_tasks: the result of the harness' `TaskManager.load`.
        items: number of items of each task, the first ones; None is all.
    """

    loaded_tasks: Mapping[str, Any]
    items: int | None

    def evaluate(
        self, loaded: LoadedModel, *, batch_size: int, on_texts: Progress | None = None
    ) -> list[TaskResult]:
        """All metrics of all tasks and groups, under the harness' names. The metric of a filter
        other than "none" is named `METRIC,FILTER`. See `scores.Task.evaluate`."""
        import lm_eval

        with _by_itself():
            # simple_evaluate would do the same, and then collect information about the machine,
            # which takes seconds.
            found = lm_eval.evaluate(
                harness_model(loaded, batch_size, on_texts),
                self.loaded_tasks,
                limit=self.items,
                bootstrap_iters=_BOOTSTRAP_ITERATIONS,
                log_samples=False,
            )
        assert found is not None
        counts = {name: count["effective"] for name, count in found["n-samples"].items()}
        return [
            TaskResult(name, _metrics(figures), counts.get(name))
            for name, figures in found["results"].items()
        ]


def ready_harness(
    names: Sequence[str], *, items: int | None, task_folder: str | Path | None
) -> HarnessTasks:
    """Load tasks, groups or tags of the harness, with their data.

    Args:
        names: names of tasks, groups or tags.
        items: number of items of each task, the first ones; None is all.
        task_folder: folder with further tasks in the harness' YAML format. If it has all tasks of
            `names`, the harness' own tasks are not listed, which would take seconds. The harness
            runs Python code that such a folder contains.

    Raises:
        MissingDependencyError: the harness is not installed.
        ConfigError: a name is unknown, or `task_folder` does not exist.
        InputError: a task or its data can't be loaded, or the task runs generated code or is
            multimodal, which is not supported.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise MissingDependencyError("lm_eval", "eval", "a task lm-eval:NAME") from error
    if task_folder is not None and not Path(task_folder).expanduser().is_dir():
        raise ConfigError(f"the folder of tasks {task_folder} does not exist")
    folder = None if task_folder is None else str(Path(task_folder).expanduser())
    with _by_itself():
        manager = TaskManager(include_path=folder, include_defaults=folder is None)
        if folder is not None and not set(names) <= set(manager.all_tasks):
            manager = TaskManager(include_path=folder)
        for name in names:
            if name not in manager.all_tasks:
                raise ConfigError(
                    f"task lm-eval:{name} is unknown{nearest(name, manager.all_tasks)}: "
                    "`lm-eval ls tasks` lists those of the harness, --task-folder adds your own"
                )
        try:
            found = manager.load(list(names))
        except Exception as error:
            # A task's files and the library that loads its data can raise any error.
            raise InputError(
                f"lm-eval:{','.join(names)} can't be loaded: {type(error).__name__}: "
                f"{str(error)[:300]}"
            ) from error
    for name, task in found["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            raise InputError(
                f"task lm-eval:{name} runs code that the model wrote, or shows it pictures, which "
                "is not done here: take it out"
            )
        # The defaults of simple_evaluate, which is not called.
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=_OTHER_SEED)
    return HarnessTasks(found, items)


def _metrics(figures: Mapping[str, Any]) -> dict[str, Metric]:
    """Convert the harness' results `{"acc,none": ..., "acc_stderr,none": ...}` to metrics by name.
    Values that are not finite numbers are left out."""
    found: dict[str, Metric] = {}
    for key, value in figures.items():
        name, comma, kind = key.partition(",")
        if not comma or name.endswith("_stderr") or not _is_finite(value):
            continue
        error = figures.get(f"{name}_stderr,{kind}", math.nan)
        shown = name if kind == "none" else key
        found[shown] = Metric(float(value), float(error) if _is_finite(error) else None)
    return found


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and math.isfinite(value)


@contextlib.contextmanager
def _by_itself() -> Iterator[None]:
    """A context for calls of the harness: random generators have the harness' default seeds, its
    output goes to stderr, and it starts no processes. The exit restores the random states of
    Python, numpy and torch."""
    states = random.getstate(), np.random.get_state()
    before = os.environ.get("DISABLE_MULTIPROC")
    # The harness' bootstrap would fork this process, which is unsafe with threads.
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with torch.random.fork_rng(), contextlib.redirect_stdout(sys.stderr):
            random.seed(_RANDOM_SEED)
            np.random.seed(_OTHER_SEED)
            torch.manual_seed(_OTHER_SEED)
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before


#: The harness' default limit of new tokens, for tasks that set none.
_MAX_NEW_TOKENS = 256
_TOKEN_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = {"top_k", "top_p", "min_p", "repetition_penalty"}


class _HarnessMethods:
    """The methods of the harness' interface `lm_eval.api.model.LM`, where they are documented."""

    def __init__(self, loaded: LoadedModel, batch_size: int, on_texts: Progress | None) -> None:
        super().__init__()
        self._loaded = loaded
        self._texts_at_a_time = batch_size
        self._on_texts = on_texts
        self._tokenizer = tokenizer_of(loaded)
        self._limit = loaded.model.config.max_position_embeddings

    @property
    def eot_token_id(self) -> int:
        eos = self._tokenizer.eos_token_id
        return self._tokenizer.separator_id if eos is None else eos

    @property
    def prefix_token_id(self) -> int:
        return self._tokenizer.separator_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """The token ids of a text, with a BOS token before them if the model expects one and the
        text does not begin with it. Names of special tokens in the text are encoded as these
        tokens, as the harness does it."""
        tokenizer = self._tokenizer
        ids = tokenizer.encode(string, special_tokens=True)
        begins = tokenizer.bos_token is not None and string.startswith(tokenizer.bos_token)
        wanted = not begins if add_special_tokens is None else add_special_tokens
        return [tokenizer.separator_id, *ids] if tokenizer.add_bos and wanted else ids

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        # The harness' progress bar would overwrite firstlight's.
        found: list[tuple[float, bool]] = super().loglikelihood(  # type: ignore[misc]
            requests, disable_tqdm=True
        )
        return found

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = [TokenPair(tuple(c), tuple(more)) for _, c, more in requests]
        for pair in pairs:
            if not 0 < len(pair.continuation) <= self._limit:
                raise InputError(
                    f"a task has a text of {len(pair.continuation)} tokens to be scored, and the "
                    f"model's context has room for 1 to {self._limit}"
                )
        return [(one.logprob, one.is_greedy) for one in self._scored(pairs)]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        windows = [self._windows(self.tok_encode(request.args[0])) for request in requests]
        scored = iter(self._scored([pair for several in windows for pair in several]))
        return [math.fsum(next(scored).logprob for _ in several) for several in windows]

    def _scored(self, pairs: list[TokenPair]) -> list[Likelihood]:
        return likelihoods(
            self._loaded.model, pairs, batch_size=self._texts_at_a_time, on_pairs=self._on_texts
        )

    def _windows(self, ids: list[int]) -> list[TokenPair]:
        """A text split into windows of the model's context length, so that each token is predicted
        once."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows = get_rolling_token_windows(
            token_list=ids,
            prefix_token=self.prefix_token_id,
            max_seq_len=self._limit,
            context_len=1,
        )
        return [TokenPair(*map(tuple, make_disjoint_window(window))) for window in windows]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        texts = [
            self._text_of(*request.args, number=number) for number, request in enumerate(requests)
        ]
        longest = max((len(t.prompt_ids) + t.config.max_new_tokens for t in texts), default=1)
        size = max(min(self._texts_at_a_time, len(texts)), 1)
        done = 0
        for index, _ in pieces_of_many(texts, BatchDecoder(self._loaded.model, size, longest)):
            if texts[index].finish_reason is not None:
                done += 1
                if self._on_texts is not None:
                    self._on_texts(done, len(texts))
        # As the harness does: new tokens are decoded without the prompt, which drops the space
        # before the first word.
        return [
            before_stops(self._tokenizer.decode(text.token_ids), text.config.stop) for text in texts
        ]

    def _text_of(self, context: str, options: Mapping[str, Any], *, number: int) -> Continuation:
        """The prompt of a request with its sampling settings, truncated from the left so that
        prompt and new tokens fit into the model's context."""
        config = sampling_of(options, number)
        room = self._limit - config.max_new_tokens
        if room < 1:
            raise InputError(
                f"a task asks for {config.max_new_tokens} new tokens, and the model's "
                f"context has room for {self._limit}: set its max_gen_toks to less"
            )
        ids = self.tok_encode(context)[-room:] or [self._tokenizer.separator_id]
        return continuation(self._loaded, ids, config)


def harness_model(loaded: LoadedModel, batch_size: int, on_texts: Progress | None) -> Any:
    """The model as a `lm_eval.api.model.LM`.

    Args:
        loaded: a model with a tokenizer.
        batch_size: number of texts that are computed at a time.
        on_texts: function that is called after each batch with the numbers of completed and of all
            texts.

    Raises:
        ModelError: the model has no tokenizer.
    """
    from lm_eval.api.model import TemplateLM

    class FirstlightLM(_HarnessMethods, TemplateLM):  # type: ignore[misc]
        """See `_HarnessMethods`. Defined here because the base class is in an optional package."""

    return FirstlightLM(loaded, batch_size, on_texts)


def sampling_of(options: Mapping[str, Any], number: int) -> SamplingConfig:
    """The sampling settings of a task's `generation_kwargs`.

    Args:
        options: the request's options.
        number: number of the request, which is its seed if it samples.

    Raises:
        ConfigError: an option is unknown, or out of range.
    """
    known = {"until", "do_sample", "temperature", *_TOKEN_LIMITS, *_SAMPLING}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(
            f"a task's generation_kwargs have {', '.join(unknown)}, which is not known here "
            f"(known: {', '.join(sorted(known))})"
        )
    until = options.get("until") or []
    limits = [options[name] for name in _TOKEN_LIMITS if options.get(name) is not None]
    temperature = float(options.get("temperature") or 0.0)
    return SamplingConfig(
        max_new_tokens=int(limits[0]) if limits else _MAX_NEW_TOKENS,
        temperature=temperature if options.get("do_sample", temperature > 0) else 0.0,
        stop=tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop),
        seed=number,
        **{name: options[name] for name in _SAMPLING & set(options)},
    )


def before_stops(text: str, stops: Sequence[str]) -> str:
    """The text before the first occurrence of any of the stop texts."""
    for stop in stops:
        text = text.partition(stop)[0]
    return text
