"""A simulated GPU whose asynchronous copies complete as late as CUDA allows, so that reading too
early gives noise.

Tensors are real and in host memory. Those created with `device="cpu"` and page-locked ones count as
the host's, all others as the GPU's. `copy_` to or from page-locked memory with `non_blocking`
leaves noise there until the host waits for the stream. Each stream is in order, independent of the
others.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .no_gpu import torch_cuda

_GETTERS: Any = {
    Tensor.device.__get__: "device",
    Tensor.is_cuda.__get__: "is_cuda",  # type: ignore[attr-defined]
}
_LIKE = (torch.empty_like, torch.zeros_like)
_FACTORIES = (torch.empty, torch.zeros, torch.tensor, *_LIKE)


class Stream:
    """The work given to a stream of the GPU for which the host has not waited yet."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.pending: list[Callable[[], object]] = []

    def synchronize(self) -> None:
        """Complete all of its work."""
        pending, self.pending = self.pending, []
        for act in pending:
            act()

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event after the work so far."""
        event = event or Event()
        event.record(self)
        return event

    def wait_stream(self, other: Stream) -> None:
        """Make later work wait for the current work of another stream."""
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        """Make later work wait for the event."""
        self.pending.append(event.synchronize)


class Event:
    """A position in a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._before: list[Callable[[], object]] = []
        self._stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Record the position after the stream's current work."""
        assert stream is not None
        self._stream, self._before = stream, list(stream.pending)

    def synchronize(self) -> None:
        """Complete all work before it."""
        for act in self._before:
            if self._stream is not None and act in self._stream.pending:
                self._stream.pending.remove(act)
                act()


class LateCopies(TorchFunctionMode):
    """See the module docstring.

    Attributes:
        device: device of tensors that are not in host memory.
        streams: streams created so far; the first is the default stream.
        stream: the current one.
        waits: shapes of tensors for whose copies the host waited one by one.
        lates: copies to the GPU for which the host did not wait.
    """

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.device = torch.device("cuda", index)
        self.streams = [Stream()]
        self.stream = self.streams[0]
        self.waits: list[tuple[int, ...]] = []
        self.lates = 0
        self._host: dict[int, bool] = {}
        self._kept: list[Any] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch."""
        kwargs = dict(kwargs or {})
        if func in _GETTERS:
            on_gpu = not self.is_host(args[0])
            if _GETTERS[func] == "is_cuda":
                return on_gpu
            return self.device if on_gpu else torch.device("cpu")
        if func in _FACTORIES:
            return self._made(func, args, kwargs)
        if func is Tensor.pin_memory:
            return self._as_host(args[0].clone(), pinned=True)
        if func is Tensor.is_pinned:
            return self.is_pinned(args[0])
        if func is Tensor.cpu:
            return self._to(args[0], torch.device("cpu"), None, False)
        if func is Tensor.to:
            copy = kwargs.pop("copy", False)
            device, dtype, late, _ = torch._C._nn._parse_to(*args[1:], **kwargs)
            return self._to(args[0].clone() if copy else args[0], device, dtype, late)
        if func is Tensor.copy_:
            return self._copy(*args, **kwargs)
        return func(*args, **kwargs)

    def is_host(self, tensor: Tensor) -> bool:
        """Return True if a tensor is in host memory."""
        return _address(tensor) in self._host

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return True if a tensor is in page-locked memory."""
        return self._host.get(_address(tensor), False)

    def synchronize(self, device: Any = None) -> None:
        """Wait for a device, or for the current one if it is None."""
        index = torch.cuda.current_device() if device is None else torch.device(device).index
        if index == self.device.index:
            for stream in self.streams:
                stream.synchronize()

    @contextlib.contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        """Context manager in which another stream is the current one."""
        before, self.stream = self.stream, stream
        if stream not in self.streams:
            self.streams.append(stream)
        try:
            yield
        finally:
            self.stream = before

    def _made(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        pinned, device = kwargs.pop("pin_memory", False), kwargs.pop("device", None)
        made: Tensor = func(*args, **kwargs)
        if device is None:
            on_host = self.is_host(args[0]) if func in _LIKE else True
        else:
            on_host = torch.device(device).type == "cpu"
        return self._as_host(made, pinned=pinned) if on_host else made

    def _as_host(self, tensor: Tensor, *, pinned: bool) -> Tensor:
        # Kept, so that no other storage gets its address.
        self._kept.append(tensor.untyped_storage())
        self._host[_address(tensor)] = pinned
        return tensor

    def _to(
        self, tensor: Tensor, device: Any, dtype: torch.dtype | None, non_blocking: bool
    ) -> Tensor:
        target = self.device if device is None else torch.device(device)
        changed = tensor if dtype is None else tensor.to(dtype)
        if (target.type == "cpu") == self.is_host(tensor):
            return changed
        if target.type == "cpu":
            # torch allocates page-locked memory for a copy for which nobody waits.
            result = torch.empty_like(changed, memory_format=torch.preserve_format)
            return self._copy(self._as_host(result, pinned=non_blocking), changed, non_blocking)
        # Copies to the GPU follow the order of the stream. For pageable memory, the host waits.
        self.lates += non_blocking and self.is_pinned(tensor)
        self.stream.synchronize()
        return changed.clone()

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not self.is_host(target) and non_blocking and self.is_pinned(source):
            self.lates += 1
            target.detach().fill_(math.nan if target.is_floating_point() else 77)
            # The source is read when the copy is made, which may be before it has its own values.
            self.stream.pending.append(functools.partial(_arrive, target.detach(), source.detach()))
            return target
        if not self.is_host(target) or self.is_host(source):
            return target.copy_(source)
        if non_blocking and self.is_pinned(target):
            values = source.detach().clone()
            target.detach().fill_(math.nan if target.is_floating_point() else 77)
            self.stream.pending.append(functools.partial(_arrive, target.detach(), values))
            return target
        self.stream.synchronize()
        self.waits.append(tuple(source.shape))
        return target.copy_(source)


def _arrive(target: Tensor, values: Tensor) -> None:
    with torch._C.DisableTorchFunction():
        target.copy_(values)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextlib.contextmanager
def late_copies(index: int = 0, devices: int = 1) -> Iterator[LateCopies]:
    """Context manager in which tensors are on the GPU with an index, and copies from it are
    late.
    """
    mode = LateCopies(index)
    with torch_cuda(devices), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", mode.synchronize)
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "stream", mode.on_stream)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: mode.stream)
        patch.setattr(torch.cuda, "default_stream", lambda device=None: mode.streams[0])
        with mode:
            yield mode
