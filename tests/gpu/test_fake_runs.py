"""The work of a run between its steps, on fake CUDA tensors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from firstlight.data.corpus import TokenDataset
from firstlight.data.loader import Batch
from firstlight.evaluation.perplexity import evaluate_split
from firstlight.optim.config import OptimizerConfig
from firstlight.optim.optimizer import Optimizer
from firstlight.training.micro_batch_trials import try_step
from firstlight.training.out_of_memory import repeated_step
from firstlight.training.run import Run
from firstlight.training.state import TrainState
from firstlight.training.step import MicroBatchTooLargeError, train_step

from .fake_cuda import fake_cuda
from .no_gpu import hardware, needs_no_gpu
from .test_fake_steps import GPT2, LLAMA, batch_of, program_of, recipe_of

pytestmark = [pytest.mark.gpu, needs_no_gpu]


@pytest.mark.parametrize("masked", [False, True])
def test_evaluation_runs_on_gpu(data: Path, masked: bool) -> None:
    dataset = TokenDataset(data, "val", verify=False)
    recipe = recipe_of(GPT2, efficiency__precision="bf16", data__document_masking=masked)
    with fake_cuda() as (cuda, _):
        program = program_of(recipe.model_copy(update={"efficiency": sdpa(recipe)}))
        program.model.eval()
        cuda.calls.clear()
        found = evaluate_split(
            program.evaluation_loss,
            dataset,
            seq_len=32,
            batch_size=4,
            device=hardware().device,
            document_masking=masked,
            first_id=1,
        )
        assert found.rows == found.total_rows > 4
        assert not cuda.on_host(), cuda.on_host()[0]
        assert not cuda.named("_scaled_dot_product_cudnn_attention")
        assert {d for c in cuda.named("mm", "addmm") for _, d, _ in c.inputs} == {torch.bfloat16}


def sdpa(recipe: Any) -> Any:
    """Use attention that supports masks without triton."""
    return recipe.efficiency.model_copy(update={"attention": "sdpa"})


@pytest.mark.parametrize("masked", [False, True])
def test_micro_batch_trial_runs_on_gpu(masked: bool) -> None:
    recipe = recipe_of(LLAMA, efficiency__attention="efficient", data__document_masking=masked)
    recipe = recipe.model_copy(
        update={"batch": recipe.batch.model_copy(update={"gradient_accumulation_steps": 4})}
    )
    with fake_cuda() as (cuda, asked):
        trial = try_step(recipe, hardware())
        # Time and peak memory are measured on the GPU.
        assert asked.names().count("synchronize") == 4
        assert asked.names()[-1] == "max_memory_allocated"
        assert trial.peak_bytes == 5000
        assert cuda.named("_fused_adamw_")


class Written(torch.autograd.Function):
    """A loss in memory that the next one overwrites, as with CUDA graphs."""

    memory = torch.zeros(())

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        Written.memory.copy_(loss)
        return Written.memory.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def test_train_step_sums_loss_in_memory_reused_by_cuda_graph() -> None:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, 2.0)

    def loss_sum(input_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        loss: Tensor = Written.apply(layer(input_ids.float()[..., None]).sum())  # type: ignore[no-untyped-call]
        return loss

    batches = [Batch(ids, ids, 2) for ids in (torch.tensor([[1, 2]]), torch.tensor([[3, 5]]))]
    optimizer = Optimizer(layer, OptimizerConfig(max_grad_norm=0.0))
    assert train_step(loss_sum, optimizer, batches).loss == 2.0 * (1 + 2 + 3 + 5) / 4


def run_stub() -> Any:
    """The attributes of a run that its attempts at a step need."""
    recipe = recipe_of()
    events: list[Any] = []
    return SimpleNamespace(
        state=TrainState(step=3),
        recipe=recipe,
        micro_batch_size=recipe.batch.rows,
        program=SimpleNamespace(hardware=hardware(), forget_statistics=lambda: None),
        advise=lambda: None,
        tell=lambda _: None,
        add_event=lambda *args, **details: events.append((args, details)),
        events=events,
    )


def test_out_of_memory_releases_memory_before_next_try() -> None:
    tried: list[Any] = []

    def update(batches: Any) -> None:
        batches = list(batches)
        tried.append([(len(b.input_ids), b.labels.device, asked.names()[:]) for b in batches])
        if len(tried) == 1:
            torch.cuda.set_rng_state(torch.full((16,), 9, dtype=torch.uint8), 0)
            raise MicroBatchTooLargeError("CUDA out of memory")

    with fake_cuda() as (_, asked):
        stub = run_stub()
        before = asked.states[0].clone()
        while len(tried) < 2:
            with repeated_step(stub):
                update(Run.micro_batches(stub, [batch_of(stub.recipe)]))
            stub.micro_batch_size = stub.state.micro_batch_rows
        gpu = torch.device("cuda", 0)
        assert [[(rows, device) for rows, device, _ in one] for one in tried] == [
            [(2, gpu)],
            [(1, gpu), (1, gpu)],
        ]
        assert "empty_cache" not in tried[0][0][2]
        assert "empty_cache" in tried[1][0][2]
        # Dropout draws the same numbers again.
        assert torch.equal(asked.states[0], before)
    assert stub.state.micro_batch_rows == 1
