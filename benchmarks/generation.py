"""`benchmarks generation`: measures tokens per second, and the fraction of the memory bandwidth
limit.

A decoding step takes at least as long as reading the weights once. The memory bandwidth is measured
in the same run by copying a large tensor (bytes read and written). Each row runs in a separate
process, the rows take turns, and each number is the median over the turns.

`measure` describes how a row is timed. A row without the key-value cache recomputes the full text
for each token; its tokens must equal those of the row with the cache.
"""

from __future__ import annotations

import ctypes
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.memory import copy_rate
from benchmarks.options import GenerationBench
from benchmarks.rows import ProgramRow, installed_rows, run_bench
from firstlight.bench.display import Panel, draw_panels
from firstlight.bench.models import SMALL, find_model
from firstlight.bench.rows import Found, Keep, Result, RowOutcome, require_known, require_positive
from firstlight.checkpoint.selection import resolve_model_folder
from firstlight.console import say
from firstlight.conversion.convert import convert
from firstlight.errors import ConfigError, FirstlightError, ModelError
from firstlight.files.atomic import new_folder, write_json
from firstlight.generation.batch import BatchDecoder
from firstlight.generation.config import SamplingConfig
from firstlight.generation.continuation import Continuation
from firstlight.generation.engine import first_tokens, load, next_tokens
from firstlight.hardware.device import find_hardware, machine_facts, synchronize
from firstlight.hardware.environment import for_generation
from firstlight.hardware.fresh_process import ask, error_of, plain_environment
from firstlight.hardware.process_memory import begin_peak, peak_resident_bytes
from firstlight.lora.files import config_folder
from firstlight.models import Model, ModelConfig, empty_model
from firstlight.models.accounting import count_parameters, meta_model
from firstlight.weights.huggingface import CONFIG_NAME, read_config
from firstlight.weights.loading import embedding_name, weights_to_save
from firstlight.weights.stored import save_weights

#: The row with which the tokens per second of all other rows are compared.
REFERENCE = "transformers-bf16"


@dataclass(frozen=True)
class GenerationRow(ProgramRow):
    """One program with its settings.

    Attributes:
        dtype: number format of the weights.
        compile: True compiles the steps of decoding; see `BatchDecoder`.
        cache: False recomputes the full text for each token.
    """

    dtype: str
    compile: bool = False
    cache: bool = True


ROWS = (
    GenerationRow("transformers-fp32", "transformers", "float32"),
    GenerationRow(REFERENCE, "transformers", "bfloat16"),
    GenerationRow("fp32", "firstlight", "float32"),
    # Only in fp32, because rounding in bf16 soon makes the two computations choose different
    # tokens.
    GenerationRow("fp32-no-cache", "firstlight", "float32", cache=False),
    GenerationRow("bf16", "firstlight", "bfloat16"),
    GenerationRow("int8", "firstlight", "int8"),
    GenerationRow("fp32-compiled", "firstlight", "float32", compile=True),
    GenerationRow("bf16-compiled", "firstlight", "bfloat16", compile=True),
    GenerationRow("int8-compiled", "firstlight", "int8", compile=True),
    GenerationRow("llama.cpp-fp32", "llama.cpp", "float32"),
    GenerationRow("llama.cpp-bf16", "llama.cpp", "bfloat16"),
    GenerationRow("llama.cpp-int8", "llama.cpp", "int8"),
)

#: Number formats of rows and of `convert`, for llama.cpp.
_GGUF_DTYPES = {"float32": "f32", "bfloat16": "bf16", "int8": "q8_0"}


def decided(bench: GenerationBench) -> GenerationBench:
    """Return the options, with defaults for those that are open.

    Raises:
        ConfigError: a value is out of range, or a name is unknown.
    """
    usual: dict[str, Any] = {
        "model": SMALL if bench.quick else "gpt2-124m",
        "prompt_tokens": 32 if bench.quick else 128,
        "new_tokens": 16 if bench.quick else 64,
        "repeats": 1 if bench.quick else 3,
        "rows": [row.name for row in ROWS if not (bench.quick and row.compile)],
    }
    open_keys = {k: v for k, v in usual.items() if getattr(bench, k) in (None, (), [])}
    bench = replace(bench, **open_keys)
    require_positive(prompt_tokens=bench.prompt_tokens or 0, repeats=bench.repeats or 0)
    require_positive(2, new_tokens=bench.new_tokens or 0)
    if not bench.batch_sizes or min(bench.batch_sizes) < 1:
        raise ConfigError("batch sizes must be at least 1")
    require_known("row", bench.rows, [row.name for row in ROWS])
    return bench


