"""Train a few steps with one program, in a separate process, and report their time and memory.

    python -m firstlight.hardware.fresh_process firstlight.bench.training_once REQUEST

The same command also runs as one of several ranks of a run with `distributed.engine`
(`process.ask_ranks`): each rank trains on different sequences, with its share of a CPU's threads.

REQUEST is a JSON object:

    program           "firstlight", a name of `reference_programs`, or "trainer"
    recipe            values of a recipe, including its model, data.seq_len and device
    resolved          true if the recipe has no open key; otherwise its keys are resolved here
    micro_batch_size  sequences of a step, as one batch; firstlight reads the recipe instead
    data              a file of `write_tokens`, or the folder of a prepared corpus
    warmup_steps      number of steps that are not timed
    steps             number of steps that are timed
    phase_steps       number of further steps, timed by forward, backward and update; default 0
    profiled_steps    number of steps after these, timed by class of operators; default 0
    threads           threads of torch
    compile           false, for dry runs, does not compile programs other than firstlight
    written_out       names of `written_out.PARTS` that replace parts of firstlight's model

What is measured, in this order:

1. All libraries that the program needs are imported, torch's compiler and 8-bit libraries too, and
   the recipe's open keys are resolved. Then the resident memory of the process is noted, and the
   peak that the kernel counts is reset.
2. Model, optimizer and loss function are made, as `firstlight train` makes them.
3. `first_step_seconds`: the first step, with compilation. Only the warm-up steps, of which it is
   the first, allocate and compile.
4. `step_seconds` of each timed step, from its batches in host memory to the updated parameters;
   for the Trainer from its `on_step_begin` to its `on_step_end`. `step_cpu_seconds` is the
   processor time of all threads in the step: other work on the machine affects it less, but it
   includes threads that wait by spinning.
5. `phases` and `operators`: the breakdown of the further steps, see `step_parts`. Memory and losses
   do not include these steps.

Step s trains on the sequences from s * n on, where n is the number of sequences of a step, so that
programs and recipes with the same n see the same tokens. `losses` are those of all warm-up and
timed steps, each before the step's update. The learning rate rises linearly over the first four
steps and is constant after them.

On a CPU, `total_peak_bytes` is the peak of the process's resident memory, and `peak_bytes` is how
far it exceeds the level of step 1. On a GPU, both are the peak of torch's allocator. With several
processes, both are those of the largest process, and losses are over the sequences of all of them.

The process prints one line on stdout: a JSON object with these values and, for firstlight,
`chosen`: the values of the recipe's keys that can be left open. An error is printed as
{"error": {"type", "message"}} instead.

The data are the source of Python's standard library: it is on every machine, it is real text, and
it is the same for every row of a table. `benchmarks gpu` and `benchmarks learning` train on token shards,
with a tokenizer that was trained on the text (`library_corpus`). The others take `write_tokens`,
which needs no tokenizer: each word, run of white space or punctuation mark is a token, whose id is
its CRC-32 modulo one less than the vocabulary size. So ids of the whole vocabulary occur, with the
frequencies of words, whatever its size. A new document begins at each line that begins a function,
method or class.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sysconfig
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy
import torch

from firstlight.bench.memory import begin_peak
from firstlight.bench.reference_programs import (
    LoopStep,
    StepClock,
    autocast_loop,
    pure_bf16_loop,
    train_with_trainer,
)
from firstlight.bench.step_parts import PartsClock
from firstlight.bench.written_out import write_out
from firstlight.data.corpus import TokenDataset, row_span, separate_documents
from firstlight.data.loader import Batch, rows_to_batch
from firstlight.data.prepare import prepare
from firstlight.data.records import read_documents
from firstlight.data.sources import find_sources
from firstlight.errors import InputError
from firstlight.files.atomic import write_file
from firstlight.hardware.device import Hardware
from firstlight.models import GPT2Config, LlamaConfig, empty_model
from firstlight.parallel import barrier, gather_objects
from firstlight.parallel.engine import Engine
from firstlight.recipe import Recipe, ResolvedRecipe, parse_recipe, parse_resolved_recipe
from firstlight.recipe.resolve import facts_here, resolve
from firstlight.tokenizer import train_tokenizer
from firstlight.training.micro_batch import largest_micro_batch
from firstlight.training.processes import run_processes
from firstlight.training.program import TrainingProgram
from firstlight.training.starting_model import attach

#: Number of steps over which the learning rate rises linearly.
_RISE_STEPS = 4

#: Tokens of an epoch for which open keys are resolved.
EPOCH_TOKENS = 10**9


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Train and measure; the module's docstring describes the request and the result.

    Raises:
        FirstlightError: the recipe is invalid, or the loss became NaN or infinite.
    """
    parse = parse_resolved_recipe if request.get("resolved") else parse_recipe
    recipe: Recipe = parse(request["recipe"])
    _import_libraries(request["program"], recipe)
    with run_processes(recipe) as (hardware, engine):
        return _measured(request, recipe, hardware, engine)


