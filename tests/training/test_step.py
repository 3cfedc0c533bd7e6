from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import firstlight.optim.optimizer
from firstlight.data.loader import IGNORE_INDEX, Batch
from firstlight.errors import TrainingError
from firstlight.models import GPT2, GPT2Config, Llama, LlamaConfig, Model
from firstlight.optim.config import OptimizerConfig
from firstlight.optim.optimizer import Optimizer
from firstlight.recipe.schema import GuardConfig
from firstlight.training.guard import Guard, LossScaler
from firstlight.training.step import MicroBatchTooLargeError, StepResult, train_step
from optimizer_models import same

_VOCABULARY, _SEQ_LEN = 23, 8


def gpt2(dtype: torch.dtype = torch.float64) -> GPT2:
    model = GPT2(
        GPT2Config(
            vocab_size=_VOCABULARY,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=_SEQ_LEN,
            initializer_range=0.2,
        )
    )
    model.init_weights(torch.Generator().manual_seed(1))
    return model.to(dtype)


def llama() -> Llama:
    model = Llama(
        LlamaConfig(
            vocab_size=_VOCABULARY,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=_SEQ_LEN,
        )
    )
    model.init_weights(torch.Generator().manual_seed(1))
    return model


def loss_in_its_own_dtype(model: Model) -> Any:
    """Return a function for the summed loss of a model's logits, without training's cast to
    fp32.
    """

    def loss_sum(input_ids: Tensor, labels: Tensor, document_ids: Tensor | None = None) -> Tensor:
        logits = model(input_ids).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")

    return loss_sum