def bench_generation(bench: GenerationBench, on_run: Keep) -> Result:
    """Measure all rows.

    Returns:
        "model", "parameters", "prompt_tokens", "new_tokens", "repeats", "machine" with its
        "copy_bytes_per_second", "complete", and "rows": see `summarize`.

    Raises:
        ConfigError: the prompt and the new tokens do not fit into the model's context.
        ModelError: the model is invalid, or a row without the cache chose other tokens.
        InputError: there is no model.
        StorageError: a file system error.
    """
    bench = decided(bench)
    hardware, own = find_hardware(bench.device), for_generation()
    rows = installed_rows([row for row in ROWS if row.name in bench.rows])
    if hardware.device.type != "cpu" and any(row.program == "llama.cpp" for row in rows):
        say("llama.cpp is measured only on CPUs: its rows are skipped")
        rows = [row for row in rows if row.program != "llama.cpp"]
    with tempfile.TemporaryDirectory(prefix="firstlight-bench-") as temporary:
        folder, config = _model_folder(bench, Path(temporary))
        sizes = {"prompt_tokens": bench.prompt_tokens, "new_tokens": bench.new_tokens}
        parameters = count_parameters(meta_model(config)).total
        head = {"model": bench.model, "parameters": parameters, "repeats": bench.repeats, **sizes}
        machine = {**machine_facts(hardware), "copy_bytes_per_second": 0.0, "environment": own}
        request = {
            **sizes,
            "folder": str(folder),
            "device": str(hardware.device),
            "batch_sizes": list(bench.batch_sizes),
            "times": 1 if bench.quick else 3,
            "threads": torch.get_num_threads(),
            "vocab_size": config.vocab_size,
        }
        by_name = {row.name: row for row in rows}

        def measure(name: str) -> Found:
            row, environment = by_name[name], plain_environment()
            rates = (machine["copy_bytes_per_second"], copy_rate(hardware.device))
            machine["copy_bytes_per_second"] = max(rates)
            if row.program == "firstlight":
                environment = dict(own) | environment
            # The cache is empty, so that the first turn measures compilation regardless of earlier
            # runs.
            environment["TORCHINDUCTOR_CACHE_DIR"] = str(Path(temporary) / "caches")
            environment["HF_HUB_OFFLINE"] = "1"
            # Without the cache, one continuation takes minutes.
            times = request["times"] if row.cache else 1
            of_row = {**request, **asdict(row), "times": times}
            if row.program == "llama.cpp":
                try:
                    of_row["folder"] = str(_gguf_folder(folder, Path(temporary), row.dtype))
                # GGUF does not support the model, so this row has no result.
                except FirstlightError as error:
                    return error_of(type(error).__name__, str(error))
            return ask("benchmarks.generation", of_row, environment)

        def result(outcomes: Mapping[str, RowOutcome]) -> Result:
            found = summarize(rows, outcomes, machine["copy_bytes_per_second"], config)
            return {**head, "machine": machine, "rows": found}

        assert bench.repeats is not None
        return run_bench(
            "generation", list(by_name), bench.repeats, measure, summarize=result, on_run=on_run
        )


