"""Hostile recipes, tokenizers, chat templates and run folders, by name."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostile_place import (
    DEEP,
    Build,
    Opened,
    Place,
    add_json_text,
    change_json,
    fifo,
    folder_instead,
    link,
    set_json,
    sparse,
)


def recipe(content: str | bytes) -> Build:
    """A recipe file of this content."""
    return lambda place: Opened("recipe", place.file("recipe.yaml", content))


def recipe_of(build: Callable[[Place], str | bytes]) -> Build:
    """A recipe file whose content depends on the place."""
    return lambda place: Opened("recipe", place.file("recipe.yaml", build(place)))


def recipe_spoiled(spoil: Callable[[Path], object]) -> Build:
    """Something else in the place of a recipe file."""

    def build(place: Place) -> Opened:
        spoil(place.folder / "recipe.yaml")
        return Opened("recipe", place.folder / "recipe.yaml")

    return build


def trained(**sections: Any) -> Build:
    """A run from a recipe with these values."""
    return lambda place: Opened("train", place.recipe_file(**sections))


def laughs(template: str, first: str, count: int = 40) -> str:
    """Lines of YAML, each of which names the one before it several times."""
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{i}: &a{i} " + template.format(old=f"*a{i - 1}") for i in range(1, count)]
    return "\n".join(lines)


def tokenizer(spoil: Callable[[Place, Path], object], call: str = "tokenizer") -> Build:
    """A tokenizer's folder, spoiled."""

    def build(place: Place) -> Opened:
        folder = place.copy("tokenizer")
        spoil(place, folder)
        return Opened(call, folder)

    return build


def tokenizer_json(change: Callable[[Any], object]) -> Build:
    """A tokenizer.json that says something else."""
    return tokenizer(lambda _, folder: change_json(folder / "tokenizer.json", change))


def tokenizer_file(name: str, content: bytes | Callable[[Place], bytes]) -> Build:
    """A tokenizer of one file."""

    def build(place: Place) -> Opened:
        return Opened(
            "tokenizer", place.file(name, content if isinstance(content, bytes) else content(place))
        )

    return build


def template(text: str) -> Build:
    """A tokenizer with this chat template, which is rendered."""
    return tokenizer(
        lambda _, folder: set_json(folder / "tokenizer_config.json", chat_template=text), "chat"
    )


def run_folder(spoil: Callable[[Place, Path], object]) -> Build:
    """A run folder, spoiled beside its checkpoints, and gone on from."""

    def build(place: Place) -> Opened:
        folder = place.copy("run")
        spoil(place, folder)
        return Opened("resume", place.recipe_file(schedule={"max_steps": 3}))

    return build


