"""Bugs of other trainers in a step: loss, gradients, schedule, optimizer, loss scale."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small import (
    GPT2,
    LLAMA,
    SEQ_LEN,
    VOCABULARY,
    batch_of,
    counting_split,
    new_model,
    new_optimizer,
    summed_loss,
    weights_of,
)
from torch import Tensor

from firstlight.data.loader import Batch, TokenLoader
from firstlight.errors import TrainingError
from firstlight.models.accounting import meta_model, train_flops_per_token
from firstlight.optim.schedule import Schedule
from firstlight.training.guard import LossScaler
from firstlight.training.loop import train
from firstlight.training.step import train_step


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """These tensors are too small for more."""
    torch.set_num_threads(1)


def gradients(batches: list[Batch], **settings: Any) -> dict[str, Tensor]:
    """What a step of these micro-batches is made with."""
    model = new_model()
    train_step(summed_loss(model), new_optimizer(model, max_grad_norm=0.0, **settings), batches)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def joined(batches: list[Batch]) -> Batch:
    return Batch(
        torch.cat([b.input_ids for b in batches]),
        torch.cat([b.labels for b in batches]),
        sum(b.num_valid for b in batches),
    )


# Loss and gradients


def test_accumulation_is_normalised_by_tokens_not_micro_batches() -> None:
    """transformers #34191, #35438: a token of a short micro-batch counted for more."""
    micro_batches = [batch_of([8, 8], 1), batch_of([1], 2), batch_of([3, 0], 3)]
    # Equal rows, as micro-batches have in a run.
    whole, cut = gradients([joined(micro_batches)]), gradients(micro_batches)
    assert whole.keys() == cut.keys()
    for name, gradient in whole.items():
        torch.testing.assert_close(cut[name], gradient, rtol=1e-4, atol=1e-7)


def test_accumulation_includes_gradient_of_every_micro_batch() -> None:
    """FunASR #3472: what the micro-steps before the last had found was lost."""
    first, second = batch_of([8], 1), batch_of([8], 2)
    together, alone = gradients([first, second]), gradients([second])
    half = {name: gradient / 2 for name, gradient in alone.items()}
    assert any((together[name] - half[name]).abs().max() > 1e-4 for name in together)
    one, two = gradients([first]), gradients([second])
    for name, gradient in together.items():
        torch.testing.assert_close((one[name] + two[name]) / 2, gradient, rtol=1e-4, atol=1e-7)


def test_gradients_of_previous_step_are_cleared() -> None:
    model = new_model()
    optimizer = new_optimizer(model, max_grad_norm=0.0, learning_rate=1e-30)
    for _ in range(2):
        train_step(summed_loss(model), optimizer, [batch_of([8])])
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name, gradient in gradients([batch_of([8])]).items():
        torch.testing.assert_close(found[name], gradient)


def test_accumulation_partial_last_window_is_weighted_by_tokens(tmp_path: Path) -> None:
    """ms-swift #10084: the filled-up part of the last row counted as tokens learned from."""
    dataset = counting_split(tmp_path, 20)  # rows of 8, 8 and 3 predictions
    with TokenLoader(dataset, SEQ_LEN, 1, 1, workers=0) as loader:
        batches = [loader.next_batch() for _ in range(3)]
    assert sorted(batch.num_valid for batch in batches) == [3, 8, 8]
    for batch in batches:
        assert batch.num_valid == int((batch.labels != -100).sum())
        short = Batch(batch.input_ids % VOCABULARY, batch.labels.clamp(max=1), batch.num_valid)
        seen = int((short.labels == 1).sum())
        model = new_model()
        result = train_step(summed_loss(model), new_optimizer(model), [short])
        assert result.tokens == seen


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["weight", "loss"])
def test_clipping_nan_gradient_raises_and_changes_nothing(value: float, where: str) -> None:
    """pytorch #46849: a norm of NaN "clips" every weight to NaN."""
    model = new_model()
    optimizer = new_optimizer(model)
    train_step(summed_loss(model), optimizer, [batch_of([8])])
    before = weights_of(model), {n: t.clone() for n, t in optimizer.state_tensors().items()}
    loss_sum = summed_loss(model)

    def poisoned(input_ids: Tensor, labels: Tensor, document_ids: Tensor | None = None) -> Tensor:
        loss = loss_sum(input_ids, labels, document_ids)
        if where == "loss":
            return loss * value
        last = list(model.parameters())[-1]
        last.register_hook(lambda gradient: torch.full_like(gradient, value))  # type: ignore[no-untyped-call]
        return loss

    with pytest.raises(TrainingError, match="not finite"):
        train_step(poisoned, optimizer, [batch_of([8])])
    after = optimizer.state_tensors()
    assert weights_of(model) == before[0]
    assert all(torch.equal(after[name], tensor) for name, tensor in before[1].items())


