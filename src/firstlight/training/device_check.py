"""Check a device by running a small training step and generating a few tokens, and comparing the
results with fp64 results on the CPU. If the results differ, each operation is compared in order to
find the faulty one.

Some PyTorch kernels have returned wrong numbers without raising an error, especially on Apple GPUs.
The loss is then wrong or falls more slowly, without any indication of the cause.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_flatten, tree_map_only

from firstlight.data.loader import Batch
from firstlight.errors import ConfigError, FirstlightError, StorageError, first_line
from firstlight.files.atomic import remove_file, write_json
from firstlight.files.cache import cache_folder
from firstlight.generation.batch import BatchDecoder
from firstlight.generation.few_rows import use_few_rows
from firstlight.hardware.device import Hardware, find_hardware, is_out_of_memory
from firstlight.methods import matmul_precision
from firstlight.methods.attention import choose_attention
from firstlight.methods.precision import BOUNDS, dtype_of, weights_distance
from firstlight.recipe import ResolvedRecipe, parse_resolved_recipe
from firstlight.recipe.resolve import facts_here
from firstlight.training.guard import DivergedError
from firstlight.training.micro_batch_trials import trial_program
from firstlight.training.program import TrainingProgram

#: Sizes of the models with which a device is checked. Their head dimension is 64, because GPUs have
#: fused kernels for it.
_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_MODELS: list[dict[str, Any]] = [
    {**_SIZES, "model_type": "gpt2"},
    {**_SIZES, "model_type": "llama", "num_key_value_heads": 1, "tie_word_embeddings": False},
]


class CheckedKeys(NamedTuple):
    """Settings from the recipe's `efficiency` section that are used when a device is checked.

    Attributes:
        precision: "fp32", "bf16" or "fp16".
        attention: the attention backend; see `EfficiencyConfig`.
    """

    precision: str
    attention: str = "sdpa"


def check_machine(tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """Run `check_device` on the CPU and on each GPU of this machine, in fp32 and in the precision
    that "auto" selects. Return the results.

    Args:
        tell: called with a message before each check.
    """
    names = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    names += ["mps"] if torch.backends.mps.is_available() else []
    results: list[dict[str, Any]] = []
    for name in names:
        try:
            hardware = find_hardware(name)
        except ConfigError as error:  # The installed version of torch does not support this GPU.
            unknown = {"device": name, "name": name, "precision": "", "attention": ""}
            results.append({**unknown, "problem": str(error)})
            continue
        device = hardware.device
        for precision in dict.fromkeys(("fp32", facts_here(hardware).precision)):
            tell(f"checking {device} in {precision}")
            # Select the GPU, because CUDA graphs are recorded on the current one.
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                results.append(check_device(hardware, CheckedKeys(precision)))
    return results


def require_checked_device(
    recipe: ResolvedRecipe, hardware: Hardware, tell: Callable[[str], None]
) -> None:
    """Check the GPU of a run, unless it has already passed the check or `run.check_device` is
    false. CPUs are not checked, because the reference is computed on the CPU.

    Raises:
        ConfigError: the GPU computes wrong values.
    """
    dtype = dtype_of(recipe.efficiency.precision)
    precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32")
    keys = CheckedKeys(precision, recipe.efficiency.attention)
    is_cpu = hardware.device.type == "cpu"
    if is_cpu or not recipe.run.check_device or _has_passed(hardware, keys):
        return
    tell(f"checking {hardware.device} ({hardware.name}) once: comparing a small step with the CPU")
    if (problem := check_device(hardware, keys)["problem"]) is not None:
        raise ConfigError(f"{problem}; set run.check_device to false to train anyway")


def check_device(hardware: Hardware, keys: CheckedKeys) -> dict[str, Any]:
    """Check a device. If it passes, record this in the cache.

    Returns:
        A dict of JSON values with the keys "device", "name", "precision", "attention" and
        "problem". The value of "problem" is one line that names the problem and a remedy, or None
        if the device has passed.
    """
    problem, name = None, f"{hardware.device} ({hardware.name})"
    try:
        if not _error(hardware, keys) <= 1:  # also true for NaN
            wrong = _wrong_operation(hardware, keys)
            problem = f"{name} computes wrong values in {keys.precision}: {wrong}"
    except (RuntimeError, MemoryError, FirstlightError) as error:
        if is_out_of_memory(error) or isinstance(error, MemoryError):
            return _result(
                hardware,
                keys,
                f"{name} has too little free memory for the check: end the other programs that "
                "use it",
            )
        problem = f"{name} fails in {keys.precision}: {first_line(error)}"
    result = _result(hardware, keys, problem and f"{problem}: {_advice(hardware, keys)}")
    # Ignore errors. If the file can't be written, the check is repeated the next time.
    with contextlib.suppress(StorageError, *_NO_CACHE):
        if problem is None:
            write_json(_passed_file(hardware, keys), result)
        else:
            remove_file(_passed_file(hardware, keys))
    return result


def _result(hardware: Hardware, keys: CheckedKeys, problem: str | None) -> dict[str, Any]:
    """Check a device and return the result described in `check_device`."""
    device = {"device": str(hardware.device), "name": hardware.name}
    return {**device, **keys._asdict(), "problem": problem}


#: Errors that are raised if the cache folder can't be read or the user does not have a home
#: directory.
_NO_CACHE = (OSError, RuntimeError)


def _has_passed(hardware: Hardware, keys: CheckedKeys) -> bool:
    """Return True if the cache contains a record that the device has passed."""
    try:
        return _passed_file(hardware, keys).exists()
    except _NO_CACHE:
        return False


def _passed_file(hardware: Hardware, keys: CheckedKeys) -> Path:
    """Return the path of the cache file that records that a device has passed."""
    nvidia = Path("/proc/driver/nvidia/version")
    # If NVIDIA's file does not exist, use the version of the operating system's kernel, which
    # contains the drivers of other GPUs. The file is also missing under WSL2.
    driver = nvidia.read_text() if nvidia.exists() else platform.release()
    name, device = hardware.name, hardware.device
    if device.type == "cuda":
        # Include the GPU's UUID, because only one of several identical GPUs may be faulty.
        name += f" {torch.cuda.get_device_properties(device).uuid}"
    facts = "\n".join((name, driver, str(torch.__version__), *keys))
    return cache_folder() / f"device-checks/{hashlib.sha256(facts.encode()).hexdigest()}.json"


def _wrong_operation(hardware: Hardware, keys: CheckedKeys) -> str:
    """Describe the first operation that returns a wrong result, including how far the result is
    from the correct one.
    """
    comparison = _Comparison(BOUNDS[keys.precision][1])
    with contextlib.suppress(RuntimeError, FirstlightError):
        _error(hardware, keys, comparison)
    return (
        comparison.wrong
        or "not in a single operation, but in the result of a training step or a generation"
    )


def _advice(hardware: Hardware, keys: CheckedKeys) -> str:
    """Return advice for a device that computes wrong values. If the device passes the check with a
    different setting, the advice recommends that setting first.
    """
    remedies = [] if hardware.device.type == "cpu" else ["run.device: cpu"]
    for key, value in (("attention", "blockwise"), ("attention", "plain"), ("precision", "fp32")):
        other = keys._replace(**{key: value})
        with contextlib.suppress(RuntimeError, FirstlightError):
            if other != keys and _error(hardware, other) <= 1:
                remedies.insert(0, f"efficiency.{key}: {value}")
                break
    return f"use {' or '.join([*remedies, 'another version of torch'])}"


def _error(hardware: Hardware, keys: CheckedKeys, watching: _Comparison | None = None) -> float:
    """Run a training step and generate tokens with each model, and compare the results with fp64
    computations on the CPU. Return the largest difference, as a multiple of the largest accepted
    difference. A device passes the check if the result is at most 1.

    Args:
        hardware: hardware with the device to check.
        keys: settings to use on the device.
        watching: mode that compares each operation while the device computes, or None.
    """
    most_loss, most_distance = BOUNDS[keys.precision]
    errors = []
    for number in range(len(_MODELS)):
        program, batch = _program(number, keys, hardware)
        try:
            with watching or contextlib.nullcontext():
                loss, moved = _train(program, batch)
        except DivergedError:  # The loss is not finite.
            return float("inf")
        exact_loss, exact_moved = _train_exactly(number)
        losses = [abs(loss - exact_loss), *_generate(program, batch.input_ids.cpu(), watching)]
        errors += [loss / most_loss for loss in losses]
        for one, exact in zip(moved, exact_moved, strict=True):
            errors.append(weights_distance([one], [exact], [torch.zeros(())]) / most_distance)
    # Python's `max` is not used, because it may skip NaN.
    return float(torch.tensor(errors).amax())


def _program(number: int, keys: CheckedKeys, hardware: Hardware) -> tuple[TrainingProgram, Batch]:
    """Create the training program for the model `_MODELS[number]`, and a batch for it."""
    # This large eps makes updates proportional to the gradients, so that they have the same
    # relative error as the gradients. With a small eps, an update would depend only on the sign of
    # the gradient, even if the gradient is merely a rounding error.
    optimizer = {"learning_rate": 5.0, "eps": 1.0, "weight_decay": 0.01}
    efficiency = {"matmul_precision": "highest", "compile": False, "loss_chunk_tokens": 24 * number}
    values = {
        "data": {"dir": "-", "seq_len": 48},
        "model": _MODELS[number],
        "batch": {"micro_batch_size": 2, "gradient_accumulation_steps": 2},
        "efficiency": {**efficiency, **keys._asdict()},
        "optimizer": optimizer,
    }
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        program, batch = trial_program(parse_resolved_recipe(values), hardware)
    return program, batch


def _train(program: TrainingProgram, batch: Batch) -> tuple[float, list[Tensor]]:
    """Run a step. Return its loss and a list that contains the norm of the gradient and the change
    of each parameter, all on the CPU.
    """
    before = [parameter.detach().cpu().clone() for parameter in program.model.parameters()]
    result = program.step([batch, batch], lr_scale=1.0)
    after = [parameter.detach().cpu() for parameter in program.model.parameters()]
    moved = [new - old for new, old in zip(after, before, strict=True)]
    return result.loss, [torch.tensor(result.grad_norm), *moved]


@functools.cache
def _train_exactly(number: int) -> tuple[float, list[Tensor]]:
    """Run `_train` in fp64 on the CPU."""
    program, batch = _program(number, CheckedKeys("fp32"), find_hardware("cpu"))
    program.model.double()
    return _train(program, batch)


@torch.no_grad()
def _generate(program: TrainingProgram, ids: Tensor, watching: _Comparison | None) -> list[float]:
    """Generate tokens with the program's model, and compare the results with an fp64 computation on
    the CPU. Return two differences in nats: the mean difference in the loss of the next token, and
    the mean increase in loss caused by differences in the most likely token.

    Args:
        program: program of the model, which is modified.
        ids: token ids of two sequences, int64 of shape [2, tokens], on the CPU.
        watching: mode that compares each operation during the generation, or None.
    """
    config, model = program.recipe.efficiency, program.model.eval().cpu()
    model.cast(torch.float64)
    choose_attention(model, "plain")
    exact_RTV = model(ids).log_softmax(-1)
    model.cast(program.dtype)
    # Sequences of different lengths need a mask, which some kernels do not support.
    takes_masks = config.attention not in ("flash", "cudnn", "flex")
    choose_attention(model, config.attention if takes_masks else "sdpa")
    if watching is None:
        # While operations are compared, do not use the kernels for small batches or recorded CUDA
        # graphs, because a TorchFunctionMode does not see the operations inside them.
        use_few_rows(model)
    decoder = BatchDecoder(model.to(program.hardware.device), 2, ids.shape[1])
    with watching or contextlib.nullcontext(), matmul_precision(config):
        # First process two sequences of different lengths in one pass. Then process more tokens of
        # both sequences, and finally more tokens of only the first sequence.
        found = [decoder.add_many([ids[0, :20].tolist(), ids[1, :23].tolist()])]
        places = [*enumerate(decoder.lengths)]  # (row, number of tokens) pairs
        for count in (2, 2, 2, 1, 1, 1):
            if len(decoder) > count:
                decoder.remove(1)
            found.append(decoder.step([int(ids[place]) for place in enumerate(decoder.lengths)]))
            places += enumerate(decoder.lengths)
        logits_NV = torch.cat(found)
        found_NV = logits_NV.float().softmax(-1).cpu().double().log()
        chosen_N1 = logits_NV.argmax(-1, keepdim=True).cpu()
    rows_N, lengths_N = torch.tensor(places).T
    exact_NV = exact_RTV[rows_N, lengths_N - 1]
    next_N1 = ids[rows_N, lengths_N][:, None]
    loss_N1 = found_NV.gather(1, next_N1) - exact_NV.gather(1, next_N1)
    added_N1 = exact_NV.amax(1, keepdim=True) - exact_NV.gather(1, chosen_N1)
    return [float(loss_N1.abs().mean()), float(added_N1.mean())]


class _Comparison(TorchFunctionMode):
    """Mode that runs each operation a second time in fp64 on the CPU with the same inputs and
    compares the results, until it finds a wrong result. It also compares the backward pass of each
    operation, using random gradients.

    Args:
        bound: largest accepted distance from the fp64 result, as a fraction of its L2 norm.

    Attributes:
        bound: largest accepted distance from the fp64 result, as a fraction of its L2 norm.
        wrong: description of the first operation with a wrong result, including its distance, or
            None.
    """

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = bound
        self.wrong: str | None = None
        self._compared: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operation and compare its result with the fp64 result."""
        inputs = (args, kwargs or {})
        name = resolve_name(func) or getattr(func, "__name__", str(func))
        leaves = tree_flatten(inputs)[0]
        # Compare each combination of an operation and its input layouts only once, because every
        # layer makes the same calls.
        layouts = [(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in leaves]
        call = str((name, layouts))
        has_values = any(t.is_floating_point() for t in _tensors(inputs)) and "empty" not in name
        if self.wrong is not None or not has_values or call in self._compared:
            return func(*args, **inputs[1])
        self._compared.add(call)
        own = tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), inputs)
        exact = tree_map_only(Tensor, _exact, inputs)
        result = func(*args, **inputs[1])
        # Some operations can't run on a different device or in a different dtype. They are not
        # compared.
        with contextlib.suppress(Exception):
            expected = func(*exact[0], **exact[1])
            # Also compare the inputs, because the operation may have written to them.
            self._compare(name, (result, inputs), (expected, exact))
            # Skip in-place operations, because running them again would modify their inputs twice.
            if not name.endswith("_") and (wanted := _tensors(expected, learns=True)):
                roots = _tensors(func(*own[0], **own[1]), learns=True)
                self._compare_backward(name, (own, roots), (exact, wanted))
        return result

    def _compare_backward(self, name: str, *passes: tuple[Any, list[Tensor]]) -> None:
        found = []
        for inputs, roots in passes:
            random = torch.Generator().manual_seed(0)
            # Give the gradients the same memory layout as the results, as in training. When their
            # layouts differed, the backward pass of cuDNN's attention returned wrong results (torch
            # 2.11 on an H200).
            drawn = [
                torch.empty_like(root).copy_(torch.randn(root.shape, generator=random))
                for root in roots
            ]
            leaves = _tensors(inputs, learns=True)
            found.append(torch.autograd.grad(roots, leaves, drawn, allow_unused=True))
        self._compare(f"the backward pass of {name}", *found)

    def _compare(self, name: str, found: Any, expected: Any) -> None:
        for pair in list(zip(_tensors(found), _tensors(expected), strict=True)):
            # Replace NaN and infinity with 0 before computing the difference. The results then
            # still differ, unless the fp64 result contains NaN or infinity in the same places.
            one, exact = (x.detach().cpu().double().nan_to_num(0, 0, 0) for x in pair)
            if not pair[1].is_floating_point():
                # An integer result, such as an index, is either right or wrong.
                one = one.where(one == exact, 0)
            distance = float((one - exact).norm() / exact.norm())
            if self.wrong is None and distance > self.bound:
                self.wrong = (
                    f"{name} differs from fp64 on the CPU by {distance:.1%} (limit: "
                    f"{self.bound:.1%})"
                )


def _tensors(values: Any, *, learns: bool = False) -> list[Tensor]:
    """Return the tensors in a nested structure. If `learns` is True, return only tensors that
    require gradients.
    """
    found = [value for value in tree_flatten(values)[0] if isinstance(value, Tensor)]
    return [tensor for tensor in found if tensor.requires_grad or not learns]


def _exact(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor on the CPU. Floating-point values are converted to fp64."""
    new = tensor.detach().cpu().clone()
    return new.double().requires_grad_(tensor.requires_grad) if new.is_floating_point() else new
