"""The demo: from the Python standard library's source to a model that writes Python.

Runs the commands that a person would type, one after the other, and says each first. What is
there already from an earlier call is used again.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path("demo")
TOKENIZER, DATA, RUN = FOLDER / "tokenizer", FOLDER / "data", FOLDER / "run"
SAMPLING = "--max-new-tokens 96 --temperature 0.7 --top-k 50 --seed 1".split()
PROMPTS = ("def read_lines(path):\n", "class Queue:\n", "import os\n\ndef main():\n")


def firstlight(*arguments: str, returned: bool = False) -> str:
    """Run `firstlight ARGUMENTS...`; let its output through, or with `returned` return stdout."""
    print(f"\n$ firstlight {shlex.join(arguments)}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "firstlight", *arguments]
    stdout = subprocess.PIPE if returned else None
    done = subprocess.run(command, stdout=stdout, text=True, encoding="utf-8")
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout or ""


def main() -> None:
    """Run the whole pipeline and say what came of it."""
    start = time.monotonic()
    if not (TOKENIZER / "tokenizer.json").exists():
        firstlight("tokenizer", "train", "stdlib", "--vocab-size", "4096", "--out", str(TOKENIZER))
    if not (DATA / "manifest.json").exists():
        firstlight("prepare", "stdlib", "--tokenizer", str(TOKENIZER), "--out", str(DATA))
    firstlight("train", "recipes/demo.yaml", "--resume")
    result = json.loads(firstlight("eval", str(RUN), "--json", returned=True))
    for prompt in PROMPTS:
        firstlight("generate", str(RUN), "--prompt", prompt, *SAMPLING)
        print(flush=True)
    print(
        f"""
{"-" * 78}
The model needs {result["bits_per_byte"]:.3f} bits for a byte of Python that it has not seen.
gzip -9 needs   {result["gzip_bits_per_byte"]:.3f} on the same held-out files.
All of it took {time.monotonic() - start:.0f} s. A picture of the run: {RUN / "report.png"}

Next:
  .venv/bin/firstlight generate {RUN} --prompt 'def main():'
  .venv/bin/firstlight info {RUN}
  .venv/bin/firstlight tokenizer train YOUR_FOLDER --vocab-size 4096 --out mine/tokenizer
  .venv/bin/firstlight prepare YOUR_FOLDER --tokenizer mine/tokenizer --out mine/data
  .venv/bin/firstlight train recipes/demo.yaml --data.dir mine/data --run.dir mine/run
{"-" * 78}"""
    )


if __name__ == "__main__":
    main()
