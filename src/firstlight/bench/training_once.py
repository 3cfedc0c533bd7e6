"""Train a few steps with one program, in a separate process, and report their time and memory.

    python -m firstlight.bench.process firstlight.bench.training_once REQUEST

or in several, as ranks of a run with `distributed.engine` (`process.ask_ranks`): each trains on
different sequences, with its share of a CPU's threads.

REQUEST is a JSON object:

    program           "firstlight", a name of `reference_programs`, or "trainer"
    recipe            a recipe's values, with its model, data.seq_len and device
    resolved          true if the recipe has no open key; else it is resolved here
    micro_batch_size  sequences of a step, which every program but firstlight computes at once
    data              a file of `write_tokens`, or a prepared corpus
    warmup_steps      steps that are not timed
    steps             steps that are timed
    phase_steps       further steps, divided into forward, backward and update; 0 unless given
    profiled_steps    further steps after these, by class of operators; 0 unless given
    threads           threads of torch
    compile           false compiles no other program than firstlight, for dry runs
    written_out       parts of firstlight's model that are written out: see `written_out`

What is measured, in this order:

1. Everything that the program needs is imported, torch's compiler and 8-bit libraries too, and open
   keys are decided; then the resident memory of the process is noted, and its peak set back to it.
2. Model, optimizer and loss function are made, as `firstlight train` makes them.
3. `first_step_seconds`: the first step, with compilation. It and the other warm-up steps are the
   only ones that allocate and compile.
4. `step_seconds`: of each timed step, from its batches in memory to the updated parameters;
   for the Trainer from its `on_step_begin` to its `on_step_end`. `step_cpu_seconds` is the
   processor's time in it, of all threads: it suffers less from other work on the machine, but
   counts threads that wait by spinning.
5. `phases` and `operators` of the further steps, see `step_parts`; memory and losses are without
   them.

Step s trains on the sequences from s x sequences a step on, so that programs and recipes with as
many of them see the same tokens. `losses` are those before each update, of all steps. The learning
rate rises over the first four steps and then stays.

`total_peak_bytes` is on a CPU the peak of the process's resident memory and `peak_bytes` what of
that is above the level of step 1; on a GPU both are the peak of what was allocated. With several
processes they are those of the largest process, and losses are over the sequences of all processes.

The one line on stdout is a JSON object of these, and with firstlight `chosen`, the keys of the
recipe that were left to it; or {"error": {"type", "message"}} where firstlight refuses.

The data are the source of Python's standard library: it is on every machine, it is real text, and
it is the same for every row of a table. `bench gpu` and `bench learning` train on shards that a
tokenizer of their own was trained for (`library_corpus`). The others take `write_tokens`, which
needs no tokenizer: a word, a run of blanks or a sign is a token; its id is its CRC-32 modulo the
vocabulary, so that ids of the whole vocabulary occur, as often as words do, whatever its size. A
document is what lies between two lines that begin a function, method or class.
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

#: Steps over which the learning rate rises.
_RISE_STEPS = 4

#: Open keys are decided as for a run of this length.
EPOCH_TOKENS = 10**9


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Train as the module's head says, and return the measurements.

    Raises:
        FirstlightError: the recipe is refused, or the loss stopped being a number.
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
    """Import what comes late otherwise, so that it doesn't count as the program's memory.

    A missing library is refused later, by the code that needs it.
    """
    names = ["torch._dynamo"]  # which torch's optimizers import at their first step
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
    """The losses, and the values of the keys that a recipe may leave open."""
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
        if pins:  # as the loader's threads do while a step computes
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
    """Write `count` tokens of the standard library, starting it again if it is shorter.

    Args:
        path: safetensors file to write: "tokens" [count], and "starts" of the documents.
        count: number of tokens.
        vocab_size: size of the vocabulary, whose last id ends every document.

    Raises:
        InputError: the library's source is not there.
        StorageError: the disk refused.
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
    """Train a tokenizer on the standard library's source, or on another text, and prepare it as
    token shards, unless they are there: ten seconds for 50,257 tokens.

    Args:
        folder: parent of tokenizer/ and corpus/.
        vocab_size: vocabulary size of the tokenizer.
        source: text, as `prepare` takes it.

    Returns:
        The prepared corpus, with its splits "train" and "val".

    Raises:
        InputError: the text is not there.
        StorageError: the disk refused.
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
    """The rows of a prepared corpus in their order, from its first again behind the last."""

    def __init__(self, folder: Path, seq_len: int) -> None:
        self.dataset, self.seq_len = TokenDataset(folder, "train"), seq_len
        # A last row that is short is left out.
        self.count = max(1, (self.dataset.num_tokens - 1) // seq_len)

    def batch(self, first: int, rows: int, documents: bool) -> Batch:
        """Rows `first` to `first + rows` as one batch; see `Tokens.batch`."""
        numbers = [row % self.count for row in range(first, first + rows)]
        return rows_to_batch(self.dataset, numbers, self.seq_len, 0, document_masking=documents)


def open_rows(path: Path, seq_len: int) -> Tokens | ShardRows:
    """The rows of a prepared corpus, or of a file of `write_tokens`."""
    return ShardRows(path, seq_len) if path.is_dir() else Tokens(path, seq_len)


class Tokens:
    """The rows of a file that `write_tokens` wrote."""

    def __init__(self, path: Path, seq_len: int) -> None:
        arrays = safetensors.numpy.load_file(path)
        self.tokens: npt.NDArray[np.int64] = arrays["tokens"]
        self.starts: npt.NDArray[np.int64] = arrays["starts"]
        self.seq_len = seq_len

    def batch(self, first: int, rows: int, documents: bool) -> Batch:
        """Rows `first` to `first + rows` as one batch.

        Args:
            documents: number the documents of each row, for masking. A document's end is, as an
                input, the begin of the next, so that no label is left out.
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
