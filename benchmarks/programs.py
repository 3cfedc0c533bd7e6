"""Programs for comparison in benchmarks: bare loops for GPT-2, and transformers' Trainer.

Each loop is an efficient single-file training program that does not use this library: a model of
linear layers and torch's fused attention, compiled as a whole, with its vocabulary padded to a
multiple of 64, and torch's fused AdamW.

- "reference", like nanoGPT's train.py: fp32 parameters, matrix products in bf16 by autocast, weight
  decay on matrices only, gradients clipped to a norm of 1.
- "reference-fp32": the same without autocast, for machines whose fp32 products are faster.
- "pure-bf16", like the optimised script of LLMs-from-scratch, chapter 5: parameters and AdamW's
  moments are in bf16 without an fp32 copy, and gradients are not clipped.

The shape letters are those of `models/ops.py`.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from firstlight.bench.steps import StepClock
from firstlight.data.loader import Batch
from firstlight.models import GPT2Config
from firstlight.recipe import Recipe

_VOCAB_MULTIPLE = 64
_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.1
_MAX_GRAD_NORM = 1.0

#: (input_ids [B, T], labels [B, T], learning rate) -> the loss before the update
LoopStep = Callable[[Tensor, Tensor, float], float]


class _Layer(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        C = config.hidden_size
        self.heads = config.num_attention_heads
        self.attention_norm = nn.LayerNorm(C, config.layer_norm_epsilon)
        self.qkv = nn.Linear(C, 3 * C)
        self.attention_out = nn.Linear(C, C)
        self.mlp_norm = nn.LayerNorm(C, config.layer_norm_epsilon)
        self.mlp_in = nn.Linear(C, config.intermediate_size)
        self.mlp_out = nn.Linear(config.intermediate_size, C)

    def forward(self, x_BTC: Tensor) -> Tensor:
        q_BTC, k_BTC, v_BTC = self.qkv(self.attention_norm(x_BTC)).chunk(3, dim=-1)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q_BTC, k_BTC, v_BTC)
        )
        y_BHTD = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTC = x_BTC + self.attention_out(y_BHTD.transpose(1, 2).flatten(2))
        hidden = F.gelu(self.mlp_in(self.mlp_norm(x_BTC)), approximate="tanh")
        return x_BTC + self.mlp_out(hidden)  # type: ignore[no-any-return]


class PlainGPT2(nn.Module):
    """GPT-2 without dropout, with a head that is tied to the embedding."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        rows = math.ceil(config.vocab_size / _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
        self.tokens = nn.Embedding(rows, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.head = nn.Linear(config.hidden_size, rows, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_stream = name.endswith(("attention_out.weight", "mlp_out.weight"))
                scale = math.sqrt(2 * config.num_hidden_layers) if into_stream else 1.0
                nn.init.normal_(parameter, 0.0, config.initializer_range / scale)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, input_ids_BT: Tensor, labels_BT: Tensor) -> Tensor:
        """Return the mean cross-entropy (nats) of input ids and labels [batch, seq_len], both
        int64."""
        positions_T = torch.arange(input_ids_BT.shape[1], device=input_ids_BT.device)
        x_BTC = self.tokens(input_ids_BT) + self.positions(positions_T)
        for layer in self.layers:
            x_BTC = layer(x_BTC)
        logits_BTV = self.head(self.norm(x_BTC))
        return F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten())


def autocast_loop(
    config: GPT2Config, device: torch.device, *, bf16: bool, compile_model: bool
) -> LoopStep:
    """Return a function that trains one step of the program "reference", or of "reference-fp32".

    Args:
        config: shape of the model.
        device: device to run on.
        bf16: True for matrix products in bf16, by autocast ("reference").
        compile_model: False leaves torch.compile out, for tests.
    """
    model = PlainGPT2(config).to(device)
    forward = torch.compile(model) if compile_model else model
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": _WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=_BETAS, fused=True)
    precision: contextlib.AbstractContextManager[object] = (
        torch.autocast(device.type, torch.bfloat16) if bf16 else contextlib.nullcontext()
    )

    def step(input_ids: Tensor, labels: Tensor, learning_rate: float) -> float:
        _set_learning_rate(optimizer, learning_rate)
        with precision:
            loss = forward(input_ids, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach().item()  # type: ignore[no-any-return]

    return step


def pure_bf16_loop(config: GPT2Config, device: torch.device, *, compile_model: bool) -> LoopStep:
    """Return a function that trains one step of the program "pure-bf16"; see `autocast_loop`."""
    model = PlainGPT2(config).to(device, torch.bfloat16)
    forward = torch.compile(model) if compile_model else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.0, betas=_BETAS, weight_decay=_WEIGHT_DECAY, fused=True
    )

    def step(input_ids: Tensor, labels: Tensor, learning_rate: float) -> float:
        _set_learning_rate(optimizer, learning_rate)
        optimizer.zero_grad()
        loss = forward(input_ids, labels)
        loss.backward()
        optimizer.step()
        return loss.detach().item()  # type: ignore[no-any-return]

    return step


def _set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


class _Sequences(IterableDataset[dict[str, torch.Tensor]]):
    """The sequences of batches one by one, int64 [seq_len]. The labels equal the inputs, because
    the models of transformers shift labels themselves."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for batch in self._batches:
            for row in batch.input_ids:
                yield {"input_ids": row, "labels": row}


def train_with_trainer(
    recipe: Recipe,
    batches: Iterator[Batch],
    steps: int,
    rows: int,
    clock: StepClock,
    *,
    compile_model: bool,
) -> list[float]:
    """Train a new model of the recipe's shape with the Trainer; return the loss of each step.

    The vocabulary is not padded, attention is torch's SDPA, precision is bf16 by autocast, the
    optimizer is the Trainer's default, gradients are clipped to a norm of 1, and the learning rate
    is constant.

    Args:
        recipe: recipe with the model, learning rate, seed and device.
        batches: a batch for each step.
        steps: number of steps.
        rows: sequences of a batch.
        clock: clock that measures each step.
        compile_model: False leaves torch.compile out, for dry runs.
    """
    import transformers
    from transformers.trainer_callback import PrinterCallback

    class Times(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.start()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.stop()

    assert recipe.model is not None
    values = recipe.model.to_hf()
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with tempfile.TemporaryDirectory(prefix="firstlight-bench-") as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            max_steps=steps,
            per_device_train_batch_size=rows,
            bf16=True,
            torch_compile=compile_model,
            use_cpu=recipe.run.device == "cpu",
            learning_rate=recipe.optimizer.learning_rate,
            lr_scheduler_type="constant",
            weight_decay=recipe.optimizer.weight_decay,
            max_grad_norm=1.0,
            adam_beta2=0.95,
            seed=recipe.run.seed % 2**32,
            logging_steps=1,
            dataloader_pin_memory=False,
        )
        trainer = transformers.Trainer(
            model=model, args=arguments, train_dataset=_Sequences(batches), callbacks=[Times()]
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
