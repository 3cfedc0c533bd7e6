"""The table of docs/scaling.md: what each process of a run needs, by model and engine.

python tests/unit/scaling_table.py     # writes it into the page
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from firstlight.models import LlamaConfig
from firstlight.models.accounting import RankMemory, count_parameters, meta_model, rank_memory

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"
BEGIN = "<!-- memory: written by tests/unit/scaling_table.py -->"
END = "<!-- end of memory -->"

ROW_TOKENS = 4096

#: Shapes as in their makers' config.json.
MODELS = {
    "Llama 3.2 1B": LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    ),
    "Llama 3.1 8B": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "Llama 3.1 70B": LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
}


@dataclass(frozen=True)
class Way:
    """A line of the table for each model: how so many GPUs share it."""

    name: str
    gpus: int

    def memory(self, config: LlamaConfig) -> RankMemory:
        """Of one process."""
        if self.name in ("none", "ddp"):
            engine = "none" if self.gpus == 1 else "ddp"
            return rank_memory(config, ROW_TOKENS, engine, self.gpus)  # type: ignore[arg-type]
        return rank_memory(
            config,
            ROW_TOKENS,
            "fsdp",
            self.gpus,
            shard=8 if "shard 8" in self.name else None,
            offload="offload" in self.name,
        )


WAYS = (
    Way("none", 1),
    Way("ddp", 8),
    Way("fsdp", 8),
    Way("fsdp, offload cpu", 8),
    Way("ddp", 64),
    Way("fsdp", 64),
    Way("fsdp, shard 8", 64),
    Way("fsdp, offload cpu", 64),
)


def gib(size: int) -> str:
    """A size in GiB, as the table has it."""
    return f"{size / 2**30:,.1f}" if size else "-"


def table() -> str:
    """The table, in Markdown."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield (
        "| model | GPUs | engine | weights | gradients | moments | computing | a row | **GPU** "
        "| CPU | accumulating adds |"
    )
    yield "|---|---:|---|" + "---:|" * 8
    for name, config in MODELS.items():
        parameters = count_parameters(meta_model(config)).total
        for way in WAYS:
            need = way.memory(config)
            parts = (need.weights, need.gradients, need.moments)
            yield (
                f"| {name} ({parameters:,}) | {way.gpus} | {way.name} | "
                + " | ".join("-" if need.offloaded else gib(part) for part in parts)
                + f" | {gib(need.computing)} | {gib(need.layer_inputs)} | **{gib(need.device)}** "
                f"| {gib(need.host)} | {gib(need.accumulating)} |"
            )


def with_table(page: str) -> str:
    """The page with the table between its two marks.

    Raises:
        ValueError: a mark is missing.
    """
    before, rest = page.split(f"{BEGIN}\n", 1)
    _, after = rest.split(END, 1)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