def make_batch(valid_labels: list[int], seed: int = 0) -> Batch:
    """Return a batch with one row per entry, which is the row's number of valid labels."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(valid_labels), _SEQ_LEN)
    input_ids = torch.randint(_VOCABULARY, shape, generator=generator)
    labels = torch.randint(_VOCABULARY, shape, generator=generator)
    for row, count in enumerate(valid_labels):
        labels[row, count:] = IGNORE_INDEX
    return Batch(input_ids, labels, sum(valid_labels))


def cut(batch: Batch, sizes: list[int]) -> list[Batch]:
    """Split the rows of a batch into micro-batches of the given sizes."""
    assert sum(sizes) == len(batch.input_ids)
    ids, labels = torch.split(batch.input_ids, sizes), torch.split(batch.labels, sizes)
    return [
        Batch(i, one, int((one != IGNORE_INDEX).sum())) for i, one in zip(ids, labels, strict=True)
    ]


def gradients(
    model: Model, batches: list[Batch], **settings: Any
) -> tuple[StepResult, dict[str, Tensor]]:
    """Take one step, and return its result and its gradients."""
    optimizer = Optimizer(model, OptimizerConfig(**settings))
    result = train_step(loss_in_its_own_dtype(model), optimizer, batches)
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert len(found) == len(dict(model.named_parameters()))
    return result, found


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def bits(model: Model) -> dict[str, bytes]:
    return {name: p.detach().numpy().tobytes() for name, p in model.state_dict().items()}


# --- accumulation ----------------------------------------------------------------------------

# Rows with 8, 1, 5, 0, 8 and 2 labels: equal micro-batches with very different numbers of labels.
_ROWS = [8, 1, 5, 0, 8, 2, 3]


@pytest.mark.parametrize("sizes", [[1] * 7, [2, 2, 2, 1], [3, 3, 1], [1, 6], [6, 1]])
def test_train_step_any_micro_batches_match_gradient_of_one_batch(sizes: list[int]) -> None:
    batch = make_batch(_ROWS)
    whole, expected = gradients(gpt2(), [batch], max_grad_norm=0.0)
    accumulated, found = gradients(gpt2(), cut(batch, sizes), max_grad_norm=0.0)
    assert largest_difference(found, expected) < 1e-12
    assert accumulated.loss == pytest.approx(whole.loss, rel=1e-13)
    assert accumulated.grad_norm == pytest.approx(whole.grad_norm, rel=1e-12)
    assert accumulated.tokens == whole.tokens == sum(_ROWS)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, _SEQ_LEN), min_size=2, max_size=6).filter(any), st.data())
def test_train_step_any_label_counts_and_splits_give_same_gradient(
    rows: list[int], data: st.DataObject
) -> None:
    batch = make_batch(rows, seed=3)
    first = data.draw(st.integers(1, len(rows) - 1))
    _, expected = gradients(gpt2(), [batch], max_grad_norm=0.0)
    _, found = gradients(gpt2(), cut(batch, [first, len(rows) - first]), max_grad_norm=0.0)
    assert largest_difference(found, expected) < 1e-12


def test_train_step_gradient_is_that_of_mean_over_all_valid_labels() -> None:
    batch, model = make_batch(_ROWS), gpt2()
    mean = loss_in_its_own_dtype(model)(batch.input_ids, batch.labels) / sum(_ROWS)
    expected = dict(
        zip(
            dict(model.named_parameters()),
            torch.autograd.grad(mean, list(model.parameters())),
            strict=True,
        )
    )
    result, found = gradients(model, cut(batch, [2, 2, 3]), max_grad_norm=0.0)
    assert largest_difference(found, expected) < 1e-12
    assert result.loss == pytest.approx(float(mean.detach()), rel=1e-13)


def test_train_step_mean_of_micro_batch_means_differs_measurably() -> None:
    # The bug that this prevents changes the gradient by far more than the tolerance.
    batch, model = make_batch(_ROWS), gpt2()
    _, expected = gradients(gpt2(), [batch], max_grad_norm=0.0)
    loss_sum, parts = loss_in_its_own_dtype(model), cut(batch, [2, 2, 2, 1])
    for part in parts:
        (loss_sum(part.input_ids, part.labels) / part.num_valid / len(parts)).backward()
    wrong = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert largest_difference(wrong, expected) > 1e-3


def test_train_step_accumulates_built_in_loss_of_model() -> None:
    batch = make_batch(_ROWS)
    results = []
    for batches in ([batch], cut(batch, [2, 2, 3])):
        model = llama()
        optimizer = Optimizer(model, OptimizerConfig(max_grad_norm=0.0))
        results.append((train_step(model, optimizer, batches), model))
    (whole, a), (accumulated, b) = results
    assert accumulated.loss == pytest.approx(whole.loss, rel=1e-6)
    grads_a = {n: p.grad for n, p in a.named_parameters() if p.grad is not None}
    grads_b = {n: p.grad for n, p in b.named_parameters() if p.grad is not None}
    assert largest_difference(grads_b, grads_a) < 1e-7


def test_train_step_ignores_gradients_of_previous_step() -> None:
    batch = make_batch(_ROWS)
    model = gpt2()
    _, expected = gradients(gpt2(), [batch], max_grad_norm=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e6)
    _, found = gradients(model, [batch], max_grad_norm=0.0)
    assert largest_difference(found, expected) == 0


def test_train_step_without_labels_raises_and_changes_nothing() -> None:
    model = gpt2()
    before = bits(model)
    with pytest.raises(TrainingError, match="a global batch does not contain any labels"):
        gradients(model, [make_batch([0, 0])])
    assert bits(model) == before


# --- non-finite values -----------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("micro_batch", [0, 1])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_train_step_non_finite_loss_raises_and_changes_no_bit(
    value: float, micro_batch: int, name: Any
) -> None:
    model = gpt2(torch.float32)
    optimizer = Optimizer(model, OptimizerConfig(name=name))
    batches = cut(make_batch(_ROWS), [3, 4])
    train_step(model, optimizer, batches)
    before, moments = bits(model), optimizer.state_tensors()
    calls = []

    def loss_sum(input_ids: Tensor, labels: Tensor, document_ids: Tensor | None = None) -> Tensor:
        calls.append(1)
        loss: Tensor = model(input_ids, labels)
        return loss + value if len(calls) - 1 == micro_batch else loss

    with pytest.raises(TrainingError, match=r"not finite; lower optimizer\.learning_rate"):
        train_step(loss_sum, optimizer, batches)
    assert bits(model) == before
    after = optimizer.state_tensors()
    assert after.keys() == moments.keys()
    assert all(torch.equal(after[key], moments[key]) for key in moments)
    # The bad gradients have been deleted, so they do not affect the next step.
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_train_step_one_non_finite_gradient_raises_and_changes_no_bit(
    value: float, max_grad_norm: float
) -> None:
    model = gpt2(torch.float32)
    before = bits(model)
    optimizer = Optimizer(model, OptimizerConfig(max_grad_norm=max_grad_norm))

    def spoil(gradient: Tensor) -> Tensor:
        return gradient.index_fill(0, torch.tensor([0]), value)

    handle = model.transformer.ln_f.bias.register_hook(spoil)  # type: ignore[no-untyped-call]
    with pytest.raises(TrainingError, match=r"gradient norm (nan|inf)"):
        train_step(model, optimizer, [make_batch(_ROWS)])
    assert bits(model) == before
    handle.remove()
    assert math.isfinite(train_step(model, optimizer, [make_batch(_ROWS)]).loss)


def test_train_step_opposite_infinities_in_micro_batches_raise() -> None:
    model = gpt2(torch.float32)
    before = bits(model)
    values = iter([math.inf, -math.inf])

    def loss_sum(input_ids: Tensor, labels: Tensor, document_ids: Tensor | None = None) -> Tensor:
        loss: Tensor = model(input_ids, labels)
        return loss + next(values)

    with pytest.raises(TrainingError):
        train_step(loss_sum, Optimizer(model, OptimizerConfig()), cut(make_batch(_ROWS), [3, 4]))
    assert bits(model) == before


@pytest.mark.parametrize("in_backward", [False, True])
def test_train_step_out_of_memory_before_update_changes_no_bit_and_leaves_no_gradient(
    in_backward: bool,
) -> None:
    model = gpt2(torch.float32)
    optimizer = Optimizer(model, OptimizerConfig(max_grad_norm=0.0), in_backward=in_backward)
    before = bits(model)
    calls: list[int] = []

    def loss_sum(input_ids: Tensor, labels: Tensor, document_ids: Tensor | None = None) -> Tensor:
        calls.append(1)
        if in_backward or len(calls) == 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to")
        loss: Tensor = model(input_ids, labels)
        return loss

    batches = cut(make_batch(_ROWS), [7] if in_backward else [3, 4])
    # If the update is part of the backward pass, parameters may already have changed, so the step
    # is not repeated.
    with pytest.raises(RuntimeError if in_backward else MicroBatchTooLargeError, match="can't all"):
        train_step(loss_sum, optimizer, batches)
    assert bits(model) == before
    assert all(parameter.grad is None for parameter in model.parameters())


def test_train_step_other_error_is_not_taken_for_out_of_memory() -> None:
    model = gpt2(torch.float32)

    def loss_sum(input_ids: Tensor, labels: Tensor, document_ids: Tensor | None = None) -> Tensor:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        train_step(loss_sum, Optimizer(model, OptimizerConfig()), [make_batch(_ROWS)])


# --- updates on a GPU, which start before the host knows whether the step is finite -------------


def run_ahead(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """Start updates early, as on a GPU. torch's fused CPU kernels also read `found_inf`.

    Returns:
        The list that gets `found_inf` of each update.
    """
    monkeypatch.setattr(firstlight.optim.optimizer, "_runs_ahead", lambda _: True)
    begun: list[float | None] = []
    step = Optimizer.step

    def noted(optimizer: Optimizer, found_inf: Tensor | None = None) -> None:
        begun.append(None if found_inf is None else float(found_inf))
        step(optimizer, found_inf)

    monkeypatch.setattr(Optimizer, "step", noted)
    return begun


def state_after(
    losses: list[float],
    *,
    scaled: bool = False,
    z_score: float | None = None,
    dtype: torch.dtype = torch.float32,
    **keys: Any,
) -> tuple[dict[str, bytes], dict[str, Tensor], list[bool]]:
    """Return weights, moments and skipped steps after one step per value, whose loss is multiplied
    by it.
    """
    model = llama().to(dtype)
    optimizer = Optimizer(model, OptimizerConfig(**keys))
    scaler = LossScaler(2.0**4) if scaled else None
    guard, skipped = Guard(GuardConfig(spike_z_score=z_score)), []
    for value in losses:

        def loss_sum(*batch: Any, factor: float = value) -> Tensor:
            loss: Tensor = model(*batch)
            return loss * factor

        function: Any = loss_sum
        batches = [make_batch(_ROWS)]
        result = train_step(
            function,
            optimizer,
            batches,
            scaler,
            guard.accepts,
            skips_only_infinite=guard.refuses_only_infinite,
        )
        skipped.append(result.skipped)
    with optimizer.master_weights():
        return bits(model), optimizer.state_tensors(), skipped


_BAD = [1.0, math.nan, 1.0, math.inf, -math.inf, 0.5]
_CAUTIOUS = {"cautious_weight_decay": True, "weight_decay": 0.1}
_NORMUON = {"muon_beta2": 0.95, "muon_momentum_warmup_steps": 3, "implementation": "fused"}

_SKIPPING: dict[str, dict[str, Any]] = {
    "adamw": {},
    "cautious adamw": _CAUTIOUS,
    "muon": {"name": "muon"},
    "cautious normuon in stacks": {"name": "muon", **_NORMUON, **_CAUTIOUS},
    "lion": {"name": "lion"},
    "cautious lion in lists": {"name": "lion", "implementation": "foreach", **_CAUTIOUS},
    "adafactor": {"name": "adafactor"},
    "adafactor in lists": {"name": "adafactor", "implementation": "foreach"},
}


@pytest.mark.parametrize("losses", [[1.0, 2.0, 0.001], _BAD, [math.nan, 1.0]])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("keys", _SKIPPING.values(), ids=_SKIPPING)
def test_train_step_update_begun_early_equals_regular_update(
    losses: list[float], scaled: bool, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without clipping, whose factor the two paths divide and multiply by.
    weights, moments, skipped = state_after(losses, scaled=scaled, max_grad_norm=0.0, **keys)
    begun = run_ahead(monkeypatch)
    ahead = state_after(losses, scaled=scaled, max_grad_norm=0.0, **keys)
    assert ahead[0] == weights
    assert same(ahead[1], moments)
    assert begun == ahead[2] == skipped == [not math.isfinite(value) for value in losses]


@pytest.mark.parametrize("keys", _SKIPPING.values(), ids=_SKIPPING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_train_step_skipped_early_update_changes_no_bit(
    keys: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes negative zeros, and steps in which the loss is infinite but the gradients are
    finite.
    """
    run_ahead(monkeypatch)
    model = llama().to(dtype)
    optimizer = Optimizer(model, OptimizerConfig(**keys))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(found_inf=torch.zeros(()))
    with torch.no_grad():
        for parameter in optimizer.updated.values():
            parameter.flatten()[:3] = -0.0
        for moment in optimizer.state_shards().values():
            if moment.dim():
                moment.flatten()[:2] *= -0.0
    before = [
        t.detach().clone()
        for t in (*optimizer.updated.values(), *optimizer.state_shards().values())
    ]
    for value in (1.0, math.nan, math.inf, -math.inf):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        optimizer.clip_gradients()
        optimizer.step(found_inf=torch.ones(()))
        # The next step's passes have begun, and freed the gradients when they failed.
        optimizer.zero_grad()
        optimizer.take_back_counts()
        after = (*optimizer.updated.values(), *optimizer.state_shards().values())
        for one, other in zip(before, after, strict=True):
            assert one.numpy().tobytes() == other.detach().numpy().tobytes()


