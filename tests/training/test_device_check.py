from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_recipe import plain_recipe
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from builders import slow_but
from firstlight.cli.main import main
from firstlight.errors import ConfigError
from firstlight.generation import few_rows
from firstlight.hardware.device import Hardware, find_hardware
from firstlight.recipe import ResolvedRecipe
from firstlight.training import device_check, start
from firstlight.training.device_check import CheckedKeys, check_device, require_checked_device
from firstlight.training.loop import train

CPU = find_hardware("cpu")
GPU = Hardware(torch.device("cuda"), "a GPU of a test", 2**33, bf16=True)


class WrongKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A device on which some kernels are wrong, except in fp64.

    Args:
        names: kernel names, such as "aten::mm".
        factor: factor applied to the kernels' floating-point results; indices are increased by one.
    """

    def __init__(self, *names: str, factor: float = 1.01) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names, self.factor = names, factor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator and change its result."""
        result = func(*args, **(kwargs or {}))
        inputs = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        if func._schema.name in self.names and not any(x.dtype == torch.float64 for x in inputs):
            pairs = zip(args, func._schema.arguments, strict=False)
            written = [x for x, one in pairs if one.alias_info and one.alias_info.is_write]
            for tensor in tree_flatten(written or result)[0]:
                if tensor.is_floating_point():
                    tensor.mul_(self.factor)
                else:
                    tensor.add_(1).remainder_(300)
        return result


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    few_rows.steps()  # compiled kernels are stored in the user's cache
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FIRSTLIGHT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


_FUNCTIONAL, _TENSOR = "torch.nn.functional", "torch.Tensor"


#: Kernel -> the operation named in the message if the kernel is wrong.
_OPERATIONS = {
    "aten::embedding": f"{_FUNCTIONAL}.embedding",
    "aten::embedding_dense_backward": f"the backward pass of {_FUNCTIONAL}.embedding",
    "aten::native_layer_norm": f"{_FUNCTIONAL}.layer_norm",
    "aten::native_layer_norm_backward": f"the backward pass of {_FUNCTIONAL}.layer_norm",
    "rms_norm": f"{_FUNCTIONAL}.rms_norm",
    "aten::addmm": "torch.addmm",
    "aten::mm": "the backward pass of torch.addmm",
    "aten::cos": f"{_TENSOR}.cos",
    "aten::sin": f"{_TENSOR}.sin",
    "aten::neg": f"{_TENSOR}.neg",
    "aten::cat": "torch.cat",
    "attention": f"{_FUNCTIONAL}.scaled_dot_product_attention",
    "attention_backward": f"the backward pass of {_FUNCTIONAL}.scaled_dot_product_attention",
    "aten::gelu": f"{_FUNCTIONAL}.gelu",
    "aten::gelu_backward": f"the backward pass of {_FUNCTIONAL}.gelu",
    "aten::silu": f"{_FUNCTIONAL}.silu",
    "aten::silu_backward": f"the backward pass of {_FUNCTIONAL}.silu",
    "aten::_log_softmax": f"{_FUNCTIONAL}.cross_entropy",
    "aten::nll_loss_backward": f"the backward pass of {_FUNCTIONAL}.cross_entropy",
    "firstlight::linear_cross_entropy": "firstlight.linear_cross_entropy.default",
    "aten::_foreach_norm": "_foreach_norm",
    "aten::_foreach_mul_": "_foreach_mul_",
    "aten::_fused_adamw_": "_fused_adamw_",
    "aten::index_put_": f"{_TENSOR}.__setitem__",
    "aten::_softmax": f"{_TENSOR}.softmax",
    "aten::argmax": f"{_TENSOR}.argmax",
}

#: The cases of `make test`: forward, backward, loss, update, cache and sampling.
_QUICK = (
    "aten::mm",
    "attention_backward",
    "firstlight::linear_cross_entropy",
    "aten::_fused_adamw_",
    "aten::index_put_",
)


