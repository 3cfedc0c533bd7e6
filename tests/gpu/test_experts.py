"""Mixtures of experts on the device under test: grouped products, and complete runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from runs import Runs, difference, train_recipe
from switches import Combination

from firstlight.hardware.device import Hardware
from firstlight.models.moe import _has_kernel, grouped_linear

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

_MIXTRAL = {
    "model.model_type": "mixtral",
    "model.num_key_value_heads": 2,
    "model.num_experts": 4,
    "model.num_experts_per_tok": 2,
}
#: If a token's two best experts are almost equal, it may visit the other one after rounding.
_LOW = (0.01, 0.15)
_LLAMA: Combination = frozenset([("model", "llama")])


@pytest.fixture(scope="module")
def runs(rows: Path, hardware: Hardware) -> Runs:
    """Return runs of a tiny Mixtral."""
    return Runs(rows, hardware, _MIXTRAL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("counts", [[5, 0, 20, 7], [0, 0, 0, 32], [8, 8, 8, 8]], ids=str)
def test_grouped_products_on_device_match_each_expert(
    device: torch.device, dtype: torch.dtype, counts: list[int]
) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(sum(counts), 32, generator=generator).to(device, dtype).requires_grad_()
    weight = torch.randn(4, 48, 32, generator=generator).to(device, dtype).requires_grad_()
    out_grad = torch.randn(sum(counts), 48, generator=generator).to(device, dtype)
    ends = torch.tensor(counts, device=device).cumsum(0)
    found = grouped_linear(x, weight, ends)
    found.backward(out_grad)  # type: ignore[no-untyped-call]
    wide_x, wide = (t.detach().double().requires_grad_() for t in (x, weight))
    blocks = zip(torch.split(wide_x, counts), wide, strict=True)
    expected = torch.cat([F.linear(rows, own) for rows, own in blocks])
    expected.backward(out_grad.double())  # type: ignore[no-untyped-call]
    bound = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    results = (found.detach(), expected.detach())
    for one, other in (results, (x.grad, wide_x.grad), (weight.grad, wide.grad)):
        assert one is not None
        assert other is not None
        assert one.dtype == dtype
        assert float((one.double() - other).norm()) <= bound * float(other.norm())
    if device.type == "cuda":
        assert _has_kernel(weight) == (dtype == torch.bfloat16)


def test_mixture_of_experts_on_device_trains_like_cpu(runs: Runs) -> None:
    run, on_cpu = runs.of(_LLAMA), Runs(runs.data, further=_MIXTRAL).of(_LLAMA)
    found = difference(run, on_cpu)
    assert found.loss <= 1e-4
    assert found.weights <= 1e-2


@pytest.mark.parametrize(
    "further, bounds",
    [
        ({"efficiency.precision": "bf16"}, _LOW),
        ({"efficiency.precision": "bf16_params"}, _LOW),
        ({"efficiency.precision": "fp16"}, _LOW),
        ({"efficiency.activation_checkpointing": "selective"}, (1e-5, 1e-3)),
        ({"efficiency.compile": True, "efficiency.compile_backend": "aot_eager"}, (1e-5, 1e-3)),
        (
            {"batch.micro_batch_size": 2, "batch.gradient_accumulation_steps": 2},
            # The balancing loss is computed per micro-batch.
            _LOW,
        ),
    ],
    ids=str,
)
def test_mixture_method_on_device_stays_near_plain_mixture(
    runs: Runs, further: dict[str, object], bounds: tuple[float, float]
) -> None:
    run = train_recipe(runs.recipe(_LLAMA, further), hardware=runs.hardware)
    found = difference(run, runs.of(_LLAMA))
    assert found.loss <= bounds[0]
    assert found.weights <= bounds[1]


@pytest.mark.cuda_only("compiling takes half a minute on a CPU")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_mixture_compiled_on_device_trains_like_plain(runs: Runs, precision: str) -> None:
    settings = {"efficiency.precision": precision}
    plain = train_recipe(runs.recipe(_LLAMA, settings), hardware=runs.hardware)
    compiled = runs.recipe(_LLAMA, {**settings, "efficiency.compile": True})
    run = train_recipe(compiled, hardware=runs.hardware)
    found = difference(run, plain)
    fp32 = precision == "fp32"
    assert found.loss <= (2e-5 if fp32 else _LOW[0])
    assert found.weights <= (2e-3 if fp32 else _LOW[1])
