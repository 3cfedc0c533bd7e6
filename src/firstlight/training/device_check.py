"""Check of a device: a small training step and a small generation on it, compared with fp64 on the
CPU; if they differ, each of their operations, to name the wrong one.

PyTorch has had kernels that return wrong numbers without an error, above all on Apple GPUs: the
loss falls more slowly or is wrong, and nothing says why.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_flatten, tree_map_only

from firstlight.data.loader import Batch
from firstlight.errors import ConfigError, FirstlightError, StorageError, first_line
from firstlight.files.atomic import remove_file, write_json
from firstlight.files.cache import cache_folder
from firstlight.generation.batch import BatchDecoder
from firstlight.generation.config import SamplingConfig
from firstlight.generation.few_rows import use_few_rows
from firstlight.generation.sampling import filter_probabilities, sample_rows
from firstlight.hardware.device import Hardware, driver_version, find_hardware
from firstlight.methods import matmul_precision
from firstlight.methods.attention import choose_attention
from firstlight.methods.precision import BOUNDS, dtype_of, weights_distance
from firstlight.models import Model, empty_model
from firstlight.models.ops import IGNORE_INDEX
from firstlight.recipe import ResolvedRecipe, parse_resolved_recipe
from firstlight.recipe.resolve import facts_here
from firstlight.training.guard import DivergedError
from firstlight.training.program import TrainingProgram

#: Rows of the step and the generation, tokens of a row, and tokens of the vocabulary.
_ROWS, _TOKENS, _VOCABULARY = 4, 48, 320

#: Standard deviation of the weights.
_STD = 0.03

#: Kernels that take no mask, without which texts of different lengths can't be decoded together.
_WITHOUT_MASKS = ("flash", "cudnn", "flex")

#: The models: heads of 64, for which GPUs have fused kernels.
_SIZES: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
_MODELS: list[dict[str, Any]] = [
    {**_SIZES, "model_type": "gpt2"},
    {**_SIZES, "model_type": "llama", "num_key_value_heads": 1, "tie_word_embeddings": False},
]


@dataclass(frozen=True)
class DeviceCheck:
    """The result of a check.

    Attributes:
        device, name: torch's and the maker's name of the device.
        precision, attention: values of the recipe's `efficiency` section that were checked.
        loss: greatest difference of a loss from fp64, in nats; None if the device has not passed.
        weights: greatest `weights_distance` of a parameter from fp64; None likewise.
        problem: what is wrong and what to do, in one line; None if the device has passed.
    """

    device: str
    name: str
    precision: str
    attention: str
    loss: float | None
    weights: float | None
    problem: str | None = None


@dataclass(frozen=True)
class CheckedKeys:
    """Keys of the recipe's `efficiency` section with which a check computes."""

    precision: str
    attention: str = "sdpa"
    loss_chunk_tokens: int = _TOKENS // 2


#: Other values of keys, to be tried on a device that computes wrongly.
_WAYS_AROUND: list[dict[str, Any]] = [
    {"attention": "blockwise"},
    {"attention": "plain"},
    {"loss_chunk_tokens": 0},
    {"precision": "fp32"},
]


def check_machine(tell: Callable[[str], None]) -> list[DeviceCheck]:
    """Check the CPU and each GPU of this machine, in fp32 and in the precision of "auto".

    Args:
        tell: called with a message before each check.
    """
    names = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    names += ["mps"] if torch.backends.mps.is_available() else []
    results = []
    for hardware in map(find_hardware, names):
        device = hardware.device
        for precision in dict.fromkeys(("fp32", facts_here(hardware).precision)):
            tell(f"checking {device} in {precision}")
            # CUDA graphs are recorded on the current GPU.
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                results.append(check_device(hardware, CheckedKeys(precision)))
    return results


def require_checked_device(
    recipe: ResolvedRecipe, hardware: Hardware, tell: Callable[[str], None]
) -> None:
    """Check the GPU of a run, unless it has passed before or `run.check_device` is false. CPUs, on
    which the reference is computed, are not checked.

    Raises:
        ConfigError: the GPU computes wrongly.
    """
    if hardware.device.type == "cpu" or not recipe.run.check_device:
        return
    config = recipe.efficiency
    precisions = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    chunk = CheckedKeys.loss_chunk_tokens if config.loss_chunk_tokens else 0
    keys = CheckedKeys(precisions[dtype_of(config.precision)], config.attention, chunk)
    if _passed_file(hardware, keys).exists():
        return
    tell(f"checking {hardware.name} once: a small step beside the CPU")
    if (problem := check_device(hardware, keys).problem) is not None:
        raise ConfigError(f"{problem}; run.check_device: false trains nevertheless")


