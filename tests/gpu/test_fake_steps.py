"""Complete training steps on fake CUDA tensors: devices, dtypes, shapes and kernels of each
recipe.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
import torch

from firstlight.data.loader import Batch
from firstlight.hardware.compiling import Compiler
from firstlight.hardware.device import find_hardware
from firstlight.models import build_model
from firstlight.models.moe import _has_kernel
from firstlight.optim.eight_bit import quiet_import
from firstlight.optim.new_model import NEW_MODEL
from firstlight.recipe import Recipe, ResolvedRecipe, parse_recipe
from firstlight.recipe.resolve import Facts, facts_here, resolve
from firstlight.training.program import TrainingProgram
from firstlight.training.starting_model import attach
from firstlight.training.step import run_passes, train_step

from .fake_cuda import FakeCuda, fake_cuda
from .no_gpu import hardware, needs_no_gpu

pytestmark = [pytest.mark.gpu, needs_no_gpu]

GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 500,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_experts": 4, "num_experts_per_tok": 2}
ROWS, TOKENS = 2, 128
#: Recipes are resolved for a GPU with bf16 and triton.
GPU = Facts("cuda", "bf16", Compiler("cuda", device="", cores=16), lambda _: 1e15)


def open_recipe_of(model: dict[str, Any] = GPT2, **keys: Any) -> Recipe:
    """Return a tiny unresolved recipe with keys `section__key`."""
    values: dict[str, Any] = {
        "model": model,
        "data": {"dir": "nowhere", "seq_len": TOKENS},
        "batch": {"micro_batch_size": ROWS},
        "efficiency": {"precision": "fp32", "compile": False, "loss_chunk_tokens": 0},
        "run": {"device": "cuda"},
    }
    for key, value in keys.items():
        section, _, name = key.partition("__")
        values.setdefault(section, {})[name] = value
    return parse_recipe(values)


def recipe_of(model: dict[str, Any] = GPT2, **keys: Any) -> ResolvedRecipe:
    """Return a tiny recipe with keys `section__key`, resolved for `GPU`."""
    return resolve(open_recipe_of(model, **keys), GPU)


def batch_of(recipe: ResolvedRecipe, *, pinned: bool = False) -> Batch:
    """Return a batch in host memory."""
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    masked = recipe.data.document_masking or recipe.preference is not None
    documents = torch.zeros(ROWS, TOKENS, dtype=torch.int32) if masked else None
    pairs = torch.zeros(ROWS, 4, dtype=torch.float64) if recipe.preference is not None else None
    return Batch(ids, ids.clone(), ids.numel(), documents, pairs)


def program_of(recipe: ResolvedRecipe) -> TrainingProgram:
    """Return the recipe's program on the fake GPU."""
    model = build_model(recipe.model, recipe.efficiency.vocab_multiple)
    if recipe.lora is not None:
        attach(model, recipe, hardware())
    return TrainingProgram(recipe, model, hardware())


def steps(cuda: FakeCuda, recipe: ResolvedRecipe, micro_batches: int = 1) -> TrainingProgram:
    """Run two steps of a recipe on the fake GPU, and record the second."""
    program = program_of(recipe)
    for _ in range(2):
        batches = [batch_of(recipe).to(hardware().device) for _ in range(micro_batches)]
        cuda.calls.clear()
        cuda.reads = 0
        program.step(batches, lr_scale=1.0)
    return program


#: Recipes, each with the dtype of its matrix products.
PRECISIONS = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "bf16_params": torch.bfloat16,
    "fp16": torch.float16,
}
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def require_on_gpu(cuda: FakeCuda, program: TrainingProgram) -> None:
    """Check that weights, gradients and moments are on the GPU, and that nothing was computed
    elsewhere.
    """
    assert {p.device.type for p in program.model.parameters()} == {"cuda"}
    assert {b.device.type for b in program.model.buffers()} <= {"cuda"}
    for name, tensor in program.optimizer.state_shards().items():
        # Step counters may be on the host, which reads them.
        assert tensor.device.type == "cuda" or not tensor.dim(), name
    assert not cuda.on_host(), cuda.on_host()[0]