@pytest.mark.parametrize("name", ["adamw", "muon", "lion"])
@pytest.mark.parametrize("scaled", [False, True])
def test_train_step_clipping_in_update_equals_separate_pass_up_to_rounding(
    name: str, scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moments(**keys: Any) -> dict[str, Tensor]:
        return state_after([1.0], scaled=scaled, name=name, **keys)[1]

    expected, free = moments(max_grad_norm=0.1), moments(max_grad_norm=0.0)
    run_ahead(monkeypatch)
    found = moments(max_grad_norm=0.1)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-6, atol=0)
        assert not value.dim() or not torch.allclose(free[key], value, rtol=0.5, atol=0)


def test_train_step_with_spike_guard_begins_no_early_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    losses = [*(1.0 + 0.001 * (i % 3) for i in range(20)), 1000.0, 1.0]
    expected = state_after(losses, z_score=6.0, max_grad_norm=0.0)
    begun = run_ahead(monkeypatch)
    found = state_after(losses, z_score=6.0, max_grad_norm=0.0)
    assert found[0] == expected[0]
    assert found[2] == expected[2]
    assert expected[2] == [False] * 20 + [True, False]
    assert begun == [None] * 21


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "sgd"},
        {"name": "adafactor", "adafactor_variant": "torch"},
        {"name": "muon", "implementation": "for-loop"},  # applies to Muon's AdamW group
        {"implementation": "foreach"},
    ],
)
def test_optimizer_reads_found_inf_only_if_supported(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for keys in _SKIPPING.values():
        assert not Optimizer(gpt2(), OptimizerConfig(**keys)).reads_found_inf
    run_ahead(monkeypatch)
    assert not Optimizer(gpt2(), OptimizerConfig(**changes)).reads_found_inf
    for keys in ({}, _SKIPPING["adafactor"], _SKIPPING["cautious lion in lists"]):
        assert Optimizer(gpt2(), OptimizerConfig(**keys)).reads_found_inf


# --- clipping --------------------------------------------------------------------------------


def norm(found: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(gradient.pow(2).sum()) for gradient in found.values()))


