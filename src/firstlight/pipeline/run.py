"""`train_texts`: texts in, a trained model out, within the time there is."""

from __future__ import annotations

import lzma
import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firstlight.console import say
from firstlight.data.sources import limited_sources
from firstlight.errors import ConfigError
from firstlight.pipeline.choices import Choices
from firstlight.pipeline.facts import Length, TextFacts
from firstlight.pipeline.plan import (
    DEFAULT_SECONDS,
    TextPlan,
    plan_lines,
    plan_texts,
    request_of,
    scan_texts,
    time_text,
)
from firstlight.pipeline.run_folder import (
    DATA_FOLDER,
    RECIPE_NAME,
    place_of_run,
    read_state,
    remember,
    remembered,
)

if TYPE_CHECKING:
    from firstlight.hardware.device import Hardware
    from firstlight.pipeline.result import TextRun
    from firstlight.recipe import Recipe, ResolvedRecipe
    from firstlight.tokenizer import Tokenizer
    from firstlight.training.forecast import Forecast
    from firstlight.training.loop import TrainResult

#: Text that a tokenizer is trained on: more hardly changes it.
_TOKENIZER_BYTES = 24 << 20
#: Text that is prepared whatever the length of the run; of more, as much as the run reads.
_PREPARED_BYTES = 64 << 20
#: Part of the text that is prepared beyond what the run is expected to read.
_SPARE = 1.5
#: Held-out text that xz is tried on.
_XZ_BYTES = 8 << 20
#: Seconds of the whole command that are not training: starting the run, and its report.
_RESERVED_SECONDS = 4.0
#: A run that is shorter is not worth its start.
_LEAST_SECONDS = 10.0

#: Called with a plan; returns the seconds that a person chose.
Ask = Callable[[TextPlan], float]


def train_texts(
    inputs: str | Path | Sequence[str | Path],
    *,
    budget: str | float | None = None,
    tokens: str | float | None = None,
    steps: int | None = None,
    size: str | None = None,
    run_dir: str | Path | None = None,
    overrides: Mapping[str, Any] | Sequence[tuple[str, str]] = (),
    text_key: str = "text",
    progress: bool = True,
    ask: Ask | None = None,
    began: float | None = None,
) -> TextRun:
    """Train a model on texts: tokenizer, shards, settings, training, evaluation, report.

    A second call with the same texts and options goes on with a run that was not finished, and one
    with other options begins a run beside it with the same tokenizer and shards.

    Args:
        inputs: files, folders, globs, "stdlib" or "hf:NAME[:CONFIG]"; see `find_sources`.
        budget: wall-clock time of the whole call, such as "30m", or seconds; of budget, tokens and
            steps at most one is given. Without any, it is ten minutes.
        tokens: tokens to train on, such as "10M".
        steps: optimizer steps.
        size: "tiny", "small", "medium", "large", "xl" or a number of parameters such as "10M"; None
            chooses by the budget and the amount of text.
        run_dir: run folder; None is runs/NAME, with the name of the first input.
        overrides: values of the recipe by `section.key`; the other choices follow.
        text_key: field of the text in JSONL lines, tables and datasets.
        progress: show what happens on stderr.
        ask: asked for the seconds where no length is given.
        began: `time.time()` that the budget counts from; None is now.

    Raises:
        InputError: the inputs can't be read, or hold no text.
        ConfigError: an argument is invalid, the budget is too short, or `run_dir` has another run.
        TrainingError, StorageError, DataError: see `train`.
    """
    from firstlight.pipeline.result import result_of

    began = time.time() if began is None else began
    tell = say if progress else _silent
    request = request_of(inputs, budget, tokens, steps, size, overrides, text_key)
    scan = scan_texts(request, tell, progress=progress)
    plan: TextPlan | None = None
    if not request.has_length:
        if ask is None:
            tell(f"no --budget is given: {time_text(DEFAULT_SECONDS)}")
            request = replace(request, seconds=DEFAULT_SECONDS)
        else:
            plan, asked = plan_texts(request, scan), time.time()
            request = replace(request, seconds=ask(plan))
            # The time that a person takes to answer is not the run's.
            began += time.time() - asked
    folder, state = place_of_run(request, scan, run_dir)
    result, choices = None, None
    if state.get("complete"):
        tell(f"{folder} is complete: nothing is left to do")
    elif state.get("begun") and (folder / RECIPE_NAME).is_file():
        result = _go_on(folder, tell, progress=progress)
    else:
        plan = replace(plan or plan_texts(request, scan), request=request)
        pipeline = _Pipeline(plan, folder, tell, progress=progress, began=began)
        result = pipeline.begin()
        state, choices = pipeline.state, pipeline.plan.choices
    if result is not None and result.stopped_by is None and not result.diverged:
        state = remember(folder, state, complete=True)
    return result_of(folder, result, choices, request, state, began)


def _go_on(folder: Path, tell: Callable[[str], None], *, progress: bool) -> TrainResult:
    """Go on with the run of an earlier call."""
    from firstlight.planner.plan.processes import RunForecaster
    from firstlight.recipe import load_recipe
    from firstlight.training.loop import train

    tell(f"going on with {folder}")
    with RunForecaster() as forecaster:
        recipe = load_recipe(folder / RECIPE_NAME)
        return train(recipe, resume=True, progress=progress, forecaster=forecaster)


