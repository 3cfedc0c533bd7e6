"""Part "generation" of `benchmarks gpu`: tokens per second relative to transformers, and to
the limit of the memory's bandwidth.

    python -m firstlight.hardware.fresh_process benchmarks.gpu.generation REQUEST

REQUEST is a JSON object:

    model          values of a recipe's section `model`
    device         "cuda", or "cpu" in a dry run
    dtype          number format of the weights: "bfloat16" or "float32"
    programs       names of `_PROGRAMS`
    batch_sizes    numbers of prompts that are continued at a time
    prompt_tokens  tokens of each prompt
    new_tokens     new tokens of each prompt
    turns          timed turns of all programs, after one warm-up turn

The result has, under "programs", each program's "reason" (the error message, or "") and "batches",
see `generation.measure`; "copy_bytes_per_second", the measured memory bandwidth; "step_bytes",
see `step_bytes`, by batch size; and "line", the result in words.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.generation import (
    Continue,
    Timing,
    bytes_per_token,
    continue_with_generate,
    continue_with_sampling,
)
from benchmarks.gpu.parts import BenchMachine, Findings, Page, Part, Row, draw_bars
from benchmarks.memory import copy_rate
from benchmarks.models import model_values, random_model
from benchmarks.pages import markdown_table
from firstlight.bench.display import cells
from firstlight.bench.models import config_of
from firstlight.generation.batch import BatchDecoder
from firstlight.models import Model, ModelConfig
from firstlight.models.accounting import cache_bytes_per_token
from firstlight.weights.loading import file_tensors

NAME = "generation"

_MODULE = "benchmarks.gpu.generation"


def _rows(machine: BenchMachine) -> list[Row]:
    dry = machine.dry
    # Without transformers on this machine, only firstlight's own rates are measured.
    known = [one for one in _PROGRAMS if one != "transformers" or not machine.lacks(one)]
    return [
        Row(
            f"{model}, as it is",
            _MODULE,
            {
                "model": model_values(model),
                "device": machine.device,
                "dtype": "float32" if dry else "bfloat16",
                "programs": known,
                "batch_sizes": [1, 2] if dry else [1, 8, 64],
                "prompt_tokens": 16 if dry else 128,
                "new_tokens": 8 if dry else 64,
                "turns": 2,
            },
            seconds=9.0 if dry else 70.0,
            value=value,
        )
        for model, value in ({"tiny-gpt2": 2} if dry else {"gpt2-124m": 2, "llama-1b": 3}).items()
    ]


@dataclass(frozen=True)
class _Rate:
    """Tokens per second of a program with one number of texts.

    Attributes:
        model: name of the model.
        program: name of the program.
        batch: one of the program's "batches" in the result.
        limit: tokens per second at which the memory's bandwidth is used up; None if unknown.
        ratio: speed relative to transformers, the median over the turns; None if not measured.
        whole_ratio: the same with the time until the first tokens.
    """

    model: str
    program: str
    batch: Mapping[str, Any]
    limit: float | None
    ratio: float | None
    whole_ratio: float | None

    @property
    def rate(self) -> float:
        """Tokens per second, the median over the turns."""
        rates: list[float] = self.batch["tokens_per_second"]
        return statistics.median(rates)

    @property
    def share(self) -> str:
        """`rate` as a percentage of `limit`; "" if the limit is unknown."""
        return "" if self.limit is None else f"{self.rate / self.limit:.0%}"


def _rates(found: Findings) -> Iterator[_Rate]:
    for row in found.measured(NAME):
        run = found.outcome(NAME, row.name).runs[0]
        bandwidth = run["copy_bytes_per_second"]
        if found.machine.gpu is not None:
            bandwidth = max(bandwidth, found.machine.gpu.bandwidth)
        batches = run["programs"].get("transformers", {}).get("batches", ())
        base = {one["batch_size"]: one for one in batches}
        new_tokens = row.request["new_tokens"]
        for program, entry in run["programs"].items():
            for batch in entry["batches"]:
                size = batch["batch_size"]
                if not batch["tokens_per_second"]:
                    continue
                read = run["step_bytes"][str(size)]
                yield _Rate(
                    row.name.partition(",")[0],
                    program,
                    batch,
                    None if read is None else size * bandwidth / read,
                    ratio=_ratio(base.get(size), batch, new_tokens, whole=False),
                    whole_ratio=_ratio(base.get(size), batch, new_tokens, whole=True),
                )


def _ratio(
    base: Mapping[str, Any] | None, batch: Mapping[str, Any], new_tokens: int, *, whole: bool
) -> float | None:
    """The speed relative to `base`, the median over the turns; None without turns. `whole` counts
    the time until the first tokens, too."""

    def seconds(one: Mapping[str, Any]) -> list[float]:
        later = one["batch_size"] * (new_tokens - 1)
        turns = zip(one["first_token_seconds"], one["tokens_per_second"], strict=True)
        return [whole * first + later / rate for first, rate in turns]

    pairs = [] if base is None else zip(seconds(base), seconds(batch), strict=False)
    ratios = [theirs / own for theirs, own in pairs]
    return statistics.median(ratios) if ratios else None


def _page(found: Findings) -> Page:
    rates = list(_rates(found))
    rows = [
        cells(
            "{one.model}, {one.program} | {one.batch[batch_size]} | {one.rate:,.0f}"
            " | {one.ratio:.2f}x | {one.share} | {first:.0f} | {one.whole_ratio:.2f}x"
            " | {one.batch[warm_up_seconds]:.1f}",
            {"one": one, "first": 1000 * statistics.median(one.batch["first_token_seconds"])},
        )
        for one in rates
    ]
    header = (
        "program",
        "texts",
        "tokens/s",
        "to transformers",
        "of the limit",
        "first ms",
        "whole, to transformers",
        "warm-up s",
    )
    failed = [
        (f"{row.name}: {program}", entry["reason"])
        for row in found.measured(NAME)
        for program, entry in found.outcome(NAME, row.name).runs[0]["programs"].items()
        if entry["reason"]
    ]
    text = [
        markdown_table(header, rows),
        'bf16, random weights, prompts of 128 tokens, 64 new ones, greedy. "firstlight" chooses\n'
        'tokens as `generate` and `serve` do, by the settings of each text; "decoder" takes the\n'
        "largest logit. Tokens/s are those after the first tokens, before which firstlight reads\n"
        "one prompt after the other (first ms). The limit is that of the memory: the weights and\n"
        "the cached keys and values of all texts are read once for each step, at the data sheet's\n"
        "bandwidth (or that of copying, if it was measured to be higher). Ratios are medians over\n"
        "turns (A B A B).\n",
        "![tokens per second](../images/gpu-generation.png)\n",
    ]
    if failed:
        text.insert(1, markdown_table(("program without a figure", "reason"), failed))
    bars = [
        (f"{one.model}, {one.program}, texts: {one.batch['batch_size']}", one.rate) for one in rates
    ]
    pictures = {"gpu-generation.png": draw_bars("Generation", "tokens/s", bars)} if bars else {}
    return Page("\n".join(_summary(rates)), "\n".join(text), pictures)


def _summary(rates: Sequence[_Rate]) -> Iterator[str]:
    for key in dict.fromkeys((one.model, one.batch["batch_size"]) for one in rates):
        own = [
            one
            for one in rates
            if (one.model, one.batch["batch_size"]) == key and one.program != "transformers"
        ]
        if not own:
            continue
        best = max(own, key=lambda one: one.rate)
        beside = ""
        if best.ratio is not None:
            beside = f", {best.ratio:.1f} times transformers ({best.whole_ratio:.1f} with prompts)"
        share = f", {best.share} of the memory's limit" if best.share else ""
        name = f"{key[0]}, {key[1]} text{'s' * (key[1] > 1)}"
        yield f"- {name}: {best.rate:,.0f} tokens/s ({best.program}){beside}{share}."


GENERATION = Part(
    NAME,
    "Generation",
    "Tokens per second with 1, 8 and 64 texts at a time, beside transformers' `generate` on the "
    "same weights and beside what the memory's bandwidth allows.",
    _rows,
    page=_page,
)


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Measure all programs in turns; the module's docstring describes the request and result."""
    config = config_of(request["model"])
    device, dtype = torch.device(request["device"]), getattr(torch, request["dtype"])
    model = random_model(config, device).to(dtype).eval()
    programs: dict[str, dict[str, Any]] = {
        name: {"reason": "", "batches": []} for name in request["programs"]
    }
    shared = _Shared(model, request)
    made = {
        name: _attempt(programs[name], functools.partial(_PROGRAMS[name], shared))
        for name in request["programs"]
    }
    for size in request["batch_sizes"]:
        _take_turns(programs, made, request, size, vocab_size=config.vocab_size)
    return {
        "copy_bytes_per_second": max(copy_rate(device) for _ in range(3)),
        "step_bytes": {
            str(size): step_bytes(config, request, size) for size in request["batch_sizes"]
        },
        "programs": programs,
        "line": _in_words(programs),
    }


