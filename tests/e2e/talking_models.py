"""Model folders that say what a test has them say: each token has one that follows it."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from firstlight.files.atomic import write_file
from firstlight.models import LlamaConfig, empty_model
from firstlight.tokenizer import Tokenizer, train_tokenizer
from firstlight.tokenizer.chat_template import CHAT_TEMPLATES, required_tokens
from firstlight.weights.huggingface import model_files
from firstlight.weights.loading import weights_to_save
from firstlight.weights.stored import save_weights

_TEXT = "user assistant system you the and answer question a b c d e f g h i j k l m n o p\n" * 20


@functools.cache
def small_tokenizer(words: str, template: str | None = "chatml") -> Tokenizer:
    """Byte-level, with a token for each of the words and one of the built-in templates."""
    tokenizer = train_tokenizer([_TEXT, words * 40], 500)
    if template is None:
        return tokenizer
    return tokenizer.extended(required_tokens(template), CHAT_TEMPLATES[template])


def write_talking_model(
    folder: Path,
    answer: str,
    *,
    template: str | None = "chatml",
    context: int = 256,
    endless: bool = False,
) -> Path:
    """A model that answers everything with the same words, whatever the sampling.

    Args:
        folder: where it goes.
        answer: no token of it may come twice.
        template: a built-in one.
        context: tokens.
        endless: it says the answer again and again, instead of ending its turn.
    """
    tokenizer = small_tokenizer(answer, template)
    ids = tokenizer.encode(answer)
    assert len(set(ids)) == len(ids), [tokenizer.decode([token_id]) for token_id in ids]
    ends = {None: "<|endoftext|>", "chatml": "<|im_end|>"}
    end = tokenizer.special_tokens[ends[template]]
    size = tokenizer.vocab_size
    width = -(-size // 4) * 4
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=width,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=4,
        max_position_embeddings=context,
        tie_word_embeddings=False,
    )
    model = empty_model(config)
    follower = torch.full((size,), ids[0])
    for one, other in zip(ids, [*ids[1:], ids[0] if endless else end], strict=True):
        follower[one] = other
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        named = dict(model.named_parameters())
        named["model.norm.weight"].fill_(1.0)
        named["model.embed_tokens.weight"][:, :size] = torch.eye(size)
        named["lm_head.weight"][follower, torch.arange(size)] = 5.0
    for name, content in model_files(config, tokenizer).items():
        write_file(folder / name, content)
    save_weights(weights_to_save(model), folder)
    return folder
