"""Trains a new model on texts: scans the texts, makes tokenizer and shards, chooses settings, and
trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firstlight.pipeline.facts import TextFacts
from firstlight.pipeline.plan import RunPlan, TextPlan, plan_texts, scan_texts
from firstlight.pipeline.preparation import (
    Preparation,
    fitting_prompts,
    prepared_texts,
    train_tokenizer_on,
)
from firstlight.pipeline.request import Request
from firstlight.pipeline.run_folder import RunCall
from firstlight.pipeline.scan import CorpusFacts

if TYPE_CHECKING:
    from firstlight.pipeline.machine import FittedRecipe
    from firstlight.training.loop import TrainResult


class NewModel:
    """The training of a new model on texts; implements `run.Work`.

    Args:
        request: inputs, length and overrides of the run.
        tell: function that is called with each message for the user.
        progress: show a progress bar.

    Attributes:
        content_key: hash of the texts.

    Raises:
        InputError, ConfigError: see `scan_texts`.
    """

    def __init__(self, request: Request, tell: Callable[[str], None], *, progress: bool) -> None:
        self._scan = scan_texts(request, tell, progress=progress)
        self.content_key = self._scan.facts.content_key

    def plan(self, request: Request, gpu: str | None = None) -> RunPlan:
        """The plan from estimated facts about the texts; see `plan_texts`."""
        return plan_texts(request, self._scan, gpu)

    def begin(self, plan: RunPlan, request: Request, call: RunCall) -> TrainResult:
        """Prepare the texts, choose settings again from the counted tokens and the remaining time,
        and train."""
        from firstlight.pipeline.machine import KnownForecast
        from firstlight.training.loop import train

        assert isinstance(plan, TextPlan)
        scan, size = plan.scan, plan.text.vocab_size
        texts = Preparation(
            scan,
            request.text_key,
            plan.choices.tokens * plan.text.bytes_per_token,
            str(size),
            lambda: train_tokenizer_on(scan, request.text_key, size, call.tell),
        )
        data = prepared_texts(texts, call)
        text = counted_text(data, scan.facts, call.state.get("xz"))
        plan = replace(plan, request=request).choose_again(call.length(request), text)
        if text.vocab_size < size:
            plan = replace(
                plan, vocabulary=f"{size:,} were wanted, but the text has too few different pairs"
            )
        fitted = self._fitted(plan, data, call)
        plan = replace(plan, choices=fitted.choices, memory_bytes=fitted.memory_bytes)
        for line in plan.lines():
            call.tell(line)
        call.write_recipe(fitted.resolved, plan.choices, request)
        call.remember(begun=True, expected=plan.choices.bits_per_byte)
        forecaster = KnownForecast(fitted.forecast)
        return train(
            fitted.recipe, on_step=call.on_step, progress=call.progress, forecaster=forecaster
        )

    def _fitted(self, plan: TextPlan, data: Path, call: RunCall) -> FittedRecipe:
        """The recipe of the choices, fitted to the memory by `fitted_recipe`."""
        from firstlight.pipeline.machine import fitted_recipe
        from firstlight.tokenizer import Tokenizer

        values: dict[str, Any] = plan.choices.values
        values["run"] = {"dir": str(call.folder)}
        values["data"] |= {"dir": str(data)}
        most = plan.choices["data.seq_len"] // 2
        prompts = fitting_prompts(plan.scan.prompts, Tokenizer.from_pretrained(data), most)
        values["evaluation"]["sample_prompts"] = prompts
        overrides = [one for one in plan.request.overrides if one[0] != "model.vocab_size"]
        return fitted_recipe(
            values,
            overrides,
            plan.choices,
            plan.machine,
            plan.speed,
            lambda: call.length(plan.request),
        )


def counted_text(data: Path, facts: CorpusFacts, xz: float | None = None) -> TextFacts:
    """Facts about prepared text, with counted tokens.

    Args:
        data: the folder of the shards.
        facts: facts about the corpus from its scan.
        xz: bits per byte of the held-out text compressed by xz; None keeps those of the sample.
    """
    from firstlight.data.shards import read_manifest

    manifest = read_manifest(data)
    splits = manifest["splits"]
    train, val = splits["train"], splits.get("val", {"tokens": 0, "text_bytes": 0})
    size = train["text_bytes"] + val["text_bytes"]
    tokens = train["tokens"] + val["tokens"]
    hardness = facts.hardness
    if xz is not None:
        hardness = replace(hardness, held_out_xz_bits_per_byte=xz)
    return TextFacts(
        manifest["vocab_size"],
        train["tokens"],
        size / tokens,
        hardness,
        val["tokens"],
        facts.bytes_per_character,
    )
