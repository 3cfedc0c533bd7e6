"""Models, batches and splits of a few numbers, for the tests of known bugs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.data.corpus import TokenDataset
from firstlight.data.loader import IGNORE_INDEX, Batch
from firstlight.data.shards import ShardWriter
from firstlight.files.atomic import write_json
from firstlight.methods import LossFunction
from firstlight.models import GPT2Config, LlamaConfig, Model, ModelConfig, empty_model
from firstlight.optim.config import OptimizerConfig
from firstlight.optim.optimizer import Optimizer

VOCABULARY, SEQ_LEN = 23, 8

LLAMA = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=SEQ_LEN,
)
#: Its head is tied to its embedding.
GPT2 = GPT2Config(
    vocab_size=VOCABULARY,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=SEQ_LEN,
)


def new_model(config: ModelConfig = LLAMA, vocab_multiple: int = 1) -> Model:
    """The model with the same initial weights every time."""
    model = empty_model(config, vocab_multiple)
    model.init_weights(torch.Generator().manual_seed(1))
    return model


def new_optimizer(model: Model, **values: Any) -> Optimizer:
    """AdamW, unless `values` say otherwise."""
    return Optimizer(model, OptimizerConfig.model_validate(values))


def summed_loss(model: Model) -> LossFunction:
    """The summed cross-entropy of a model's logits."""

    def loss_sum(input_ids: Tensor, labels: Tensor, document_ids: Tensor | None = None) -> Tensor:
        logits = model(input_ids).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")

    return loss_sum


def batch_of(valid_labels: Sequence[int], seed: int = 0) -> Batch:
    """One row for each entry, with so many labels that count."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(valid_labels), SEQ_LEN)
    input_ids = torch.randint(VOCABULARY, shape, generator=generator)
    labels = torch.randint(VOCABULARY, shape, generator=generator)
    for row, count in enumerate(valid_labels):
        labels[row, count:] = IGNORE_INDEX
    return Batch(input_ids, labels, sum(valid_labels))


def weights_of(model: Model) -> dict[str, bytes]:
    """Every parameter's bytes."""
    return {name: p.detach().numpy().tobytes() for name, p in model.state_dict().items()}


def make_split(
    folder: Path,
    documents: Sequence[Sequence[int]],
    *,
    dtype: str = "<u2",
    shard_tokens: int = 50,
    **manifest: Any,
) -> Path:
    """A prepared folder with these documents as its training split; `manifest` are further or
    other entries."""
    with ShardWriter(folder, "train", np.dtype(dtype), shard_tokens) as writer:
        for document in documents:
            writer.write(np.array(document, dtype))
    tokens = sum(map(len, documents))
    split = {
        "documents": len(documents),
        "tokens": tokens,
        "text_bytes": tokens,
        "shards": writer.shards,
    }
    content = {
        "format": "firstlight-tokens",
        "version": 1,
        "vocab_size": 65536,
        "tokenizer_sha256": "",
        "splits": {"train": split},
    }
    write_json(folder / "manifest.json", {**content, **manifest})
    return folder


def counting_split(folder: Path, num_tokens: int) -> TokenDataset:
    """A split whose token at place i is i + 1, in documents of ten."""
    places = range(1, num_tokens + 1)
    documents = [places[start : start + 10] for start in range(0, num_tokens, 10)]
    return TokenDataset(make_split(folder, documents), "train")
