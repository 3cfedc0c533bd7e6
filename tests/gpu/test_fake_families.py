"""Every family on fake CUDA tensors: a training step, and texts continued from a cache."""

from __future__ import annotations

import pytest
import torch

from firstlight.generation.batch import BatchDecoder
from firstlight.methods.attention import able_backends
from firstlight.models import FAMILIES, build_model

from .fake_cuda import fake_cuda
from .no_gpu import hardware, needs_no_gpu
from .test_fake_steps import TOKENS, batch_of, program_of, recipe_of, require_on_gpu, steps
from .usual import usual_config

pytestmark = [pytest.mark.gpu, needs_no_gpu]

#: Called by torch's attention with two products, but not by its fused kernels.
MATH = ("_scaled_dot_product_attention_math", "_safe_softmax")


@pytest.mark.parametrize(
    ("precision", "documents"),
    [("bf16", False), ("bf16_params", True)],
    ids=["bf16", "bf16_params of documents"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_step_of_each_family_stays_on_gpu(family: str, precision: str, documents: bool) -> None:
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
def test_generation_of_each_family_stays_on_gpu(family: str) -> None:
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


#: Families with grouped queries that torch's fused kernels support.
GROUPED = [
    family
    for family in FAMILIES
    if (config := usual_config(family)).num_key_value_heads < config.num_attention_heads
    and able_backends(config) is None
]


@pytest.mark.parametrize(
    ("capability", "precision"),
    [((7, 5), "fp16"), ((8, 6), "bf16"), ((8, 6), "fp32"), ((9, 0), "bf16")],
)
@pytest.mark.parametrize("family", GROUPED)
def test_grouped_query_attention_keeps_no_scores(
    family: str, capability: tuple[int, int], precision: str
) -> None:
    """Scores would be stored by torch's "math" kernel: in training with and without masks, for a
    prompt, for texts decoded together or alone, and for a prompt whose start is in the cache.
    """
    config = usual_config(family)
    with fake_cuda(capability=capability) as (cuda, _):
        for documents in (False, True):
            recipe = recipe_of(
                config.model_dump() | {"max_position_embeddings": TOKENS},
                efficiency__precision=precision,
                efficiency__attention="sdpa",
                data__document_masking=documents,
            )
            program = program_of(recipe)
            program.loss_sum(*batch_of(recipe).to(hardware().device).inputs).backward()  # type: ignore[no-untyped-call]
            assert not cuda.named(*MATH), (documents, cuda.named(*MATH)[0])
        with torch.inference_mode():
            dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
            model = build_model(config).to(dtype[precision]).to(hardware().device).eval()
            decoder = BatchDecoder(model, 3, TOKENS // 2, reuse_prefixes=True)
            cuda.calls.clear()
            decoder.add([1, 2, 3])
            decoder.step([4])
            decoder.add([1, 2, 3, 5, 6])
            decoder.step([7, 8])
        assert cuda.calls
        assert not cuda.named(*MATH), cuda.named(*MATH)[0]