@pytest.mark.parametrize("kernel", slow_but(_QUICK, _OPERATIONS))
def test_device_check_wrong_kernel_names_operation(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_check, "_advice", lambda *_: "advice")
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    kernels = {
        "attention": (attention,),
        "attention_backward": (f"{attention}_backward",),
        # Some torch versions have a fused kernel.
        "rms_norm": ("aten::rsqrt", "aten::_fused_rms_norm"),
    }
    with WrongKernels(*kernels.get(kernel, (kernel,))):
        problem = check_device(CPU, CheckedKeys("fp32"))["problem"]
    assert f"computes wrong values in fp32: {_OPERATIONS[kernel]} differs from fp64 " in problem
    assert problem.endswith(" (limit: 0.1%): advice")


def test_device_check_kernel_returning_nan_names_operation() -> None:
    with WrongKernels("aten::gelu", factor=math.nan):
        problem = check_device(CPU, CheckedKeys("fp32"))["problem"]
    assert "torch.nn.functional.gelu differs from fp64 on the CPU by 100.0%" in problem
    assert problem.endswith(": use another version of torch")


def test_device_check_missing_kernel_reports_error() -> None:
    class Missing(WrongKernels):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func._schema.name == "aten::silu":
                raise NotImplementedError("silu is not built\nfor this device")
            return func(*args, **(kwargs or {}))

    with Missing():
        problem = check_device(CPU, CheckedKeys("fp32"))["problem"]
    assert (
        problem
        == f"cpu ({CPU.name}) fails in fp32: silu is not built: use another version of torch"
    )


def test_device_check_wrong_attention_kernel_suggests_one_that_passes() -> None:
    with WrongKernels("aten::_scaled_dot_product_flash_attention_for_cpu"):
        problem = check_device(CPU, CheckedKeys("fp32"))["problem"]
    assert problem.endswith(": use efficiency.attention: blockwise or another version of torch")


def test_device_check_wrong_bf16_kernel_suggests_precision_that_passes() -> None:
    class WrongInBf16(WrongKernels):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if not any(isinstance(x, Tensor) and x.dtype == torch.bfloat16 for x in args):
                return func(*args, **(kwargs or {}))
            return super().__torch_dispatch__(func, types, args, kwargs)

    with WrongInBf16("aten::silu", factor=1.3):
        problem = check_device(CPU, CheckedKeys("bf16"))["problem"]
    assert "in bf16: torch.nn.functional.silu differs from fp64 on the CPU by 30.0%" in problem
    assert problem.endswith(": use efficiency.precision: fp32 or another version of torch")


def test_device_check_wrong_index_in_bf16_names_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "_advice", lambda *_: "advice")
    with WrongKernels("aten::argmax"):
        problem = check_device(CPU, CheckedKeys("bf16"))["problem"]
    assert "torch.Tensor.argmax differs from fp64 on the CPU by 100.0% (limit: 5.0%)" in problem