def _model_folder(bench: GenerationBench, temporary: Path) -> tuple[Path, ModelConfig]:
    """Return the model's folder and its config.

    If the option is a name rather than a path, a model with random weights is made in `temporary`.

    Raises:
        ConfigError: the prompt and the new tokens don't fit the model's context.
    """
    assert bench.model is not None
    if Path(bench.model).exists():
        folder = resolve_model_folder(bench.model)
        config = read_config(config_folder(folder))
    else:
        config = find_model(bench.model)
        folder = temporary / "model"
        model = empty_model(config)
        model.init_weights(torch.Generator().manual_seed(0))
        with new_folder(folder) as place:
            write_json(place / CONFIG_NAME, {**config.to_hf(), "dtype": "float32"})
            save_weights(weights_to_save(model), place, max_shard_bytes=2**34)
    needed = (bench.prompt_tokens or 0) + (bench.new_tokens or 0)
    if needed > config.max_position_embeddings:
        raise ConfigError(
            f"{bench.prompt_tokens} prompt tokens and {bench.new_tokens} new tokens do not fit "
            f"into the model's context of {config.max_position_embeddings}"
        )
    return folder, config


def _gguf_folder(folder: Path, temporary: Path, dtype: str) -> Path:
    """Return the folder of a model's GGUF file, which the first turn writes."""
    found = temporary / f"gguf-{dtype}"
    if not found.exists():
        convert(folder, found, to="gguf", dtype=_GGUF_DTYPES[dtype])
    return found


def bytes_per_token(config: ModelConfig, dtype: str) -> int | None:
    """Return the bytes of weights that one step of decoding reads: all but the embedding tables of
    tokens and positions, of which only single rows are read. None for mixture-of-experts models,
    where the bytes depend on the experts to which tokens are routed.

    Args:
        config: the model's config.
        dtype: name of the weights' number format in torch, or "int8": matrices in int8, the other
            weights in bf16.
    """
    if config.expert_count:
        return None
    model = meta_model(config)
    looked_up = {"transformer.wpe.weight"}
    if not config.tie_word_embeddings:
        looked_up.add(embedding_name(model))
    kept = torch.bfloat16 if dtype == "int8" else getattr(torch, dtype)
    return sum(
        parameter.numel() * (1 if dtype == "int8" and parameter.dim() == 2 else kept.itemsize)
        for name, parameter in model.named_parameters()
        if name not in looked_up
    )


def summarize(
    rows: Sequence[GenerationRow],
    outcomes: Mapping[str, RowOutcome],
    copy_bytes_per_second: float,
    config: ModelConfig,
) -> list[dict[str, Any]]:
    """Return the medians of each row.

    Returns:
        For each row the fields of `GenerationRow`, "reason" (the error message, or ""),
        "weight_bytes" (see `bytes_per_token`) and "batches"; of a measured row also "load_seconds"
        and "peak_bytes" (the largest over the turns). Each batch has:

        - "batch_size": number of prompts
        - "tokens_per_second": the median over the turns; "tokens_per_second_min" and "_max"
        - "first_token_seconds": the median; "warm_up_seconds" of the first turn
        - "speed_ratio": speed relative to REFERENCE, the median of the turns' ratios; None if it is
          not measured
        - "share_of_limit": fraction of the rate at which memory could be read; None if unknown
        - "cache_speedup": for a row without the cache, the rate with the cache divided by that
          without, the median of the turns' ratios; otherwise None
        - "token_ids": new tokens of the first prompt

    Raises:
        ModelError: a row without the cache chose other tokens than the one with it.
    """
    base = outcomes[REFERENCE].runs if REFERENCE in outcomes else []
    cached = {row.dtype: outcomes[row.name].runs for row in rows if _is_plain(row)}
    result = []
    for row in rows:
        outcome, size = outcomes[row.name], bytes_per_token(config, row.dtype)
        entry = {**asdict(row), "reason": outcome.problem, "weight_bytes": size, "batches": []}
        if outcome.runs:
            entry["load_seconds"] = outcome.median("load_seconds")
            entry["peak_bytes"] = max(outcome.values("peak_bytes"))
            entry["batches"] = [
                _batch_summary(number, outcome.runs, base, size, limit=copy_bytes_per_second)
                for number in range(len(outcome.runs[0]["batches"]))
            ]
        if outcome.runs and not row.cache:
            for number, batch in enumerate(entry["batches"]):
                ratios = _cache_ratios(number, outcome.runs, cached.get(row.dtype, []))
                batch["cache_speedup"] = statistics.median(ratios) if ratios else None
        result.append(entry)
    return result