def _silent(_: str) -> None:
    pass


class _Pipeline:
    """One call of `train_texts` on its way.

    Args:
        plan: the plan by estimates.
        folder: the run folder.
        tell: called with each line for people.
        progress: show progress bars.
        began: time that the budget counts from.

    Attributes:
        plan: the plan as far as it is known.
        state: content of the run folder's pipeline.json.
    """

    def __init__(
        self,
        plan: TextPlan,
        folder: Path,
        tell: Callable[[str], None],
        *,
        progress: bool,
        began: float,
    ) -> None:
        self.plan, self.state, self._folder = plan, dict[str, Any](), folder
        self._tell, self._progress, self._began = tell, progress, began

    def _remember(self, **values: Any) -> None:
        self.state = remember(self._folder, self.state, **values)

    def begin(self) -> TrainResult:
        """Prepare the texts, choose, and train."""
        from firstlight.training.loop import train

        request, facts = self.plan.request, self.plan.scan.facts
        self._remember(request=remembered(request), content_key=facts.content_key)
        data = self._prepared()
        self._count_text(data)
        recipe, resolved, forecast = self._chosen(data)
        for line in plan_lines(self.plan):
            self._tell(line)
        self._write_recipe(resolved)
        self._remember(begun=True)
        return train(recipe, progress=self._progress, forecaster=_KnownForecast(forecast))

    # The texts

    def _prepared(self) -> Path:
        """The folder of tokenizer and shards, made now or by an earlier call."""
        from firstlight.data.prepare import prepare

        plan = self.plan
        needed = _SPARE * plan.choices.tokens * plan.text.bytes_per_token
        # By powers of two, so that another budget can use the same.
        limit = _PREPARED_BYTES << max(math.ceil(math.log2(needed / _PREPARED_BYTES)), 0)
        # Nobody knows the size of a dataset.
        known = all(source.dataset is None for source in plan.scan.sources)
        whole = known and plan.scan.facts.total_bytes <= limit
        key = f"{plan.scan.facts.content_key}-{plan.text.vocab_size}-{0 if whole else limit}"
        for folder in (self._folder, *sorted(self._folder.parent.glob("*"))):
            state = self.state if folder == self._folder else read_state(folder)
            data = folder / DATA_FOLDER
            if state.get("data_key") == key and (data / "manifest.json").is_file():
                self._tell(f"tokenizer and shards of {data} are used again")
                self._remember(data_key=key, data=str(data), xz=state.get("xz"))
                return data
        data = self._folder / DATA_FOLDER
        sources = limited_sources(plan.scan.sources, limit)
        tokenizer = self._trained_tokenizer()
        split = plan.scan.split
        begun = time.time()
        manifest = prepare(
            sources,
            tokenizer,
            data,
            val_fraction=split.fraction,
            split_of=split.splitter(),
            text_key=plan.request.text_key,
            overwrite=True,
            progress=self._progress,
        )
        tokens = {name: entry["tokens"] for name, entry in manifest["splits"].items()}
        self._tell(
            f"shards: {tokens.get('train', 0):,} tokens to train on, {tokens.get('val', 0):,} held "
            f"out ({time_text(time.time() - begun)})"
        )
        self._remember(data_key=key, data=str(data), xz=_xz_bits(data, tokenizer))
        return data

    def _trained_tokenizer(self) -> Tokenizer:
        from firstlight.data.records import read_documents
        from firstlight.tokenizer import train_tokenizer

        plan, begun = self.plan, time.time()
        split_of = plan.scan.split.splitter()
        sources = limited_sources(plan.scan.sources, _TOKENIZER_BYTES)
        records = read_documents(sources, plan.request.text_key)
        texts = (one.value for one in records if one.error is None)
        # Held-out text has no part in the tokenizer where it is whole documents.
        kept = (text for text in texts if split_of(text) in ("train", "tail"))
        tokenizer = train_tokenizer(kept, plan.text.vocab_size)
        self._tell(f"tokenizer: {tokenizer.vocab_size:,} tokens ({time_text(time.time() - begun)})")
        return tokenizer

    def _count_text(self, data: Path) -> None:
        """Take the counts of the prepared text into the plan."""
        from firstlight.data.shards import read_manifest

        manifest = read_manifest(data)
        splits = manifest["splits"]
        train, val = splits["train"], splits.get("val", {"tokens": 0, "text_bytes": 0})
        size = train["text_bytes"] + val["text_bytes"]
        tokens = train["tokens"] + val["tokens"]
        text = TextFacts(
            manifest["vocab_size"],
            train["tokens"],
            size / tokens,
            self.plan.text.gzip_bits_per_byte,
            val["tokens"],
        )
        self.plan = self.plan.choose_again(self._length(), text)

    # The settings

    def _length(self) -> Length:
        """The length of the training loop, less what the command has taken and will take.

        Raises:
            ConfigError: no time is left.
        """
        request = self.plan.request
        if request.seconds is None:
            return Length(None, request.tokens, request.steps)
        taken = time.time() - self._began
        left = request.seconds - taken - _RESERVED_SECONDS
        if left < _LEAST_SECONDS:
            raise ConfigError(
                f"the budget of {time_text(request.seconds)} is too short: reading and preparing "
                f"the texts has taken {time_text(taken)}; give more, or call it again, which uses "
                "the prepared texts"
            )
        return Length(left)

    def _chosen(self, data: Path) -> tuple[Recipe, ResolvedRecipe, Forecast | None]:
        """The recipe of the choices, once it is known to fit into memory."""
        from firstlight.planner.plan.automatic import forecast_run
        from firstlight.planner.plan.machine import resolve_for
        from firstlight.recipe import parse_recipe
        from firstlight.tokenizer import Tokenizer

        plan = self.plan
        overrides = [one for one in plan.request.overrides if one[0] != "model.vocab_size"]
        values = plan.choices.values
        values["run"] = {"dir": str(self._folder)}
        values["data"] |= {"dir": str(data)}
        tokenizer = Tokenizer.from_pretrained(data)
        most = plan.choices["data.seq_len"] // 2
        prompts = [_shortened(prompt, tokenizer, most) for prompt in plan.scan.prompts]
        values["evaluation"]["sample_prompts"] = [one for one in prompts if one] or [""]
        forecast = None
        while True:
            recipe = parse_recipe(values, "the chosen recipe", overrides)
            resolved = resolve_for(recipe, plan.machine)
            forecast = forecast_run(resolved, plan.machine.hardware, 1)
            rows = resolved.batch.micro_batch_size
            fits = forecast is None or forecast.peak_bytes <= plan.machine.usable_bytes
            if fits or rows == 1 or "batch.micro_batch_size" in plan.request.fixed:
                break
            values["batch"]["micro_batch_size"] = rows // 2
        choices = _with_value(plan.choices, "batch.micro_batch_size", rows)
        if "schedule.max_minutes" in choices.keys:
            # Choosing has taken time too: the run has what is left now.
            left = self._length().seconds
            assert left is not None
            choices = _with_value(choices, "schedule.max_minutes", round(left / 60, 4))
            values["schedule"]["max_minutes"] = round(left / 60, 4)
        if forecast is not None and plan.speed.kind == "cpu":
            rate = choices.tokens_per_second
            forecast = replace(forecast, tokens_per_second=(0.7 * rate, rate, 1.3 * rate))
        memory = None if forecast is None else forecast.peak_bytes
        self.plan = replace(plan, choices=choices, memory_bytes=memory)
        recipe = parse_recipe(values, "the chosen recipe", overrides)
        return recipe, resolve_for(recipe, plan.machine), forecast

    def _write_recipe(self, recipe: ResolvedRecipe) -> None:
        from firstlight.files.atomic import write_file
        from firstlight.pipeline.recipe_text import commented_yaml

        reasons = {choice.key: choice.reason for choice in self.plan.choices.choices}
        command = shlex.join(["firstlight", "train", *self.plan.request.inputs])
        header = (
            f"Chosen by `{command}`. A comment gives the reason for the key below it.",
            f"Train it again, changed or not: firstlight train {self._folder / 'recipe.yaml'} "
            "--run.dir ANOTHER_FOLDER",
        )
        write_file(self._folder / RECIPE_NAME, commented_yaml(recipe, reasons, header))


