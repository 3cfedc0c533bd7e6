"""The `efficiency` section of a recipe: methods that change how a step is computed, but not its
result."""

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
    """The `loss` section of a recipe: terms of the training loss besides the cross-entropy."""

    z_loss_coef: float = Field(0.0, ge=0)
    """coefficient of the z-loss, the squared logarithm of the softmax denominator of each token
    (Chowdhery et al. 2022). It keeps logits from drifting in long runs; 1e-4 is usual. train/loss
    includes it, val/loss does not."""


class EfficiencyConfig(Section):
    """The `efficiency` section of a recipe. Each key is one method; most can be combined."""

    precision: Precision = "auto"
    """number format of the computation. "auto" is bf16 if matrix products are faster in bf16
    than in fp32, fp16 on GPUs whose tensor cores support only fp16 (V100, T4), otherwise fp32.
    "tf32" rounds the inputs of fp32 matrix products to 10 bits on GPUs that support it. "bf16" is
    autocast: parameters, moments and the loss stay in fp32, matrix products run in bf16.
    "bf16_params" keeps the model's parameters in bf16 and fp32 master weights in the optimizer.
    "fp16" is autocast with dynamic loss scaling. "fp8" is bf16 with the matrix products of linear
    layers of at least 4 million weights in fp8 (torchao; GPUs from compute capability 8.9); experts
    of mixtures stay in bf16."""
    bf16_residual: bool = False
    """keep the residual stream, to which each layer adds its output, in bf16 instead of fp32: this
    is faster and activations take less memory. Norms still compute in fp32. Requires precision
    "bf16" or "fp8"."""
    matmul_precision: MatmulPrecision | None = None
    """value of torch.set_float32_matmul_precision during training steps, for products of fp32
    tensors (precision "fp32" or "tf32"): "highest" computes them in fp32; "high" is precision
    "tf32"; "medium" rounds their inputs to bf16 if products are faster in bf16 (on CPUs; on
    NVIDIA GPUs torch computes as with "high"). null is "high" with precision "tf32", otherwise
    torch's setting, which is "highest"."""
    attention: Attention = "auto"
    """backend of attention. "auto" is the fastest for the available hardware; "sdpa" is torch's
    fused attention, which chooses a kernel itself; "flash", "efficient", "cudnn", "math" name the
    kernel; "flex" is torch's compiled attention (CUDA); "plain" is two matrix products and a
    softmax, which store all T x T scores; "blockwise" is the same for 128 queries at a time,
    recomputed in the backward pass, which is the fastest in bf16 on CPUs with up to 1,024
    tokens."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """activations that the backward pass recomputes instead of keeping them: "none"; "full", those
    of every layer; "selective", all except the results of matrix products and attention; "budget",
    selected by torch.compile to meet `activation_memory_budget`."""
    activation_memory_budget: float = Field(0.5, ge=0, le=1)
    """fraction of the activations' memory that "budget" may use: 1 keeps all, 0 is like "full"."""
    activation_offload: bool = False
    """keep activations for the backward pass in CPU memory instead of GPU memory. No effect on a
    CPU."""
    loss_chunk_tokens: int | None = Field(None, ge=0)
    """number of tokens for which the head and the cross-entropy are computed at a time, so that the
    logits of all tokens are never in memory together; 0 computes all at once. null is 512 for fp32
    on a CPU with a vocabulary of at least 16,384, where it costs no time, otherwise 0."""
    optimizer_in_backward: bool = False
    """update each parameter as soon as its gradient is available, then free the gradient; on a GPU,
    groups of up to 8 million values are updated together. Requires one micro-batch per step and no
    clipping."""
    empty_cache_steps: int = Field(0, ge=0)
    """number of steps after which the GPU's unused cached memory is released; 0 is never."""
    vocab_multiple: int = Field(1, ge=1)
    """embedding and head are padded to a multiple of this number of rows (64 suits tensor cores);
    1 adds no rows. Rows beyond the vocabulary do not produce logits and are not exported."""
    compile: bool | Literal["auto"] = "auto"
    """compile the training step's forward and backward pass with torch.compile, which reduces
    memory accesses and memory use. Compilation takes seconds to a minute at the start and requires
    a C++ compiler and Python's headers on CPUs, or Triton and a C compiler on GPUs. "auto" compiles
    if these are installed and the run is long enough to save time, in short runs with
    `compile_regional`."""
    compile_backend: Literal["inductor", "cudagraphs", "aot_eager", "eager"] = "inductor"
    """backend of torch.compile: "inductor"; "cudagraphs", torch's own kernels launched together as
    CUDA graphs, without a compiler; or "aot_eager" and "eager" for debugging."""
    compile_mode: Literal[
        "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
    ] = "default"
    """mode of torch.compile; "max-autotune" and "reduce-overhead" are for GPUs."""
    compile_regional: bool = False
    """compile one layer, whose code all layers share, and head and loss, instead of the whole
    model: compilation takes a fraction of the time, but steps are slightly slower."""

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
        """The format of a GPU's matrix products: `precision`, or "tf32" for fp32 tensors with
        `matmul_precision` "high" or "medium"."""
        is_tf32 = self.precision == "fp32" and self.matmul_precision in ("high", "medium")
        return "tf32" if is_tf32 else self.precision
