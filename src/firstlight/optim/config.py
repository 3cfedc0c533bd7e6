"""The `optimizer` section of a recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

OptimizerName = Literal["adamw", "adamw8bit", "paged_adamw8bit", "adafactor", "muon", "sgd"]
Implementation = Literal["auto", "for-loop", "foreach", "fused"]
EightBitLibrary = Literal["auto", "bitsandbytes", "torchao"]
AdafactorVariant = Literal["auto", "paper", "torch"]


class OptimizerConfig(BaseModel):
    """The `optimizer` section of a recipe.

    Bytes of state a parameter are beside the fp32 parameter itself (4) and its gradient (4).

    name: "adamw" (Loshchilov and Hutter 2019): two fp32 moments, 8 bytes of state a parameter;
        the default. "adamw8bit": both moments in 8 bits with a scale for every 256 values
        (Dettmers et al. 2022), 2.03 bytes; nearly the same loss. Each update unpacks and packs the
        moments, which on a CPU takes ten times AdamW's update and more. "paged_adamw8bit": the
        same, in memory that CUDA moves to the CPU's when the GPU's is full, at the price of the
        moving (bitsandbytes; CUDA only). "adafactor" (Shazeer and Stern 2018): the second moment
        as one row and one column a matrix and no first one, nearly 0 bytes; steps of a size
        relative to the parameter's root mean square, so it needs a learning_rate of its own, about
        1e-2. "muon": Muon for the matrices and stacked experts inside the layers (Jordan et al.
        2024), 4 bytes, AdamW for embeddings, head and norms, 8 bytes; each update costs 15 matrix
        products a matrix on top, and fewer are needed. "sgd": momentum only, 4 bytes, or 0 with
        sgd_momentum 0; the cheapest update, and slow to learn a Transformer.
    implementation: how torch runs AdamW (Muon's too) and SGD: "fused", one kernel that reads and
        writes each value once (an update is bound by memory, not arithmetic); "foreach", one
        kernel an operation over all parameters, with temporary copies as large as the
        parameters; "for-loop", parameter by parameter, the least memory without fused kernels
        and the slowest on GPUs. "auto" is fused where the device has it, else foreach; for
        Adafactor, which has no fused kernel, for-loop, since foreach costs the memory that it
        saves. All give the same numbers to rounding.
    eight_bit_library: whose 8-bit AdamW: "bitsandbytes" has kernels of its own and starts at
        once; "torchao" compiles its update, which takes tens of seconds on a CPU at the first
        step. "auto" takes bitsandbytes if it is installed, else torchao. Tensors under 4096
        values stay in 32 bits. Embeddings are in 8 bits too (but see embeddings_in_32_bits):
        blocks of 256 values lie within a token's row where hidden_size is a multiple of 256, so
        rare tokens' large gradients don't blur the others'. The state of one library does not fit
        the other.
    embeddings_in_32_bits: with an 8-bit optimizer, update token and position embeddings (and a head
        that is tied to them) by torch's AdamW with fp32 moments, 8 bytes a parameter of theirs, as
        Dettmers et al. 2022 advise for training from scratch; paged_adamw8bit does not page these.
    learning_rate: the peak, of all but Muon's part.
    muon_learning_rate: Muon's peak; null takes `learning_rate`. Its updates are scaled by
        0.2 sqrt(larger side) to AdamW's size (Liu et al. 2025), so one rate can serve both.
    betas, eps: AdamW's, of every kind.
    muon_momentum: Muon's.
    sgd_momentum: SGD's; 0 needs no state.
    adafactor_threshold: Adafactor's updates are scaled down to this root mean square (its d).
    adafactor_beta2_decay: Adafactor's second moment forgets with 1 - step ** this; at most 0.
    adafactor_variant: the form of Adafactor. "paper": weight decay is relative to the parameter's
        root mean square, as steps are, and the rate is the schedule's (transformers' Adafactor with
        relative_step off). "torch": torch.optim.Adafactor, whose weight decay is learning_rate
        times weight_decay for each parameter (1e-3 a step at 1e-2 and 0.1) and whose rate is at
        most 1/sqrt(step). "auto" is paper; a run that an older version began goes on with torch.
    weight_decay: applied to matrices only, never to norms and biases. Decoupled, but for SGD,
        where it is added to the gradient; with Adafactor, relative to the parameter's size (see
        adafactor_variant).
    max_grad_norm: gradients are scaled down to this global L2 norm; 0 switches it off. Costs one
        reading of all gradients, and when it scales, one writing.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    name: OptimizerName = "adamw"
    implementation: Implementation = "auto"
    eight_bit_library: EightBitLibrary = "auto"
    embeddings_in_32_bits: bool = False
    learning_rate: float = Field(1e-3, gt=0)
    muon_learning_rate: float | None = Field(None, gt=0)
    betas: list[float] = Field([0.9, 0.95], min_length=2, max_length=2)
    eps: float = Field(1e-8, gt=0)
    muon_momentum: float = Field(0.95, ge=0, lt=1)
    sgd_momentum: float = Field(0.9, ge=0, lt=1)
    adafactor_threshold: float = Field(1.0, ge=1)
    adafactor_beta2_decay: float = Field(-0.8, le=0)
    adafactor_variant: AdafactorVariant = "auto"
    weight_decay: float = Field(0.1, ge=0)
    max_grad_norm: float = Field(1.0, ge=0)

    @model_validator(mode="after")
    def _check(self) -> OptimizerConfig:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {self.betas} must each be at least 0 and below 1")
        if self.implementation != "auto" and self.name.endswith("adamw8bit"):
            raise ValueError(
                f"implementation '{self.implementation}' is of torch's own optimizers, and "
                f"{self.name} has only one: set implementation to auto, or name to adamw"
            )
        if self.embeddings_in_32_bits and not self.name.endswith("adamw8bit"):
            raise ValueError(
                f"embeddings_in_32_bits is for 8-bit optimizers, and {self.name} has no 8-bit "
                "state: leave it out, or set name to adamw8bit"
            )
        if self.implementation == "fused" and self.name == "adafactor":
            raise ValueError(
                "torch has no fused Adafactor: set implementation to foreach, or name to adamw"
            )
        if self.eight_bit_library == "torchao" and self.name == "paged_adamw8bit":
            raise ValueError(
                "torchao has no paged optimizer: set eight_bit_library to bitsandbytes, "
                "or name to adamw8bit"
            )
        return self
