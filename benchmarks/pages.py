"""Measures the pages of docs/benchmarks again, and resumes where an earlier call stopped.

    make benchmarks                             or:  python -m benchmarks.pages [NAME...]
    make benchmarks NAMES=learning

The figures of a page are in blocks, and each block names the command that creates it:

    <!-- benchmark NAME, 20 minutes: python -m benchmarks ... -->
    ...
    <!-- end -->

The command's output replaces the text between the two comments, and its picture replaces
docs/images/NAME.png. docs/benchmarks/learning.md and budget.md are written as a whole by separate
commands, which take hours and are called by name: learning and budget, or one of learning-NAME and
budget-NAME. Each command's results are in bench-results/NAME, those of these two pages in
bench-results/learning and bench-results/budget. A finished command leaves a file `done` in
bench-results/NAME, and is not called again until that file is removed. A command that was stopped
resumes if its benchmark supports it. The text around a block is written by hand: check it against
the new figures.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

ROOT = Path(__file__).resolve().parents[1]
PAGES, IMAGES = ROOT / "docs" / "benchmarks", ROOT / "docs" / "images"
RESULTS = ROOT / "bench-results"
#: Texts used for the pages on learning and on budgets.
SHAKESPEARE, WIKITEXT = (
    ROOT.parent / "shared" / "data" / name
    for name in ("tinyshakespeare.txt", "wikitext2-valid.txt")
)
#: Share of the processors that other programs may use before a command is started.
_MOST_BUSY, _SECONDS_OF_WATCHING = 0.1, 5.0

_BLOCK = re.compile(
    r"<!-- benchmark ([\w-]+), (\d+) minutes: "
    r"((?:firstlight bench|python -m benchmarks) [^\n]+) -->\n(.*?)<!-- end -->\n",
    re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """The figures created by one command.

    Attributes:
        name: name of the block, of its results and of its picture.
        minutes: estimated duration on two cores.
        command: the command without --out.
        page: file of the page; None for a command that writes its page itself.
    """

    name: str
    minutes: int
    command: str
    page: Path | None

    @property
    def folder(self) -> Path:
        """The folder of the command's file `done`, and of a block's results."""
        return RESULTS / self.name

    @property
    def results(self) -> Path:
        """The folder of the results, which commands that write the same page share."""
        return self.folder if self.page is not None else RESULTS / self.name.partition("-")[0]

    @property
    def is_done(self) -> bool:
        """True if exactly this command has finished."""
        done = self.folder / "done"
        return done.is_file() and done.read_text(encoding="utf-8") == self.command


def blocks() -> list[Block]:
    """Return the blocks of all pages, and the commands that write a page as a whole."""
    found = [
        Block(name, int(minutes), command, page)
        for page in sorted(PAGES.glob("*.md"))
        for name, minutes, command, _ in _BLOCK.findall(page.read_text(encoding="utf-8"))
    ]
    return [
        *found,
        *(
            Block(f"{bench}-{name}", minutes, f"python -m benchmarks {bench} {options}", None)
            for bench, commands in (("learning", _learning()), ("budget", _budget()))
            for name, minutes, options in commands
        ),
    ]


def _learning() -> list[tuple[str, int, str]]:
    """Return name, minutes and options of the commands for the page on learning; the last one
    writes it."""
    texts, by_bytes = f"--corpus stdlib --corpus {WIKITEXT}", f"--corpus bytes:{SHAKESPEARE}"
    rows, sample = "--rows nanogpt-tuned,before,nanochat,new", "--held-out-tokens 16384"
    equal_tokens = f"--sizes 2.6m --tokens 150000 {sample}"
    large = f"--sizes 30m --tokens 50000 {sample}"
    return [
        ("cpu", 14, f"{by_bytes} --sizes 0.8m --rows nanogpt-cpu,new --minutes 2"),
        ("bytes", 4, f"{by_bytes} {rows} {equal_tokens}"),
        ("changes", 34, f"{texts} {rows},changes {equal_tokens}"),
        ("30m", 21, f"{texts} {by_bytes} --rows before,new {large}"),
        # Changes that reduce the loss at 2.6m and are part of the settings of new models.
        ("30m-changes", 14, f"{texts} --rows before,qk-norm,untied-head {large}"),
        (
            "minute",
            25,
            f"{texts} {by_bytes} --sizes 2.6m --rows nanogpt-tuned,new --minutes 1 "
            f"--page {PAGES / 'learning.md'}",
        ),
    ]


def _budget() -> list[tuple[str, int, str]]:
    """Return name, minutes and options of the commands for the page on budgets. Each measures the
    runs of one more budget, and writes a page of all runs so far."""
    options = f"--corpus stdlib --corpus {SHAKESPEARE} --corpus {WIKITEXT}"
    commands = []
    for budget, minutes in (("3m", 100), ("10m", 200), ("30m", 400)):
        options += f" --budget {budget}"
        commands.append((budget, minutes, f"{options} --page {PAGES / 'budget.md'}"))
    return commands


def others_share() -> float:
    """Return the share of the processors that other programs use now."""
    return psutil.cpu_percent(_SECONDS_OF_WATCHING) / 100


def measure(block: Block) -> None:
    """Run the command of a block, and insert its figures into the page.

    Raises:
        SystemExit: other programs are busy, or the command failed or was stopped.
    """
    busy = others_share()
    if busy > _MOST_BUSY:
        sys.exit(f"{busy:.0%} of the processors are busy: call again on an idle machine")
    words = [*shlex.split(block.command), "--out", str(block.results)]
    print(f"$ {shlex.join(words)}", file=sys.stderr, flush=True)
    is_of_one_thread = "learning" in words
    # The firstlight of this Python, not the first one on PATH.
    words = ["-m", *words] if words[0] == "firstlight" else words[1:]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=os.environ | ({"OMP_NUM_THREADS": "1"} if is_of_one_thread else {}),
        check=False,
    )
    print(done.stdout, end="", flush=True)
    if done.returncode:
        sys.exit(f"stopped at {block.name}: the same command resumes there")
    if block.page is not None:
        publish(block, done.stdout, busy)
    block.folder.mkdir(parents=True, exist_ok=True)
    (block.folder / "done").write_text(block.command, encoding="utf-8")


def publish(block: Block, output: str, busy: float) -> None:
    """Replace the figures of a block by a command's output, and its picture by the new one.

    Args:
        block: the block.
        output: the tables that the command printed.
        busy: share of the processors that other programs used before the command was started.
    """
    assert block.page is not None
    lines = [line for line in output.splitlines() if not line.startswith("written: ")]
    versions = f"torch {torch.__version__}, Python {sys.version.split()[0]}"
    parts = [
        f"{datetime.date.today()}, {versions}; other programs used {busy:.0%} of the processors "
        "before the run.",
        "\n".join(["```text", *lines, "```"]),
    ]
    (picture,) = block.folder.glob("*.png")
    shutil.copyfile(picture, IMAGES / f"{block.name}.png")
    parts.append(f"![{block.name}](../images/{block.name}.png)")
    figures = "\n" + "\n\n".join(parts) + "\n\n"

    text = block.page.read_text(encoding="utf-8")
    (place,) = [one for one in _BLOCK.finditer(text) if one[1] == block.name]
    text = text[: place.start(4)] + figures + text[place.end(4) :]
    block.page.write_text(text, encoding="utf-8")


def _named(known: Sequence[Block], name: str) -> list[Block]:
    """Return the block with this name, or the blocks whose names start with it and a hyphen."""
    return [one for one in known if one.name == name] or [
        one for one in known if one.name.startswith(f"{name}-")
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the remaining blocks of all pages, or only the named ones."""
    parser = argparse.ArgumentParser(description="Measure docs/benchmarks again, or resume it.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="only these blocks, or those of NAME-..."
    )
    parser.add_argument("--list", action="store_true", help="list the remaining commands, and stop")
    options = parser.parse_args(arguments)
    known = blocks()
    # The pages on learning and on budgets take hours, so they are only measured if they are named.
    wanted = [one for one in known if one.page is not None]
    if options.names:
        named = {name: _named(known, name) for name in options.names}
        for name in (name for name, found in named.items() if not found):
            parser.error(f"no block {name}: {', '.join(one.name for one in known)}")
        wanted = [one for one in known if any(one in found for found in named.values())]
    left = [block for block in wanted if not block.is_done]
    for block in left:
        print(f"{block.minutes:>4} minutes  {block.name:<20}  {block.command}")
    minutes = sum(block.minutes for block in left)
    print(f"{len(left)} of {len(wanted)} commands left, about {minutes} minutes")
    if not options.list:
        for block in left:
            measure(block)


if __name__ == "__main__":
    main()


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table in Markdown; the first column is aligned left, the others right."""
    lines = ["| " + " | ".join(header) + " |"]
    lines.append("|---|" + "---:|" * (len(header) - 1))
    for row in rows:
        cells = (str(cell).replace("|", "\\|").replace("\n", " ") for cell in row)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