@pytest.mark.parametrize("attention", ["sdpa", "plain", "blockwise"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_device_check_correct_device_passes(precision: str, attention: str) -> None:
    keys = CheckedKeys(precision, attention)
    random = torch.get_rng_state()
    assert check_device(CPU, keys)["problem"] is None
    assert torch.equal(torch.get_rng_state(), random)
    # Far from the bound, so that other correct kernels also pass.
    assert device_check._error(CPU, keys) < 0.3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_device_check_correct_device_names_no_operation(precision: str) -> None:
    fault = device_check._wrong_operation(CPU, CheckedKeys(precision))
    assert fault.startswith("not in a single operation")


def test_info_check_lists_each_device_and_fails_for_wrong_one(
    capfd: pytest.CaptureFixture[str],
) -> None:
    passed = device_check._passed_file(CPU, CheckedKeys("fp32"))
    assert main(["info", "--check"]) == 0
    assert "cpu in fp32      passed\n" in capfd.readouterr().out
    assert json.loads(passed.read_text())["device"] == "cpu"
    with WrongKernels("aten::silu"):
        assert main(["info", "--check", "--json"]) == 1
    checks = json.loads(capfd.readouterr().out)["checks"]
    assert "torch.nn.functional.silu differs from fp64 on the CPU by 1.0%" in checks[0]["problem"]
    assert not passed.exists()
    assert main(["info", "model", "--check"]) == 2
    assert "--check applies to this machine" in capfd.readouterr().err


_MODEL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def _recipe(**run: Any) -> ResolvedRecipe:
    efficiency = {"precision": "bf16_params", "attention": "plain"}
    data = {"dir": "-", "seq_len": 16}
    return plain_recipe({"data": data, "model": _MODEL, "efficiency": efficiency, "run": run})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return the properties of `GPU` in torch's format."""
    properties = SimpleNamespace(uuid="first")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    return properties


@pytest.mark.usefixtures("gpu")
def test_device_check_runs_until_gpu_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    problem = "the GPU computes wrong values: use another"

    def check(hardware: Hardware, keys: CheckedKeys) -> dict[str, Any]:
        checked.append((hardware, keys))
        return {"problem": problem if len(checked) == 1 else None}

    told: list[str] = []
    monkeypatch.setattr(device_check, "check_device", check)
    require_checked_device(_recipe(), CPU, told.append)
    require_checked_device(_recipe(check_device=False), GPU, told.append)
    assert not checked
    assert not told
    with pytest.raises(ConfigError, match=f"^{problem}; set run.check_device to false"):
        require_checked_device(_recipe(), GPU, told.append)
    require_checked_device(_recipe(), GPU, told.append)
    assert checked == [(GPU, CheckedKeys("bf16", "plain"))] * 2
    assert len(told) == 2
    passed = device_check._passed_file(*checked[0])
    passed.parent.mkdir(exist_ok=True)
    passed.touch()
    require_checked_device(_recipe(), GPU, told.append)
    assert len(checked) == 2


def test_device_check_cache_file_depends_on_device_torch_and_settings(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [
        device_check._passed_file(hardware, keys)
        for hardware in (CPU, GPU)
        for keys in (CheckedKeys("fp32"), CheckedKeys("bf16"), CheckedKeys("bf16", "plain"))
    ]
    gpu.uuid = "second"  # with the same name
    paths.append(device_check._passed_file(GPU, CheckedKeys("fp32")))
    monkeypatch.setattr(torch, "__version__", "99.0")
    paths.append(device_check._passed_file(CPU, CheckedKeys("fp32")))
    assert len(set(paths)) == len(paths)


@pytest.mark.usefixtures("gpu")
def test_device_check_unreadable_cache_does_not_end_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", fail)
    assert not device_check._has_passed(GPU, CheckedKeys("fp32"))


def test_device_check_without_free_memory_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    monkeypatch.setattr(device_check, "_error", fail)
    problem = check_device(CPU, CheckedKeys("fp32"))["problem"]
    assert problem == (
        f"cpu ({CPU.name}) has too little free memory for the check: end the other programs that "
        "use it"
    )


def test_device_check_gpu_without_torch_kernels_does_not_hide_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def find(name: str) -> Hardware:
        if name == "cuda:0":
            raise ConfigError("no code")
        return CPU

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(device_check, "find_hardware", find)
    monkeypatch.setattr(device_check, "check_device", lambda *_: {"problem": None})
    found = [check["problem"] for check in device_check.check_machine(lambda _: None)]
    assert found.count("no code") == 1
    assert found.count(None) == len(found) - 1 >= 2


def test_train_on_failing_gpu_raises_before_creating_folder(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise ConfigError("wrong")

    monkeypatch.setattr(start, "require_checked_device", refuse)
    run = tmp_path / "run"
    values = {"model": _MODEL, "data": {"dir": str(data), "seq_len": 16}, "run": {"dir": str(run)}}
    with pytest.raises(ConfigError, match="wrong"):
        train(values)
    assert not run.exists()
