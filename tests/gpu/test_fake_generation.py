"""Loading, generation and evaluation on fake CUDA tensors: devices, dtypes and shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from firstlight.evaluation.scores import TokenPair, likelihoods
from firstlight.generation.batch import BatchDecoder, CompiledStep, RecordedSteps, _settings
from firstlight.generation.beams import _Beam, beam_search
from firstlight.generation.config import SamplingConfig
from firstlight.generation.continuation import Continuation
from firstlight.generation.engine import first_tokens, next_tokens, pieces_of
from firstlight.generation.few_rows import use_few_rows
from firstlight.methods.attention import choose_attention, varying_lengths
from firstlight.models import Model, build_model, moe
from firstlight.weights.loading import load_weights
from firstlight.weights.stored import StoredTensor

from .fake_cuda import FakeCuda, fake_cuda
from .no_gpu import hardware, needs_no_gpu
from .test_fake_steps import GPT2, LLAMA, MIXTRAL, recipe_of

pytestmark = [pytest.mark.gpu, needs_no_gpu]

FAMILIES = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": LLAMA | {"model_type": "mistral", "sliding_window": 16},
    "mixtral": MIXTRAL,
}


def model_on_gpu(config: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> Model:
    recipe = recipe_of(config)
    model = build_model(recipe.model).to(dtype).to(hardware().device).eval()
    use_few_rows(model)
    return model


def nothing_on_host(cuda: FakeCuda) -> bool:
    """Return True if operators ran, all of them on the GPU, and none of them plans for each
    length.
    """
    assert not cuda.on_host(), cuda.on_host()[0]
    assert not cuda.named("_scaled_dot_product_cudnn_attention")
    return bool(cuda.calls)


@pytest.mark.parametrize("family", FAMILIES)
def test_batch_with_joining_and_leaving_texts_stays_on_gpu(family: str) -> None:
    with fake_cuda() as (cuda, _), torch.inference_mode():
        model = model_on_gpu(FAMILIES[family])
        decoder = BatchDecoder(model, 3, 200, reuse_prefixes=True)
        cuda.calls.clear()
        cuda.waits = 0
        vocab = model.config.vocab_size
        assert decoder.add([1, 2, 3]).shape == (vocab,)
        assert decoder.step([4]).shape == (1, vocab)
        decoder.add([1, 2, 3, 7])
        decoder.add([5] * 80)
        logits = decoder.step([1, 2, 3])
        assert (tuple(logits.shape), logits.device.type) == ((3, vocab), "cuda")
        decoder.remove(0)
        assert decoder.step([4, 4]).dtype == torch.bfloat16
        assert nothing_on_host(cuda)
        products = cuda.named("mm", "addmm", "bmm")
        assert {dtype for call in products for _, dtype, _ in call.inputs} == {torch.bfloat16}
        decoder.remove(0)
        assert decoder.add_many([[1, 2, 3], [4, 5, 6, 7]]).shape == (2, vocab)
        assert not cuda.named("_scaled_dot_product_cudnn_attention")
        assert cuda.waits == 0


@pytest.mark.everywhere
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_step_is_not_read_by_cpu(family: str) -> None:
    with fake_cuda() as (cuda, _), torch.inference_mode():
        model = model_on_gpu(FAMILIES[family])
        decoder = BatchDecoder(model, 3, 200)
        assert isinstance(decoder._ragged, RecordedSteps)
        cuda.calls.clear()
        reads = cuda.reads
        with varying_lengths():
            decoder._ragged._run(3, 128)
        assert (cuda.reads, nothing_on_host(cuda)) == (reads, True)
        # The numbers of the rows, which are the same in all layers, are computed once.
        rows = [call for call in cuda.named("arange") if call.outputs[0][2] == (3,)]
        assert len(rows) == 1


@pytest.mark.parametrize(
    ("capability", "dtype", "hip", "is_recorded"),
    [
        ((9, 0), torch.bfloat16, None, True),
        ((10, 0), torch.bfloat16, None, True),
        ((9, 0), torch.bfloat16, "7.0", False),
        ((9, 0), torch.float32, None, False),
        ((8, 0), torch.bfloat16, None, False),
        ((12, 0), torch.bfloat16, None, False),
    ],
)
def test_expert_steps_are_recorded_if_kernel_finds_rows(
    capability: tuple[int, int],
    dtype: torch.dtype,
    hip: str | None,
    is_recorded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch 2.11 to 2.14: `_grouped_mm_cuda` has a fast path for these GPUs."""
    monkeypatch.setattr(torch.version, "hip", hip)
    with fake_cuda(capability=capability) as (cuda, _), torch.inference_mode():
        model = model_on_gpu(MIXTRAL, dtype)
        decoder = BatchDecoder(model, 3, 200)
        assert isinstance(decoder._ragged, RecordedSteps) == is_recorded
        if is_recorded:
            (weight, *_) = [w for name, w in model.named_parameters() if "gate_up_proj" in name]
            ends_E = torch.zeros(len(weight), dtype=torch.int32, device="cuda")
            cuda.reads = 0
            # Its code, which the fake GPU does not run in a forward pass.
            grouped = moe._grouped_linear._init_fn
            assert len(grouped(weight.new_zeros(6, weight.shape[2]), weight, ends_E)) == 6
            assert cuda.reads == 0