def test_clipping_applies_after_unscaling_loss() -> None:
    """The scaled gradient of fp16 is a thousand times the limit, and is "clipped" to nothing."""
    plain, scaled = new_model(), new_model()
    for model, scaler in ((plain, None), (scaled, LossScaler(2.0**16))):
        optimizer = new_optimizer(model, max_grad_norm=0.5, name="sgd", sgd_momentum=0.0)
        result = train_step(summed_loss(model), optimizer, [batch_of([8, 8])], scaler)
        norm = torch.linalg.vector_norm(
            torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
        )
        assert result.grad_norm > 0.5
        assert float(norm) == pytest.approx(0.5, rel=1e-4)
    for one, two in zip(plain.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(one, two)


def test_grad_norm_counts_tied_weight_once() -> None:
    model = new_model(GPT2)
    optimizer = new_optimizer(model, max_grad_norm=0.0)
    result = train_step(summed_loss(model), optimizer, [batch_of([8, 8])])
    squares = sum(
        float(p.grad.double().square().sum()) for p in set(model.parameters()) if p.grad is not None
    )
    assert result.grad_norm == pytest.approx(math.sqrt(squares), rel=1e-5)


def test_weight_decay_excludes_norms_and_biases() -> None:
    model = new_model(GPT2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
            parameter.grad = torch.zeros_like(parameter)
    new_optimizer(model, weight_decay=0.5, learning_rate=0.1).step()
    for name, parameter in model.named_parameters():
        expected = 0.95 if parameter.dim() >= 2 else 1.0
        assert torch.equal(parameter, torch.full_like(parameter, expected)), name


def test_dropout_is_reenabled_after_evaluation(recipe: dict[str, Any]) -> None:
    """A run that is evaluated often learns otherwise than one that isn't."""
    recipe["model"] = {**_DROPOUT}
    recipe["schedule"]["max_steps"] = 4
    recipe["checkpoint"]["every_steps"] = 0
    losses = []
    for every in (1, 0):
        recipe["evaluation"] = {
            "every_steps": every,
            "max_rows": 1,
            "sample_tokens": 2,
            "on_start": False,
        }
        recipe["run"]["dir"] += f"-{every}"
        records: list[Any] = []
        train(recipe, on_step=records.append)
        losses.append([record["train/loss"] for record in records])
    assert losses[0] == losses[1]


_DROPOUT = {
    "model_type": "gpt2",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "embd_pdrop": 0.2,
    "attn_pdrop": 0.2,
    "resid_pdrop": 0.2,
}


# Schedule


def test_schedule_warmup_and_decay_start_at_expected_step() -> None:
    """lightning #1772: the first update had a learning rate of 0, or the second's."""
    shares = [Schedule(10, 4, 10, 0.1).lr_scale(step) for step in range(10)]
    assert shares[:4] == [0.25, 0.5, 0.75, 1.0]
    assert shares[4] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 6)))


def test_schedule_minimum_learning_rate_is_reached_at_last_step() -> None:
    for max_steps, warmup in ((10, 4), (7, 0), (2, 1), (100, 9)):
        shares = [
            Schedule(max_steps, warmup, max_steps, 0.1).lr_scale(step) for step in range(max_steps)
        ]
        assert shares[-1] == pytest.approx(0.1, abs=1e-12)
        assert all(share > 0.1 + 1e-6 for share in shares[:-1]), (max_steps, warmup)
    assert Schedule(10, 4, 10, 0.1).lr_scale(10**6) == pytest.approx(0.1)


def test_schedule_horizon_is_unchanged_on_resume(recipe: dict[str, Any]) -> None:
    """OneTrainer #1604: the steps that were left became the whole length of the schedule."""
    recipe["evaluation"] = {"every_steps": 0, "max_rows": 1, "sample_tokens": 1}
    recipe["checkpoint"] = {"every_steps": 3}
    recipe["schedule"] = {"max_steps": 9, "warmup_steps": 2}
    whole: list[Any] = []
    train(recipe, on_step=whole.append)
    expected = [1e-3 * Schedule(9, 2, 9, 0.1).lr_scale(step) for step in range(9)]
    assert [record["learning_rate"] for record in whole] == expected
    recipe["run"]["dir"] += "-again"
    parts: list[Any] = []
    for last in (4, 7, 9):

        def stop(record: Any, last: int = last) -> None:
            parts.append(record)
            if record["step"] == last < 9:
                raise KeyboardInterrupt

        try:
            train(recipe, resume=True, on_step=stop)
        except KeyboardInterrupt:
            continue
    rates = {record["step"]: record["learning_rate"] for record in parts}
    assert [record["step"] for record in parts] == [1, 2, 3, 4, 4, 5, 6, 7, 7, 8, 9]
    assert [rates[step] for step in range(1, 10)] == expected