def test_train_step_clipping_scales_all_gradients_together() -> None:
    free, expected = gradients(gpt2(), [make_batch(_ROWS)], max_grad_norm=0.0)
    limit = free.grad_norm / 4
    result, found = gradients(gpt2(), [make_batch(_ROWS)], max_grad_norm=limit)
    # the unclipped norm is reported
    assert result.grad_norm == pytest.approx(free.grad_norm, rel=1e-12)
    assert norm(found) == pytest.approx(limit, rel=1e-5)
    scale = norm(found) / norm(expected)
    scaled = {name: gradient * scale for name, gradient in expected.items()}
    assert largest_difference(found, scaled) < 1e-12


@pytest.mark.parametrize("limit", [0.0, 1e6])
def test_train_step_gradients_below_limit_are_unchanged(limit: float) -> None:
    free, expected = gradients(gpt2(), [make_batch(_ROWS)], max_grad_norm=0.0)
    assert norm(expected) == pytest.approx(free.grad_norm, rel=1e-12)
    _, found = gradients(gpt2(), [make_batch(_ROWS)], max_grad_norm=limit)
    assert largest_difference(found, expected) == 0


def test_train_step_clipping_applies_to_accumulated_gradient() -> None:
    batch = make_batch(_ROWS)
    _, expected = gradients(gpt2(), [batch], max_grad_norm=0.1)
    _, found = gradients(gpt2(), cut(batch, [1] * 7), max_grad_norm=0.1)
    assert largest_difference(found, expected) < 1e-12


def test_train_step_grad_norm_counts_tied_weight_once() -> None:
    model = gpt2()
    assert model.lm_head.weight is model.transformer.wte.weight
    result, found = gradients(model, [make_batch(_ROWS)], max_grad_norm=0.0)
    assert "lm_head.weight" not in found
    assert result.grad_norm == pytest.approx(norm(found), rel=1e-12)
