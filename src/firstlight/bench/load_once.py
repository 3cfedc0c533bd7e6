"""Load one model once, in a process of its own, and say what it took.

    python -m firstlight.bench.load_once REQUEST

REQUEST is a JSON object:

    program  "firstlight" or "transformers"
    folder   the model folder
    way      of firstlight's `load`; null is its default
    dtype    "float32" or "bfloat16"; null is that of the file
    threads  for torch

What is measured, in this order:

1. `import_seconds`: everything that loading needs is imported, and what the program itself puts
   off until later is not.
2. The resident memory of the process is noted, and its peak set back to it.
3. `load_seconds`: from the call to the model in evaluation mode. `load_peak_bytes` is the peak of
   resident memory by then, above the level of step 2.
4. `first_logits_seconds`: from the start of step 3 to the logits that follow a prompt of 16
   tokens. `peak_bytes` is the peak by then, above the level of step 2; `total_peak_bytes` is that
   of the whole process.

`load_cpu_seconds` and `first_logits_cpu_seconds` are the processor's time, user and system, of
all threads: it suffers less than the clock's when other work shares the machine.

Resident memory is counted as at the head of `memory.py`.

The one line on stdout is a JSON object of these numbers and `model_bytes`, the bytes of the
model's parameters.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from typing import Any

from firstlight.bench.memory import begin_peak, peak_resident_bytes
from firstlight.bench.process import answer

_PROMPT_TOKENS = 16

#: (a function that loads the model, a function from model and ids to logits)
_Program = tuple[Callable[[], Any], Callable[[Any, Any], Any]]


def load_once(request: dict[str, Any]) -> dict[str, float]:
    """Load a model as the module's head says, and return the measurements.

    Raises:
        FirstlightError: firstlight can't load the model.
    """
    start = time.perf_counter()
    import torch

    program = _firstlight(request) if request["program"] == "firstlight" else _transformers(request)
    load, logits_of = program
    torch.set_num_threads(request["threads"])
    input_ids = torch.arange(_PROMPT_TOKENS)[None]
    result = {"import_seconds": time.perf_counter() - start}

    level = begin_peak()
    clock, cpu = time.perf_counter(), time.process_time()
    model = load()
    result["load_seconds"] = time.perf_counter() - clock
    result["load_cpu_seconds"] = time.process_time() - cpu
    result["load_peak_bytes"] = peak_resident_bytes() - level
    with torch.inference_mode():
        logits = logits_of(model, input_ids)
    result["first_logits_seconds"] = time.perf_counter() - clock
    result["first_logits_cpu_seconds"] = time.process_time() - cpu
    result["total_peak_bytes"] = peak_resident_bytes()
    result["peak_bytes"] = result["total_peak_bytes"] - level
    assert bool(torch.isfinite(logits).all())
    result["model_bytes"] = sum(parameter.nbytes for parameter in model.parameters())
    return result


def _firstlight(request: dict[str, Any]) -> _Program:
    from firstlight.generation.engine import load

    options: dict[str, Any] = {"dtype": request["dtype"] or "auto"}
    if request["way"] is not None:
        options["way"] = request["way"]
    return (
        lambda: load(request["folder"], **options).model,
        lambda model, input_ids: model(input_ids, logits_to_keep=1),
    )


def _transformers(request: dict[str, Any]) -> _Program:
    import transformers

    # Imported lazily by from_pretrained otherwise, which would be counted as loading.
    importlib.import_module("transformers.models.qwen2.modeling_qwen2")
    transformers.utils.logging.disable_progress_bar()
    return (
        lambda: transformers.AutoModelForCausalLM.from_pretrained(
            request["folder"], dtype=request["dtype"] or "auto", local_files_only=True
        ).eval(),
        lambda model, input_ids: model(input_ids, logits_to_keep=1, use_cache=False).logits,
    )


if __name__ == "__main__":
    answer(load_once, sys.argv[1])