def check_device(hardware: Hardware, keys: CheckedKeys) -> DeviceCheck:
    """Check a device, and note in the cache that it has passed."""
    device, problem = f"{hardware.device} ({hardware.name})", None
    loss = weights = math.inf
    try:
        with contextlib.suppress(DivergedError):  # a loss that is not finite
            loss, weights = _differences(hardware, keys)
    except (RuntimeError, FirstlightError) as error:
        problem = f"{device} fails in {keys.precision}: {first_line(error)}"
    else:
        if not _are_near(loss, weights, keys):
            what = _wrong_operation(hardware, keys) or (
                f"a loss is off by {loss:.1g} nats and a weight by {weights:.2g} of its movement, "
                "though no operation is wrong alone"
            )
            problem = (
                f"{device} computes wrong values in {keys.precision}: {what}, compared with fp64 "
                "on the CPU"
            )
    if problem is not None:
        problem = f"{problem}: {_advice(hardware, keys)}"
    result = DeviceCheck(
        str(hardware.device),
        hardware.name,
        keys.precision,
        keys.attention,
        loss=loss if problem is None else None,
        weights=weights if problem is None else None,
        problem=problem,
    )
    path = _passed_file(hardware, keys)
    # Without the file, the check is only repeated.
    with contextlib.suppress(StorageError):
        if problem is None:
            write_json(path, dataclasses.asdict(result))
        else:
            remove_file(path)
    return result


def _wrong_operation(hardware: Hardware, keys: CheckedKeys) -> str | None:
    """The first operation with wrong results, and how far they are off; None if there is none."""
    bound = BOUNDS[keys.precision][1]
    comparison = _Comparison(bound)
    with contextlib.suppress(RuntimeError, FirstlightError):
        _differences(hardware, keys, comparison)
    if comparison.wrong is None:
        return None
    name, distance = comparison.wrong
    return f"{name} is off by {distance:.1%} (bound {bound:.1%})"


def _advice(hardware: Hardware, keys: CheckedKeys) -> str:
    """What to do with a device that computes wrongly: first a setting with which it passes."""
    advice = []
    for change in _WAYS_AROUND:
        other = dataclasses.replace(keys, **change)
        with contextlib.suppress(RuntimeError, FirstlightError):
            if other != keys and _are_near(*_differences(hardware, other), other):
                advice += [f"efficiency.{key}: {value}" for key, value in change.items()]
                break
    if hardware.device.type != "cpu":
        advice.append("run.device: cpu")
    return f"use {' or '.join([*advice, 'another version of torch'])}"


def _passed_file(hardware: Hardware, keys: CheckedKeys) -> Path:
    """The file of the cache that exists if a device has passed."""
    facts = (hardware.name, driver_version(hardware.device), torch.__version__)
    name = "_".join(map(str, (*facts, *dataclasses.astuple(keys))))
    name = re.sub(r"[^\w.+]+", "-", name)
    return cache_folder() / "device-checks" / f"{name}.json"


def _are_near(loss: float, weights: float, keys: CheckedKeys) -> bool:
    most_loss, most_weights = BOUNDS[keys.precision]
    return loss <= most_loss and weights <= most_weights  # False for NaN


def _differences(
    hardware: Hardware, keys: CheckedKeys, watching: _Comparison | None = None
) -> tuple[float, float]:
    """The greatest difference of a loss from fp64 on the CPU, in nats, and the greatest
    `weights_distance` of a tensor, of a training step and a generation of each model.

    Args:
        hardware: hardware of the device.
        keys: keys of the recipe.
        watching: the mode in which the device computes; None for none.
    """
    losses, distances = [], []
    for number in range(len(_MODELS)):
        loss, moved = _train(*_drawn(number, keys), hardware, watching)
        exact_loss, exact_moved = _train_exactly(number)
        losses.append(abs(loss - exact_loss))
        for one, exact in zip(moved, exact_moved, strict=True):
            distances.append(weights_distance([one], [exact], [torch.zeros(())]))
        losses += _generation_differences(*_drawn(number, keys), hardware, watching)
    # Not `max`, which may skip NaN.
    return float(torch.tensor(losses).amax()), float(torch.tensor(distances).amax())