def _measured(
    request: dict[str, Any], recipe: Recipe, hardware: Hardware, engine: Engine
) -> dict[str, Any]:
    program = request["program"]
    share = engine.world.size if hardware.device.type == "cpu" else 1
    torch.set_num_threads(max(1, request["threads"] // share))
    torch.manual_seed(recipe.run.seed)
    if program == "firstlight" and not isinstance(recipe, ResolvedRecipe):
        recipe = _resolved(recipe, hardware)
    assert recipe.data.seq_len is not None
    tokens = open_rows(Path(request["data"]), recipe.data.seq_len)
    level = begin_peak()
    timed, phase_steps = request["warmup_steps"] + request["steps"], request.get("phase_steps", 0)
    clock = PartsClock(hardware.device, level, timed, phase_steps)
    chosen: dict[str, Any] = {}
    steps = timed + phase_steps + request.get("profiled_steps", 0)
    if isinstance(recipe, ResolvedRecipe):
        parts = request.get("written_out", ())
        losses, chosen = _firstlight(recipe, tokens, steps, hardware, engine, clock, parts)
    else:
        rows = request["micro_batch_size"]
        batches = (tokens.batch(step * rows, rows, documents=False) for step in range(steps))
        compiles = request.get("compile", True)
        if program == "trainer":
            losses = train_with_trainer(recipe, batches, steps, rows, clock, compile_model=compiles)
        else:
            loop = _loop(program, recipe, hardware, compile_model=compiles)
            losses = _run_loop(loop, recipe, batches, hardware, clock)
    assert clock.peaks is not None
    peak, total = map(max, zip(*gather_objects(list(clock.peaks)), strict=True))
    return {
        "first_step_seconds": clock.seconds[0],
        "step_seconds": clock.seconds[request["warmup_steps"] : timed],
        "step_cpu_seconds": clock.cpu_seconds[request["warmup_steps"] : timed],
        "phases": clock.phases,
        "operators": clock.operators,
        "losses": losses[:timed],
        "peak_bytes": peak,
        "total_peak_bytes": total,
        "chosen": chosen,
    }


def _import_libraries(program: str, recipe: Recipe) -> None:
    """Import libraries that would be imported during the run, so that the memory which they take
    is not counted as the program's.

    A missing library is ignored here: the code that needs it raises a better error.
    """
    names = ["torch._dynamo"]  # torch's optimizers import it in their first step
    if program != "firstlight" or recipe.efficiency.compile:
        names.append("torch._inductor.compile_fx")
    if program == "trainer":
        names.append("transformers.trainer")
    if recipe.lora is not None and recipe.lora.quantize == "nf4":
        names.append("bitsandbytes")
    if "8bit" in recipe.optimizer.name:
        library = recipe.optimizer.eight_bit_library
        names.append("bitsandbytes" if library == "auto" else library)
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _resolved(recipe: Recipe, hardware: Hardware) -> ResolvedRecipe:
    facts = facts_here(
        hardware,
        epoch_tokens=EPOCH_TOKENS,
        largest_micro_batch=lambda open_: largest_micro_batch(open_, hardware, lambda _: None),
    )
    return resolve(recipe, facts)


def _lr_scale(step: int) -> float:
    return min(1.0, (step + 1) / _RISE_STEPS)


def _firstlight(
    decided: ResolvedRecipe,
    tokens: Tokens | ShardRows,
    steps: int,
    hardware: Hardware,
    engine: Engine,
    clock: StepClock,
    written_out: Collection[str],
) -> tuple[list[float], dict[str, Any]]:
    """Train with firstlight: the loss of each step, and the values of keys that can be open."""
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
        # Outside the timed part: the loader's threads pin batches while a step computes.
        if pins:
            batches = [batch.pin_memory() for batch in batches]
        barrier()
        clock.start()
        batches = [batch.to(hardware.device) for batch in batches]
        losses.append(program.step(batches, _lr_scale(step)).loss)
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


def _loop(program: str, recipe: Recipe, hardware: Hardware, *, compile_model: bool) -> LoopStep:
    config = recipe.model
    assert isinstance(config, GPT2Config | LlamaConfig)
    if program == "pure-bf16":
        assert isinstance(config, GPT2Config)
        return pure_bf16_loop(config, hardware.device, compile_model=compile_model)
    bf16 = program == "reference"
    return autocast_loop(config, hardware.device, bf16=bf16, compile_model=compile_model)


def _run_loop(
    loop: LoopStep, recipe: Recipe, batches: Iterator[Batch], hardware: Hardware, clock: StepClock
) -> list[float]:
    losses = []
    for step, batch in enumerate(batches):
        rate = recipe.optimizer.learning_rate * _lr_scale(step)
        clock.start()
        batch = batch.to(hardware.device)
        losses.append(loop(batch.input_ids, batch.labels, rate))
        clock.stop()
    return losses


_WORD = re.compile(r"\w+|\s+|[^\w\s]")
_DOCUMENT = re.compile(r"^(?= *(?:def|class) )", re.MULTILINE)


def write_tokens(path: Path, count: int, vocab_size: int) -> None:
    """Write `count` tokens of the standard library's source, repeated if it has fewer.

    Args:
        path: safetensors file to write: "tokens" int64 [count] and "starts" int64 [documents], the
            position of each document's first token.
        count: number of tokens.
        vocab_size: size of the vocabulary, whose last id ends every document.

    Raises:
        InputError: this Python has no source of its standard library.
        StorageError: a file system error.
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
            f"the source of Python's standard library, which this benchmark trains on, is not in "
            f"{folder}: install a Python that has it"
        )
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")
        yield from (part for part in _DOCUMENT.split(text) if part)


def library_corpus(folder: Path, vocab_size: int, source: str | Path = "stdlib") -> Path:
    """Train a tokenizer on a text, and prepare the text as token shards, unless corpus/ exists.

    With the standard library and a vocabulary of 50,257 tokens, this takes about ten seconds.

    Args:
        folder: parent of tokenizer/ and corpus/.
        vocab_size: vocabulary size of the tokenizer.
        source: text, as `prepare` takes it; "stdlib" is the source of Python's standard library.

    Returns:
        Folder of the prepared corpus, with its splits "train" and "val".

    Raises:
        InputError: the text does not exist.
        StorageError: a file system error.
    """
    corpus = folder / "corpus"
    if not corpus.exists():
        found = read_documents(find_sources([source]), "text")
        texts = (record.value for record in found if record.error is None)
        tokenizer = train_tokenizer(texts, vocab_size)
        tokenizer.save_pretrained(folder / "tokenizer")
        prepare([source], tokenizer, corpus, workers=1)
    return corpus


class ShardRows:
    """The rows of a prepared corpus's split "train" in order; after the last, the first follows."""

    def __init__(self, folder: Path, seq_len: int) -> None:
        self.dataset, self.seq_len = TokenDataset(folder, "train"), seq_len
        # The last row, if it is short, is left out: all batches have the same shape.
        self.count = max(1, (self.dataset.num_tokens - 1) // seq_len)

    def batch(self, first: int, rows: int, documents: bool) -> Batch:
        """`rows` rows from row `first` on as one batch; see `Tokens.batch`."""
        numbers = [row % self.count for row in range(first, first + rows)]
        return rows_to_batch(self.dataset, numbers, self.seq_len, 0, document_masking=documents)


def open_rows(path: Path, seq_len: int) -> Tokens | ShardRows:
    """The rows of a prepared corpus if `path` is a folder, otherwise those of a file that
    `write_tokens` wrote."""
    return ShardRows(path, seq_len) if path.is_dir() else Tokens(path, seq_len)


class Tokens:
    """The rows of a file that `write_tokens` wrote.

    Attributes:
        tokens: int64 [tokens].
        starts: position of each document's first token, int64 [documents].
        seq_len: input tokens of a row.
    """

    def __init__(self, path: Path, seq_len: int) -> None:
        arrays = safetensors.numpy.load_file(path)
        self.tokens: npt.NDArray[np.int64] = arrays["tokens"]
        self.starts: npt.NDArray[np.int64] = arrays["starts"]
        self.seq_len = seq_len

    def batch(self, first: int, rows: int, documents: bool) -> Batch:
        """`rows` rows from row `first` on as one batch.

        Args:
            documents: True adds the document numbers, for masking. The token that ends a document
                is, as an input, the first of the next one, so that no label is masked.

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
