"""Pipeline parallelism. Each process has a few consecutive layers of a Llama model, called a stage.
The micro-batches of a step pass from stage to stage. This uses torch.distributed.pipelining with
the 1F1B schedule of PipeDream (Narayanan et al. 2019).

A stage is a plain `Llama` model in which stand-in modules replace the layers of the other stages. A
stand-in returns its input. The stage's parameters have the same names as in the whole model.
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

#: Dtypes that the output of the last stage can have. The dtype is sent to the other stages as an
#: index into this tuple.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class _Received(nn.Module):
    """Stand-in for the embedding. It returns the previous stage's hidden states, of shape [batch,
    seq_len, hidden_size], which `Pipeline.take` has set.
    """

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None
        # Keep a tensor named `weight`, because some code reads the model's device from
        # `embedding.weight.device`.
        self.register_buffer("weight", torch.empty(0), persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        assert self.hidden is not None
        return self.hidden


class _Elsewhere(nn.Module):
    """Stand-in for a layer of another stage. It returns its input, of shape [batch, seq_len,
    hidden_size].
    """

    def forward(self, x_BTC: Tensor, *_: Any) -> tuple[Tensor, None]:
        return x_BTC, None


def unstageable(config: ModelConfig, stages: int) -> Iterator[str]:
    """Yield each reason why a model can't be split into `stages` stages, as a sentence."""
    if not config.has_pipeline:
        able = families_with(lambda family: family.config.has_pipeline)
        yield (
            f"distributed.pipeline supports {able}, but the model is {config.model_type}: set "
            "pipeline to 1, and distributed.engine to fsdp"
        )
    elif config.num_hidden_layers < stages:
        yield (
            f"distributed.pipeline {stages} is greater than model.num_hidden_layers "
            f"{config.num_hidden_layers}: lower it to this number"
        )
    if config.tie_word_embeddings:
        yield (
            "distributed.pipeline places the embedding and the head in different processes, so "
            "they can't be tied: set model.tie_word_embeddings to false, or distributed.pipeline "
            "to 1 and distributed.engine to fsdp"
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
    """Create one stage of a model, on the CPU. This needs memory for the stage's own parameters
    and, at most, for the largest parameter of the other stages.

    Args:
        config: a config for which `unstageable` yields no reasons.
        vocab_multiple: the size of the vocabulary is padded to a multiple of this number.
        stage, stages: index of this process's stage, and the number of stages.
        generator: source of the random initial values of the whole model. None leaves the values
            uninitialized, except for the rows that pad the vocabulary, which are zero.
        init: see `LanguageModel.init_weights`.
    """
    # Build the model on the meta device, because it may be larger than this machine's memory.
    with torch.device("meta"):
        model = build_model(config, vocab_multiple)
    own = _own_layers(config.num_hidden_layers, stage, stages)
    elsewhere = [
        *(layer for number, layer in enumerate(model.layers) if number not in own),
        *([model.embedding] if stage > 0 else []),
        *(map(model.get_submodule, model.final_modules) if stage < stages - 1 else []),
    ]
    others = {id(p) for module in elsewhere for p in module.parameters()}
    _allocate(model, others, draws=generator is not None)
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


def _allocate(model: Model, others: set[int], *, draws: bool) -> None:
    """Replace the parameters of a model on the meta device with uninitialized parameters on the
    CPU.

    Args:
        model: a whole model on the meta device.
        others: `id` of each parameter that belongs to another stage. If `draws` is True, all these
            parameters share one buffer. Random numbers are drawn for them and discarded, so that
            this stage gets the same values as if the whole model were initialised. Otherwise, these
            parameters stay on the meta device.
        draws: True if random initial values will be drawn.
    """
    largest = max((p.numel() for p in model.parameters() if id(p) in others), default=0)
    scratch = torch.empty(largest if draws else 0)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:  # no bias
                continue
            if id(parameter) not in others:
                module._parameters[name] = nn.Parameter(torch.empty(parameter.shape))
            elif draws:
                place = scratch[: parameter.numel()].view(parameter.shape)
                module._parameters[name] = nn.Parameter(place)


def _own_layers(layers: int, stage: int, stages: int) -> range:
    # The numbers of layers in the stages differ by at most one.
    return range(stage * layers // stages, (stage + 1) * layers // stages)


class PipelineEngine(Engine):
    """Gives each process one stage of the model. Micro-batches pass from stage to stage."""

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
        # Create the whole model on the meta device, because only the names of its parameters are
        # needed.
        own = {name for name, _ in model.named_parameters()}
        return {name for name, _ in whole.named_parameters()} - own

    def run_schedule(
        self, loss_sum: Callable[..., Tensor], batches: Sequence[Any], divisor: float
    ) -> Tensor:
        """See `Engine.run_schedule`."""
        return self._pipeline.pass_all(loss_sum, batches, divisor)

    def joined_norm(self, norm: Tensor) -> Tensor:
        """See `Engine.joined_norm`."""
        # Each parameter is in only one stage, so the squares of the stages' norms add up.
        return all_reduce_sum(norm.detach().double().cpu() ** 2).sqrt().to(norm)

    def state_tensors(
        self, model: Model, optimizer: Optimizer, tensors_of: TensorsOf
    ) -> StateTensors:
        """See `Engine.state_tensors`. Each stage sends its tensors to the main process."""
        moments = gather_to_main(optimizer.state_tensors())
        with optimizer.master_weights():
            return StateTensors(gather_to_main(on_cpu(tensors_of(model))), moments)


class Pipeline:
    """Connects this process's stage to the stages of the other processes.

    The constructor replaces `model.forward` with the forward pass through all stages, which is used
    for evaluation and generation. All processes must call this forward pass with the same inputs,
    and all get the same outputs.

    Args:
        model: the result of `stage_model`, on its device.
        stage, stages: index of this process's stage, and the number of stages.
        device: this process's device.

    Attributes:
        forward: the model's plain forward function, which computes only this stage.
    """

    def __init__(self, model: Model, stage: int, stages: int, device: torch.device) -> None:
        self.forward: Callable[..., Tensor] = model.forward
        self._stage = stage
        self._stages = stages
        self._device = device
        self._model = model
        self._divisor = 1.0
        self._total = torch.zeros((), dtype=torch.float64)
        self._schedules: dict[tuple[int, ...], PipelineScheduleSingle] = {}
        # The labels are passed to all stages, but only the last stage has a head. Make every other
        # stage return hidden states instead of a loss.
        if not self._is_last:
            model.head_loss = _hand_on
        model.forward = self.of_all  # type: ignore[method-assign]

    @property
    def _is_last(self) -> bool:
        return self._stage == self._stages - 1

    @property
    def _dtype(self) -> torch.dtype:
        """Dtype of the hidden states passed between stages. It is the parameters' dtype, because
        autocast does not change the dtype of the residual stream.
        """
        return next(self._model.parameters()).dtype

    def take(self, hidden: Tensor) -> None:
        """Set the previous stage's output, which is the input of the next call to `forward`.

        Args:
            hidden: hidden states of shape [batch, seq_len, hidden_size].
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
        """Run the forward and backward passes of a step's micro-batches through all stages.

        Args:
            loss_sum: this stage's loss function, which calls `forward`.
            batches: micro-batches of equal shape; all processes must pass the same ones.
            divisor: number by which each loss is divided before its backward pass.

        Returns:
            The summed loss over all micro-batches, before the division: a scalar [], fp64. It is
            the same on all processes.
        """
        # Concatenate the micro-batches, because torch's schedule takes a single tensor and splits
        # it into micro-batches itself.
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
            # torch wraps the error of a forward pass in another RuntimeError.
            raise (error.__cause__ or error) from None
        return all_reduce_sum(self._total)

    def _schedule(
        self, loss_sum: Callable[..., Tensor], count: int, rows: int, tokens: int
    ) -> PipelineScheduleSingle:
        """Return torch's schedule for `count` micro-batches of shape [rows, tokens]. The schedule
        is cached.
        """
        key = (count, rows, tokens)
        if key not in self._schedules:
            # Imported here, because the import takes several seconds.
            from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

            # Specify the shapes of inputs and outputs, so that torch's stages do not have to
            # exchange them.
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
            # 1F1B keeps fewer activations, but needs at least as many micro-batches as stages.
            schedule = Schedule1F1B if count >= self._stages else ScheduleGPipe
            # torch would divide the gradients by the number of micro-batches. Instead,
            # `_scaled_loss` divides by the number of valid tokens of all micro-batches.
            self._schedules[key] = schedule(
                stage, count, loss_fn=self._scaled_loss, scale_grads=False
            )
        return self._schedules[key]

    def _scaled_loss(self, loss: Tensor, _: Tensor) -> Tensor:
        # Compute the total in fp64 to limit rounding errors, because it is the sum of many
        # micro-batches' losses.
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
        """Run the forward pass of the whole model. All processes must call this method with the
        same arguments. For their shapes, see `LanguageModel.forward`.
        """
        if self._stage:
            shape = (*input_ids.shape, self._model.config.hidden_size)
            hidden = torch.empty(shape, dtype=self._dtype, device=self._device)
            dist.recv(hidden, self._stage - 1)
            self.take(hidden)
        if self._is_last:
            return self._from_last(self.forward(input_ids, labels, document_ids, **options))
        # Pass the input ids in place of labels, because with labels the forward function calls
        # `head_loss`. In this stage, `head_loss` is replaced by `_hand_on`, which returns the
        # hidden states.
        options = {**options, "logits_to_keep": 0}
        hidden = self.forward(input_ids, input_ids, document_ids, **options)
        dist.send(hidden.contiguous(), self._stage + 1)
        return self._from_last(None)

    def _from_last(self, result: Tensor | None) -> Tensor:
        """Send the last stage's result to all processes, and return it. All other stages must pass
        None.
        """
        # To receive the result, the other stages need its dtype and its shape, which has up to
        # three dimensions.
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
    """This process's stage as a module that torch's schedules can call."""

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
        """Compute this stage's output for one micro-batch.

        Args:
            before: hidden states from the previous stage, of shape [batch, seq_len, hidden_size].
                In the first stage, this argument is the input ids, of shape [batch, seq_len].
            input_ids, labels, document_ids: int64 tensors of shape [batch, seq_len]; see
                `LanguageModel.forward`.

        Returns: Hidden states of shape [batch, seq_len, hidden_size]. The last stage returns the
        summed loss, a scalar [].
        """
        if before.is_floating_point():
            self._pipeline.take(before)
        return self._loss_sum(input_ids, labels, document_ids)


def _hand_on(x_BTC: Tensor, *_: Any) -> Tensor:
    """Return the hidden states [batch, seq_len, hidden_size] unchanged. This function replaces
    `head_loss` in all stages except the last.
    """
    return x_BTC