def _drawn(number: int, keys: CheckedKeys) -> tuple[ResolvedRecipe, Model]:
    """A recipe for a model of `_MODELS`, and the model with random weights."""
    efficiency = {**dataclasses.asdict(keys), "compile": False, "matmul_precision": "highest"}
    recipe = parse_resolved_recipe(
        {
            "data": {"dir": "-", "seq_len": _TOKENS},
            "model": _MODELS[number],
            "batch": {"micro_batch_size": _ROWS // 2, "gradient_accumulation_steps": 2},
            "efficiency": efficiency,
            # With this eps, updates are proportional to gradients, so that both have the same
            # relative error. With a small one, they have the signs of gradients, even of those
            # that are nothing but rounding errors.
            "optimizer": {"learning_rate": 1.0, "eps": 1.0, "weight_decay": 0.01},
        }
    )
    model = empty_model(recipe.model)
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.normal_(float(is_norm), _STD, generator=generator)
    return recipe, model


def _ids() -> Tensor:
    """The tokens of the rows, int64 [rows, tokens + 1]."""
    shape = (_ROWS, _TOKENS + 1)
    return torch.randint(_VOCABULARY, shape, generator=torch.Generator().manual_seed(0))


def _train(
    recipe: ResolvedRecipe, model: Model, hardware: Hardware, watching: _Comparison | None = None
) -> tuple[float, list[Tensor]]:
    """Loss of a step on a device, and [norm of the gradient, movement of each parameter] in fp64
    on the CPU."""
    before = [parameter.detach().double() for parameter in copy.deepcopy(model).parameters()]
    program = TrainingProgram(recipe, model, hardware)
    if program.scaler is not None:
        program.scaler.scale = 2.0**8  # the initial scale may overflow
    labels = _ids()[:, 1:].clone()
    labels[:, :5] = IGNORE_INDEX
    batch = Batch(_ids()[:, :-1].contiguous(), labels, int((labels != IGNORE_INDEX).sum()))
    halves = [half.to(hardware.device) for half in batch.split(_ROWS // 2)]
    with watching or contextlib.nullcontext():
        result = program.step(halves, lr_scale=1.0)
    after = [parameter.detach().cpu().double() for parameter in program.model.parameters()]
    moved = [new - old for new, old in zip(after, before, strict=True)]
    return result.loss, [torch.tensor(result.grad_norm), *moved]


@functools.cache
def _train_exactly(number: int) -> tuple[float, list[Tensor]]:
    """`_train` in fp64 on the CPU."""
    recipe, model = _drawn(number, CheckedKeys("fp32"))
    return _train(recipe, model.double(), find_hardware("cpu"))


@torch.no_grad()
def _generation_differences(
    recipe: ResolvedRecipe, model: Model, hardware: Hardware, watching: _Comparison | None
) -> tuple[float, float]:
    """Differences from fp64 on the CPU in a generation, in nats: the mean difference of the loss of
    the next token, and the mean loss that is added by choosing other tokens as the likeliest."""
    model = model.eval().to(dtype_of(recipe.efficiency.precision))
    ids = _ids()
    exact_RTV = copy.deepcopy(model).double()(ids[:, :-1]).log_softmax(-1)
    if recipe.efficiency.attention not in _WITHOUT_MASKS:
        choose_attention(model, recipe.efficiency.attention)
    if watching is None:
        # Otherwise torch would see no operation of recorded steps and of kernels for few rows.
        use_few_rows(model)
    found: list[Tensor] = []
    places: list[tuple[int, int]] = []
    decoder = BatchDecoder(model.to(hardware.device), 2, _TOKENS)
    with watching or contextlib.nullcontext(), matmul_precision(recipe.efficiency):
        # Two texts of different lengths in one pass, then tokens of both, then tokens of one.
        found.append(decoder.add_many([ids[0, :20].tolist(), ids[1, :23].tolist()]))
        places += enumerate(decoder.lengths)
        for count in (2, 2, 2, 1, 1, 1):
            if len(decoder) > count:
                decoder.remove(1)
            found.append(decoder.step([int(ids[place]) for place in enumerate(decoder.lengths)]))
            places += enumerate(decoder.lengths)
        logits_NV = torch.cat(found)
        probabilities_NV = filter_probabilities(logits_NV, SamplingConfig(temperature=1.0, top_k=0))
        chosen = sample_rows(logits_NV, SamplingConfig(temperature=0.0), [])
    differences, added = [], []
    # `places` are rows and numbers of tokens, thus positions of the next token.
    for place, p_V, choice in zip(places, probabilities_NV.cpu().double(), chosen, strict=True):
        exact_V, next_id = exact_RTV[place[0], place[1] - 1], ids[place]
        differences.append((p_V[next_id].log() - exact_V[next_id]).abs())
        added.append(exact_V.max() - exact_V[choice] if choice is not None else math.nan)
    return float(torch.tensor(differences).mean()), float(torch.tensor(added).mean())


class _Comparison(TorchFunctionMode):
    """Mode in which each operation, and its backward pass with random gradients, is repeated in
    fp64 on the CPU with the same inputs, until one has a wrong result.

    Args:
        bound: greatest distance of a right result from fp64, as a share of its L2 norm.

    Attributes:
        wrong: name of the first operation with a wrong result, and the distance; None without one.
    """

    def __init__(self, bound: float) -> None:
        super().__init__()
        self._bound = bound
        self.wrong: tuple[str, float] | None = None
        self._compared: set[tuple[Any, ...]] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operation, and compare it."""
        inputs = (args, kwargs or {})
        name = resolve_name(func) or getattr(func, "__name__", str(func))
        # Attributes are no operations, and empty tensors have no values.
        is_skipped = name.endswith(("__get__", "__set__")) or "empty" in name
        if self.wrong is not None or is_skipped or not self._is_new(name, inputs):
            return func(*args, **inputs[1])
        own = tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), inputs)
        exact = tree_map_only(Tensor, _exact, inputs)
        result = func(*args, **inputs[1])
        # Some operations can't be repeated on another device or in another dtype.
        with contextlib.suppress(Exception):
            expected = func(*exact[0], **exact[1])
            # With the inputs, because the operation may have written to them.
            self._compare(name, (result, inputs), (expected, exact))
            if not name.endswith("_"):
                self._compare_backward(name, func, own, exact, expected)
        return result

    def _is_new(self, name: str, inputs: Any) -> bool:
        """True if an operation has floating-point inputs of layouts with which it was not compared
        yet."""
        if not any(t.is_floating_point() for t in _tensors(inputs)):
            return False
        call = (name, *(_layout(leaf) for leaf in tree_flatten(inputs)[0]))
        is_new = call not in self._compared
        self._compared.add(call)
        return is_new

    def _compare_backward(self, name: str, func: Any, own: Any, exact: Any, expected: Any) -> None:
        wanted = _tensors(expected, learns=True)
        if not wanted:
            return
        roots = _tensors(func(*own[0], **own[1]), learns=True)
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in wanted]
        own_drawn = [g.to(t.device, t.dtype) for g, t in zip(drawn, roots, strict=True)]
        self._compare(
            f"the backward pass of {name}",
            torch.autograd.grad(roots, _tensors(own, learns=True), own_drawn, allow_unused=True),
            torch.autograd.grad(wanted, _tensors(exact, learns=True), drawn, allow_unused=True),
        )

    def _compare(self, name: str, found: Any, expected: Any) -> None:
        for one, exact in zip(_tensors(found), _tensors(expected), strict=True):
            exact = exact.detach().cpu().double()
            apart = torch.where(exact.isfinite(), one.detach().cpu().double() - exact, 0.0)
            norm = float(exact.nan_to_num(0, 0, 0).norm())
            distance = float(apart.norm()) / norm if norm else 0.0
            if self.wrong is None and not distance <= self._bound:
                self.wrong = (name, distance)


def _tensors(values: Any, *, learns: bool = False) -> list[Tensor]:
    """The tensors in nested values; with `learns` those with gradients only."""
    found = [value for value in tree_flatten(values)[0] if isinstance(value, Tensor)]
    return [tensor for tensor in found if tensor.requires_grad or not learns]


def _layout(leaf: Any) -> Any:
    """Shape, strides, dtype and gradient of a tensor; another argument as text."""
    if not isinstance(leaf, Tensor):
        return str(leaf)
    return leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad


def _exact(tensor: Tensor) -> Tensor:
    """A copy on the CPU, in fp64 if its values are floating-point numbers."""
    copied = tensor.detach().cpu()
    if not copied.is_floating_point():
        return copied.clone()
    return copied.to(torch.float64, copy=True).requires_grad_(tensor.requires_grad)