def _shortened(prompt: str, tokenizer: Tokenizer, most: int) -> str:
    """The beginning of a prompt that has so many tokens at most."""
    while len(tokenizer.encode_prompt(prompt)) > most:
        prompt = prompt[: len(prompt) // 2]
    return prompt


def _with_value(choices: Choices, key: str, value: Any) -> Choices:
    changed = [replace(one, value=value) if one.key == key else one for one in choices.choices]
    return replace(choices, choices=changed)


def _xz_bits(data: Path, tokenizer: Tokenizer) -> float | None:
    """What xz makes of the held-out text, bits for a byte; None without held-out text."""
    from firstlight.data.corpus import TokenDataset
    from firstlight.data.shards import read_manifest

    if "val" not in read_manifest(data)["splits"]:
        return None
    held = TokenDataset(data, "val")
    text = tokenizer.decode(held[0 : held.num_tokens].tolist()).encode("utf-8")[:_XZ_BYTES]
    return 8 * len(lzma.compress(text)) / max(len(text), 1)


class _KnownForecast:
    """A forecaster whose forecast is made already; see `training.forecast.Forecaster`."""

    def __init__(self, forecast: Forecast | None) -> None:
        self._forecast = forecast

    def forecast(
        self, recipe: ResolvedRecipe, hardware: Hardware, processes: int
    ) -> Forecast | None:
        """The forecast of the run."""
        return self._forecast

    def advise(self, recipe: ResolvedRecipe, hardware: Hardware, processes: int) -> str | None:
        """See `Forecaster`."""
        from firstlight.planner.plan.processes import RunForecaster

        with RunForecaster() as forecaster:
            return forecaster.advise(recipe, hardware, processes)
