"""fp32 master weights of parameters that a model holds in fewer bits.

An update is often smaller than half the distance between two bf16 numbers (2^-8 of the value), and
adding it to a bf16 parameter would change nothing. So updates are added to an fp32 copy, and the
model computes with that copy rounded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from firstlight.errors import ConfigError


class MasterWeights:
    """fp32 copies of the parameters with fewer bits; parameters with 32 or more need none.

    Args:
        parameters: a model's trained parameters by name.
        initial: fp32 values by name to start from, which become the masters themselves. A missing
            master weight starts from the parameter's own value.

    Attributes:
        updated: tensors that an optimizer updates, by the parameter's name: the master weight, or
            the parameter itself without one.

    Raises:
        ConfigError: an initial value is of another shape, or not fp32.
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
    def refill(self) -> None:
        """Make the parameters their masters, rounded to nearest."""
        for name, parameter in self._low.items():
            parameter.copy_(self._masters[name])

    @torch.no_grad()
    def refill_one(self, name: str) -> None:
        """Set one parameter to its rounded master weight; do nothing without one."""
        if name in self._low:
            self._low[name].copy_(self._masters[name])

    def take_gradients(self) -> None:
        """Add the parameters' gradients to their masters', and free them."""
        for name in self._low:
            self.take_gradient(name)

    @torch.no_grad()
    def take_gradient(self, name: str) -> None:
        """`take_gradients` for one parameter; does nothing without a master weight or a
        gradient."""
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
        """Context in which the parameters are their master weights: reads and writes are fp32.

        After it, the parameters have the memory that they had before, with the masters rounded.
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
