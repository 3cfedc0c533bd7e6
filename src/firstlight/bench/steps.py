"""Measure a row of a benchmark that trains for some steps.

    python -m firstlight.hardware.fresh_process firstlight.bench.steps REQUEST

For a run with `distributed.engine`, `fresh_process.ask_ranks` starts this command once per rank.
Each rank trains on different sequences and uses its share of a CPU's threads.

REQUEST is a JSON object:

    recipe            values of a recipe, including the model, data.seq_len and the device
    resolved          true if the recipe has no open keys; otherwise, they are resolved here
    data              file written by `write_tokens`
    warmup_steps      number of steps that are not timed
    steps             number of steps that are timed
    threads           number of torch threads
    written_out       names in `WRITTEN_OUT_PARTS`: parts of the model to replace

The measurement consists of these steps:

1. All libraries that the run needs are imported, including torch's compiler and 8-bit libraries.
   The open keys of the recipe are resolved. Then the resident memory of the process is recorded,
   and the kernel's counter of peak memory is reset.
2. Model, optimizer and loss function are created as in `firstlight train`.
3. The warm-up steps run, in which memory is allocated and code is compiled. `first_step_seconds` is
   the duration of the first one.
4. The timed steps run. `step_seconds` is the duration of each timed step, from batches in host
   memory to updated parameters. `step_cpu_seconds` is the processor time of all threads in the
   step. It is less affected by other load on the machine, but it includes the time in which threads
   wait by spinning.

Let n be the number of sequences per step. Step s trains on the n sequences that start at sequence s
* n, so recipes with the same n are trained on the same tokens. `losses` contains the losses of all
warm-up and timed steps, each computed before the step's update. The learning rate rises linearly
over the first four steps and is constant afterwards.

On a CPU, `total_peak_bytes` is the peak resident memory of the process, and `peak_bytes` is the
difference between this peak and the memory recorded in step 1. On a GPU, `total_peak_bytes` and
`peak_bytes` are both the peak of torch's allocator. With several processes, they are the maximum
over all processes, and losses are means over the sequences of all processes.

The result also contains `chosen`, the resolved values of the recipe keys that can be left open.

The training data is the source code of Python's standard library, which is real text and available
on every machine. Each word, run of whitespace or punctuation mark is a token. The id of a token is
its CRC-32 modulo (vocabulary size - 1). This does not require a tokenizer. For any vocabulary size,
ids from the entire vocabulary occur, and their frequencies are distributed like word frequencies. A
new document begins at each line that starts a function, method or class.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import re
import sysconfig
import time
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import safetensors.numpy
import torch
from torch import Tensor, nn

from firstlight.bench.models import SMALL, find_model
from firstlight.bench.rows import StepsBench, require_positive
from firstlight.data.corpus import row_span, separate_documents
from firstlight.data.loader import Batch
from firstlight.errors import ConfigError, InputError
from firstlight.files.atomic import write_file
from firstlight.hardware.device import Hardware, find_hardware, machine_facts, synchronize
from firstlight.hardware.process_memory import begin_peak, peaks
from firstlight.models import Model, ModelConfig, empty_model
from firstlight.models.accounting import count_parameters, meta_model, train_flops_per_token
from firstlight.models.gpt2 import GPT2MLP, GPT2Attention
from firstlight.models.ops import AttentionOptions, plain_attention
from firstlight.parallel import barrier, gather_objects
from firstlight.parallel.engine import Engine
from firstlight.recipe import Recipe, ResolvedRecipe, parse_recipe, parse_resolved_recipe
from firstlight.recipe.resolve import facts_here, resolve
from firstlight.training.micro_batch_trials import largest_micro_batch
from firstlight.training.processes import run_processes
from firstlight.training.program import TrainingProgram
from firstlight.training.starting_model import attach

#: Number of steps over which the learning rate rises linearly.
_RISE_STEPS = 4

#: Assumed number of tokens per epoch when open keys are resolved.
EPOCH_TOKENS = 10**9


@dataclass(frozen=True)
class StepsPlan:
    """Options of a `StepsBench` in which all default values have been filled in. `name` is the
    value of the option `model`."""

    name: str
    model: ModelConfig
    hardware: Hardware
    seq_len: int
    micro_batch_size: int
    steps: int
    repeats: int

    def head(self, warmup_steps: int) -> dict[str, Any]:
        """Return the part of a benchmark's result that is known before anything is measured."""
        model = meta_model(self.model)
        return {
            "model": self.name,
            "parameters": count_parameters(model).total,
            "seq_len": self.seq_len,
            "micro_batch_size": self.micro_batch_size,
            "steps": self.steps,
            "warmup_steps": warmup_steps,
            "repeats": self.repeats,
            "flops_per_token": train_flops_per_token(model, self.seq_len),
            "machine": machine_facts(self.hardware),
        }