class Anything:
    """A constraint that allows any id of the tiny vocabulary."""

    def __init__(self) -> None:
        self._allowed_V = torch.ones(512, dtype=torch.bool)

    def allowed(self, vocab_size: int) -> torch.Tensor:
        """Return True for all ids."""
        return self._allowed_V

    def push(self, token_id: int) -> bool:
        """Return False: the text is never complete."""
        return False


_KINDS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0},
    "sampled": {"top_k": 5, "top_p": 0.9, "min_p": 0.1},
    "log-probabilities": {"logprobs": 3, "choices": 2},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "logit_bias": {4: 1.0}},
    "grammar": {"temperature": 0.5},
}


@pytest.mark.parametrize("kind", [*_KINDS, pytest.param("all", marks=pytest.mark.everywhere)])
def test_decoding_step_reads_once_and_does_not_wait_for_upload(kind: str) -> None:
    kinds = [kind] * 2 if kind in _KINDS else [*_KINDS]
    with fake_cuda() as (cuda, _):
        constraint: Any = Anything()
        decoder = BatchDecoder(model_on_gpu(LLAMA), 8, 200)
        texts = [
            Continuation(
                [1, 2, 3],
                SamplingConfig(**_KINDS[name]),
                context=200,
                constraint=constraint if name == "grammar" else None,
            )
            for name in kinds
        ]
        chosen = first_tokens(texts, decoder)
        for number in range(4):
            for text, one in zip(texts, chosen, strict=True):
                text.push(one)
            cuda.calls.clear()
            cuda.reads = cuda.uploads = cuda.waits = 0
            chosen = next_tokens(texts, decoder)
            assert (cuda.reads, cuda.waits, nothing_on_host(cuda)) == (1, 0, True)
            if kind == "plain":  # after the first step, the host sends nothing
                assert cuda.uploads == (number == 0)


@pytest.mark.everywhere
def test_single_text_is_read_once_per_token() -> None:
    with fake_cuda() as (cuda, _):
        decoder = BatchDecoder(model_on_gpu(LLAMA), 1, 200)
        text = Continuation(
            [1, 2, 3], SamplingConfig(max_new_tokens=9, prompt_logprobs=2), context=200
        )
        cuda.reads = cuda.waits = 0
        assert len(list(pieces_of(text, decoder))) == 9
        assert (cuda.reads, cuda.waits) == (10, 0)  # and once for the prompt


@pytest.mark.parametrize("family", FAMILIES)
def test_likelihoods_are_computed_on_gpu(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [TokenPair((1, 2, 3), (4, 5)), TokenPair((1, 2, 3), (6,)), TokenPair((9,), (1, 2))]
    with fake_cuda() as (cuda, _):
        model = model_on_gpu(FAMILIES[family], torch.float32)
        monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: [0.0] * len(tensor))
        cuda.calls.clear()
        assert len(likelihoods(model, pairs, batch_size=4)) == 3
        assert nothing_on_host(cuda)


