"""The optimizer of a run. It updates the parameters, clips gradients, and saves and restores the
optimizer state, keyed by parameter name.

The table of all optimizers is in `config.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from firstlight.errors import CheckpointError, ConfigError
from firstlight.optim.config import (
    OPTIMIZERS,
    Kind,
    OptimizerConfig,
    parameter_groups,
    parameter_kinds,
)
from firstlight.optim.dtensors import full_tensor, is_sharded, shard_like
from firstlight.optim.muon import Muon
from firstlight.optim.spec import (
    ForeachOptimizer,
    Layout,
    OptimizerSpec,
    in_lists,
    is_sharded_like,
    list_values,
)


class MasterWeights:
    """fp32 copies of the parameters stored in fewer than 32 bits.

    An update is often smaller than half the distance between two neighbouring bf16 numbers (2^-8 of
    the value), so adding it to a bf16 parameter would not change the parameter. Therefore, updates
    are added to an fp32 copy, the master weight, and the model computes with the rounded master
    weight. fp32 parameters do not need a copy.

    Args:
        parameters: trained parameters of a model, keyed by name.
        initial: fp32 values, keyed by parameter name, to use as the master weights without copying
            them. A master weight without an initial value is initialised with the value of its
            parameter.

    Attributes:
        updated: tensors that the optimizer updates, keyed by parameter name. Each tensor is the
            parameter's master weight or, if there is none, the parameter itself.

    Raises:
        ConfigError: an initial value has a different shape or is not fp32.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], initial: Mapping[str, Tensor] | None
    ) -> None:
        self._low = {n: p for n, p in parameters.items() if p.dtype.itemsize < 4}
        self._masters = {
            name: nn.Parameter(_initial(name, p, (initial or {}).get(name)))
            for name, p in self._low.items()
        }
        self.updated: dict[str, nn.Parameter] = {
            name: self._masters.get(name, p) for name, p in parameters.items()
        }
        self.refill()

    @torch.no_grad()
    def refill(self, names: Collection[str] | None = None) -> None:
        """Set the parameters to their master weights, rounded to the nearest representable value.

        Args:
            names: names of the parameters to set. Parameters without a master weight are ignored.
                None for all parameters.
        """
        names = [name for name in (names or self._low) if name in self._low]
        if names:
            rounded: list[Tensor] = [self._low[name] for name in names]
            torch._foreach_copy_(rounded, [self._masters[name] for name in names])

    def take_gradients(self) -> None:
        """Add the gradients of the parameters, in fp32, to the gradients of their master weights.
        Then free the gradients of the parameters."""
        for name in self._low:
            self.take_gradient(name)

    @torch.no_grad()
    def take_gradient(self, name: str) -> None:
        """Do the same as `take_gradients` for a single parameter. Do nothing if the parameter does
        not have a master weight or does not have a gradient."""
        if name not in self._low or self._low[name].grad is None:
            return
        parameter, master = self._low[name], self._masters[name]
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    @contextlib.contextmanager
    def in_model(self) -> Iterator[None]:
        """Replace the parameters with the master weights within the context, so that they can be
        read and written in fp32.

        Afterwards, the parameters use their original memory again and contain the rounded master
        weights.
        """
        rounded = {name: parameter.data for name, parameter in self._low.items()}
        try:
            for name, parameter in self._low.items():
                parameter.data = self._masters[name].data
            yield
        finally:
            for name, parameter in self._low.items():
                parameter.data = rounded[name]
            self.refill()


def _initial(name: str, parameter: nn.Parameter, given: Tensor | None) -> Tensor:
    if given is None:
        return parameter.detach().float()
    if given.shape != parameter.shape or given.dtype != torch.float32:
        raise ConfigError(
            f"the fp32 value of '{name}' is {list(given.shape)} {given.dtype}, "
            f"expected {list(parameter.shape)} torch.float32"
        )
    return given.detach().to(parameter.device)


