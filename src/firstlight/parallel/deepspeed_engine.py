"""The engine that runs DeepSpeed, and an `Optimizer` that wraps DeepSpeed's optimizer."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from firstlight.models import Model
from firstlight.optim.config import OptimizerConfig
from firstlight.optim.optimizer import Optimizer, require_fitting_state
from firstlight.optim.spec import Layout
from firstlight.parallel.deepspeed_model import ZeroModel, set_shard
from firstlight.parallel.engine import DistributedConfig, Engine, StateTensors, TensorsOf, on_cpu
from firstlight.parallel.group import group_of_one

_OPEN_MPI_LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"


class DeepSpeedEngine(Engine):
    """Shards the model by DeepSpeed's ZeRO; also for a run with one process, which can offload."""

    name = "deepspeed"
    shards_state = True
    updates_itself = True
    averages_gradients = True
    # Gradients of the broken pass may already be in DeepSpeed's buffers.
    can_repeat_step = False
    _zero: ZeroModel

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """See `Engine.session`.

        Inside the context, the environment variable LOCAL_RANK is the index of this process'
        device, because DeepSpeed reads the index from there. Only torchrun and similar launchers
        set LOCAL_RANK; and if a launcher makes only one GPU visible to each process, the local rank
        is not the index of that GPU. DeepSpeed refuses a LOCAL_RANK that differs from Open MPI's
        variable, so Open MPI's variable is set, too.
        """
        world, device = self.world, self.device
        index = (device.index or 0) if device.type == "cuda" else world.local_rank
        names = ["LOCAL_RANK"]
        if _OPEN_MPI_LOCAL_RANK in os.environ:
            names.append(_OPEN_MPI_LOCAL_RANK)
        before = {name: os.environ.get(name) for name in names}
        os.environ.update(dict.fromkeys(names, str(index)))
        # Stage 3 replaces torch's function by its own, which models without DeepSpeed can't use.
        linear = torch.nn.functional.linear
        try:
            with group_of_one(device) if world.size == 1 else contextlib.nullcontext():
                yield
        finally:
            torch.nn.functional.linear = linear
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def set_up(
        self, model: Model, config: OptimizerConfig, precision: str, **_: Any
    ) -> tuple[Optimizer, Callable[..., Tensor]]:
        """See `Engine.set_up`. DeepSpeed wraps model and optimizer together, so this engine does
        not use `share`."""
        optimizer = ZeroOptimizer(
            model,
            config,
            self.config,
            self.device,
            precision=precision,
            local_rank=self.world.local_rank,
        )
        self._zero = optimizer.zero
        return optimizer, self._zero.forward

    @contextlib.contextmanager
    def backward_pass(self, *, last: bool) -> Iterator[None]:
        """See `Engine.backward_pass`."""
        self._zero.set_last(last)
        yield

    def backward(self, loss: Tensor) -> None:
        """See `Engine.backward`."""
        self._zero.backward(loss)

    def state_tensors(
        self, model: Model, optimizer: Optimizer, tensors_of: TensorsOf
    ) -> StateTensors:
        """See `Engine.state_tensors`."""
        moments = optimizer.state_tensors(keep=self.is_main)
        with optimizer.master_weights():
            return StateTensors(on_cpu(tensors_of(model)) if self.is_main else {}, moments)


