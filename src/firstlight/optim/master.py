"""fp32 master weights of parameters that a model holds in fewer bits.

An update is often smaller than half the distance between two neighbouring bf16 numbers (2^-8 of the
value), so that adding it to a bf16 parameter would change nothing. Updates are therefore added to
an fp32 copy, the master weight, and the model computes with the master weight rounded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from firstlight.errors import ConfigError


class MasterWeights:
    """fp32 copies of the parameters that have fewer than 32 bits; the others need none.

    Args:
        parameters: a model's trained parameters by name.
        initial: fp32 values by name, which become the master weights themselves. A master weight
            without an initial value starts from the value of its parameter.

    Attributes:
        updated: tensors that an optimizer updates, by the parameter's name: the master weight, or
            the parameter itself if it has none.

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
        """Set the parameters to their master weights, rounded to nearest."""
        for name, parameter in self._low.items():
            parameter.copy_(self._masters[name])

    @torch.no_grad()
    def refill_one(self, name: str) -> None:
        """`refill` for one parameter; does nothing if it has no master weight."""
        if name in self._low:
            self._low[name].copy_(self._masters[name])

    def take_gradients(self) -> None:
        """Add the parameters' gradients to those of the master weights, in fp32, and free them."""
        for name in self._low:
            self.take_gradient(name)

    @torch.no_grad()
    def take_gradient(self, name: str) -> None:
        """`take_gradients` for one parameter; does nothing if it has no master weight or no
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

        Afterwards the parameters are in their former memory again, with the rounded master weights.
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