def plan_steps(bench: StepsBench, command: str) -> StepsPlan:
    """Return a plan in which options that are None are replaced by their default values.

    Raises:
        ConfigError: a value is out of range, or the model or the device is unknown.
    """
    hardware = find_hardware(bench.device)
    if hardware.device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{command} supports only cpu and cuda, not {hardware.device.type}")
    name = bench.model or (SMALL if bench.quick else "gpt2-124m")
    model = find_model(name)
    on_gpu = hardware.device.type == "cuda"
    limit = model.max_position_embeddings
    usual = {
        "seq_len": min(256 if bench.quick else 1024, limit),
        "micro_batch_size": 16 if on_gpu else 4,
        "steps": 20 if on_gpu else 4,
        "repeats": 1 if bench.quick else 3,
    }
    given = {key: getattr(bench, key) for key in usual}
    chosen = {key: usual[key] if value is None else value for key, value in given.items()}
    require_positive(**chosen)
    if chosen["seq_len"] > limit:
        raise ConfigError(f"seq_len {chosen['seq_len']} exceeds {name}'s context of {limit}")
    return StepsPlan(name, model, hardware, **chosen)


def steps_title(result: Mapping[str, Any]) -> str:
    """Return the heading for the picture of a benchmark that trains for some steps."""
    size = f"{result['micro_batch_size']} x {result['seq_len']} tokens per step"
    end = "" if result["complete"] else " (incomplete)"
    return f"{result['model']}, {size}; {result['machine']['name']}{end}"


class StepClock:
    """A clock that measures the duration of each step. At the start and at the end of a step, it
    waits until the device has finished all work.

    Attributes:
        seconds: wall-clock seconds of each step so far.
        cpu_seconds: CPU time of each step in seconds, summed over all threads.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self._device = device
        self._start = (0.0, 0.0)

    def start(self) -> None:
        """Begin a step."""
        synchronize(self._device)
        self._start = (time.perf_counter(), time.process_time())

    def stop(self) -> None:
        """End a step."""
        synchronize(self._device)
        self.seconds.append(time.perf_counter() - self._start[0])
        self.cpu_seconds.append(time.process_time() - self._start[1])


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Train a model and measure its steps. The module's docstring describes the request and the
    result.

    Raises:
        FirstlightError: the recipe is invalid, or the loss became NaN or infinite.
    """
    recipe = read_recipe(request)
    import_libraries(recipe)
    with run_processes(recipe) as (hardware, engine):
        use_threads(request, recipe, hardware, engine)
        decided = resolved(recipe, hardware)
        tokens = Tokens(Path(request["data"]), decided.data.seq_len)
        level = begin_peak()
        clock = StepClock(hardware.device)
        steps = request["warmup_steps"] + request["steps"]
        written_out = request.get("written_out", ())
        losses, chosen = train_steps(
            decided, tokens, steps, hardware, engine=engine, clock=clock, written_out=written_out
        )
        return step_figures(
            request, clock, losses, chosen, peak_bytes=peaks(hardware.device, level)
        )