def _is_plain(row: GenerationRow) -> bool:
    return row.program == "firstlight" and row.cache and not row.compile


def _cache_ratios(
    number: int, runs: Sequence[Mapping[str, Any]], cached: Sequence[Mapping[str, Any]]
) -> list[float]:
    """Return the tokens per second with the cache divided by those without, for each turn that has
    both.

    Raises:
        ModelError: decoding with the cache chose other tokens than decoding without it.
    """
    ratios = []
    for run, other in zip(runs, cached, strict=False):
        without, with_cache = run["batches"][number], other["batches"][number]
        if without["token_ids"] != with_cache["token_ids"]:
            raise ModelError(
                f"with the key-value cache the model chose {with_cache['token_ids']}, without it "
                f"{without['token_ids']}, but they must be equal: report this as a bug"
            )
        rates = [statistics.median(one["tokens_per_second"]) for one in (with_cache, without)]
        ratios.append(rates[0] / rates[1])
    return ratios


def _batch_summary(
    number: int,
    runs: Sequence[Mapping[str, Any]],
    base: Sequence[Mapping[str, Any]],
    weight_bytes: int | None,
    *,
    limit: float,
) -> dict[str, Any]:
    def rates(replies: Sequence[Mapping[str, Any]]) -> list[float]:
        return [statistics.median(r["batches"][number]["tokens_per_second"]) for r in replies]

    own, batches = rates(runs), [run["batches"][number] for run in runs]
    ratios = [a / b for a, b in zip(own, rates(base), strict=False)]
    rate, size = statistics.median(own), batches[0]["batch_size"]
    return {
        "batch_size": size,
        "tokens_per_second": rate,
        "tokens_per_second_min": min(own),
        "tokens_per_second_max": max(own),
        "first_token_seconds": statistics.median(
            seconds for batch in batches for seconds in batch["first_token_seconds"]
        ),
        "warm_up_seconds": batches[0]["warm_up_seconds"],
        "speed_ratio": statistics.median(ratios) if ratios else None,
        "cache_speedup": None,
        "share_of_limit": None if weight_bytes is None else rate / size * weight_bytes / limit,
        "token_ids": batches[0]["token_ids"],
    }


def draw(result: Mapping[str, Any]) -> bytes:
    """Return a PNG of a result: tokens per second of each row, one panel per batch size."""
    rows = [row for row in result["rows"] if row["batches"]]
    names = [row["name"] for row in rows]
    colors = ["tab:blue" if row["program"] == "firstlight" else "tab:gray" for row in rows]
    panels = []
    for number, batch in enumerate(rows[0]["batches"] if rows else ()):
        size = batch["batch_size"]
        rates = [row["batches"][number]["tokens_per_second"] for row in rows]
        title = f"{size} text{'s' * (size > 1)} at a time"
        panels.append(Panel("tokens/s", names, rates, colors=colors, title=title))
    machine = result["machine"]
    title = f"{result['model']} · {machine['name']}, {machine['threads']} threads"
    return draw_panels(title, [panels] if panels else [])


# The measurement of one row.


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
    build = {"transformers": _transformers, "llama.cpp": _llama_cpp}.get(
        request["program"], _firstlight
    )
    if request["program"] == "llama.cpp":
        import llama_cpp  # noqa: F401
    elif request["program"] == "transformers":
        import transformers
        from transformers import AutoModelForCausalLM  # noqa: F401

        transformers.logging.disable_progress_bar()
        transformers.logging.set_verbosity_error()
    before = begin_peak()
    start = time.perf_counter()
    continue_texts = build(request)
    found: dict[str, Any] = {"load_seconds": time.perf_counter() - start}
    found["batches"] = [timed_batch(request, n, continue_texts) for n in request["batch_sizes"]]
    return found | {"peak_bytes": peak_resident_bytes() - before}


