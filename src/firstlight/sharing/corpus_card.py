"""The card (README.md) of a prepared corpus: metadata for the hub, and facts from its manifest."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from firstlight.sharing.card import code, hub_datasets, source_link, split_lines, table
from firstlight.sharing.facts import DataFacts

#: The hub's size categories by their upper bound in documents (exclusive).
_SIZES = {
    1_000: "n<1K",
    10_000: "1K<n<10K",
    100_000: "10K<n<100K",
    1_000_000: "100K<n<1M",
    10_000_000: "1M<n<10M",
    100_000_000: "10M<n<100M",
    1_000_000_000: "100M<n<1B",
}


def corpus_card(
    facts: DataFacts, manifest: Mapping[str, Any], repository: str, licence: str | None
) -> str:
    """The text of a corpus' card.

    Args:
        facts: names of the corpus' inputs, its splits, and the options that it was prepared with.
        manifest: the corpus' manifest.
        repository: USER/NAME on the hub.
        licence: the hub's id of the licence, such as "cc-by-4.0"; None if no licence was given.
    """
    from huggingface_hub import DatasetCardData

    name = repository.rpartition("/")[2]
    documents = sum(split["documents"] for split in facts.splits.values())
    metadata = DatasetCardData(
        license=licence,
        task_categories=["text-generation"],
        size_categories=next((text for most, text in _SIZES.items() if documents < most), "n>1B"),
        source_datasets=hub_datasets([facts]) or None,
        tags=["firstlight", "tokenized"],
        # The hub's viewer shows tables, which shards are not.
        viewer=False,
    ).to_yaml()
    rows = [
        ("vocabulary (tokens)", f"{manifest['vocab_size']:,}"),
        ("type of a token", str(manifest.get("dtype", ""))),
        ("tokenizer's SHA-256", f"`{manifest['tokenizer_sha256']}`"),
    ]
    blocks = [
        f"---\n{metadata}\n---",
        f"# {name}",
        "Token shards for training language models, prepared with firstlight: documents are "
        "tokenized, and each split's shards are listed with size and SHA-256 in `manifest.json`.",
        "## Content",
        *(
            [f"Prepared from {', '.join(map(source_link, facts.sources))}."]
            if facts.sources
            else []
        ),
        "\n".join([*split_lines(facts.splits), *_left_out(manifest)]),
        "## Tokenizer",
        "`tokenizer.json` is read by transformers (`AutoTokenizer`).",
        table(row for row in rows if row[1]),
        "## Use",
        code(f"firstlight train RECIPE.yaml --data.dir hf://datasets/{repository}"),
        "The shards are fetched into a cache once and compared with their SHA-256. A folder of "
        "their own:",
        code(f"hf download {repository} --repo-type dataset --local-dir {name}"),
        *_command(facts, name, licence_only="gutenberg_stripped" in manifest),
        "## Licence",
        licence or "No licence was given.",
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _left_out(manifest: Mapping[str, Any]) -> list[str]:
    rejected = manifest["documents"].get("rejected") or {}
    total = sum(rejected.values())
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in rejected.items())
    return [f"- left out: {total:,} documents ({reasons})"] if total else []


def _command(facts: DataFacts, name: str, *, licence_only: bool) -> list[str]:
    if not facts.sources:
        return []
    sources = shlex.join(facts.sources)
    options = f" {shlex.join(facts.options)}" if facts.options else ""
    command = f"firstlight prepare {sources} --tokenizer {name} --out {name}-again{options}"
    made = "the same shards are made by"
    if licence_only:
        made = (
            "similar shards are made by the command below, which also ends documents at "
            "separators and replaces CRLF. Here, only Project Gutenberg's licence was left out:"
        )
    return [f"From the same inputs, {made}", code(command)]
