"""The table of docs/scaling.md: what each process of a run needs, by model and engine.

python tests/scaling_table.py     # writes it into the page
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from firstlight.models import LlamaConfig, ModelConfig
from firstlight.models.accounting import (
    count_parameters,
    is_inside_a_layer,
    is_multiplied,
    meta_model,
)

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scaling.md"
BEGIN = "<!-- memory: written by tests/scaling_table.py -->"
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


Engine = Literal["none", "ddp", "fsdp"]


@dataclass(frozen=True)
class RankMemory:
    """Bytes that one process of a run needs, by what they hold; see `rank_memory`.

    Attributes:
        weights: fp32 parameters, or this process' pieces of them.
        gradients: fp32, of the same.
        moments: AdamW's two, fp32, of the same.
        computing: bf16 weights, and with fsdp gradients, of what is whole at a time.
        layer_inputs: kept for the backward pass, of one row.
        accumulating: whole gradients, in steps of several micro-batches.
        offloaded: whether weights, gradients and moments lie in the CPU's memory.
    """

    weights: int
    gradients: int
    moments: int
    computing: int
    layer_inputs: int
    accumulating: int
    offloaded: bool

    @property
    def state(self) -> int:
        """Weights, gradients and moments."""
        return self.weights + self.gradients + self.moments

    @property
    def device(self) -> int:
        """On the GPU, with one row and one micro-batch a step."""
        return self.computing + self.layer_inputs + (0 if self.offloaded else self.state)

    @property
    def host(self) -> int:
        """In the CPU's memory."""
        return self.state if self.offloaded else 0


def rank_memory(
    config: ModelConfig,
    row_tokens: int,
    engine: Engine = "none",
    processes: int = 1,
    *,
    offload: bool = False,
) -> RankMemory:
    """What training a model takes of each process: fp32 AdamW, products in bf16, full activation
    checkpointing.

    Arithmetic, not a measurement. Left out: what a layer needs while it is computed (again), the
    logits (`efficiency.loss_chunk_tokens` bounds them), buffers of NCCL and of the allocator.

    Args:
        config: the model's shape.
        row_tokens: tokens of the one row of a micro-batch.
        engine: what the processes share the model by.
        processes: how many.
        offload: with fsdp, keep the pieces in the CPU's memory.
    """
    parameters = dict(meta_model(config).named_parameters())
    whole = sum(p.numel() for p in parameters.values())
    inside = sum(p.numel() for name, p in parameters.items() if is_inside_a_layer(name))
    pieces = processes if engine == "fsdp" else 1
    # FSDP2 cuts the first dimension, into pieces that are as large as the first.
    held = sum(-(-len(p) // pieces) * (p.numel() // len(p)) for p in parameters.values())
    stream = row_tokens * config.hidden_size * config.num_hidden_layers
    if engine == "fsdp":
        outside, layer = whole - inside, inside // config.num_hidden_layers
        # While a layer is computed back: its weights and the next's, its gradient, that gradient in
        # fp32 for the sum; and outside of the layers, weights and gradient. In the end: the latter
        # with their gradient in fp32.
        computing = max(4 * outside + 10 * layer, 8 * outside)
    else:
        # autocast's copies of the matrices stay until the forward pass is done.
        model = meta_model(config)
        factors = model.named_parameters(remove_duplicate=False)
        computing = 2 * sum(p.numel() for name, p in factors if is_multiplied(model, name))
    return RankMemory(
        weights=4 * held,
        gradients=4 * held,
        moments=8 * held,
        computing=computing,
        # The stream is of the embedding's dtype, which fsdp puts together in bf16.
        layer_inputs=stream * (2 if engine == "fsdp" else 4),
        accumulating=4 * whole if engine == "fsdp" else 0,
        offloaded=offload,
    )


@dataclass(frozen=True)
class Way:
    """A row of the table for each model: an engine on a number of GPUs.

    Attributes:
        name: engine, as the table shows it.
        gpus: number of GPUs; 1 stands for any number, since every process holds the whole model.
    """

    name: str
    gpus: int

    def memory(self, config: LlamaConfig) -> RankMemory:
        """Memory of one process."""
        if self.gpus == 1:
            return rank_memory(config, ROW_TOKENS)
        return rank_memory(config, ROW_TOKENS, "fsdp", self.gpus, offload="offload" in self.name)


WAYS = (
    Way("none, ddp", 1),
    Way("fsdp", 8),
    Way("fsdp, offload cpu", 8),
    Way("fsdp", 64),
)


def gib(size: int) -> str:
    """A size in GiB, as the table has it."""
    return f"{size / 2**30:,.1f}" if size else "-"


def table() -> str:
    """The table, in Markdown."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield (
        "| model | GPUs | engine | state | computing | per row | **GPU** | CPU "
        "| accumulation adds |"
    )
    yield "|---|---:|---|" + "---:|" * 6
    for name, config in MODELS.items():
        parameters = count_parameters(meta_model(config)).total
        for way in WAYS:
            need = way.memory(config)
            yield (
                f"| {name} ({parameters:,}) | {'any' if way.gpus == 1 else way.gpus} | {way.name} "
                f"| {'-' if need.offloaded else gib(need.state)} | {gib(need.computing)} "
                f"| {gib(need.layer_inputs)} | **{gib(need.device)}** | {gib(need.host)} "
                f"| {gib(need.accumulating)} |"
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