@pytest.mark.parametrize("model", [GPT2, LLAMA, MIXTRAL], ids=["gpt2", "llama", "mixtral"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_train_step_runs_on_gpu_in_its_precision(model: dict[str, Any], precision: str) -> None:
    with fake_cuda() as (cuda, _):
        program = steps(cuda, recipe_of(model, efficiency__precision=precision), 2)
        require_on_gpu(cuda, program)
        inner = [c for c in cuda.named(*PRODUCTS) if len(c.inputs) > 1]
        dtypes = {dtype for call in inner for _, dtype, _ in call.inputs}
        # The table of rotary angles is computed in fp32.
        assert dtypes == {PRECISIONS[precision]}
        kinds = {p.dtype for p in program.model.parameters()}
        assert kinds == {torch.bfloat16 if precision == "bf16_params" else torch.float32}
        moments = {t.dtype for t in program.optimizer.state_shards().values()}
        assert moments == {torch.float32}


@pytest.mark.everywhere
@pytest.mark.parametrize("residual", [True, False])
def test_bf16_residual_is_added_and_normalised_without_fp32_copies(residual: bool) -> None:
    recipe = recipe_of(GPT2, efficiency__precision="bf16", efficiency__bf16_residual=residual)
    stream, kept = (ROWS, TOKENS, 64), torch.bfloat16 if residual else torch.float32
    with fake_cuda() as (cuda, _):
        require_on_gpu(cuda, steps(cuda, recipe))
        norms = [c.inputs[0] for c in cuda.named("native_layer_norm")]
        assert norms == [("cuda", kept, stream)] * 5
        sums = [c.outputs[0][1] for c in cuda.named("add") if c.outputs[0][2] == stream]
        # The sum of the two embeddings is fp32; each layer adds to the stream twice.
        assert sums[:5] == [torch.float32, *[kept] * 4]


#: Keys of optimizers whose update skips a step without the host.
SKIPPING: dict[str, dict[str, Any]] = {
    "adamw": {},
    "cautious adamw": {"optimizer__cautious_weight_decay": True},
    "muon": {"optimizer__name": "muon"},
    "muon of new models": {
        f"optimizer__{key}": value for key, value in NEW_MODEL["optimizer"].items()
    },
    "lion": {"optimizer__name": "lion"},
    "adafactor": {"optimizer__name": "adafactor"},
}


@pytest.mark.parametrize("precision", ["bf16", "bf16_params", "fp16"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.everywhere if "new models" in name else ())
        for name in SKIPPING
    ],
)
def test_train_step_waits_once_for_loss_and_norm_after_update(name: str, precision: str) -> None:
    """The update waits neither for the clipping factor nor for the host's decision: a wait would
    leave the GPU idle while the update is launched.
    """
    with fake_cuda() as (cuda, _):
        steps(cuda, recipe_of(LLAMA, efficiency__precision=precision, **SKIPPING[name]), 4)
        assert cuda.reads == 1
        assert cuda.last_read == len(cuda.calls)


@pytest.mark.everywhere
def test_adamw_clips_without_pass_over_gradients() -> None:
    with fake_cuda() as (cuda, _):
        steps(cuda, recipe_of(LLAMA, efficiency__precision="bf16"))
        assert not cuda.named("_foreach_mul_")
        updates = cuda.named("_fused_adamw_")
        assert len(updates) == 2  # with weight decay, and without
        for update in updates:
            # In addition to five tensors per parameter: `grad_scale` and `found_inf`.
            assert len(update.inputs) % 5 == 2


#: Operators that do not launch a kernel.
VIEWS: tuple[str, ...] = (
    "alias",
    "detach",
    "expand",
    "lift_fresh",
    "scalar_tensor",
    "select",
    "slice",
    "t",
)
VIEWS += ("transpose", "unbind", "unsqueeze", "view", "_unsafe_view")
VIEWS += ("_record_function_enter_new", "_record_function_exit")


@pytest.mark.everywhere
@pytest.mark.parametrize(
    ("name", "most"), [("adamw", 7), ("muon of new models", 250), ("lion", 75), ("adafactor", 420)]
)
def test_update_launches_at_most_limited_number_of_kernels(name: str, most: int) -> None:
    """For a model with two layers: 16 matrices in 4 sizes, and 5 vectors."""
    with fake_cuda() as (cuda, _):
        program = steps(cuda, recipe_of(LLAMA, efficiency__precision="bf16", **SKIPPING[name]))
        for parameter in program.optimizer.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        found_inf = torch.zeros((), device="cuda")
        cuda.calls.clear()
        program.optimizer.step(found_inf)
        assert len([one for one in cuda.calls if one.name.split(".")[1] not in VIEWS]) <= most


def test_optimizer_in_backward_updates_small_parameters_together() -> None:
    model, keys = METHODS["update in the backward pass"]
    with fake_cuda() as (cuda, _):
        steps(cuda, recipe_of(model, efficiency__precision="bf16_params", **keys))
        assert len(cuda.named("_fused_adamw_")) == 2  # with weight decay, and without
        assert len(cuda.named("_foreach_copy_")) == 1


ATTENTION = {
    "sdpa": "_scaled_dot_product_cudnn_attention",
    "flash": "_scaled_dot_product_flash_attention",
    "efficient": "_scaled_dot_product_efficient_attention",
    "cudnn": "_scaled_dot_product_cudnn_attention",
    "math": "_safe_softmax",
    "plain": "_softmax",
    "blockwise": "blockwise_attention",
}


@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("attention", ATTENTION)
def test_each_attention_setting_uses_its_kernel(model: dict[str, Any], attention: str) -> None:
    recipe = recipe_of(model, efficiency__precision="bf16", efficiency__attention=attention)
    with fake_cuda() as (cuda, _):
        require_on_gpu(cuda, steps(cuda, recipe))
        assert len(cuda.named(ATTENTION[attention])) == 2
        backward = cuda.named(f"{ATTENTION[attention]}_backward")
        assert attention in ("math", "plain") or len(backward) == 2


@pytest.mark.parametrize("attention", ["auto", "sdpa", "efficient", "math", "plain", "flex"])
@pytest.mark.parametrize("window", [None, 32], ids=["documents", "documents and a window"])
def test_document_masking_uses_kernels_that_take_masks(
    attention: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LLAMA if window is None else LLAMA | {"model_type": "mistral", "sliding_window": window}
    recipe = recipe_of(
        model,
        efficiency__precision="bf16",
        efficiency__attention=attention,
        data__document_masking=True,
    )
    masks = flex_of_blocks(monkeypatch)
    with fake_cuda() as (cuda, _):
        require_on_gpu(cuda, steps(cuda, recipe))
        assert not cuda.named("_scaled_dot_product_flash_attention")
        assert len(masks) == (4 if attention in ("auto", "flex") else 0)


def flex_of_blocks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Make flex attention use a block mask and compute nothing: triton writes its kernel. Returns
    the masks with which it was called.
    """
    masks: list[Any] = []

    def flex(q: Any, k: Any, v: Any, *, block_mask: Any, enable_gqa: bool, **_: Any) -> Any:
        assert block_mask.kv_num_blocks.device == q.device
        assert enable_gqa == (q.shape[1] != k.shape[1])
        masks.append(block_mask)
        groups = q.shape[1] // k.shape[1]
        return q + k.repeat_interleave(groups, 1) + v.repeat_interleave(groups, 1)

    monkeypatch.setattr("firstlight.methods.attention._compiled_flex", lambda: flex)
    return masks


METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "checkpointing full": (LLAMA, {"efficiency__activation_checkpointing": "full"}),
    "checkpointing selective": (LLAMA, {"efficiency__activation_checkpointing": "selective"}),
    "checkpointing of experts": (MIXTRAL, {"efficiency__activation_checkpointing": "full"}),
    "loss in chunks": (LLAMA, {"efficiency__loss_chunk_tokens": 96}),
    "padded vocabulary": (GPT2, {"efficiency__vocab_multiple": 128}),
    "update in the backward pass": (
        LLAMA,
        {"efficiency__optimizer_in_backward": True, "optimizer__max_grad_norm": 0.0},
    ),
    "dropout": (GPT2 | {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}, {}),
    "dropout recomputed": (
        GPT2 | {"resid_pdrop": 0.1},
        {"efficiency__activation_checkpointing": "full"},
    ),
    "lora": (LLAMA, {"lora__rank": 4}),
    "lora dropout": (GPT2, {"lora__rank": 4, "lora__dropout": 0.1}),
    "dora": (LLAMA, {"lora__rank": 4, "lora__dora": True}),
    "fused": (LLAMA, {"optimizer__implementation": "fused"}),
    "foreach": (LLAMA, {"optimizer__implementation": "foreach"}),
    "for-loop": (LLAMA, {"optimizer__implementation": "for-loop"}),
    "muon": (LLAMA, {"optimizer__name": "muon"}),
    "muon of experts": (MIXTRAL, {"optimizer__name": "muon"}),
    "adafactor": (LLAMA, {"optimizer__name": "adafactor"}),
    "adafactor of torch": (
        LLAMA,
        {"optimizer__name": "adafactor", "optimizer__adafactor_variant": "torch"},
    ),
    "lion": (LLAMA, {"optimizer__name": "lion"}),
    "sgd": (GPT2, {"optimizer__name": "sgd"}),
}


@pytest.mark.parametrize(
    ("method", "precision"),
    [
        (method, precision)
        for method in METHODS
        for precision in ("bf16", "bf16_params", "fp16")
        # Rejected: an update in the backward pass can't be undone after an overflow.
        if (method, precision) != ("update in the backward pass", "fp16")
    ],
)
def test_each_method_runs_on_gpu(method: str, precision: str) -> None:
    model, keys = METHODS[method]
    with fake_cuda() as (cuda, _):
        program = steps(cuda, recipe_of(model, efficiency__precision=precision, **keys))
        require_on_gpu(cuda, program)


@pytest.mark.parametrize("lora", [{}, {"lora__rank": 4}], ids=["all weights", "lora"])
def test_preference_step_stays_on_gpu(lora: dict[str, Any]) -> None:
    keys = {"preference__beta": 0.1, "data__document_masking": True, **lora}
    recipe = recipe_of(LLAMA, efficiency__precision="bf16", efficiency__attention="sdpa", **keys)
    with fake_cuda() as (cuda, _):
        program = steps(cuda, recipe)
        require_on_gpu(cuda, program)
        assert program.preference is not None
        assert program.preference._sums is not None
        assert program.preference._sums.device.type == "cuda"


LIBRARIES: dict[str, tuple[str, dict[str, Any]]] = {
    "8-bit": ("bitsandbytes.optim", {"optimizer__name": "adamw8bit"}),
    "paged": ("bitsandbytes.optim", {"optimizer__name": "paged_adamw8bit"}),
    "fp8": ("torchao.float8", {"efficiency__precision": "fp8"}),
    "fp8 of gpt2": ("torchao.float8", {"efficiency__precision": "fp8"}),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("method", LIBRARIES)
def test_library_methods_stay_on_gpu(method: str) -> None:
    module, keys = LIBRARIES[method]
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"not installed: {module}")
    # They check for a GPU when they are imported.
    with quiet_import():
        importlib.import_module(module)
    with fake_cuda() as (cuda, _):
        model = GPT2 if method == "fp8 of gpt2" else LLAMA
        program = steps(cuda, recipe_of(model, **keys))
        require_on_gpu(cuda, program)
        moments = program.optimizer.state_shards()
        dtypes = {t.dtype for n, t in moments.items() if n.endswith((".state1", ".exp_avg"))}
        kinds = [type(m).__name__ for m in program.model.modules()]
        if method == "fp8":
            assert kinds.count("Float8Linear") == 2 * 7
        elif method == "fp8 of gpt2":
            # torchao's fp8 tensors have the dtype of the weight, which autocast casts in the
            # forward pass: the products for the gradients of four inputs in each layer.
            weights = [c.inputs[1] for c in cuda.named("mm") if c.inputs[1][1] == torch.float32]
            assert len(weights) == 2 * 4
        else:
            assert torch.uint8 in dtypes


def test_dora_norms_are_fp32_under_autocast() -> None:
    recipe = recipe_of(LLAMA, efficiency__precision="bf16", lora__rank=4, lora__dora=True)
    with fake_cuda() as (cuda, _):
        steps(cuda, recipe)
        changes = [c for c in cuda.named("mm") if (4 in c.inputs[0][2]) and 4 in c.inputs[1][2]]
        wide = [c for c in changes if {dtype for _, dtype, _ in c.inputs} == {torch.float32}]
        assert len(wide) >= 2 * 2
        norms = cuda.named("linalg_vector_norm")
        assert {c.inputs[0][1] for c in norms} == {torch.float32}


def test_grouped_matmul_is_used_where_cuda_supports_it() -> None:
    """In bf16, with rows of a multiple of 16 bytes, from compute capability 8.0."""
    with fake_cuda():
        for dtype, columns, expected in (
            (torch.bfloat16, 64, True),
            (torch.bfloat16, 60, False),
            (torch.float16, 64, False),
            (torch.float32, 64, False),
        ):
            weight = torch.empty(4, 32, columns, dtype=dtype, device="cuda")
            assert _has_kernel(weight) is expected


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        (name, implementation)
        for name in ("adamw", "adafactor", "muon", "sgd")
        for implementation in ("auto", "fused", "foreach", "for-loop")
        if (name, implementation) != ("adafactor", "fused")
    ],
)
def test_optimizer_moments_are_restored_to_their_device(name: str, implementation: str) -> None:
    """From a checkpoint, where they are on the host; a fused step counter is on the GPU."""
    keys = {"optimizer__name": name, "optimizer__implementation": implementation}
    with fake_cuda() as (cuda, _):
        recipe = recipe_of(LLAMA, **keys)
        program = steps(cuda, recipe)
        before = {n: t.device.type for n, t in program.optimizer.state_shards().items()}
        saved = program.optimizer.state_tensors()
        assert {t.device.type for t in saved.values()} == {"cpu"}
        program.optimizer.load_state_tensors(saved)
        after = {n: t.device.type for n, t in program.optimizer.state_shards().items()}
        assert after == before
        program.step([batch_of(recipe).to(hardware().device)], lr_scale=1.0)


def test_unused_memory_is_released_at_fixed_step_interval() -> None:
    recipe = recipe_of(efficiency__empty_cache_steps=2)
    with fake_cuda() as (_, asked):
        program = program_of(recipe)
        given = []
        for _ in range(4):
            program.step([batch_of(recipe).to(hardware().device)], lr_scale=1.0)
            given.append(asked.names().count("empty_cache"))
    assert given == [0, 1, 1, 2]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_nf4_weights_stay_on_gpu(model: dict[str, Any], precision: str) -> None:
    keys = {"lora__rank": 4, "lora__quantize": "nf4", "efficiency__precision": precision}
    # It checks for a GPU when it is imported.
    pytest.importorskip("bitsandbytes.functional")
    with fake_cuda() as (cuda, _):
        program = steps(cuda, recipe_of(model, **keys))
        require_on_gpu(cuda, program)
        linear = cuda.named("nf4_linear")
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        assert linear
        assert {c.outputs[0][1] for c in linear} == {half}
        unpacked = cuda.named("dequantize_4bit")
        assert {c.outputs[0][1] for c in unpacked} == {half}


@pytest.mark.everywhere
@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_auto_precision_on_t4_is_fp16_with_loss_scale_and_efficient_attention(
    model: dict[str, Any],
) -> None:
    with fake_cuda(capability=(7, 5)) as (cuda, _):
        written = open_recipe_of(model, efficiency__precision="auto", optimizer__name="muon")
        recipe = resolve(written, facts_here(find_hardware("cuda")))
        assert recipe.efficiency.precision == "fp16"
        program = steps(cuda, recipe)
        assert program.scaler is not None
        assert len(cuda.named("_scaled_dot_product_efficient_attention")) == 2
        inner = [c for c in cuda.named(*PRODUCTS) if len(c.inputs) > 1]
        assert {d for c in inner for _, d, _ in c.inputs} == {torch.float16}


@pytest.mark.everywhere
@pytest.mark.parametrize(
    ("capability", "kernel"),
    [
        ((10, 0), "cudnn"),
        ((9, 0), "cudnn"),
        ((8, 9), "flash"),
        ((8, 0), "flash"),
        ((7, 5), "efficient"),
    ],
)
def test_train_step_uses_first_attention_kernel_in_torch_order(
    capability: tuple[int, int], kernel: str
) -> None:
    recipe = recipe_of(GPT2, efficiency__precision="fp16")
    with fake_cuda(capability=capability) as (cuda, _):
        steps(cuda, recipe)
        assert len(cuda.named(f"_scaled_dot_product_{kernel}_attention")) == 2


class _Event:
    """torch.cuda.Event, which notes how many operators had been started when the host waited."""

    cuda: FakeCuda
    waited: list[int]

    def record(self) -> None:
        """Stands for the end of a copy."""

    def synchronize(self) -> None:
        self.waited.append(len(self.cuda.calls))


def test_next_passes_are_started_before_host_waits_for_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    with fake_cuda() as (cuda, _):
        _Event.cuda, _Event.waited = cuda, []
        recipe = recipe_of(LLAMA)
        program, ends = program_of(recipe), list[int]()
        batch = batch_of(recipe).to(hardware().device)

        def run_ahead() -> bool:
            run_passes(program.loss_sum, program.optimizer, [batch], None, program.engine)
            ends.append(len(cuda.calls))
            return True

        reads = cuda.reads
        result = train_step(program.loss_sum, program.optimizer, [batch], run_ahead=run_ahead)
        assert (result.skipped, cuda.reads) == (False, reads)
        update = max(n for n, call in enumerate(cuda.calls) if "_fused_adamw_" in call.name)
        assert update < ends[0] - 10
        assert ends == _Event.waited
        assert all(p.grad is not None for p in program.model.parameters())