# Optimizer and loss scale


def test_restored_optimizer_uses_learning_rate_of_schedule() -> None:
    """torchtitan #4598: the group's rate of the checkpoint won over the schedule's."""
    for name in ("adamw", "muon"):
        saved, fresh = new_model(LLAMA), new_model(LLAMA)
        old = new_optimizer(saved, name=name, learning_rate=0.5)
        train_step(summed_loss(saved), old, [batch_of([8])])
        fresh.load_state_dict(saved.state_dict())
        for model, rate in ((saved, 0.5), (fresh, 1e-3)):
            optimizer = (
                old if model is saved else new_optimizer(model, name=name, learning_rate=rate)
            )
            if model is fresh:
                optimizer.load_state_tensors(old.state_tensors())
            assert optimizer.set_learning_rate(0.5) == pytest.approx(rate / 2)
            rates = {float(g["lr"]) for o in optimizer._torch_optimizers for g in o.param_groups}
            assert rates == {rate / 2}


def test_loss_scale_is_restored_on_resume(recipe: dict[str, Any]) -> None:
    """transformers #34053: it began anew, too large, and the first steps overflowed."""
    recipe["evaluation"] = {"every_steps": 0, "max_rows": 1, "sample_tokens": 1}
    recipe["efficiency"] = {"precision": "fp16"}
    recipe["schedule"] = {"max_steps": 4, "warmup_steps": 0}
    recipe["checkpoint"] = {"every_steps": 2}
    from firstlight.training import program

    class Small(LossScaler):
        def __init__(self, scale: float = 2.0**5) -> None:
            super().__init__(scale)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "LossScaler", Small)

        def stop(record: Any) -> None:
            if record["step"] == 2:
                return
            if record["step"] == 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            train(recipe, on_step=stop)
    records: list[Any] = []
    train(recipe, resume=True, on_step=records.append)
    assert [record["loss_scale"] for record in records] == [2.0**5] * len(records)
    assert records[0]["step"] == 3


# Numbers that mislead


def test_mfu_excludes_embedding_lookup() -> None:
    """nanoGPT #464: the embedding's look-up, which computes nothing, was counted as a product."""
    config = LLAMA
    found = train_flops_per_token(meta_model(config), SEQ_LEN)
    C, inner, layers = 16, config.intermediate_size, 2
    products = layers * (4 * C * C + 3 * C * inner) + VOCABULARY * C
    attention = 12 * layers * C * (SEQ_LEN - SEQ_LEN / 2)
    assert found == 6 * products + attention


def test_tokens_per_second_divides_by_step_duration(recipe: dict[str, Any]) -> None:
    """litgpt `pretrain.py`: by seconds since the machine started, or since 1970."""
    recipe["schedule"]["max_steps"] = 2
    recipe["evaluation"] = {"every_steps": 0, "max_rows": 1, "sample_tokens": 1}
    records: list[Any] = []
    import time

    start = time.perf_counter()
    train(recipe, on_step=records.append)
    passed = time.perf_counter() - start
    tokens = 0
    for record in records:
        assert 0 < record["seconds"] < passed
        new = record["tokens_seen"] - tokens
        assert record["learned_tokens_per_second"] * record["seconds"] == pytest.approx(new)
        tokens = record["tokens_seen"]


def test_skipped_step_leaves_moments_unchanged() -> None:
    """An overflow of fp16 that halves the scale must leave everything else as it was."""
    model, scaler = new_model(), LossScaler(2.0**16)
    optimizer = new_optimizer(model)
    train_step(summed_loss(model), optimizer, [batch_of([8])])
    before, moments = weights_of(model), optimizer.state_tensors()
    moments = {name: tensor.clone() for name, tensor in moments.items()}
    loss_sum = summed_loss(model)
    result = train_step(
        lambda ids, labels, _=None: loss_sum(ids, labels) * math.inf,
        optimizer,
        [batch_of([8])],
        scaler,
    )
    assert result.skipped
    assert scaler.scale == 2.0**15
    assert weights_of(model) == before
    now = optimizer.state_tensors()
    assert all(torch.equal(now[name], tensor) for name, tensor in moments.items())