def timed_batch(request: Mapping[str, Any], size: int, continue_texts: Continue) -> dict[str, Any]:
    """Time the continuations of `size` prompts: a batch of the result of `measure`."""
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
    """Return a function that continues prompts greedily, as `firstlight generate` does.

    Args:
        decoder: decoder without texts, with room for all prompts.
        request: "prompt_tokens" and "new_tokens" of each prompt.
    """
    longest = request["prompt_tokens"] + request["new_tokens"]
    config = SamplingConfig(max_new_tokens=request["new_tokens"], temperature=0)

    def continue_texts(prompts: list[list[int]]) -> Timing:
        start = time.perf_counter()
        texts = [Continuation(prompt, config, context=longest + 1) for prompt in prompts]
        for text, chosen in zip(texts, first_tokens(texts, decoder), strict=True):
            text.push(chosen)
        first = time.perf_counter()
        while texts[0].finish_reason is None:
            for text, chosen in zip(texts, next_tokens(texts, decoder), strict=True):
                text.push(chosen)
        end = time.perf_counter()
        for _ in texts:
            decoder.remove(0)
        return first - start, end - first, texts[0].token_ids

    return continue_texts


def _without_cache(model: Model, request: Mapping[str, Any]) -> Continue:
    """Return a function that continues prompts greedily without a cache: the model computes the
    whole text again for each new token."""
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
    """Return a function that continues prompts with transformers' `generate`, greedily."""

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


def _llama_cpp(request: dict[str, Any]) -> Continue:
    """Return a function that continues prompts with llama.cpp, greedily, all in one context."""
    from llama_cpp import llama_cpp as library

    (path,) = Path(request["folder"]).iterdir()
    size, largest = request["vocab_size"], max(request["batch_sizes"])
    settings = library.llama_model_default_params()
    # Weights are repacked for the processor's kernels, as by default in llama.cpp. AMX kernels
    # built with GCC 12 crash, so the row then has no result.
    settings.n_gpu_layers = 0
    longest = request["prompt_tokens"] + request["new_tokens"]
    options = library.llama_context_default_params()
    # llama.cpp rounds the size of a context up to a multiple of 256.
    options.n_ctx = -(-longest // 256) * 256 * largest
    options.n_batch = largest * request["prompt_tokens"]
    options.n_seq_max = largest
    options.n_threads = options.n_threads_batch = request["threads"]
    silent = library.llama_log_callback(lambda *_: None)
    library.llama_log_set(silent, ctypes.c_void_p(0))
    model = library.llama_model_load_from_file(bytes(path), settings)
    context = model and library.llama_init_from_model(model, options)
    if not context:
        raise ModelError(f"llama.cpp can't open {path.name}")
    # Freed with the process of this row.
    batch = library.llama_batch_init(options.n_batch, 0, 1)

    def next_tokens(parts: list[list[int]], position: int) -> list[int]:
        """Return the greedy tokens after one part of each text, all of one length."""
        batch.n_tokens = 0
        for number, part in enumerate(parts):
            for place, token in enumerate(part):
                entry = batch.n_tokens
                batch.token[entry], batch.pos[entry] = token, position + place
                batch.n_seq_id[entry], batch.seq_id[entry][0] = 1, number
                batch.logits[entry] = place == len(part) - 1
                batch.n_tokens += 1
        if library.llama_decode(context, batch):
            raise ModelError(f"llama.cpp can't compute {path.name}")
        last = [len(part) * (number + 1) - 1 for number, part in enumerate(parts)]
        logits = (library.llama_get_logits_ith(context, entry) for entry in last)
        return [int(np.ctypeslib.as_array(one, (size,)).argmax()) for one in logits]

    def continue_texts(prompts: list[list[int]]) -> Timing:
        library.llama_memory_clear(library.llama_get_memory(context), True)
        start = time.perf_counter()
        chosen = next_tokens(prompts, 0)
        first = time.perf_counter()
        token_ids = [chosen[0]]
        for position in range(request["prompt_tokens"], longest - 1):
            chosen = next_tokens([[token] for token in chosen], position)
            token_ids.append(chosen[0])
        return first - start, time.perf_counter() - first, token_ids

    # llama.cpp logs until the process ends, so the callback must stay alive.
    continue_texts.silent = silent  # type: ignore[attr-defined]
    return continue_texts