def make_optimizers(
    parameters: Mapping[str, nn.Parameter], kinds: Mapping[str, Kind], config: OptimizerConfig
) -> list[tuple[OptimizerSpec, torch.optim.Optimizer]]:
    """Create torch optimizers that together update every parameter exactly once.

    Args:
        parameters: parameters, keyed by name.
        kinds: kinds of these parameters, keyed by name.
        config: the recipe's `optimizer` section.

    Returns:
        Pairs (OptimizerSpec, torch optimizer): one for the optimizer that the config selects, and
        one for AdamW, which updates the remaining parameters. An optimizer without parameters is
        omitted.

    Raises:
        ConfigError: the config is not supported on the device of the parameters.
        MissingDependencyError: a library for 8-bit optimizers is needed but not installed.
    """
    spec = OPTIMIZERS[config.name]
    has_choice = "embeddings_in_32_bits" in spec.options
    wide = "embedding" if has_choice and config.embeddings_in_32_bits is not False else None
    # AdamW updates the parameters that the selected optimizer does not update. With Muon, these are
    # the embeddings, the head and the norms.
    own = {n: p for n, p in parameters.items() if kinds[n].role != wide and spec.takes(n, p)}
    rest = {n: p for n, p in parameters.items() if n not in own}
    return [
        (one, one.make(parameter_groups(some, kinds, config), config))
        for one, some in ((spec, own), (OPTIMIZERS["adamw"], rest))
        if some
    ]


