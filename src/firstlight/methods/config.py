"""The `efficiency` and `loss` sections of a recipe."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from firstlight.section import Section

Precision = Literal["auto", "fp32", "tf32", "bf16", "bf16_params", "fp16", "fp8"]
MatmulPrecision = Literal["highest", "high", "medium"]
Attention = Literal[
    "auto", "plain", "blockwise", "sdpa", "flash", "efficient", "math", "cudnn", "flex"
]
ActivationCheckpointing = Literal["none", "full", "selective", "budget"]


class LossConfig(Section):
    """The `loss` section of a recipe, which configures terms of the training loss in addition to
    the cross-entropy."""

    z_loss_coef: float = Field(0.0, ge=0)
    """coefficient of the z-loss, the squared logarithm of the softmax denominator of each token
    (Chowdhery et al. 2022). The z-loss keeps logits from drifting in long runs. A common value is
    1e-4. train/loss includes the z-loss, and val/loss does not."""


class EfficiencyConfig(Section):
    """The `efficiency` section of a recipe, which selects methods that change how a step is
    computed, but not its result. Each key is one method, and most methods can be combined."""

    precision: Precision = "auto"
    """number format of the computation. "auto" selects bf16 if matrix products are faster in bf16
    than in fp32, fp16 on GPUs whose tensor cores support only fp16 (V100, T4), and fp32 in all
    other cases. "tf32" rounds the inputs of fp32 matrix products to 10 bits on GPUs that support
    it. "bf16" uses autocast, which computes matrix products in bf16, while parameters, moments and
    the loss stay in fp32. "bf16_params" stores the model's parameters in bf16, and fp32 master
    weights in the optimizer. "fp16" uses autocast with dynamic loss scaling. "fp8" is the same as
    "bf16", except that the matrix products of linear layers with at least 4 million weights are
    computed in fp8 (torchao; GPUs with compute capability 8.9 or higher). Experts stay in bf16."""
    bf16_residual: bool = False
    """keep the residual stream, to which each layer adds its output, in bf16 instead of fp32. This
    is faster, and activations take less memory. Norms are still computed in fp32. Requires
    precision "bf16" or "fp8"."""
    matmul_precision: MatmulPrecision | None = None
    """value of torch.set_float32_matmul_precision during training steps, for products of fp32
    tensors (precision "fp32" or "tf32"). "highest" computes the products in fp32. "high" has the
    same effect as precision "tf32". On CPUs, "medium" rounds the inputs to bf16 if products are
    faster in bf16; on NVIDIA GPUs, it has the same effect as "high". null uses "high" with
    precision "tf32", and otherwise torch's setting, which is "highest"."""
    attention: Attention = "auto"
    """backend of attention. "auto" is the fastest backend for the available hardware. "sdpa" is
    torch's fused attention, for which torch chooses the kernel; "flash", "efficient", "cudnn" and
    "math" select a specific kernel. "flex" is torch's compiled attention (CUDA). "plain" is two
    matrix products and a softmax, and stores all T x T scores. "blockwise" computes the same result
    for 128 queries at a time and recomputes the scores in the backward pass; it is the fastest
    backend on CPUs in bf16 with up to 1,024 tokens."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """activations that are recomputed in the backward pass instead of being stored. "none"
    recomputes no activations, and "full" recomputes the activations of every layer. "selective"
    recomputes all activations except the results of matrix products and attention. With "budget",
    torch.compile selects which activations to store, so that they fit into
    `activation_memory_budget`."""
    activation_memory_budget: float = Field(0.5, ge=0, le=1)
    """maximum memory of the stored activations with "budget", as a fraction of the memory of all
    activations. 1 stores all activations, and 0 has the same effect as "full"."""
    activation_offload: bool = False
    """store activations for the backward pass in CPU memory instead of GPU memory. This has no
    effect on a CPU."""
    loss_chunk_tokens: int | None = Field(None, ge=0)
    """number of tokens for which the head and the cross-entropy are computed at a time, so that the
    logits of all tokens are never in memory together. 0 computes all tokens at once. null uses 512
    on a CPU in fp32 with a vocabulary of at least 16,384 tokens, where this takes no additional
    time, and 0 in all other cases."""
    optimizer_in_backward: bool = False
    """update each parameter as soon as its gradient is available, and then free the gradient. On a
    GPU, groups of parameters with up to 8 million values are updated together. Requires one
    micro-batch per step and no gradient clipping."""
    empty_cache_steps: int = Field(0, ge=0)
    """interval, in steps, at which the GPU's unused cached memory is released; 0 never releases
    it."""
    vocab_multiple: int = Field(1, ge=1)
    """the embedding and the head are padded so that their number of rows is a multiple of this
    number. 64 is suitable for tensor cores, and 1 adds no rows. Rows beyond the vocabulary do not
    produce logits and are not exported."""
    compile: bool | Literal["auto"] = "auto"
    """compile the forward and backward pass of the training step with torch.compile, which reduces
    memory accesses and memory use. Compilation at the start of a run takes from a few seconds to a
    minute. It requires a C++ compiler and Python's headers on CPUs, or Triton and a C compiler on
    GPUs. "auto" compiles if the required software is installed and the run is long enough to save
    time. In short runs, "auto" uses `compile_regional`."""
    compile_backend: Literal["inductor", "cudagraphs", "aot_eager", "eager"] = "inductor"
    """backend of torch.compile. "inductor" generates kernels. "cudagraphs" launches torch's own
    kernels together as CUDA graphs and does not need a compiler. "aot_eager" and "eager" are for
    debugging."""
    compile_mode: Literal[
        "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
    ] = "default"
    """mode of torch.compile; "max-autotune" and "reduce-overhead" are for GPUs."""
    compile_regional: bool = False
    """compile a single layer and the head with the loss, instead of the whole model. The compiled
    code of the layer is used for all layers. Compilation takes a fraction of the time, but steps
    are slightly slower."""

    @model_validator(mode="after")
    def _one_precision_of_products(self) -> Self:
        if self.precision == "tf32" and self.matmul_precision not in (None, "high"):
            raise ValueError(
                f"precision tf32 implies matmul_precision high, not {self.matmul_precision}: "
                "remove one of the two (precision fp32 supports any)"
            )
        return self

    @property
    def products(self) -> Precision:
        """Number format of matrix products on a GPU. This is `precision`, or "tf32" for fp32
        tensors if `matmul_precision` is "high" or "medium"."""
        is_tf32 = self.precision == "fp32" and self.matmul_precision in ("high", "medium")
        return "tf32" if is_tf32 else self.precision
