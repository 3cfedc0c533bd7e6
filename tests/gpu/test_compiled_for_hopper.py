"""Compiled training steps become machine code for an H100 on a machine without a GPU.

They need triton, which torch's CPU build does not include. Installed in the environment, it would
make firstlight assume that a GPU can compile, so install it in a separate folder:

    pip install --no-deps --target DIR triton
    PYTHONPATH=DIR make test-gpu DEVICE=cpu
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from .no_gpu import needs_no_gpu

pytestmark = [
    pytest.mark.gpu,
    needs_no_gpu,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="not installed: triton"),
]


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("gpt2", ("gelu", "nll_loss_forward", "native_layer_norm_backward")),
        ("llama in regions", ("silu", "rsqrt")),
        ("mixtral", ("silu",)),
        ("documents", ("flex_attention", "flex_attention_backward")),
    ],
)
def test_every_step_kernel_compiles_for_compute_capability_9(
    case: str, parts: tuple[str, ...]
) -> None:
    kernels = _compiled(case)["kernels"]
    assert {architecture for architecture, _ in kernels.values()} == {"sm_90a"}
    assert all(size > 1000 for _, size in kernels.values())
    for part in parts:
        assert any(part in name for name in kernels), (part, sorted(kernels))


@pytest.mark.parametrize(("family", "wide"), [("gpt2", 1), ("llama", 0)])
def test_bf16_residual_compiled_keeps_no_fp32_stream_or_logits(family: str, wide: int) -> None:
    """Except the gradient that GPT-2's two embeddings sum, once per step."""
    found = _compiled(f"{family} bf16 residual")
    assert found["breaks"] == []
    sizes: Counter[int] = Counter()
    for shape, dtype, count in found["buffers"]:
        if dtype == "float32":
            sizes[math.prod(shape)] += count
    tokens, width, vocabulary = 2 * 128, 96, {"gpt2": 500, "llama": 512}[family]
    assert sizes[tokens * width] == wide
    assert sizes[tokens * vocabulary] == 0
    # Gradients of the weights are in fp32.
    assert sizes[width * vocabulary] > 0


def _compiled(case: str) -> dict[str, Any]:
    """Return the driver's answer for a case."""
    tests = Path(__file__).resolve().parents[1]
    paths = os.pathsep.join(filter(None, (str(tests), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "gpu.compile_driver", case],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