def varint(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def piece(text: bytes, kind: int = 1) -> bytes:
    """An entry of a sentencepiece model."""
    inner = b"\x0a" + varint(len(text)) + text + b"\x18" + bytes([kind])
    return b"\x0a" + varint(len(inner)) + inner


def rank_lines(*tokens: bytes) -> bytes:
    """tiktoken's ranks: every byte, then these."""
    every = [*(bytes([byte]) for byte in range(256)), *tokens]
    return b"".join(base64.b64encode(t) + b" %d\n" % rank for rank, t in enumerate(every))


_EVERY_BYTE = b"".join(piece(b"<0x%02X>" % byte, 6) for byte in range(256))
_SENTENCEPIECE = piece(b"<unk>", 2) + _EVERY_BYTE
_DEEP_JSON = b'{"model": ' * DEEP + b"1" + b"}" * DEEP
_GLOBALS = "{{ cycler.__init__.__globals__.os.popen('true').read() }}"

TEXTS: dict[str, Build] = {
    # Recipes
    "a recipe that calls os.system": recipe("run: !!python/object/apply:os.system ['true']"),
    "a recipe that makes an object": recipe("run: !!python/object/new:os.mkdir ['x']"),
    "a recipe that names a function": recipe("run: !!python/name:os.system"),
    "a recipe that imports a module": recipe("run: !!python/module:antigravity"),
    "a recipe that subclasses tuple": recipe(
        "!!python/object/new:tuple [!!python/object/new:map [!!python/name:eval , ['1']]]"
    ),
    "a recipe with a tag of its own": recipe("run: !secret 5"),
    "a recipe of a billion laughs": recipe(laughs("[{old}, {old}, {old}, {old}]", "[lol]")),
    "a recipe of a billion laughs where a text belongs": recipe(
        laughs("[{old}, {old}, {old}, {old}]", "[lol]") + "\ndata: {dir: *a39}"
    ),
    "a recipe of a billion laughs where a list of texts belongs": recipe(
        laughs("[{old}, {old}, {old}, {old}]", "[lol]")
        + "\ndata: {dir: x}\nevaluation: {sample_prompts: *a39}"
    ),
    "a recipe of a billion merged keys": recipe(laughs("{{<<: [{old}, {old}]}}", "{x: 1}")),
    "a recipe that holds itself": recipe("data: &a {dir: *a}"),
    "a recipe of 100,000 keys": recipe("".join(f"k{i}: 1\n" for i in range(10**5))),
    "a recipe of 3,000 keys": recipe("".join(f"k{i}: 1\n" for i in range(3000))),
    "a recipe of 8,000 lists": recipe("data: [" + "[], " * 8000 + "]"),
    "a recipe 16,000 deep": recipe("[" * 16_000 + "]" * 16_000),
    "a recipe of 16,000 dashes": recipe("- " * 16_000),
    "a recipe with a number of 30,000 digits": recipe(f"schedule: {{max_steps: {'9' * 30_000}}}"),
    "a recipe with a number of 30,000 hexadecimal digits": recipe(
        f"data: {{dir: x}}\nschedule: {{max_steps: 0x{'F' * 30_000}}}"
    ),
    "a recipe with a number to base 60": recipe(
        "data: {dir: x}\nschedule: {max_steps: " + ":".join(["59"] * 9000) + "}"
    ),
    "a recipe with a key twice": recipe("data: {dir: a, dir: b}"),
    "a recipe with a list as a key": recipe("? [a, b]\n: c"),
    "a recipe with numbers as keys": recipe("1: 2\nnull: 3"),
    "a recipe of a thousand documents": recipe("---\n" * 1000),
    "a recipe of a date that is none": recipe("run: {seed: 2001-99-99}"),
    "a recipe of NaN": recipe("data: {dir: x}\noptimizer: {learning_rate: .nan}"),
    "a recipe of binary": recipe(bytes(range(256)) * 8),
    "a recipe of zeros": recipe(bytes(1000)),
    "a recipe in UTF-16": recipe("data: {dir: x}".encode("utf-16")),
    "a pickle as a recipe": recipe_of(lambda place: place.pickled()),
    "a pipe as a recipe": recipe_spoiled(fifo),
    "a folder as a recipe": recipe_spoiled(Path.mkdir),
    "a device as a recipe": recipe_spoiled(lambda path: link(path, "/dev/zero")),
    "a gigabyte as a recipe": recipe_spoiled(sparse),
    "a link round in a circle as a recipe": recipe_spoiled(lambda path: link(path, path)),
    "a recipe with a terminal's commands in a key": recipe('"\\e[2J\\r\\nrm": 1\ndata: {dir: x}'),
    "a recipe of a billion layers": trained(model={"num_hidden_layers": 10**9}),
    "a recipe of a hidden size of 10^9": trained(model={"hidden_size": 10**9}),
    "a recipe of a hidden size of 10^5": trained(model={"hidden_size": 10**5}),
    "a recipe of rows of 10^12 tokens": trained(
        model={"max_position_embeddings": 10**12}, data={"seq_len": 10**12}
    ),
    "a recipe of 10^12 rows": trained(batch={"micro_batch_size": 10**12}),
    "a recipe whose run folder is a pipe": lambda place: Opened(
        "train", place.recipe_file(run={"dir": str(fifo(place.folder / "pipe"))})
    ),
    # Tokenizers
    "a pickle as tokenizer.json": tokenizer(
        lambda place, folder: (folder / "tokenizer.json").write_bytes(place.pickled())
    ),
    "a pickle as tokenizer.model": tokenizer_file("tokenizer.model", Place.pickled),
    "a pickle as tokenizer_config.json": tokenizer(
        lambda place, folder: (folder / "tokenizer_config.json").write_bytes(place.pickled())
    ),
    "tokenizer.json 100,000 deep": tokenizer_file("tokenizer.json", _DEEP_JSON),
    "tokenizer_config.json 100,000 deep": tokenizer(
        lambda _, folder: (folder / "tokenizer_config.json").write_bytes(_DEEP_JSON)
    ),
    "a key twice in tokenizer_config.json": tokenizer(
        lambda _, folder: add_json_text(folder / "tokenizer_config.json", '"eos_token": "a"')
    ),
    "a gigabyte as tokenizer.json": tokenizer(
        lambda _, folder: sparse(folder / "tokenizer.json", start=b"{")
    ),
    "a gigabyte as tokenizer_config.json": tokenizer(
        lambda _, folder: sparse(folder / "tokenizer_config.json")
    ),
    "a gigabyte as chat_template.jinja": tokenizer(
        lambda _, folder: sparse(folder / "chat_template.jinja")
    ),
    "a pipe as a tokenizer": lambda place: Opened(
        "tokenizer", fifo(place.folder / "tokenizer.json")
    ),
    "a device as a tokenizer": lambda place: Opened("tokenizer", Path("/dev/zero")),
    "a gigabyte of merges": tokenizer(
        lambda _, folder: (
            (folder / "tokenizer.json").rename(folder / "vocab.json"),
            (folder / "vocab.json").write_text('{"a": 0, "b": 1}'),
            sparse(folder / "merges.txt"),
        )
    ),
    "an id of 2^32 - 1 in tokenizer.json": tokenizer_json(
        lambda t: t["model"]["vocab"].update({"zz": 2**32})
    ),
    "a negative id in tokenizer.json": tokenizer_json(
        lambda t: t["model"]["vocab"].update({"zz": -1})
    ),
    "merges of tokens that are not there": tokenizer_json(
        lambda t: t["model"]["merges"].append(["zz", "yy"])
    ),
    "a pattern that is none in tokenizer.json": tokenizer_json(
        lambda t: t.update(
            pre_tokenizer={
                "type": "Split",
                "pattern": {"Regex": "(" * 1000},
                "behavior": "Isolated",
                "invert": False,
            }
        )
    ),
    "a map of characters that is none in tokenizer.json": tokenizer_json(
        lambda t: t.update(
            normalizer={"type": "Precompiled", "precompiled_charsmap": "//////////8="}
        )
    ),
    "a post-processor that names no token": tokenizer_json(
        lambda t: t.update(
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "nowhere", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        )
    ),
    "an end token that is an object in tokenizer_config.json": tokenizer(
        lambda _, folder: set_json(folder / "tokenizer_config.json", eos_token={"content": "zz"})
    ),
    "a rank of 10^18": tokenizer_file("tokenizer.model", rank_lines() + b"YWI= %d\n" % 10**18),
    "a token of a megabyte among ranks": tokenizer_file(
        "tokenizer.model", rank_lines(b"a" * 10**6)
    ),
    "a sentencepiece model of 2^62 bytes": tokenizer_file(
        "tokenizer.model", b"\x0a" + varint(2**62) + b"x" * 100
    ),
    "a sentencepiece number without end": tokenizer_file("tokenizer.model", b"\x0a" + b"\xff" * 99),
    "a sentencepiece piece of a megabyte": tokenizer_file(
        "tokenizer.model",
        _SENTENCEPIECE + piece(b"a" * 10**6) + b"\x12\x02\x18\x02\x1a\x02\x20\x00",
    ),
    # Chat templates
    "a template that climbs to Python": template("{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    "a template that runs a command": template(_GLOBALS),
    "a template that climbs by a filter": template("{{ (messages|attr('__class__')).mro() }}"),
    "a template that climbs by a format": template("{{ '{0.__class__.__mro__}'.format('') }}"),
    "a template that reads a file": template("{% include '/etc/passwd' %}"),
    "a template that imports": template("{% import 'os' as os %}{{ os }}"),
    "a template that changes its messages": template("{{ messages.clear() }}"),
    "a template of 10^9 rounds": template("{% for i in range(10**9) %}{% endfor %}"),
    "a template that calls itself": template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
    "a template of a text of 10^10": template("{{ 'a' * 10**10 }}"),
    "a template of a text just below what it may make": template("{{ 'é\U0001f642' * 49999999 }}"),
    "a template of 10^5 brackets": template("{{" + "(" * DEEP + ")" * DEEP + "}}"),
    "a template of ten megabytes": template("a" * 10**7),
    "a template that pads": template("{{ '%999999999d' % 1 }}"),
    "a template that formats JSON wide": template("{{ messages | tojson(indent=10**9) }}"),
    "a template that writes without end": template(
        "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}"
    ),
    "a template that is no Jinja": template("{% for %}"),
    # What lies beside the checkpoints of a run
    "a run's lock is a folder": run_folder(lambda _, folder: folder_instead(folder / ".lock")),
    "a run's lock leads elsewhere": run_folder(
        lambda place, folder: link(folder / ".lock", place.outside / "written")
    ),
    "a run's checkpoints are a pipe": run_folder(
        lambda _, folder: (
            (folder / "checkpoints").rename(folder / "c"),
            fifo(folder / "checkpoints"),
        )
    ),
}

#: Damaged logs, by name: a resumed run keeps them under another name and goes on.
DAMAGED_LOGS = {
    "a run's metrics are damaged": b"\x80\x04cos\nsystem\n\n{}\n",
    "a run's metrics have no step": b"{}\n[]\n5\n",
}


def with_log(content: bytes) -> Build:
    """A run folder with this as its metrics.jsonl."""
    return run_folder(lambda _, folder: (folder / "metrics.jsonl").write_bytes(content))


#: What is opened although something beside it is odd, and does no harm.
HARMLESS: dict[str, Build] = {
    **{name: with_log(content) for name, content in DAMAGED_LOGS.items()},
    "a run's metrics are a pipe": run_folder(lambda _, folder: fifo(folder / "metrics.jsonl")),
    "a run's lock is a pipe": run_folder(lambda _, folder: fifo(folder / ".lock")),
    "a checkpoint's manifest is a pipe": run_folder(
        lambda place, _: fifo(place.checkpoint / "manifest.json")
    ),
    "a run's metrics lead elsewhere": run_folder(
        lambda place, folder: link(folder / "metrics.jsonl", place.outside / "elsewhere")
    ),
    "a run's recipe leads elsewhere": run_folder(
        lambda place, folder: link(folder / "recipe.yaml", place.outside / "elsewhere")
    ),
    "a run's samples lead elsewhere": run_folder(
        lambda place, folder: link(folder / "samples.jsonl", place.outside / "elsewhere")
    ),
}