@pytest.mark.everywhere
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_beam_search_on_gpu_needs_no_plan_per_length(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("firstlight.generation.beams._next_beams", _first_beam)
    with fake_cuda() as (cuda, _):
        model = model_on_gpu(FAMILIES[family])
        cuda.calls.clear()
        config = SamplingConfig(max_new_tokens=3, beams=2)
        assert beam_search(model, [1, 2, 3], config, ()) == ([7, 7, 7], "length")
        assert nothing_on_host(cuda)


def _first_beam(beams: Any, *_: Any, **__: Any) -> Any:
    return [_Beam([*beams[0].token_ids, 7], 0.0)], [0]


@pytest.mark.parametrize("way", ["auto", "sequential"])
@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_load_to_gpu_transfers_weights_in_parts(
    family: str, way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In sequential mode, the host holds one part of a tensor at a time."""
    from firstlight.models import empty_model
    from firstlight.weights.loading import weights_to_save
    from firstlight.weights.stored import save_weights

    recipe = recipe_of(FAMILIES[family])
    source = empty_model(recipe.model)
    source.init_weights(torch.Generator().manual_seed(0))
    save_weights(weights_to_save(source), tmp_path)
    # Fake tensors do not have memory to read into.
    monkeypatch.setattr(StoredTensor, "_fill", lambda *_: None)
    monkeypatch.setattr("firstlight.weights.stored._GPU_CHUNK_BYTES", 4096)
    monkeypatch.setattr("firstlight.weights.loading.concurrent.futures.ThreadPoolExecutor", Serial)
    with torch.device("meta"):
        model = build_model(recipe.model)
    with fake_cuda() as (cuda, _):
        load_weights(model, tmp_path, device="cuda", dtype=torch.bfloat16, mode=way)
        kinds = {(t.device.type, t.dtype) for t in model.parameters()}
        assert kinds == {("cuda", torch.bfloat16)}
        assert {t.device.type for t in model.buffers()} <= {"cuda"}
        made = [o for call in cuda.named("empty") for o in call.outputs if o[0] == "cpu"]
        assert max(shape[0] * dtype.itemsize for _, dtype, shape in made) <= 4096


class Serial:
    """An executor that runs its calls immediately, because fake tensors belong to one thread."""

    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> Serial:
        return self

    def __exit__(self, *_: object) -> None: ...

    def map(self, act: Any, values: Any) -> list[Any]:
        """Apply the function to each value."""
        return [act(value) for value in values]


def test_compiled_step_on_gpu_keeps_weights_as_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Freezing is for the CPU. Compiled code gets the tensors on the GPU."""
    monkeypatch.setattr("firstlight.generation.batch.can_compile", lambda _: True)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    with fake_cuda() as (cuda, _), torch.inference_mode():
        model = model_on_gpu(LLAMA)
        decoder = BatchDecoder(model, 2, 100, compile=True)
        assert isinstance(decoder._compiled, CompiledStep)
        decoder.add([1, 2, 3])
        decoder.add([1, 2])
        cuda.calls.clear()
        assert decoder.step([1, 2]).shape == (2, 512)
        assert nothing_on_host(cuda)
    for kind, frozen in (("cpu", True), ("cuda", False)):
        with _settings(torch.device(kind)):
            assert torch._inductor.config.freezing is frozen


@pytest.mark.parametrize("way", ["sdpa", "math", "efficient", "flex"])
def test_text_continued_from_cache_takes_mask(way: str) -> None:
    """Several new tokens after stored ones, with each attention backend that supports masks on a
    GPU.
    """
    with fake_cuda(), torch.inference_mode():
        model = model_on_gpu(LLAMA)
        choose_attention(model, way)
        cache = model.make_cache(1, 64, torch.bfloat16)
        for ids in ([[1, 2, 3]], [[4, 5]], [[6]]):
            model(torch.tensor(ids, device="cuda"), cache=cache)
        assert cache.length == 6
