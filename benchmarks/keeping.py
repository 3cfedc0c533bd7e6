"""`python -m benchmarks keeping`: what fine-tuning on a text gains on it and loses on others.

Each run is a call of `train_texts` with `init_from`. The new text is plain text, or a JSON Lines
file of conversations. The rows are all combinations of the shares of kept text (--replay), learning
rates as multiples of the chosen rate, methods (all weights or LoRA) and sizes of the text. The
control set is made once, by the first run. The held-out text is the same for all sizes: the last
tenth of the text.

Each finished run is one line of results.jsonl. A second call in the same folder measures the
missing runs.
"""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.options import KeepingBench
from firstlight.bench.display import new_figure, png_of
from firstlight.checkpoint.selection import resolve_model_folder
from firstlight.console import say
from firstlight.errors import ConfigError
from firstlight.files.atomic import make_folder, write_file
from firstlight.finetuning.choices import starting_model
from firstlight.from_texts.run import train_texts
from firstlight.hardware.device import find_hardware, machine_facts
from firstlight.lora.files import config_folder
from firstlight.planner.advise.defaults import finetuning_rate
from firstlight.run_log.reader import read_json_lines
from firstlight.weights.huggingface import read_config

#: Recipe keys of each method. The sample texts of the runs are not read.
METHODS: dict[str, dict[str, Any]] = {"full": {}, "lora": {"lora.rank": 16, "lora.alpha": 32}}
_KEYS = ("replay", "rate", "method", "kilobytes")


def bench_keeping(options: KeepingBench) -> dict[str, Any]:
    """Measure all rows, and return {"machine", "model", "text", "runs"}.

    Raises:
        ConfigError: a method is unknown.
        FirstlightError: see `train_texts`.
    """
    if unknown := set(options.methods) - METHODS.keys():
        raise ConfigError(f"methods: {', '.join(METHODS)}, not {', '.join(unknown)}")
    folder = options.folder
    make_folder(folder)
    text = Path(options.text).read_text(encoding="utf-8")
    cut = text.rfind("\n", 0, int(0.9 * len(text))) + 1
    write_file(_held_out(options), text[cut:])
    path = folder / "results.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    grid = itertools.product(
        range(options.seeds),
        [int(size) for size in options.kilobytes] or [0],
        options.methods,
        options.rates,
    )
    for seed, kilobytes, method, rate in grid:
        new = folder / f"new-{kilobytes}" / Path(options.text).name
        make_folder(new.parent)
        most = 1000 * kilobytes or None
        write_file(new, text[:cut].encode()[:most].decode(errors="ignore"))
        for replay in options.replays:
            values = replay, rate, method, kilobytes, seed
            row: dict[str, Any] = dict(zip((*_KEYS, "seed"), values, strict=True))
            if any(row.items() <= one.items() for one in found):
                continue
            result = {**row, **measure(options, new, row)}
            found.append(result)
            write_file(path, "".join(json.dumps(one) + "\n" for one in found))
            say(f"{row}: {result['new'][-1]:.4f} new, {result['kept'][-1]:.4f} kept")
    machine = machine_facts(find_hardware("auto"))
    return {"machine": machine, "model": options.model, "text": options.text, "runs": found}


def _held_out(options: KeepingBench) -> Path:
    return options.folder / f"held-out{Path(options.text).suffix}"


