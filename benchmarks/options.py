"""Options of the benchmarks.

The text of an attribute is the help of its option; the values that stand for None are in brackets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from firstlight.bench.rows import StepsBench


@dataclass(frozen=True)
class FolderBench:
    """Options of the benchmarks that resume where an earlier call stopped.

    Attributes:
        folder: folder of the results; results of earlier calls are reused.
    """

    folder: Path


@dataclass(frozen=True)
class LoadingBench:
    """Options of `benchmarks loading`.

    Attributes:
        parameters: approximate number of the model's parameters.
        dtype: number format of the file: bfloat16 or float32.
        repeats: turns of all rows.
        ways: only these rows: auto, sequential, mmap, straight, sharded, per-tensor,
            per-tensor-sequential, cast, transformers, transformers-huge-pages, transformers-cast.
        no_transformers: skip transformers' rows.
        folder: create the checkpoint here, keep it and reuse it. [a temporary folder]
        device: device to load to: auto, cpu, cuda or cuda:1.
    """

    parameters: int = 500_000_000
    dtype: str = "bfloat16"
    repeats: int = 3
    ways: Sequence[str] = ()
    no_transformers: bool = False
    folder: Path | None = None
    device: str = "auto"


@dataclass(frozen=True)
class TrainingBench(StepsBench):
    """Options of `benchmarks training`.

    Attributes:
        model: model to train: gpt2-124m, gpt2-355m, gpt2-774m, llama-110m, llama-1b, small, or
            the model, optimizer and efficiency sections of a recipe. [gpt2-124m; small with
            --quick]
        programs: programs to compare with: reference (a bare loop: bf16 autocast, compiled),
            reference-fp32, pure-bf16 (no master weights, no clipping), trainer (transformers, bf16,
            compiled). [reference; also reference-fp32 if bf16 is not faster]
        variants: one more row of firstlight with these keys of its recipe; may be given several
            times.
        same_environment: also run the other programs in the environment of `firstlight train`
            (spinning threads).
        profile: measure time by operator, with torch.profiler in two further steps of each run.
        quick: a small model, one turn.
    """

    programs: Sequence[str] | None = None
    variants: Sequence[str] = ()
    same_environment: bool = False
    profile: bool = False


@dataclass(frozen=True)
class GenerationBench:
    """Options of `benchmarks generation`.

    Attributes:
        model: model that continues texts: gpt2-124m, gpt2-355m, gpt2-774m, llama-110m, llama-1b,
            smollm2-135m or small, with random weights; or a model's folder. [gpt2-124m; small with
            --quick]
        batch_sizes: batch sizes.
        prompt_tokens: tokens of each prompt. [128; 32 with --quick]
        new_tokens: new tokens of each text. [64; 16 with --quick]
        repeats: turns of all rows. [3; 1 with --quick]
        rows: only these: transformers-fp32, transformers-bf16, fp32, fp32-no-cache, bf16, int8,
            fp32-compiled, bf16-compiled, int8-compiled, llama.cpp-fp32, llama.cpp-bf16,
            llama.cpp-int8.
        device: device to run on: auto, cpu, cuda or cuda:1.
        quick: a small model, one turn, nothing compiled.
    """

    model: str | None = None
    batch_sizes: Sequence[int] = (1, 8)
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    repeats: int | None = None
    rows: Sequence[str] = ()
    device: str = "auto"
    quick: bool = False


@dataclass(frozen=True)
class ScalingBench:
    """Options of `benchmarks scaling`.

    Attributes:
        nproc: maximum number of processes: 1, 2, 4, ... and this number are measured.
        model: model to train: gpt2-124m, gpt2-355m, gpt2-774m, llama-110m, llama-1b, small, or a
            recipe's.
        engines: only these: ddp, fsdp, fsdp-kept, fsdp-offload, hybrid, tensor, pipeline, zero-1,
            zero-2, zero-3.
        seq_len: tokens per sequence.
        micro_batch_size: sequences of each process's micro-batch.
        accumulation: micro-batches of a step.
        precision: precision as in a recipe's efficiency section.
        steps: timed steps of each turn.
        repeats: turns of all rows.
        device: device to run on: auto, cpu or cuda.
    """

    nproc: int = 2
    model: str = "small"
    engines: Sequence[str] = ()
    seq_len: int = 256
    micro_batch_size: int = 2
    accumulation: int = 1
    precision: str = "fp32"
    steps: int = 5
    repeats: int = 3
    device: str = "auto"


@dataclass(frozen=True)
class LearningBench(FolderBench):
    """Options of `benchmarks learning`.

    Attributes:
        corpora: the source of Python's standard library; a text; or a text whose tokens are bytes.
            May be given several times.
        sizes: only these: 0.8m, 2.6m, 11m, 30m, 88m, which are parameters. [2.6m]
        rows: only these recipes, or `changes` for all single changes; the first one is the baseline
            for tokens and seconds. [nanogpt, nanogpt-tuned, nanogpt-cpu, nanochat, before, new]
        variants: one more row: a row with these keys of its recipe; may be given several times.
        seeds: runs of each row.
        tokens: tokens of a run. [1.5 million, without --minutes]
        minutes: minutes of training of a run, instead of tokens.
        held_out_tokens: held-out tokens for a run's final figure, drawn once for all runs; each
            point of the curve uses an eighth of them. [all]
    """

    corpora: Sequence[str] = ("stdlib",)
    sizes: Sequence[str] = ()
    rows: Sequence[str] = ()
    variants: Sequence[str] = ()
    seeds: int = 3
    tokens: int | None = None
    minutes: float | None = None
    held_out_tokens: int | None = None


@dataclass(frozen=True)
class BudgetBench(FolderBench):
    """Options of `benchmarks budget`.

    Attributes:
        corpora: the source of Python's standard library, or texts. May be given several times.
        budgets: wall-clock time of each run: 3m, 1h. May be given several times.
        trials: number of random settings in addition to the chosen ones.
    """

    corpora: Sequence[str] = ("stdlib",)
    budgets: Sequence[str] = ("3m",)
    trials: int = 20


@dataclass(frozen=True)
class GPUBench(FolderBench):
    """Options of `benchmarks gpu`.

    Attributes:
        seconds: maximum duration of the call, not counting imports; items that would not end in
            time are left for the next call.
        items: only these items, such as A,C,D-124m; D selects all whose names start with D.
        device: cuda; or cpu, a dry run of every item with tiny shapes.
        commit: name of the commit, for a machine without git. [from git]
    """

    seconds: float = 530.0
    items: Sequence[str] = ()
    device: str = "cuda"
    commit: str = ""


@dataclass(frozen=True)
class KeepingBench(FolderBench):
    """Options of `benchmarks keeping`.

    Attributes:
        model: model to fine-tune: a folder, a run or a GGUF file.
        text: new text, a text file or a .jsonl file of conversations; its last tenth is held out.
        keep: kept text, as for `firstlight train`. [the control set]
        steps: optimizer steps of a run.
        batch_tokens: tokens per step.
        replays: shares of kept text, or auto; may be given several times.
        rates: learning rates, as multiples of the chosen one; may be given several times.
        methods: full or lora; may be given several times.
        kilobytes: sizes of the new text; may be given several times. [all of it]
        rows: held-out rows of each text per evaluation.
        evaluations: number of evaluations after the first step.
        seeds: runs of each row.
    """

    model: str = ""
    text: str = ""
    keep: str | None = None
    steps: int = 100
    batch_tokens: int = 2048
    replays: Sequence[str] = ("0", "0.05", "0.1", "0.25", "auto")
    rates: Sequence[float] = (1.0,)
    methods: Sequence[str] = ("full",)
    kilobytes: Sequence[str] = ()
    rows: int = 48
    evaluations: int = 5
    seeds: int = 3


@dataclass(frozen=True)
class DocumentsBench(FolderBench):
    """Options of `benchmarks documents`.

    Attributes:
        sources: folder of plain-text manuals, NAME.LANGUAGE.txt or .txt.gz.
        characters: number of characters of each manual's prose.
        turns: turns of both programs.
        reads: timed reads of a document in each turn.
    """

    sources: str = ""
    characters: int = 40_000
    turns: int = 3
    reads: int = 5