class Optimizer:
    """One or more torch optimizers that together update all trained parameters of a model.

    Each parameter stored in fewer than 32 bits, such as a bf16 parameter, gets an fp32 master
    weight. Master weights take 4 bytes per value, in addition to the 2 bytes of the parameter.
    Optimizer state and gradients then belong to the master weights.

    Args:
        model: model whose parameters with `requires_grad` are updated. The names of the optimizer
            state contain the names of these parameters.
        config: the recipe's `optimizer` section.
        in_backward: True to update parameters during the backward pass. Each list of parameters
            (see `in_lists`) is updated as soon as all of its gradients are computed, and the
            gradients are then freed. This reduces peak memory by 4 bytes per parameter. In return,
            a step can have only one backward pass, and `clip_gradients` reports a non-finite
            gradient only after the update.
        initial: fp32 values, keyed by parameter name, which become the master weights. A master
            weight without an initial value is initialised with the rounded value of the parameter.

    Attributes:
        parameters: trained parameters of the model, keyed by name.
        num_parameters: total number of values in the trained parameters.
        reads_found_inf: True if `step` accepts `found_inf`. A GPU can then start an update before
            the host has checked whether the gradients are finite.
        clips: False while `clip_gradients` only computes the norm, for example during a warm-up
            with `clip_after_warmup`.

    Raises:
        ConfigError: the config is not supported on the device of the model, or in the backward
            pass.
        MissingDependencyError: a library for 8-bit optimizers is needed but not installed.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        *,
        in_backward: bool = False,
        initial: Mapping[str, Tensor] | None = None,
    ) -> None:
        if in_backward and config.max_grad_norm > 0:
            raise ConfigError(
                "efficiency.optimizer_in_backward updates before the norm of all gradients is "
                "known: set optimizer.max_grad_norm to 0"
            )
        self.config = config
        self.in_backward = in_backward
        self.clips = config.max_grad_norm > 0
        self.parameters: dict[str, nn.Parameter] = {
            name: p for name, p in model.named_parameters() if p.requires_grad
        }
        # The values are counted here, because an engine that shards parameters can leave them empty
        # later.
        self.num_parameters = sum(p.numel() for p in self.parameters.values())
        self._masters = MasterWeights(self.parameters, initial)
        updated = self._masters.updated
        parts = [updated]
        if in_backward:
            items, most = iter(updated.items()), max(map(list_values, updated.values()), default=0)
            parts = [
                dict(itertools.islice(items, len(some)))
                for some in in_lists(updated.values(), most)
            ]
        #: Mapping from a parameter's name to the names of all parameters updated together with it
        #: in the backward pass.
        self._list_of = {
            name: names for names in map(tuple, parts if in_backward else ()) for name in names
        }
        kinds = parameter_kinds(model)
        self._parts = [one for part in parts for one in make_optimizers(part, kinds, config)]
        self._peaks = [
            [float(group["lr"]) for group in optimizer.param_groups]
            for optimizer in self._torch_optimizers
        ]
        owners = {
            id(p): (spec, optimizer, group)
            for spec, optimizer in self._parts
            for group in optimizer.param_groups
            for p in group["params"]
        }
        self._part_of = {name: owners[id(p)] for name, p in updated.items()}
        self.reads_found_inf = not in_backward and all(
            map(_reads_found_inf, self._torch_optimizers)
        )
        self._norms: dict[str, Tensor] = {}
        self._divisor: Tensor | None = None
        #: Parameters whose step counters the last `step` increased on the host.
        self._counted: list[tuple[torch.optim.Optimizer, nn.Parameter]] = []
        if in_backward:
            for name, parameter in self.parameters.items():
                self._update_in_backward(name, parameter)

    @property
    def _torch_optimizers(self) -> list[torch.optim.Optimizer]:
        return [optimizer for _, optimizer in self._parts]

    @property
    def updated(self) -> Mapping[str, nn.Parameter]:
        """The tensors that the optimizer updates, keyed by parameter name. Each tensor is the
        parameter's fp32 master weight or, if there is none, the parameter itself."""
        return self._masters.updated

    @property
    def state_bytes(self) -> int:
        """Total size in bytes of the `state_tensors` after the first step."""
        return sum(
            math.prod(shape) * dtype.itemsize
            for layout in self._layouts().values()
            for shape, dtype in layout.values()
        )

    def set_learning_rate(self, lr_scale: float) -> float:
        """Set the learning rate of each group to `lr_scale` times its peak, and return `lr_scale`
        times `config.learning_rate`."""
        for optimizer, peaks in zip(self._torch_optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                if isinstance(group["lr"], Tensor):
                    # torchao's compiled update reads the learning rate from this tensor.
                    group["lr"].fill_(peak * lr_scale)
                else:
                    group["lr"] = peak * lr_scale
        return self.config.learning_rate * lr_scale

    def share_matrices(self, rank: int, processes: int) -> None:
        """Distribute Muon's matrix products among processes that have the same full gradients. Each
        process computes some of the products, and all processes apply the same updates.

        Args:
            rank: rank of this process in the default process group.
            processes: number of processes in that group.
        """
        for optimizer in self._torch_optimizers:
            if isinstance(optimizer, Muon):
                optimizer.process = (rank, processes)

    # Methods that make up a training step. `accumulate` is called after each backward pass. After
    # the last backward pass, `clip_gradients`, `step` and `zero_grad` follow.

    def accumulate(self) -> None:
        """Add the low-precision gradients of a micro-batch to the fp32 gradients of the master
        weights. Call this after each backward pass.

        This has no effect on parameters with 32 or more bits, whose gradients are accumulated by
        autograd.
        """
        self._masters.take_gradients()

    def clip_gradients(
        self, grad_scale: float = 1.0, joined: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Divide the gradients by `grad_scale` and, if `clips` is True, clip their norm to
        `max_grad_norm`.

        The norm and the clipped gradients are the same as with torch's `clip_grad_norm_`. With
        `reads_found_inf`, torch's kernels divide and clip the gradients in `step`, which avoids
        reading the gradients twice.

        Args:
            grad_scale: factor by which the loss was multiplied.
            joined: function that computes the norm [] of all gradients from the norm [] of this
                process's gradients. Required if the parameters are distributed over processes,
                otherwise None.

        Returns:
            The L2 norm [] of all gradients, after division by `grad_scale` and before clipping.

        Raises:
            ConfigError: `grad_scale` is not 1, although `in_backward` has already applied the
                updates.
        """
        if self.in_backward:
            if grad_scale != 1:
                raise ConfigError(
                    "efficiency.optimizer_in_backward does not support scaled gradients: "
                    "set efficiency.precision to bf16 instead of fp16"
                )
            # During the backward pass, a list is updated as soon as all of its parameters have a
            # gradient. Lists in which a parameter did not receive a gradient have not been updated
            # yet, so they are updated now.
            for names in dict.fromkeys(self._list_of.values()):
                if any(self._masters.updated[name].grad is not None for name in names):
                    self._update_list(names)
            norms = [self._norms[name] for name in self.parameters if name in self._norms]
            return full_tensor(nn.utils.get_total_norm(norms))
        self.accumulate()
        gradients = [p.grad for p in self._masters.updated.values() if p.grad is not None]
        norm = full_tensor(nn.utils.get_total_norm(gradients))
        norm = (norm if joined is None else joined(norm)) / grad_scale
        limit = self.config.max_grad_norm if self.clips else math.inf
        # The operations and their precision are the same as in torch, so that the factor is
        # identical.
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        if not gradients or (limit == math.inf and grad_scale == 1):
            return norm
        if self.reads_found_inf:  # so that the host does not wait for the factor
            factor = factor / grad_scale
            self._divisor = factor.reciprocal()
            rest = [
                p.grad
                for optimizer in self._torch_optimizers
                if not _divides_gradients(optimizer)
                for group in optimizer.param_groups
                for p in group["params"]
                if p.grad is not None
            ]
            if rest:
                torch._foreach_mul_(rest, factor)
        elif (number := float(factor) / grad_scale) != 1:
            torch._foreach_mul_(gradients, number)
        return norm

    def step(self, found_inf: Tensor | None = None) -> None:
        """Update the parameters from their gradients. With `in_backward`, do nothing.

        Args:
            found_inf: fp32 [] on the device of the parameters. If it is 1, parameters and moments
                are not changed; if it is 0, they are updated. The value is read only on the device.
                Requires `reads_found_inf`. None always updates them.
        """
        if self.in_backward:
            return
        self.accumulate()
        # AdamW is excluded, because its kernel does not increase the step counter if an update is
        # skipped.
        self._counted = [
            (optimizer, parameter)
            for optimizer in (self._torch_optimizers if found_inf is not None else ())
            if not isinstance(optimizer, torch.optim.AdamW)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        for optimizer in self._torch_optimizers:
            if self.reads_found_inf:
                # The attributes are set in the same way as torch.amp.GradScaler sets them for
                # torch's fused kernels.
                divisor = self._divisor if _divides_gradients(optimizer) else None
                optimizer.found_inf = found_inf  # type: ignore[attr-defined]
                optimizer.grad_scale = divisor  # type: ignore[attr-defined]
            optimizer.step()
        self._masters.refill()

    def take_back_counts(self) -> None:
        """Decrease the step counters that the last `step` increased. Call this after an update was
        skipped because `found_inf` was 1."""
        for optimizer, parameter in self._counted:
            if "step" in optimizer.state[parameter]:
                optimizer.state[parameter]["step"] -= 1

    def zero_grad(self) -> None:
        """Free the gradients, and discard the gradient norms recorded with `in_backward`."""
        self._norms.clear()
        self._divisor = None
        for name, parameter in self.parameters.items():
            parameter.grad = None
            self._masters.updated[name].grad = None

    def _update_in_backward(self, name: str, parameter: nn.Parameter) -> None:
        """Register a hook that updates a parameter as soon as its gradient is accumulated."""
        # Autograd stores the hook where Python's garbage collector can't detect reference cycles. A
        # hook with a reference to this optimizer, which refers to the parameter, would keep both
        # alive until the process ends.
        owner = weakref.ref(self)

        def update(_: Tensor) -> None:
            optimizer = owner()
            assert optimizer is not None, "the model is trained, but its optimizer is gone"
            optimizer._update(name)

        parameter.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]

    def _update(self, name: str) -> None:
        """Record the norm of a parameter's gradient. Then, if all parameters in the parameter's
        list have a gradient, update the list."""
        if name in self._norms:
            raise ConfigError(
                "efficiency.optimizer_in_backward updates in every backward pass: "
                "set batch.gradient_accumulation_steps to 1"
            )
        self._masters.take_gradient(name)
        gradient = self._masters.updated[name].grad
        assert gradient is not None
        self._norms[name] = torch.linalg.vector_norm(gradient)
        if all(one in self._norms for one in self._list_of[name]):
            self._update_list(self._list_of[name])

    def _update_list(self, names: tuple[str, ...]) -> None:
        """Update the parameters of a list from their gradients, and free the gradients."""
        for optimizer in dict.fromkeys(self._part_of[name][1] for name in names):
            optimizer.step()
        for name in names:
            self._masters.updated[name].grad = None
        self._masters.refill(names)

    # State

    def master_weights(self, *, changed: bool = False) -> contextlib.AbstractContextManager[None]:
        """Replace the model's parameters with their fp32 master weights within the context.

        Use this to read and write checkpoints, not for computation. Afterwards, the parameters use
        their original memory again and contain the rounded master weights. Without master weights,
        this does nothing.

        Args:
            changed: True if the parameters are modified within the context. This class ignores it,
                but engines that gather shards need it to write the changes back to the shards.
        """
        return self._masters.in_model()

    def state_tensors(self, *, keep: bool = True) -> dict[str, Tensor]:
        """Return all moments and counters as full tensors on the CPU, keyed by `<parameter
        name>.<state name>`.

        The result is the same with and without `in_backward`, and for any sharding of the
        parameters. With sharded parameters, this is a collective operation, which every rank must
        call. Master weights are not included (see `master_weights`).

        Args:
            keep: False for a rank that only participates in the collective operations. The method
                then returns {}.
        """
        found: dict[str, Tensor] = {}
        for name, shard in self.state_shards().items():
            tensor = full_tensor(shard)
            if keep:
                found[name] = tensor.cpu().contiguous()
        return found

    def state_shards(self) -> dict[str, Tensor]:
        """Return the same tensors as `state_tensors`, but on their original devices and sharded
        like their parameters. For torch's optimizers, the tensors are views of the optimizer's
        memory."""
        return {
            f"{name}.{key}": value.detach()
            for name, state in self._states().items()
            for key, value in state.items()
        }

    def fill_state(self, fill: Callable[[dict[str, Tensor]], None]) -> None:
        """Create the state that exists after the first step, and call a function that fills in its
        values. This works only for optimizers whose `state_shards` are views of their memory, such
        as torch's optimizers.

        Args:
            fill: function that receives the `state_shards`, which are initially zero, and writes
                the values into them.
        """
        for name, layout in self._layouts().items():
            (spec, optimizer, _), parameter = self._part_of[name], self._masters.updated[name]
            if layout:
                zeros = {
                    key: torch.zeros_like(parameter, dtype=dtype)
                    if is_sharded_like(parameter, key, shape)
                    else torch.zeros(shape, dtype=dtype)
                    for key, (shape, dtype) in layout.items()
                }
                optimizer.state[parameter] = spec.rebuild(optimizer, parameter, zeros)
        fill(self.state_shards())

    @property
    def state_names(self) -> set[str]:
        """Names of the `state_tensors` after the first step."""
        return {f"{name}.{key}" for name, layout in self._layouts().items() for key in layout}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state from tensors that `state_tensors` returned. Learning rates are not
        restored, because the schedule sets them at every step.

        Raises:
            CheckpointError: a tensor is missing, unexpected, or has a different shape or dtype; the
                message names it.
        """
        layouts = self._layouts()
        require_fitting_state(layouts, tensors)
        for name, layout in layouts.items():
            (spec, optimizer, _), parameter = self._part_of[name], self._masters.updated[name]
            if layout:
                own = {key: tensors[f"{name}.{key}"] for key in layout}
                state = spec.rebuild(optimizer, parameter, own)
                optimizer.state[parameter] = {
                    key: shard_like(value, parameter)
                    if isinstance(value, Tensor) and is_sharded_like(parameter, key, value.shape)
                    else value
                    for key, value in state.items()
                }

    def _layouts(self) -> dict[str, Layout]:
        return {
            name: spec.layout(self._masters.updated[name], self.config, group)
            for name, (spec, _, group) in self._part_of.items()
        }

    def _states(self) -> dict[str, dict[str, Tensor]]:
        found: dict[str, dict[str, Tensor]] = {}
        for name, parameter in self._masters.updated.items():
            spec, optimizer, _ = self._part_of[name]
            found[name] = spec.flatten(optimizer.state.get(parameter, {}))
        return found


def _reads_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer reads `found_inf` on the GPU, as this package's optimizers and
    torch's fused AdamW do.

    torch's fused SGD also reads `found_inf`, but leaves its momentum uninitialised if the first
    update is skipped. torch's other optimizers and the 8-bit optimizers do not read `found_inf`.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    is_fused = isinstance(optimizer, torch.optim.AdamW) and bool(optimizer.defaults["fused"])
    return (is_fused or isinstance(optimizer, Muon | ForeachOptimizer)) and all(
        _runs_ahead(p) and not is_sharded(p) for p in parameters
    )


def _divides_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer that reads `found_inf` also divides gradients by `grad_scale`."""
    # A hook, such as the hook for cautious weight decay, reads the gradients before they are
    # divided.
    is_torchs = isinstance(optimizer, torch.optim.AdamW)
    return is_torchs and not optimizer._optimizer_step_pre_hooks


def _runs_ahead(tensor: Tensor) -> bool:
    """Return True if operations on a tensor run asynchronously, so that the host does not wait for
    them to finish."""
    return tensor.is_cuda


def require_fitting_state(layouts: Mapping[str, Layout], tensors: Mapping[str, Tensor]) -> None:
    """Check that a saved optimizer state contains exactly the tensors that the given layouts
    describe.

    Args:
        layouts: layout of each parameter's state, keyed by parameter name.
        tensors: saved tensors, keyed by `<parameter name>.<state name>`.

    Raises:
        CheckpointError: a tensor is missing, unexpected, or has a different shape or dtype; the
            message names it.
    """
    expected = {
        f"{name}.{key}": entry for name, layout in layouts.items() for key, entry in layout.items()
    }
    if odd := sorted(expected.keys() ^ tensors.keys()):
        raise CheckpointError(
            f"the saved optimizer state does not match this model and optimizer: "
            f"'{odd[0]}' is in only one of them"
        )
    for name, (shape, dtype) in expected.items():
        found = tensors[name]
        if (tuple(found.shape), found.dtype) != (shape, dtype):
            raise CheckpointError(
                f"the optimizer's state '{name}' is {list(found.shape)} {found.dtype}, expected "
                f"{list(shape)} {dtype}"
            )
