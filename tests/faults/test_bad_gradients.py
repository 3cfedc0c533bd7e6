"""A step whose loss or gradient is not finite, or leaps up, changes no bit."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from driven import one_thread
from plain_recipe import plain_recipe
from scale import cases
from small import LLAMA, SEQ_LEN, batch_of, new_model
from torch import Tensor

from firstlight.data.loader import Batch
from firstlight.hardware.device import find_hardware
from firstlight.recipe import GuardConfig
from firstlight.training.guard import Guard
from firstlight.training.program import TrainingProgram

_MICRO_BATCHES = 3
_KINDS = ("nan", "inf", "-inf", "leap")
_SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "muon": {"optimizer": {"name": "muon"}},
    "bf16": {"efficiency": {"precision": "bf16"}},
    "bf16_params": {"efficiency": {"precision": "bf16_params"}},
    "fp16": {"efficiency": {"precision": "fp16"}},
}


class Spoiler:
    """Spoils a gradient, or the loss, in one micro-batch of a step.

    Attributes:
        kind: what it becomes: not finite in one place, or all gradients 1e4 times as large.
        place: a parameter's name, or "loss".
        micro_batch: counted down; at 0 it is spoilt.
    """

    def __init__(self, program: TrainingProgram, generator: random.Random) -> None:
        self.generator, self.kind, self.place, self.micro_batch = generator, "nan", "", -1
        self._loss_sum = program.loss_sum
        program.loss_sum = self.loss_sum
        self._names = ["loss"]
        for name, parameter in program.model.named_parameters():
            self._names.append(name)
            parameter.register_hook(functools.partial(self.spoil, name))  # type: ignore[no-untyped-call]

    def loss_sum(
        self, input_ids: Tensor, labels: Tensor, document_ids: Tensor | None = None
    ) -> Tensor:
        loss = self._loss_sum(input_ids, labels, document_ids)
        self.micro_batch -= 1
        if self.micro_batch == 0 and self.place == "loss" and self.kind != "leap":
            return loss + float(self.kind)
        return loss

    def spoil(self, name: str, gradient: Tensor) -> Tensor:
        if self.micro_batch != 0:
            return gradient
        if self.kind == "leap":
            return gradient * 1e4
        if self.place != name:
            return gradient
        spoilt = gradient.clone()
        spoilt.view(-1)[self.generator.randrange(spoilt.numel())] = float(self.kind)
        return spoilt

    def draw(self) -> str:
        """Draw what is to be spoilt next; say it."""
        self.kind, self.place = self.generator.choice(_KINDS), self.generator.choice(self._names)
        self.micro_batch = self.generator.randint(1, _MICRO_BATCHES)
        return f"{self.kind} in {self.place} of micro-batch {self.micro_batch}"


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with one_thread():
        yield


def make_program(settings: dict[str, Any]) -> TrainingProgram:
    recipe = plain_recipe(
        {
            "model": LLAMA.model_dump(),
            "data": {"dir": "none", "seq_len": SEQ_LEN},
            "batch": {"micro_batch_size": 2},
            "optimizer": {"learning_rate": 1e-3, **settings.get("optimizer", {})},
            "efficiency": {
                "precision": "fp32",
                "compile": False,
                "loss_chunk_tokens": 0,
                "attention": "sdpa",
                **settings.get("efficiency", {}),
            },
        }
    )
    return TrainingProgram(recipe, new_model(LLAMA), find_hardware("cpu"))


def everything(program: TrainingProgram) -> dict[str, bytes]:
    """All weights, masters and moments, to the byte."""
    with program.optimizer.master_weights():
        tensors = {name: p.detach().clone() for name, p in program.model.state_dict().items()}
    tensors |= {f"{name} rounded": p.detach() for name, p in program.model.state_dict().items()}
    tensors |= program.optimizer.state_tensors()
    return {
        name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in tensors.items()
    }


def global_batches(generator: random.Random) -> Iterator[list[Batch]]:
    while True:
        yield [batch_of([SEQ_LEN, 5], generator.getrandbits(32)) for _ in range(_MICRO_BATCHES)]


@pytest.mark.parametrize("name", _SETTINGS)
def test_train_step_non_finite_loss_or_gradient_changes_no_bit(
    name: str, record_property: Any
) -> None:
    generator = random.Random(f"bad gradients {name}")
    program = make_program(_SETTINGS[name])
    guard = Guard(GuardConfig(spike_z_score=8.0))
    spoiler, batches = Spoiler(program, generator), global_batches(generator)
    for _ in range(20):  # from then on, a leap is one
        program.step(next(batches), 1.0, guard.accepts)
    count = cases(4, 400)
    for _ in range(count):
        if program.scaler is not None:
            program.scaler.scale = 1024.0  # halved by each that is not finite
        before, windows = everything(program), guard.state_dict()
        said = spoiler.draw()
        assert program.step(next(batches), 1.0, guard.accepts).skipped, said
        assert everything(program) == before, said
        after = guard.state_dict()
        assert (after["losses"], after["grad_norms"]) == (windows["losses"], windows["grad_norms"])
        # And what comes next is made, with nothing left of the bad one.
        good = program.step(next(batches), 1.0, guard.accepts)
        assert math.isfinite(good.loss), said
        assert not good.skipped, said
        assert everything(program) != before, said
    record_property("cases", ("bad losses and gradients", count))