def read_recipe(request: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a request.

    Raises:
        ConfigError: the recipe is invalid.
    """
    parse = parse_resolved_recipe if request.get("resolved") else parse_recipe
    return parse(request["recipe"])


def import_libraries(recipe: Recipe, more: Sequence[str] = ()) -> None:
    """Import the libraries that would otherwise be imported during the run, so that the memory that
    they use is not part of the measurement.

    Missing libraries are ignored here, because the code that needs them raises a better error.

    Args:
        recipe: the recipe of the run.
        more: additional modules.
    """
    names = ["torch._dynamo", *more]  # torch's optimizers import torch._dynamo in their first step.
    if recipe.efficiency.compile:
        names.append("torch._inductor.compile_fx")
    if recipe.lora is not None and recipe.lora.quantize == "nf4":
        names.append("bitsandbytes")
    if "8bit" in recipe.optimizer.name:
        library = recipe.optimizer.eight_bit_library
        names.append("bitsandbytes" if library == "auto" else library)
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def use_threads(
    request: Mapping[str, Any], recipe: Recipe, hardware: Hardware, engine: Engine
) -> None:
    """Set the number of torch threads to this rank's share, and set the random seed."""
    share = engine.world.size if hardware.device.type == "cpu" else 1
    torch.set_num_threads(max(1, request["threads"] // share))
    torch.manual_seed(recipe.run.seed)


def resolved(recipe: Recipe, hardware: Hardware) -> ResolvedRecipe:
    """Return the recipe with its open keys resolved. An epoch is assumed to have `EPOCH_TOKENS`
    tokens."""
    if isinstance(recipe, ResolvedRecipe):
        return recipe
    facts = facts_here(
        hardware,
        epoch_tokens=EPOCH_TOKENS,
        largest_micro_batch=lambda open_: largest_micro_batch(open_, hardware, lambda _: None),
    )
    return resolve(recipe, facts)


def step_figures(
    request: Mapping[str, Any],
    clock: StepClock,
    losses: Sequence[float],
    chosen: Mapping[str, Any],
    peak_bytes: tuple[int, int],
) -> dict[str, Any]:
    """Return the result of `measure`. Steps after the timed steps are ignored.

    Args:
        request: the request.
        clock: clock that measured the steps.
        losses: loss of each step.
        chosen: values of the recipe keys that can be left open.
        peak_bytes: result of `process_memory.peaks` on this rank.
    """
    timed = slice(request["warmup_steps"], request["warmup_steps"] + request["steps"])
    peak, total = map(max, zip(*gather_objects(list(peak_bytes)), strict=True))
    return {
        "first_step_seconds": clock.seconds[0],
        "step_seconds": clock.seconds[timed],
        "step_cpu_seconds": clock.cpu_seconds[timed],
        "losses": list(losses[: timed.stop]),
        "peak_bytes": peak,
        "total_peak_bytes": total,
        "chosen": dict(chosen),
    }


def lr_scale(step: int) -> float:
    """Return the learning rate of a step as a fraction of the recipe's learning rate."""
    return min(1.0, (step + 1) / _RISE_STEPS)


class Rows(Protocol):
    """The training data of a benchmark."""

    @property
    def seq_len(self) -> int: ...

    def batch(self, first: int, rows: int, documents: bool) -> Batch: ...


def train_steps(
    decided: ResolvedRecipe,
    tokens: Rows,
    steps: int,
    hardware: Hardware,
    engine: Engine,
    clock: StepClock,
    written_out: Collection[str] = (),
) -> tuple[list[float], dict[str, Any]]:
    """Train a model for `steps` steps. Return the loss of each step, and the values of the recipe
    keys that can be left open.
    """
    torch.manual_seed(decided.run.seed)
    model = empty_model(decided.model, decided.efficiency.vocab_multiple)
    model.init_weights(torch.Generator().manual_seed(decided.run.seed), decided.init)
    attach(model, decided, hardware)
    program = TrainingProgram(decided, model, hardware, engine)
    write_out(model, written_out, decided.model.max_position_embeddings)
    pins = bool(decided.data.pin_memory) and hardware.device.type == "cuda"
    micro, count = decided.batch.rows, decided.batch.accumulation(tokens.seq_len)
    masked = decided.data.document_masking
    losses = []
    for step in range(steps):
        first = (step * engine.world.size + engine.rank) * micro * count
        batches = [tokens.batch(first + micro * i, micro, masked) for i in range(count)]
        # The time for pinning is not included, because in training, the loader's threads pin
        # batches while a step is computed.
        if pins:
            batches = [batch.pin_memory() for batch in batches]
        barrier()
        clock.start()
        batches = [batch.to(hardware.device) for batch in batches]
        losses.append(program.step(batches, lr_scale(step)).loss)
        clock.stop()
    chosen = {
        "batch.micro_batch_size": micro,
        "batch.gradient_accumulation_steps": count,
        "efficiency.precision": decided.efficiency.precision,
        "efficiency.attention": decided.efficiency.attention,
        "efficiency.compile": decided.efficiency.compile,
        "efficiency.loss_chunk_tokens": decided.efficiency.loss_chunk_tokens,
    }
    return losses, chosen


_WORD = re.compile(r"\w+|\s+|[^\w\s]")
_DOCUMENT = re.compile(r"^(?= *(?:def|class) )", re.MULTILINE)


def write_tokens(path: Path, count: int, vocab_size: int) -> None:
    """Write `count` tokens of the source code of Python's standard library. The code is repeated if
    it contains fewer tokens.

    Args:
        path: safetensors file to write. It contains "tokens", int64 [count], and "starts", the
            position of each document's first token, int64 [documents].
        count: number of tokens.
        vocab_size: size of the vocabulary. Every document ends with the last id of the vocabulary.

    Raises:
        InputError: this Python installation does not include the source code of its standard
            library.
        StorageError: the file could not be written.
    """
    tokens: list[int] = []
    starts: list[int] = []
    documents = _documents()
    while len(tokens) < count:
        document = next(documents, None)
        if document is None:
            documents = _documents()
            continue
        starts.append(len(tokens))
        tokens += [zlib.crc32(word.encode()) % (vocab_size - 1) for word in _WORD.findall(document)]
        tokens.append(vocab_size - 1)
    arrays = {
        "tokens": np.array(tokens[:count], dtype=np.int64),
        "starts": np.array(starts, dtype=np.int64),
    }
    write_file(path, safetensors.numpy.save(arrays))


def _documents() -> Iterator[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    if not files:
        raise InputError(
            "the source of Python's standard library, on which this benchmark trains, is not in "
            f"{folder}: install a Python that includes it"
        )
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")
        yield from (part for part in _DOCUMENT.split(text) if part)


class Tokens:
    """Training data from a file written by `write_tokens`, divided into rows of equal length.

    Attributes:
        tokens: int64 [tokens].
        starts: position of each document's first token, int64 [documents].
        seq_len: number of input tokens per row.
    """

    def __init__(self, path: Path, seq_len: int) -> None:
        arrays = safetensors.numpy.load_file(path)
        self.tokens: npt.NDArray[np.int64] = arrays["tokens"]
        self.starts: npt.NDArray[np.int64] = arrays["starts"]
        self.seq_len = seq_len

    def batch(self, first: int, rows: int, documents: bool) -> Batch:
        """Return `rows` rows, starting at row `first`, as one batch.

        Args:
            first: index of the first row.
            rows: number of rows.
            documents: True to include `document_ids`, which are used to mask attention between
                documents. The token that ends a document is treated as the first input token of the
                next document, so that no label is masked.

        Returns:
            `input_ids` and `labels` int64 [rows, seq_len]; `document_ids` int32 [rows, seq_len] or
            None.
        """
        spans = [row_span(row, self.seq_len) for row in range(first, first + rows)]
        rows_BS = np.stack([self.tokens[span] for span in spans])
        input_ids, labels = rows_BS[:, :-1].copy(), rows_BS[:, 1:].copy()
        numbers = None
        if documents:
            numbers = torch.from_numpy(np.stack([self._document_numbers(span) for span in spans]))
        return Batch(torch.from_numpy(input_ids), torch.from_numpy(labels), labels.size, numbers)

    def _document_numbers(self, span: slice) -> npt.NDArray[np.int32]:
        first, last = np.searchsorted(self.starts, [span.start, span.stop])
        starts = self.starts[first:last] - span.start
        return separate_documents(starts, self.seq_len, eos_opens=True)[0]


# Parts of a GPT-2 model implemented with elementary operations, as in textbooks, instead of torch's
# classes. They are used only in the first rows of the ladder of `bench methods`.

#: Names of the parts that can be replaced with elementary operations. With "mask", each layer
#: stores a causal mask of the full context in fp32. For each batch, the layer slices and converts
#: this mask instead of creating a new one. With "layers", LayerNorm and GELU consist of elementary
#: operations, instead of torch.nn.LayerNorm and gelu.
WRITTEN_OUT_PARTS = ("mask", "layers")


class WrittenOutNorm(nn.LayerNorm):
    """LayerNorm (Ba et al. 2016), implemented with elementary operations. Inputs and outputs have
    shape [..., C]."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        return self.weight * ((x - mean) / torch.sqrt(variance + self.eps)) + self.bias


class WrittenOutMLP(GPT2MLP):
    """GPT-2's MLP. The tanh approximation of GELU is implemented with elementary operations. Inputs
    and outputs have shape [B, T, C]."""

    def forward(self, x_BTC: Tensor) -> Tensor:
        x = self.c_fc(x_BTC)
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3))
        return self.dropout(self.c_proj(0.5 * x * (1 + torch.tanh(inner))))  # type: ignore[no-any-return]


def _attend_with(
    stored: Tensor, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, options: AttentionOptions
) -> Tensor:
    """Compute `plain_attention` with a stored mask, fp32 [context, context]. Rows of the mask
    correspond to queries, and columns to keys. An element is 1 if the query must not attend to the
    key. If `options` contains a mask, that mask is used instead."""
    if options.mask is None:
        mask = ~stored.bool()[: q_BHTD.shape[-2], : k_BKSD.shape[-2]]
        options = options._replace(mask=mask)
    return plain_attention(q_BHTD, k_BKSD, v_BKSD, options)


def write_out(model: Model, parts: Collection[str], context: int) -> None:
    """Replace parts of a GPT-2 model with versions implemented with elementary operations. The
    weights do not change, and the results are the same up to rounding.

    Args:
        model: the model, modified in place.
        parts: names in `WRITTEN_OUT_PARTS`.
        context: number of rows and columns of the stored masks.
    """
    for module in list(model.modules()):
        if isinstance(module, GPT2Attention) and "mask" in parts:
            stored = torch.triu(torch.ones(context, context, device=module.c_attn.weight.device), 1)
            module.attend = functools.partial(_attend_with, stored)
        elif type(module) is nn.LayerNorm and "layers" in parts:
            module.__class__ = WrittenOutNorm
        elif (
            type(module) is GPT2MLP
            and "layers" in parts
            and module.activation_function == "gelu_new"
        ):
            module.__class__ = WrittenOutMLP
