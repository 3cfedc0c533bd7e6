"""LFM2's layers with convolutions: documents in one row, and the cached state."""

from __future__ import annotations

import torch

from builders import draw_weights
from firstlight.models import Lfm2, Lfm2Config, Model, empty_model

_CONFIG = Lfm2Config(
    vocab_size=37,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    conv_L_cache=4,
)


def some_model() -> Model:
    model = empty_model(_CONFIG).eval()
    draw_weights(model, 1, 0.4)
    return model


def test_documents_in_one_row_do_not_see_each_other() -> None:
    """Documents that are shorter and longer than the convolution."""
    model, ids = some_model(), torch.arange(20)[None] * 7 % 37
    lengths = [2, 9, 1, 8]
    document_ids = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    with torch.inference_mode():
        together = model(ids, document_ids=document_ids)
        apart = torch.cat([model(part) for part in torch.split(ids, lengths, 1)], 1)
        unmasked = model(ids)
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=0)
    assert (together[:, 2] - unmasked[:, 2]).abs().max() > 1e-3


def test_state_of_convolutions_does_not_grow_with_text() -> None:
    assert isinstance(some_model(), Lfm2)
    # Layers 0 and 1 have convolutions, whose states are their last three inputs.
    assert _CONFIG.state_shapes == {0: ((3, 16),), 1: ((3, 16),)}
    assert [_CONFIG.is_conv(layer) for layer in range(3)] == [True, True, False]
