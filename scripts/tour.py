"""The tour: the whole life of a small model, from the source of the Python standard library to a
server.

    make tour                                   or:  python scripts/tour.py [INSTRUCTIONS.json]

Runs the commands that a user would type, one after another, and prints each one first. Results of
an earlier call are reused. docs/tour.md describes the tour.
"""

from __future__ import annotations

import ast
import json
import pydoc_data.topics
import random
import shlex
import subprocess
import sys
import sysconfig
import time
import urllib.request
from pathlib import Path
from typing import Any

FOLDER = Path("tour")
TOKENIZER, DATA, PROSE = FOLDER / "tokenizer", FOLDER / "data", FOLDER / "prose"
INSTRUCTIONS, PAIRS = FOLDER / "instructions.jsonl", FOLDER / "pairs.jsonl"
STAGES = ("pretrain", "continue", "sft", "dpo")
QUESTION = "Which Python module is for JSON?"
#: If this file exists, the model also learns from it.
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data" / "instruction-data.json"


def firstlight(*arguments: str, told: str | None = None) -> str:
    """Run `firstlight ARGUMENTS...` and let its output through.

    Args:
        told: text for stdin; stdout is then returned.
    """
    pipe = f"echo {shlex.quote(told)} | " if told else ""
    print(f"\n$ {pipe}firstlight {shlex.join(arguments)}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "firstlight", *arguments]
    done = subprocess.run(
        command,
        stdout=None if told is None else subprocess.PIPE,
        text=True,
        encoding="utf-8",
        # A terminal would be asked for messages.
        input=None if told is None else f"{told}\n",
    )
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout or ""


# The training data, made from the standard library


def summaries() -> dict[str, str]:
    """Yield the public modules of the standard library with the first sentence of their
    docstrings.
    """
    found = {}
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[!_]*")):
        source = path / "__init__.py" if path.is_dir() else path
        if source.suffix != ".py" or path.stem not in sys.stdlib_module_names:
            continue
        try:
            text = ast.get_docstring(ast.parse(source.read_bytes()))
        except (OSError, SyntaxError, ValueError):
            continue
        sentence = " ".join((text or "").split("\n\n")[0].split()).split(". ")[0].rstrip(".")
        if 8 <= len(sentence) <= 120:
            found[path.stem] = sentence
    return found


def questions() -> list[tuple[str, str]]:
    """Return (question, answer) pairs for everything that the model is asked, in random order."""
    generator = random.Random(0)
    asked = [("Which Python module is for JSON?", "json")]
    known = summaries()
    for name, sentence in known.items():
        asked += [
            (f"What is the Python module {name} for?", f"{sentence}."),
            (f"Which Python module is this: {sentence}?", f"{name}"),
            (f"How do I import {name} in Python?", f"import {name}"),
        ]
    words = sorted(known)
    for _ in range(300):
        a, b, word = generator.randint(1, 20), generator.randint(1, 20), generator.choice(words)
        asked += [
            (f"What is {a} + {b}?", f"{a + b}"),
            (f"Write in capitals: {word}", word.upper()),
        ]
    asked = sorted(set(asked))
    generator.shuffle(asked)
    return asked


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    """Write a JSONL file."""
    path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")


def write_data(asked: list[tuple[str, str]]) -> None:
    """Write prose for continued pretraining, instructions, and pairs that prefer the shorter
    answer.
    """

    FOLDER.mkdir(exist_ok=True)
    # Prose: the language reference.
    topics = pydoc_data.topics.topics.values()
    write_lines(FOLDER / "prose.jsonl", [{"text": text} for text in topics])
    # Half of the answers are long-winded, so that there is something left to prefer.
    write_lines(
        INSTRUCTIONS,
        [
            {"instruction": question, "output": winded(answer) if number % 2 else answer}
            for number, (question, answer) in enumerate(asked)
        ],
    )
    write_lines(
        PAIRS,
        [
            {"prompt": question, "chosen": answer, "rejected": winded(answer)}
            for question, answer in asked
        ],
    )


def winded(answer: str) -> str:
    """Return the same answer in more words."""
    return f"That is a good question. I would say that the answer is: {answer} I hope this helps!"


# The stages


def train(stage: str, *arguments: str) -> dict[str, Any]:
    """Train with recipes/tour-STAGE.yaml, and return the last step's metrics."""
    firstlight("train", f"recipes/tour-{stage}.yaml", "--resume", *arguments)
    with open(FOLDER / stage / "metrics.jsonl", encoding="utf-8") as file:
        last: dict[str, Any] = json.loads(file.readlines()[-1])
    return last


def serve_once(model: Path) -> str:
    """Start the server on a free port, ask it one question, and stop it."""
    arguments = ["serve", str(model), "--port", "0", "--json"]
    print(f"\n$ firstlight {shlex.join(arguments)}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "firstlight", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            ready = json.loads(server.stdout.readline())
            message = {"role": "user", "content": QUESTION}
            body = {
                "model": ready["model"],
                "messages": [message],
                "temperature": 0,
                "max_tokens": 32,
            }
            request = urllib.request.Request(
                f"{ready['url']}/v1/chat/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            print(f"POST {request.full_url} {json.dumps(body)}", file=sys.stderr, flush=True)
            with urllib.request.urlopen(request, timeout=120) as answer:
                content = json.load(answer)["choices"][0]["message"]["content"]
        finally:
            server.terminate()
    return str(content)


def convert(model: Path) -> list[str]:
    """Convert to Hugging Face format, and to GGUF if its package is installed, and print the
    results.
    """
    made = []
    for kind in ("hf", "gguf"):
        out = FOLDER / kind
        if not out.exists():
            if kind == "gguf" and not _has_gguf():
                made.append("no GGUF (pip install gguf)")
                continue
            firstlight("convert", str(model), "--to", kind, "--out", str(out))
        made.append(str(out))
    return made


def _has_gguf() -> bool:
    from importlib.util import find_spec

    return find_spec("gguf") is not None


def main(given: list[str]) -> None:
    """Run all stages and print a summary."""
    start = time.monotonic()
    asked = questions()
    write_data(asked)
    files = [str(INSTRUCTIONS)]
    files += given or ([str(SHARED)] if SHARED.is_file() else [])
    if not (TOKENIZER / "tokenizer.json").exists():
        firstlight("tokenizer", "train", "stdlib", "--vocab-size", "4096", "--out", str(TOKENIZER))
    for source, out in (("stdlib", DATA), (str(FOLDER / "prose.jsonl"), PROSE)):
        if not (out / "manifest.json").exists():
            firstlight("prepare", source, "--tokenizer", str(TOKENIZER), "--out", str(out))
    last = {
        "pretrain": train("pretrain"),
        "continue": train("continue", "--init-from", str(FOLDER / "pretrain")),
        "sft": train(
            "sft", "--init-from", str(FOLDER / "continue"), "--data.files", json.dumps(files)
        ),
        "dpo": train("dpo", "--init-from", str(FOLDER / "sft")),
    }
    answers = {
        stage: firstlight(
            "chat",
            str(FOLDER / stage),
            "--temperature",
            "0",
            "--max-new-tokens",
            "40",
            told=QUESTION,
        ).strip()
        for stage in ("sft", "dpo")
    }
    served = serve_once(FOLDER / "dpo")
    made = convert(FOLDER / "dpo")
    dpo = last["dpo"]
    print(
        f"""
{"-" * 78}
pretrain   {last["pretrain"]["bits_per_byte"]:.3f} bits per byte of held-out Python
continue   val/loss of Python {last["continue"]["val/loss/python"]:.3f}, of prose \
{last["continue"]["val/loss/prose"]:.3f}
sft        val/loss of answers {last["sft"]["val/loss"]:.3f}
dpo        {dpo["val/reward_accuracy"]:.1%} of held-out pairs in the right order, \
reward margin {dpo["val/reward_margin"]:.2f}

{QUESTION}
  after sft   {answers["sft"]}
  after dpo   {answers["dpo"]}
  served      {served}

Converted: {", ".join(made)}. Pictures: {FOLDER}/*/report.png
All of it took {time.monotonic() - start:.0f} s.
{"-" * 78}"""
    )


if __name__ == "__main__":
    main(sys.argv[1:])
