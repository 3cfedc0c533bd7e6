"""Pipeline parallelism: each process has some of a Llama's layers, and a step's micro-batches pass
from one to the next (torch.distributed.pipelining; 1F1B of Narayanan et al. 2019).

A stage is a plain Llama in which stand-ins, which return their input, replace the parts of other
processes. Its parameters are called as in the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from firstlight.errors import ConfigError
from firstlight.models import Model, ModelConfig, build_model, families_with
from firstlight.models.language_model import InitConfig
from firstlight.optim.optimizer import Optimizer
from firstlight.parallel.engine import Engine, StateTensors, TensorsOf, on_cpu
from firstlight.parallel.group import all_reduce_sum, gather_to_main

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class _Received(nn.Module):
    """Stand-in for the embedding: returns the hidden states that the previous stage has sent."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None
        # Callers read its device only.
        self.register_buffer("weight", torch.empty(0), persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        assert self.hidden is not None
        return self.hidden


class _Elsewhere(nn.Module):
    """Stand-in for a layer of another stage."""

    def forward(self, x_BTC: Tensor, *_: Any) -> tuple[Tensor, None]:
        return x_BTC, None


def unstageable(config: ModelConfig, stages: int) -> Iterator[str]:
    """The reasons why a model can't be split into `stages` stages, each a sentence."""
    if not config.has_pipeline:
        able = families_with(lambda family: family.config.has_pipeline)
        yield (
            f"distributed.pipeline cuts {able}, and the model is {config.model_type}: set it to 1, "
            "and distributed.engine to fsdp"
        )
    elif config.num_hidden_layers < stages:
        yield (
            f"distributed.pipeline {stages} is more than model.num_hidden_layers "
            f"{config.num_hidden_layers}: set it to that at most"
        )
    if config.tie_word_embeddings:
        yield (
            "distributed.pipeline has the embedding and the head on different processes, so they "
            "can't be tied: set model.tie_word_embeddings to false, or distributed.pipeline to 1 "
            "and distributed.engine to fsdp"
        )


@torch.no_grad()
def stage_model(
    config: ModelConfig,
    vocab_multiple: int,
    stage: int,
    stages: int,
    generator: torch.Generator | None = None,
    init: InitConfig | None = None,
) -> Model:
    """One stage of a model, on the CPU. No process ever holds more than its own parameters and
    one other.

    Args:
        config: a config without reasons from `unstageable`.
        vocab_multiple: the multiple that the vocabulary is padded to.
        stage, stages: this process' stage, and the number of stages.
        generator: the source of the whole model's initial values; None sets no values, except zeros
            in the rows that pad the vocabulary.
        init: see `LanguageModel.init_weights`.
    """
    # Without memory: the whole model may be larger than this machine's.
    with torch.device("meta"):
        model = build_model(config, vocab_multiple)
    own = _own_layers(config.num_hidden_layers, stage, stages)
    elsewhere = [
        *(layer for number, layer in enumerate(model.layers) if number not in own),
        *([model.embedding] if stage > 0 else []),
        *(map(model.get_submodule, model.final_modules) if stage < stages - 1 else []),
    ]
    others = {id(p) for module in elsewhere for p in module.parameters()}
    largest = max((p.numel() for p in model.parameters() if id(p) in others), default=0)
    # All parameters of other stages lie in one place, so that random numbers are drawn as for a
    # whole model.
    scratch = torch.empty(largest if generator is not None else 0)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:  # no bias
                continue
            if id(parameter) not in others:
                module._parameters[name] = nn.Parameter(torch.empty(parameter.shape))
            elif generator is not None:
                place = scratch[: parameter.numel()].view(parameter.shape)
                module._parameters[name] = nn.Parameter(place)
    if generator is not None:
        model.init_weights(generator, init)
    for weight in (model.embedding.weight, model.lm_head.weight):
        if not weight.is_meta:
            weight[config.vocab_size :].zero_()
    for number in range(config.num_hidden_layers):
        if number not in own:
            model.layers[number] = _Elsewhere()
    if stage > 0:
        received = _Received()
        model.set_submodule(model.embedding_name, received)
        model.embed = received.forward  # type: ignore[method-assign]
    if stage < stages - 1:
        for name in model.final_modules:
            model.set_submodule(name, nn.Identity())
        model.finish = lambda x_BTC: x_BTC  # type: ignore[method-assign]
    model.finish_loading()
    return model


def _own_layers(layers: int, stage: int, stages: int) -> range:
    # Numbers of layers differ by one at most.
    return range(stage * layers // stages, (stage + 1) * layers // stages)


class PipelineEngine(Engine):
    """One stage of the model a process; micro-batches pass from stage to stage."""

    _pipeline: Pipeline

    def new_model(self, config: ModelConfig, vocab_multiple: int, **initial: Any) -> Model:
        """See `Engine.new_model`."""
        stages = self.config.pipeline
        if problems := list(unstageable(config, stages)):
            raise ConfigError("; ".join(problems))
        return stage_model(config, vocab_multiple, self.group_rank, stages, **initial)

    def share(self, model: Model, precision: str) -> Callable[..., Tensor]:
        """See `Engine.share`."""
        self._pipeline = Pipeline(model, self.world.rank, self.world.size, self.device)
        return self._pipeline.forward

    def absent_parameters(self, model: Model) -> set[str]:
        """See `Engine.absent_parameters`."""
        with torch.device("meta"):
            whole = build_model(model.config)
        # By names alone, which need no memory.
        own = {name for name, _ in model.named_parameters()}
        return {name for name, _ in whole.named_parameters()} - own

    def run_schedule(
        self, loss_sum: Callable[..., Tensor], batches: Sequence[Any], divisor: float
    ) -> Tensor:
        """See `Engine.run_schedule`."""
        return self._pipeline.pass_all(loss_sum, batches, divisor)

    def joined_norm(self, norm: Tensor) -> Tensor:
        """See `Engine.joined_norm`."""
        # Squares of norms add up, as each parameter is in one stage only.
        return all_reduce_sum(norm.detach().double().cpu() ** 2).sqrt().to(norm)

    def state_tensors(
        self, model: Model, optimizer: Optimizer, tensors_of: TensorsOf
    ) -> StateTensors:
        """See `Engine.state_tensors`. Each stage sends the tensors that it alone has."""
        moments = gather_to_main(optimizer.state_tensors())
        with optimizer.master_weights():
            return StateTensors(gather_to_main(on_cpu(tensors_of(model))), moments)


class Pipeline:
    """One process' stage among the others.

    From the construction on, the model's forward pass outside of training is that of all stages
    together: every process calls it with the same inputs, and gets the same outputs.

    Args:
        model: the result of `stage_model`, on its device.
        stage, stages: this process' stage, and the number of stages.

    Attributes:
        forward: this stage's own part of the forward pass.
    """

    def __init__(self, model: Model, stage: int, stages: int, device: torch.device) -> None:
        self.forward: Callable[..., Tensor] = model.forward
        self._stage, self._stages, self._device = stage, stages, device
        self._model = model
        self._divisor = 1.0
        self._total = torch.zeros((), dtype=torch.float64)
        self._schedules: dict[tuple[int, ...], PipelineScheduleSingle] = {}
        # Labels go to all stages, and only the last has a head to compute a loss with.
        if not self._is_last:
            model.head_loss = _hand_on
        model.forward = self.of_all  # type: ignore[method-assign]

    @property
    def _is_last(self) -> bool:
        return self._stage == self._stages - 1

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype of hidden states between stages: autocast leaves the residual stream in it."""
        return next(self._model.parameters()).dtype

    def take(self, hidden: Tensor) -> None:
        """Have the next call of `forward` go on from the previous stage's hidden states.

        Args:
            hidden: shape [batch, seq_len, hidden_size].
        """
        received: nn.Module = self._model.embedding
        assert isinstance(received, _Received)
        received.hidden = hidden

    # Training

    def pass_all(
        self,
        loss_sum: Callable[..., Tensor],
        batches: Sequence[Any],
        divisor: float,
    ) -> Tensor:
        """Forward and backward passes of a step's micro-batches through all stages.

        Args:
            loss_sum: this stage's loss function, around `forward`.
            batches: micro-batches, the same on all processes and of one shape.
            divisor: each loss is divided by it before its backward pass.

        Returns:
            The summed loss over all micro-batches, on all processes; fp64.
        """
        # One tensor, which the schedule cuts into micro-batches again.
        ids, labels = (
            torch.cat([getattr(batch, name) for batch in batches])
            for name in ("input_ids", "labels")
        )
        inputs: dict[str, Any] = {"input_ids": ids, "labels": labels}
        if batches[0].document_ids is not None:
            inputs["document_ids"] = torch.cat([batch.document_ids for batch in batches])
        self._divisor = divisor
        self._total = torch.zeros((), dtype=torch.float64)
        first = (ids,) if self._stage == 0 else ()
        schedule = self._schedule(loss_sum, len(batches), *batches[0].input_ids.shape)
        try:
            schedule.step(*first, target=labels, return_outputs=False, **inputs)
        except RuntimeError as error:
            # torch wraps the error of a forward pass into its own.
            raise (error.__cause__ or error) from None
        return all_reduce_sum(self._total)

    def _schedule(
        self, loss_sum: Callable[..., Tensor], count: int, rows: int, tokens: int
    ) -> PipelineScheduleSingle:
        key = (count, rows, tokens)
        if key not in self._schedules:
            # Only here: importing them takes seconds.
            from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

            # With the shapes given, nothing about them is exchanged.
            with torch.device("meta"):
                hidden = torch.empty(
                    rows, tokens, self._model.config.hidden_size, dtype=self._dtype
                ).requires_grad_()
                ids = torch.empty(rows, tokens, dtype=torch.int64)
                loss = torch.empty((), dtype=self._dtype).requires_grad_()
            stage = PipelineStage(
                _Stage(self, loss_sum),
                self._stage,
                self._stages,
                self._device,
                input_args=hidden if self._stage else ids,
                output_args=loss if self._is_last else hidden,
            )
            # 1F1B keeps fewer activations, and needs as many micro-batches as stages.
            schedule = Schedule1F1B if count >= self._stages else ScheduleGPipe
            # The divisor is that of the valid tokens of all micro-batches, not their number.
            self._schedules[key] = schedule(
                stage, count, loss_fn=self._scaled_loss, scale_grads=False
            )
        return self._schedules[key]

    def _scaled_loss(self, loss: Tensor, _: Tensor) -> Tensor:
        # In fp64: the losses of many micro-batches are added up.
        self._total += loss.detach().cpu()
        return loss / self._divisor

    # Evaluation and generation

    def of_all(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        document_ids: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """The whole model's forward pass on all processes; shapes as in `LanguageModel.forward`."""
        if self._stage:
            shape = (*input_ids.shape, self._model.config.hidden_size)
            hidden = torch.empty(shape, dtype=self._dtype, device=self._device)
            dist.recv(hidden, self._stage - 1)
            self.take(hidden)
        if self._is_last:
            return self._from_last(self.forward(input_ids, labels, document_ids, **options))
        # With any labels, the forward pass returns hidden states: see `_hand_on`.
        options = {**options, "logits_to_keep": 0}
        hidden = self.forward(input_ids, input_ids, document_ids, **options)
        dist.send(hidden.contiguous(), self._stage + 1)
        return self._from_last(None)

    def _from_last(self, result: Tensor | None) -> Tensor:
        """The last stage's result, on all."""
        # Other stages need dtype and shape (up to three dimensions) to receive it.
        about = torch.zeros(5, dtype=torch.int64)
        if result is not None:
            result = result.contiguous()
            numbers = [_DTYPES.index(result.dtype), result.dim(), *result.shape]
            about[: len(numbers)] = torch.tensor(numbers)
        dist.broadcast(about, self._stages - 1)
        if result is None:
            code, dimensions, *shape = about.tolist()
            result = torch.empty(shape[:dimensions], dtype=_DTYPES[code], device=self._device)
        dist.broadcast(result, self._stages - 1)
        return result


class _Stage(nn.Module):
    """This stage as the module that torch's schedules call."""

    def __init__(self, pipeline: Pipeline, loss_sum: Callable[..., Tensor]) -> None:
        super().__init__()
        self._pipeline, self._loss_sum = pipeline, loss_sum

    def forward(
        self,
        before: Tensor,
        input_ids: Tensor,
        labels: Tensor,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Hidden states, or in the last stage the summed loss.

        Args:
            before: hidden states [batch, seq_len, hidden_size] from the previous stage; in the
                first stage the input ids [batch, seq_len].
            input_ids, labels, document_ids: int64, [batch, seq_len]; see `Model.forward`.
        """
        if before.is_floating_point():
            self._pipeline.take(before)
        return self._loss_sum(input_ids, labels, document_ids)


def _hand_on(x_BTC: Tensor, *_: Any) -> Tensor:
    """Stand-in for the loss in stages before the last: the hidden states as they are."""
    return x_BTC
