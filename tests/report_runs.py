"""Run folders for the reports' tests, and a reader of their pages."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml

HOSTILE = [
    "</script><script>alert(1)</script>",
    "</pre></textarea></style></title><img src=x onerror=alert(1)>",
    "\"'><svg onload=alert(1)>",
    "&lt;b&gt; &amp; <!-- --> <![CDATA[ ]]>",
    "{{ 7 * 7 }} {% raw %} {0} %s $x",
    "\u202eevil\u202c \u2066x\u2069 \u200f",
    "\x00\x01\x1b[31m\x7f\x85\u2028\u2029",
    "a\tb\r\nc\rd\x0be",
    "\ud800 half",
    "javascript:alert(1)",
    "日本語 🙂 العربية עברית",
]
#: What could act in an element, in an attribute and in a terminal, and what no file name holds.
MOST_HOSTILE = [HOSTILE[0], HOSTILE[2], HOSTILE[6], HOSTILE[8]]


def record(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "train/loss": 5.0 / step,
        "learning_rate": 1e-3,
        "grad_norm": 1.0 + step,
        "tokens_seen": 128 * step,
        "epoch": step / 10,
        "tokens_per_second": 1000.0 + step,
        "mfu": 0.25,
        "memory_bytes": 2**28 + step,
        "seconds": 36.0,
        "data_wait_seconds": 0.1,
        "save_stall_seconds": 0.0,
        "skipped_steps": 0,
        **more,
    }


def validation(loss: float) -> dict[str, Any]:
    return {"val/loss": loss, "perplexity": 2.0**loss, "bits_per_byte": loss / 2}


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")


def write_run(
    folder: Path,
    records: list[dict[str, Any]],
    *,
    samples: list[tuple[int, str, str]] | None = None,
    events: list[dict[str, Any]] | None = None,
    starts: list[dict[str, Any]] | None = None,
    recipe: dict[str, Any] | None = None,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "metrics.jsonl", records)
    lines = [{"step": s, "prompt": p, "text": t} for s, p, t in samples or []]
    write_lines(folder / "samples.jsonl", lines)
    if events is not None:
        write_lines(folder / "events.jsonl", events)
    if starts is not None:
        write_lines(folder / "starts.jsonl", starts)
    if recipe is not None:
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), "utf-8")
    return folder


_VOID = {"meta", "input", "br", "img", "hr", "link"}


class Page(HTMLParser):
    """A page taken apart; `harmless` checks what every report promises."""

    def __init__(self, content: str) -> None:
        super().__init__(convert_charrefs=True)
        self.content = content
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.inside: dict[str, list[str]] = {}
        self.feed(content)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in _VOID:
            self.open.append(tag)
            self.inside.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.inside[tag][-1] += data

    def harmless(self) -> Page:
        """Nothing is loaded, nothing runs but what the policy names by its hash, no character
        acts on the text around it."""
        tags = [tag for tag, _ in self.elements]
        assert [tags.count(tag) for tag in ("script", "style", "title")] == [1, 1, 1]
        assert not {"img", "iframe", "object", "embed", "link", "base", "form", "a"} & set(tags)
        for _, attributes in self.elements:
            for name, value in attributes.items():
                assert not name.startswith("on"), name
                assert name not in ("src", "href", "action"), name
                assert name != "xlink:href" or value.startswith("#"), value
                assert "://" not in value
                assert "url(" not in value.replace("url(#", "")
        (policy,) = (
            a["content"]
            for _, a in self.elements
            if a.get("http-equiv") == "Content-Security-Policy"
        )
        rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
        assert rules["default-src"] == "'none'"
        for tag in ("script", "style"):
            digest = hashlib.sha256(self.inside[tag][0].encode()).digest()
            assert rules[f"{tag}-src"] == f"'sha256-{base64.b64encode(digest).decode()}'"
            assert "url(" not in self.inside[tag][0]
            assert "@import" not in self.inside[tag][0]
        acting = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u061c\u2028-\u202e\u2066-\u2069\ufeff]"
        assert not re.search(acting, self.content)
        ids = [attributes["id"] for _, attributes in self.elements if "id" in attributes]
        assert len(set(ids)) == len(ids)
        return self

    def texts(self, tag: str) -> list[str]:
        return self.inside.get(tag, [])

    def curves(self) -> list[dict[str, Any]]:
        """The data of every chart."""
        return [json.loads(a["data-curves"]) for _, a in self.elements if "data-curves" in a]