class ZeroOptimizer(Optimizer):
    """An `Optimizer` that wraps DeepSpeed's optimizer, which holds fp32 parameters and state.

    Args:
        model: see `ZeroModel`.
        config: the recipe's `optimizer` section, with an elementwise optimizer of torch.
        sharing: the recipe's `distributed` section.
        device: this process' device.
        precision, local_rank: see `ZeroModel`.

    Attributes:
        zero: the model and DeepSpeed's engine around it.

    Raises:
        MissingDependencyError, ConfigError: see `ZeroModel`.
    """

    def __init__(
        self,
        model: Model,
        config: OptimizerConfig,
        sharing: DistributedConfig,
        device: torch.device,
        *,
        precision: str,
        local_rank: int = 0,
    ) -> None:
        self._expected: dict[str, Layout] = {}
        super().__init__(model, config)
        self.reads_found_inf = False  # DeepSpeed's update does not
        self._expected = self._layouts()
        ((self._spec, self._torch),) = self._parts
        self._has_state, self._grad_scale = False, 1.0
        self.zero = ZeroModel(
            model,
            self._torch,
            sharing,
            device,
            precision=precision,
            max_grad_norm=config.max_grad_norm,
            local_rank=local_rank,
        )

    @property
    def _inner(self) -> Any:
        """DeepSpeed's optimizer, which wraps torch's optimizer."""
        return self.zero.engine.optimizer

    # One step

    def accumulate(self) -> None:
        """Do nothing: DeepSpeed adds up the gradients of micro-batches itself."""

    def clip_gradients(
        self, grad_scale: float = 1.0, joined: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """The gradients' L2 norm divided by `grad_scale`, a scalar [] in fp32; infinity if a
        gradient is not finite. `step` divides and clips the gradients."""
        self._grad_scale = grad_scale
        from deepspeed.runtime.utils import combine_grad_norm_groups

        inner = self._inner
        if self.zero.stage == 3:
            norm = combine_grad_norm_groups(inner._get_norm_groups())
        else:
            norm = inner.scaled_global_norm()
        assert isinstance(norm, Tensor)
        # DeepSpeed's norm is -1 if a gradient is not finite.
        norm = norm.detach().float()
        return torch.where(norm < 0, torch.inf, norm) / grad_scale

    def step(self, found_inf: Tensor | None = None) -> None:
        """Divide the gradients by the `grad_scale` of `clip_gradients`, clip them to
        `max_grad_norm`, and update the parameters. `found_inf` is not read."""
        # The loss was scaled before the backward pass without DeepSpeed's knowledge: with this
        # value DeepSpeed divides the gradients by the scale in its update.
        self._inner.loss_scale = self._grad_scale
        self.zero.engine.step()
        self._inner.loss_scale = 1.0
        self._has_state = True

    def zero_grad(self) -> None:
        """Drop the gradients, by the same steps as DeepSpeed after an fp16 overflow."""
        inner = self._inner
        # DeepSpeed's zero_grad leaves ZeRO's own copies of the gradients in buffers and
        # dictionaries. The other lines of this method drop these.
        inner.zero_grad(set_to_none=True)
        is_offloaded = inner.offload_optimizer if self.zero.stage == 3 else inner.cpu_offload
        if is_offloaded:
            inner.reset_cpu_buffers()
        if self.zero.stage == 3:
            inner._pre_step()
            if not is_offloaded:
                inner.averaged_gradients = {}
            return
        # DeepSpeed increments it before each backward pass: the first pass of a step is number 0.
        inner.micro_step_id = -1
        if is_offloaded:
            inner._offload_accumulated_param_ids = set()
            return
        for kept in (inner.averaged_gradients, inner.all_grad_tensors):
            for group in kept:
                kept[group] = None

    # State

    def master_weights(self, *, changed: bool = False) -> contextlib.AbstractContextManager[None]:
        """A context in which the model's parameters are whole for reading, and with `changed` also
        for writing; see `ZeroModel.whole_parameters`."""
        return self.zero.whole_parameters(changed=changed)

    def state_tensors(self, *, keep: bool = True) -> dict[str, Tensor]:
        """See `Optimizer.state_tensors`; all processes have to call it."""
        if not self._has_state:
            return {}
        from deepspeed.utils import safe_get_full_optimizer_state

        self._link_state()
        found: dict[str, Tensor] = {}
        for name, layout in self._expected.items():
            parameter = self.parameters[name]
            for key, (shape, dtype) in layout.items():
                if key == "step":
                    value = self._steps()
                else:
                    value = safe_get_full_optimizer_state(parameter, key)
                    assert value is not None
                if keep:
                    found[f"{name}.{key}"] = (
                        value.detach().cpu().reshape(shape).to(dtype).contiguous()
                    )
        return found

    def state_shards(self) -> dict[str, Tensor]:
        """An empty dict: DeepSpeed keeps the state of many parameters in one flat tensor, without
        their names."""
        return {}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Optimizer.load_state_tensors`; all processes have to call it."""
        require_fitting_state(self._expected, tensors)
        steps = next((t for name, t in tensors.items() if name.endswith(".step")), None)
        self._make_state(steps)
        for name, layout in self._expected.items():
            for key in layout:
                if key != "step":
                    self._set_state(self.parameters[name], key, tensors[f"{name}.{key}"])
        self._has_state = True

    def fill_state(self, fill: Callable[[dict[str, Tensor]], None]) -> None:
        """See `Optimizer.fill_state`. `fill` gets whole tensors on the CPU, on every process; all
        processes have to call it."""
        tensors = {
            f"{name}.{key}": torch.zeros(shape, dtype=dtype)
            for name, layout in self._expected.items()
            for key, (shape, dtype) in layout.items()
        }
        fill(tensors)
        self.load_state_tensors(tensors)

    def _layouts(self) -> dict[str, Layout]:
        # Parameters sharded by stage 3 have shape [0]: the layouts are those from before.
        return self._expected or super()._layouts()

    def _steps(self) -> Tensor:
        """The step counter of torch's optimizer, which is the same for all parameters."""
        states = self._torch.state.values()
        steps: Tensor = next(state["step"] for state in states if "step" in state)
        return steps

    def _flat(self) -> list[Tensor]:
        """The 1-D tensors that torch's optimizer updates: each holds the shards of many parameters,
        one after the other."""
        inner = self._inner
        if self.zero.stage == 3:
            return list(inner.fp32_partitioned_groups_flat)
        return list(inner.single_partition_of_fp32_groups)

    def _make_state(self, steps: Tensor | None) -> None:
        """Create the optimizer state of `steps` completed steps (a scalar tensor), with moments of
        zero."""
        keys = {key for layout in self._expected.values() for key in layout}
        for number, flat in enumerate(self._flat()):
            with self._at_hand(number):
                state: dict[str, Tensor] = {key: torch.zeros_like(flat) for key in keys - {"step"}}
                if "step" in keys:
                    assert steps is not None
                    state["step"] = steps
                parameter = flat if isinstance(flat, nn.Parameter) else nn.Parameter(flat)
                self._torch.state[flat] = self._spec.rebuild(self._torch, parameter, state)
        self._link_state()

    def _link_state(self) -> None:
        """Link parameters to their state again, in stages 1 and 2: DeepSpeed links them when only
        the first group of parameters has been updated, and the others have no state yet."""
        if self.zero.stage < 3:
            self._inner._hp_optimizer_states_linked = False
            self._inner._lazy_init_hp_params_optimizer_state()

    @contextlib.contextmanager
    def _at_hand(self, number: int) -> Iterator[None]:
        """A context that loads a group's state from its files (offload nvme) into memory, and
        writes it back at the end."""
        inner = self._inner
        in_files = self.zero.stage == 3 and inner._swappable_optimizer_subgroup(number)
        if in_files:
            inner._optimizer_states_and_gradient_swap_in(number)
        yield
        if in_files:
            inner._optimizer_states_and_gradient_swap_out(number)

    def _set_state(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        """Set a parameter's state from a whole tensor, the same on all processes."""
        if self.zero.stage == 3:
            set_shard(parameter, value, key)
        else:
            from deepspeed.utils import safe_set_full_optimizer_state

            safe_set_full_optimizer_state(parameter, value.to(self.zero.device), key)
