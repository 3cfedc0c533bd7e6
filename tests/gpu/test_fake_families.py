"""Every family on fake CUDA tensors: a step of training, and texts that go on from a cache."""

from __future__ import annotations

import pytest
import torch

from firstlight.generation.batch import BatchDecoder
from firstlight.models import FAMILIES, build_model

from .fake_cuda import fake_cuda
from .no_gpu import hardware, needs_no_gpu
from .test_fake_steps import TOKENS, recipe_of, require_on_gpu, steps
from .usual import usual_config

pytestmark = [pytest.mark.gpu, needs_no_gpu]


@pytest.mark.parametrize(
    ("precision", "documents"),
    [("bf16", False), ("bf16_params", True)],
    ids=["bf16", "bf16_params of documents"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_each_family_stays_on_the_gpu(
    family: str, precision: str, documents: bool
) -> None:
    model = usual_config(family).model_dump() | {"max_position_embeddings": TOKENS}
    recipe = recipe_of(
        model,
        efficiency__precision=precision,
        # flex attention's kernel is compiled, which needs triton.
        efficiency__attention="blockwise",
        data__document_masking=documents,
    )
    with fake_cuda() as (cuda, _):
        require_on_gpu(cuda, steps(cuda, recipe))


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_of_each_family_stay_on_the_gpu(family: str) -> None:
    config = usual_config(family)
    with fake_cuda() as (cuda, _), torch.inference_mode():
        model = build_model(config).bfloat16().to(hardware().device).eval()
        decoder = BatchDecoder(model, 3, TOKENS // 2)
        cuda.calls.clear()
        assert decoder.add([1, 2, 3]).shape == (config.vocab_size,)
        assert decoder.step([4]).shape == (1, config.vocab_size)
        decoder.add([5, 6])
        assert decoder.step([7, 8]).shape == (2, config.vocab_size)
        decoder.remove(0)
        assert decoder.step([9]).shape == (1, config.vocab_size)
        assert cuda.calls
        assert not cuda.on_host(), cuda.on_host()[0]
