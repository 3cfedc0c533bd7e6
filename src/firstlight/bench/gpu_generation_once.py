"""Tokens per second of firstlight and of transformers on the same weights, in turns.

    python -m firstlight.bench.gpu_generation_once REQUEST

REQUEST is a JSON object:

    model          the `model` section of a recipe
    device         "cuda", or "cpu" of a dry run
    dtype          of the weights: "bfloat16", "float32"
    programs       names in `_PROGRAMS`
    batch_sizes    texts at a time
    prompt_tokens, new_tokens   of each text
    turns          of all programs

Random weights are made on the device, and transformers' model has the same ones. All continue
prompts of random tokens, greedily and never ending early; of each number of prompts a continuation
that isn't timed is made first. "firstlight" is what `generate` runs (each text has its own
settings, so each has its tokens chosen by itself), "decoder" the same model with the tokens chosen
for all texts at once, on the device.

The one line on stdout is a JSON object: "copy_bytes_per_second", "step_bytes" (by batch size, bytes
of weights and cached keys and values that a step of decoding reads in the mean), and "programs":
for each its "reason" if it failed, and "batches", a list of "batch_size", "tokens_per_second" and
"first_token_seconds" of each turn, "warm_up_seconds", "token_ids" of the first text.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from firstlight.bench.fresh_process import answer
from firstlight.bench.generation import bytes_per_token, copy_rate
from firstlight.bench.generation_once import Timing, continue_with_generate, continue_with_sampling
from firstlight.bench.random_model import random_model
from firstlight.generation.batch import BatchDecoder
from firstlight.models import Model, ModelConfig
from firstlight.models.accounting import cache_bytes_per_token
from firstlight.recipe import parse_recipe
from firstlight.weights.loading import file_tensors

#: Continues prompts of one length; the request is that of a measurement.
Continue = Callable[[list[list[int]]], Timing]


def gpu_generation_once(request: dict[str, Any]) -> dict[str, Any]:
    """Measure all programs in turns, see the module's head."""
    config = _config(request["model"])
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
        _take_turns(programs, made, request, size, config.vocab_size)
    return {
        "copy_bytes_per_second": max(copy_rate(device) for _ in range(3)),
        "step_bytes": {
            str(size): step_bytes(config, request, size) for size in request["batch_sizes"]
        },
        "programs": programs,
        "line": _in_words(programs),
    }


def _config(values: Mapping[str, Any]) -> ModelConfig:
    found = parse_recipe({"data": {"dir": "-"}, "model": values}, "the model").model
    assert found is not None
    return found


def _attempt(entry: dict[str, Any], call: Callable[[], Any]) -> Any:
    """The call's result; None where it fails, which becomes the program's reason."""
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
    """Bytes that a step of decoding reads in the mean: the weights once, and the keys and values of
    all texts. None where only some experts are visited."""
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
    """What programs have in common.

    Args:
        model: firstlight's.
        request: see the module's head.
    """

    def __init__(self, model: Model, request: Mapping[str, Any]) -> None:
        self.model, self.request = model, request
        self._decoders: dict[bool, BatchDecoder] = {}

    def decoder(self, *, compiled: bool) -> BatchDecoder:
        """The decoder for all numbers of texts, compiled once."""
        if compiled not in self._decoders:
            longest = self.request["prompt_tokens"] + self.request["new_tokens"]
            largest = max(self.request["batch_sizes"])
            self._decoders[compiled] = BatchDecoder(self.model, largest, longest, compile=compiled)
        return self._decoders[compiled]


def _firstlight(shared: _Shared, *, compiled: bool = False) -> Continue:
    return continue_with_sampling(shared.decoder(compiled=compiled), shared.request)


def _greedily(shared: _Shared, *, compiled: bool = False) -> Continue:
    """The likeliest tokens of all texts, chosen on the device at once."""
    decoder, new_tokens = shared.decoder(compiled=compiled), shared.request["new_tokens"]

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
        # Copied name by name: a name that it lacks is an error, and the tables of its positions
        # stay in fp32.
        for name, tensor in file_tensors(model).items():
            if name in own:
                own.pop(name).copy_(tensor)
    left = [name for name in own if name != "lm_head.weight"]
    if left:
        raise ValueError(f"weights of transformers' model without a value: {left[:3]}")
    return continue_with_generate(theirs.eval(), device, request)


_PROGRAMS: dict[str, Callable[[_Shared], Continue]] = {
    "transformers": _transformers,
    "firstlight": _firstlight,
    "firstlight, compiled": functools.partial(_firstlight, compiled=True),
    "decoder": _greedily,
    "decoder, compiled": functools.partial(_greedily, compiled=True),
}


if __name__ == "__main__":
    answer(gpu_generation_once, sys.argv[1])