def measure(options: KeepingBench, new: Path, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fine-tune the model on a text.

    Args:
        options: model, length and kept text.
        new: training text.
        row: replay, rate, method and seed of the run.

    Returns:
        "steps", "new", "kept": step and bits per byte of each evaluation; "share": share of kept
        text; "learning_rate", "seconds".
    """
    folder, control = options.folder / "run", options.folder / "kept"
    shutil.rmtree(folder, ignore_errors=True)
    start = resolve_model_folder(options.model)
    model = starting_model(start, read_config(config_folder(start)))
    is_lora = row["method"] == "lora"
    is_chat = new.suffix == ".jsonl"
    chosen = finetuning_rate(
        "adamw",
        model.hidden_size,
        {},
        adapters=is_lora,
        young=model.is_young,
        text=not is_chat,
    )
    learning_rate = float(f"{row['rate'] * chosen:.3g}")
    done = train_texts(
        new,
        steps=options.steps,
        init_from=options.model,
        run_dir=folder,
        overrides={
            **METHODS[row["method"]],
            **({"data.val_files": [str(_held_out(options))]} if is_chat else {}),
            "run.seed": row["seed"],
            "optimizer.learning_rate": learning_rate,
            "batch.global_batch_tokens": options.batch_tokens,
            "evaluation.max_rows": options.rows,
            "evaluation.sample_prompts": [],
            "evaluation.every_steps": max(options.steps // options.evaluations, 1),
            "checkpoint.every_steps": 0,
        },
        val_inputs=() if is_chat else _held_out(options),
        keep=options.keep or (control if control.is_dir() else ()),
        replay=None if row["replay"] == "auto" else float(row["replay"]),
        progress=False,
    )
    if not options.keep and not control.is_dir():
        shutil.copytree(folder / "kept", control)
    lines = [line for line in read_json_lines(folder / "metrics.jsonl") if "kept/loss" in line]
    events = read_json_lines(folder / "events.jsonl")
    return {
        "steps": [line["step"] for line in lines],
        "new": [line["bits_per_byte"] for line in lines],
        "kept": [line["kept/bits_per_byte"] for line in lines],
        "share": events[0]["share"] if events else float(row["replay"]),
        "learning_rate": learning_rate,
        "seconds": done.seconds,
    }


# The table and the picture

HEADER = ("replay", "rate", "method", "text", "runs", "new text", "kept text", "sum")


def groups(runs: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Yield the runs of each row, which differ only in their seed."""
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for run in runs:
        found.setdefault(tuple(run[key] for key in _KEYS), []).append(run)
    yield from found.values()


def row_cells(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the cells of a row: the means and, in brackets, the spread over the seeds (largest
    minus smallest). The changes are relative to the starting model.
    """
    first = runs[0]

    def change(key: str) -> str:
        found = [100 * (run[key][-1] / run[key][0] - 1) for run in runs]
        spread = max(found) - min(found)
        return f"{statistics.mean(found):+.1f}% ({spread:.1f})"

    sums = [run["new"][-1] + run["kept"][-1] for run in runs]
    share = first["replay"]
    if share == "auto":
        share += f" ({', '.join(sorted({format(run['share'], 'g') for run in runs}))})"
    rate = f"{first['rate']:g} x ({first['learning_rate']:.2g})"
    size = f"{first['kilobytes']} kB" if first["kilobytes"] else "all"
    spread = f"{statistics.mean(sums):.4f} ({max(sums) - min(sums):.4f})"
    return [
        share,
        rate,
        first["method"],
        size,
        str(len(runs)),
        change("new"),
        change("kept"),
        spread,
    ]


def draw(result: Mapping[str, Any]) -> bytes:
    """Draw the mean curves of the new and the kept text as PNG bytes."""
    figure = new_figure(11, 4.5)
    rows = list(groups(result["runs"]))
    varied = [key for key in _KEYS if len({runs[0][key] for runs in rows}) > 1]
    for axes, key in zip(figure.subplots(1, 2), ("new", "kept"), strict=True):
        for runs in rows:
            first = runs[0]
            means = [statistics.mean(x) for x in zip(*(run[key] for run in runs), strict=False)]
            label = " ".join(str(first[name]) for name in varied)
            style = "--" if first["replay"] == "auto" else "-"
            axes.plot(first["steps"][: len(means)], means, style, marker=".", label=label)
        axes.set_title(f"{key} text", loc="left")
        axes.set_xlabel("step")
        axes.set_ylabel("bits per byte, held out")
    axes.legend(title=", ".join(varied), frameon=False)
    return png_of(figure)