def _attempt(entry: dict[str, Any], call: Callable[[], Any]) -> Any:
    """The call's result; None if it fails, and the error becomes `entry["reason"]`."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001  (one program's failure is none of the others')
        text = " ".join(str(error).split())[:300]
        entry["reason"] = f"{type(error).__name__}: {text}"
        return None


def _take_turns(
    programs: Mapping[str, dict[str, Any]],
    made: Mapping[str, Continue | None],
    request: Mapping[str, Any],
    size: int,
    *,
    vocab_size: int,
) -> None:
    generator = torch.Generator().manual_seed(size)
    shape = (size, request["prompt_tokens"])
    prompts = torch.randint(vocab_size, shape, generator=generator).tolist()
    new = size * (request["new_tokens"] - 1)
    batches: dict[str, dict[str, Any]] = {}
    for turn in range(request["turns"] + 1):
        for name, continue_texts in made.items():
            entry = programs[name]
            if continue_texts is None or entry["reason"]:
                continue
            start = time.perf_counter()
            timing = _attempt(entry, functools.partial(continue_texts, prompts))
            if timing is None:
                continue
            if not turn:
                batches[name] = {
                    "batch_size": size,
                    "warm_up_seconds": time.perf_counter() - start,
                    "first_token_seconds": [],
                    "tokens_per_second": [],
                }
                entry["batches"].append(batches[name])
                continue
            first, rest, token_ids = timing
            batches[name]["first_token_seconds"].append(first)
            batches[name]["tokens_per_second"].append(new / rest)
            batches[name]["token_ids"] = token_ids[:16]


def step_bytes(config: ModelConfig, request: Mapping[str, Any], size: int) -> int | None:
    """Mean bytes that a step of decoding reads: the weights once, and the cached keys and values of
    `size` texts. None for mixture-of-experts models, see `bytes_per_token`."""
    weights = bytes_per_token(config, request["dtype"])
    if weights is None:
        return None
    length: float = request["prompt_tokens"] + request["new_tokens"] / 2
    cached = cache_bytes_per_token(config, getattr(torch, request["dtype"]))
    return round(weights + size * length * cached)


def _in_words(programs: Mapping[str, Mapping[str, Any]]) -> str:
    said = []
    for name, entry in programs.items():
        rates = [
            f"{max(batch['tokens_per_second']):,.0f}"
            for batch in entry["batches"]
            if batch["tokens_per_second"]
        ]
        said.append(f"{name} {' / '.join(rates) or entry['reason'][:80]} tokens/s")
    return "; ".join(said)


class _Shared:
    """The model, the request and the decoder that the programs share."""

    def __init__(self, model: Model, request: Mapping[str, Any]) -> None:
        self.model, self.request = model, request
        longest = request["prompt_tokens"] + request["new_tokens"]
        self.decoder = BatchDecoder(model, max(request["batch_sizes"]), longest)


def _firstlight(shared: _Shared) -> Continue:
    return continue_with_sampling(shared.decoder, shared.request)


def _greedily(shared: _Shared) -> Continue:
    """A function that continues prompts; the device chooses the likeliest tokens of all texts."""
    decoder, new_tokens = shared.decoder, shared.request["new_tokens"]

    def continue_texts(prompts: list[list[int]]) -> Timing:
        start = time.perf_counter()
        token_ids = [int(decoder.add(prompt).argmax()) for prompt in prompts]
        first, texts = time.perf_counter(), [token_ids[0]]
        for _ in range(new_tokens - 1):
            token_ids = decoder.step(token_ids).argmax(-1).tolist()
            texts.append(token_ids[0])
        end = time.perf_counter()
        for _ in prompts:
            decoder.remove(0)
        return first - start, end - first, texts

    return continue_texts


def _transformers(shared: _Shared) -> Continue:
    import transformers

    model, request = shared.model, shared.request
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    values = model.config.to_hf()
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    device, dtype = torch.device(request["device"]), getattr(torch, request["dtype"])
    with torch.device(device):
        theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        own = dict(theirs.named_parameters())
        # Only parameters are copied: the rotary buffers of transformers' model stay in fp32. A
        # parameter without a value is an error below, except for a tied head.
        for name, tensor in file_tensors(model).items():
            if name in own:
                own.pop(name).copy_(tensor)
    left = [name for name in own if name != "lm_head.weight"]
    if left:
        raise ValueError(f"weights of transformers' model without a value: {left[:3]}")
    return continue_with_generate(theirs.eval(), device, request)


#: The programs, which take turns, so that other work of the machine affects the ratios less.
_PROGRAMS: dict[str, Callable[[_Shared], Continue]] = {
    "transformers": _transformers,
    "firstlight": _firstlight,
    "decoder": _greedily,
}
