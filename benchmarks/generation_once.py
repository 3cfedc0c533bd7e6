"""Time one program that continues texts, in a process of its own.

A row's process loads a model, and continues prompts of random tokens greedily, without stopping at
an end-of-text token. All prompts have the same length, since transformers would have to pad shorter
prompts. For each number of prompts, the first continuation is a warm-up. Then two times are
measured:

- prefill, until the first new token of all prompts is chosen,
- decoding, from there to the last new token of all prompts.

transformers' `generate` is timed as a whole, once for one new token and once for all of them; the
difference is the time of decoding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from firstlight.generation.batch import BatchDecoder
from firstlight.generation.config import SamplingConfig
from firstlight.generation.continuation import Continuation, choose_tokens
from firstlight.generation.engine import load
from firstlight.hardware.device import synchronize
from firstlight.hardware.resident import begin_peak, peak_resident_bytes
from firstlight.models import Model

#: Seconds of prefill, seconds of decoding, new tokens of the first prompt.
Timing = tuple[float, float, list[int]]

#: Function that continues prompts (token ids) of one length.
Continue = Callable[[list[list[int]]], Timing]


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Load a model and time its continuations.

    Args:
        request: the fields of `generation.GenerationRow`, "folder" (of the model), "device",
            "batch_sizes" (numbers of prompts), "prompt_tokens", "new_tokens" (of each prompt),
            "times" (timed continuations), "threads", "vocab_size".

    Returns:
        "load_seconds", "peak_bytes" (peak of resident memory above its level after the imports),
        and "batches". Each batch has "batch_size", "warm_up_seconds", "first_token_seconds" and
        "tokens_per_second" (lists with a value for each timed continuation), and the "token_ids" of
        the first prompt's new tokens.
    """
    torch.set_num_threads(request["threads"])
    build = _firstlight
    if request["program"] == "transformers":
        build = _transformers
        import transformers
        from transformers import AutoModelForCausalLM  # noqa: F401

        transformers.logging.disable_progress_bar()
        transformers.logging.set_verbosity_error()
    before = begin_peak()
    start = time.perf_counter()
    continue_texts = build(request)
    found: dict[str, Any] = {"load_seconds": time.perf_counter() - start}
    found["batches"] = [_batch(request, n, continue_texts) for n in request["batch_sizes"]]
    return found | {"peak_bytes": peak_resident_bytes() - before}


def _batch(request: dict[str, Any], size: int, continue_texts: Continue) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(size)
    shape = (size, request["prompt_tokens"])
    prompts = torch.randint(request["vocab_size"], shape, generator=generator).tolist()
    start = time.perf_counter()
    continue_texts(prompts)
    warm_up = time.perf_counter() - start
    timings = [continue_texts(prompts) for _ in range(request["times"])]
    new = size * (request["new_tokens"] - 1)
    return {
        "batch_size": size,
        "warm_up_seconds": warm_up,
        "first_token_seconds": [first for first, _, _ in timings],
        "tokens_per_second": [new / rest for _, rest, _ in timings],
        "token_ids": timings[-1][2],
    }


def _firstlight(request: dict[str, Any]) -> Continue:
    loaded = load(request["folder"], request["device"], dtype=request["dtype"])
    longest = request["prompt_tokens"] + request["new_tokens"]
    largest = max(request["batch_sizes"])
    if not request["cache"]:
        return _without_cache(loaded.model, request)
    decoder = BatchDecoder(loaded.model, largest, longest, compile=request["compile"])
    return continue_with_sampling(decoder, request)


def continue_with_sampling(decoder: BatchDecoder, request: Mapping[str, Any]) -> Continue:
    """A function that continues prompts greedily, as `firstlight generate` does.

    Args:
        decoder: decoder without texts, with room for all prompts.
        request: "prompt_tokens" and "new_tokens" of each prompt.
    """
    longest = request["prompt_tokens"] + request["new_tokens"]
    config = SamplingConfig(max_new_tokens=request["new_tokens"], temperature=0)

    def continue_texts(prompts: list[list[int]]) -> Timing:
        start = time.perf_counter()
        texts = [Continuation(prompt, config, context=longest + 1) for prompt in prompts]
        for text in texts:
            text.push(decoder.add(text.prompt_ids))
        first = time.perf_counter()
        while texts[0].finish_reason is None:
            logits_BV = decoder.step([text.token_ids[-1] for text in texts])
            chosen = choose_tokens(texts, logits_BV)
            for text, logits_V, token_id in zip(texts, logits_BV, chosen, strict=True):
                text.push(logits_V, token_id)
        end = time.perf_counter()
        for _ in texts:
            decoder.remove(0)
        return first - start, end - first, texts[0].token_ids

    return continue_texts


def _without_cache(model: Model, request: Mapping[str, Any]) -> Continue:
    """A function that continues prompts greedily without a cache: the model computes the whole text
    again for each new token."""
    device = next(model.parameters()).device

    @torch.inference_mode()
    def continue_texts(prompts: list[list[int]]) -> Timing:
        start = first = time.perf_counter()
        input_ids_BT = torch.tensor(prompts, device=device)
        for number in range(request["new_tokens"]):
            logits_BV = model(input_ids_BT, logits_to_keep=1)[:, -1]
            input_ids_BT = torch.cat((input_ids_BT, logits_BV.argmax(-1, keepdim=True)), dim=1)
            synchronize(device)
            if number == 0:
                first = time.perf_counter()
        end = time.perf_counter()
        return first - start, end - first, input_ids_BT[0, len(prompts[0]) :].tolist()

    return continue_texts


def _transformers(request: dict[str, Any]) -> Continue:
    from transformers import AutoModelForCausalLM

    device = torch.device(request["device"])
    dtype = getattr(torch, request["dtype"])
    model = AutoModelForCausalLM.from_pretrained(Path(request["folder"]), dtype=dtype)
    return continue_with_generate(model.to(device).eval(), device, request)


def continue_with_generate(
    model: Any, device: torch.device, request: Mapping[str, Any]
) -> Continue:
    """A function that continues prompts with transformers' `generate`, greedily."""

    def seconds(prompts: list[list[int]], new: int) -> tuple[float, list[int]]:
        ids = torch.tensor(prompts, device=device)
        start = time.perf_counter()
        with torch.inference_mode():
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
            )
        synchronize(device)
        return time.perf_counter() - start, found[0, ids.shape[1] :].tolist()

    def continue_texts(prompts: list[list[int]]) -> Timing:
        first, _ = seconds(prompts, 1)
        whole, token_ids = seconds(prompts, request["new_tokens"])
        return first, whole - first, token_ids

    return continue_texts
