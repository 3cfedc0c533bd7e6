"""Tests of decoding with torch.compile: the same logits, without recompiling for every length."""

from __future__ import annotations

import contextlib
import gc
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from builders import draw_weights
from firstlight.errors import ConfigError
from firstlight.generation import batch
from firstlight.generation.batch import BatchDecoder, RaggedSteps, RecordedSteps
from firstlight.generation.few_rows import quantize_int8
from firstlight.hardware.device import upload
from firstlight.models import GPT2Config, LlamaConfig, Model, ModelConfig, empty_model

GPT2 = GPT2Config(
    vocab_size=90, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
    max_position_embeddings=160,
)  # fmt: skip
MISTRAL = LlamaConfig(
    model_type="mistral", vocab_size=90, hidden_size=32, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=160, sliding_window=70,
)  # fmt: skip


_SLOW_KINDS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("mistral", "bf16", "int8")]


def new_model(config: ModelConfig) -> Model:
    model = empty_model(config).eval()
    draw_weights(model, 1, 0.3)
    return model


@pytest.fixture(autouse=True)
def _own_graphs() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


# torch's inductor imports modules that torch has deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler")
@pytest.mark.parametrize(
    "kind",
    ["gpt2", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mistral", "bf16", "int8"))],
)
@torch.no_grad()
def test_compiled_steps_match_plain_logits_and_compile_twice(kind: str) -> None:
    model = new_model(MISTRAL if kind == "mistral" else GPT2)
    atol, rtol = 1e-4, 1e-4
    if kind in ("bf16", "int8"):
        model = model.bfloat16()
        if kind == "int8":
            quantize_int8(model)
        atol, rtol = 0.25, 0.05
    plain, compiled = BatchDecoder(model, 4, 160), BatchDecoder(model, 4, 160, compile=True)
    compiled.warm_up()
    assert graphs() == 2

    def same(one: Tensor, other: Tensor) -> None:
        torch.testing.assert_close(one.float(), other.float(), atol=atol, rtol=rtol)

    texts = [[7] * 3, [1, 2] * 60, [5, 80, 6] * 20, [9]]
    for size in range(1, 5):
        text = texts[size - 1]
        same(compiled.add(text), plain.add(text))
        for step in range(6):
            ids = [(11 * step + row) % 90 for row in range(size)]
            same(compiled.step(ids), plain.step(ids))
    for decoder in (plain, compiled):
        decoder.remove(0)
        decoder.remove(1)
    for step in range(12):
        same(compiled.step([step, 3]), plain.step([step, 3]))
    for decoder in (plain, compiled):
        decoder.remove(1)
    same(compiled.step([4]), plain.step([4]))
    assert graphs() == 2


def test_compiled_step_without_compiler_raises_config_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("firstlight.generation.batch.can_compile", lambda _: False)
    with pytest.raises(ConfigError, match=r"install g\+\+"):
        BatchDecoder(new_model(GPT2), 1, 8, compile=True)


def test_generate_compiles_nothing_by_default() -> None:
    decoder = BatchDecoder(new_model(GPT2), 2, 20)
    decoder.warm_up()
    decoder.add([1, 2])
    decoder.step([3])
    assert graphs() == 0


class Recorder:
    """Replacement for torch's CUDA graphs without a GPU: a recorded step is computed when the graph
    is replayed, but not while it is recorded.

    Attributes:
        plain, recorded: number of steps that were computed without a graph, and number of recorded
            steps.
        uploads: values that were copied to the device.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plain = self.recorded = 0
        self.uploads: list[Any] = []
        self._graph: Recorder.Graph | None = None
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorder.Graph)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
        monkeypatch.setattr(torch.cuda, "graph", self._recording)
        monkeypatch.setattr(RaggedSteps, "_run", lambda *step: self._run(*step))
        monkeypatch.setattr(batch, "upload", self._upload)

    class Graph:
        """A recorded computation."""

        replay: Callable[[], object]

    @contextlib.contextmanager
    def _recording(self, graph: Graph, **options: Any) -> Iterator[None]:
        assert options == {"pool": (0, 1), "capture_error_mode": "thread_local"}
        assert not gc.isenabled()
        self._graph = graph
        yield
        self._graph = None

    def _upload(self, values: Any, device: torch.device) -> Tensor:
        self.uploads.append(values)
        return upload(values, device)

    def _run(self, steps: RaggedSteps, rows: int, reach: int) -> Tensor:
        if self._graph is None:
            self.plain += 1
            return run(steps, rows, reach)
        self.recorded += 1
        found = torch.full((rows, 2), float("nan"))
        self._graph.replay = lambda: found.copy_(run(steps, rows, reach))
        return found

    def steps(self) -> RecordedSteps:
        """Return steps whose logits reveal their inputs."""

        def compute(input_ids_B1: Tensor, lengths_B: Tensor, reach: int) -> Tensor:
            return torch.cat((input_ids_B1, lengths_B[:, None]), dim=1) * 1000.0 + reach

        return RecordedSteps(compute, 4, torch.device("cpu"))


run = RaggedSteps._run


def test_recorded_steps_record_shape_when_it_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    steps = recorder.steps()
    found, expected = [], []
    for number in range(12):
        size, reach = 1 + number % 2, 64 * (1 + number // 8)
        ids = [10 * number + row for row in range(size)]
        found.append(steps(ids, [number] * size, size, reach))
        expected.append([[1000.0 * token_id + reach, 1000.0 * number + reach] for token_id in ids])
    # Later steps do not change any of them.
    assert [one.tolist() for one in found] == expected
    assert (recorder.plain, recorder.recorded) == (4, 4)
    assert gc.isenabled()


def test_recorded_steps_keep_tokens_and_lengths_on_device_for_same_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is one unused row in addition to the two sequences."""
    recorder = Recorder(monkeypatch)
    steps = recorder.steps()
    ids, lengths = [5, 6], [30, 40]
    for number in range(5):
        found = steps(ids, lengths, 3, 64)
        own = zip(ids, lengths, strict=True)
        assert found[:2].tolist() == [[1000.0 * i + 64, 1000.0 * n + 64] for i, n in own]
        assert found[2, 1] == 1000.0 * number + 64  # Unused rows stay shorter than the sequences.
        ids, lengths = [token_id + 2 for token_id in ids], [length + 1 for length in lengths]
        read: list[int] = []
        steps.keep(torch.tensor(ids), read)
        read += ids
    assert recorder.uploads == [[[5, 6, 0], [30, 40, 0]]]
    # A different token than the kept one, a sequence that left, and a sequence that joined.
    for ids, lengths in (([1, 2], [35, 45]), ([2], [46]), ([2, 9], [47, 3])):
        found = steps(ids, lengths, 3, 64)
        own = zip(ids, lengths, strict=True)
        assert found[: len(ids)].tolist() == [[1000.0 * i + 64, 1000.0 * n + 64] for i, n in own]
    assert len(recorder.uploads) == 4


def test_recorded_steps_evict_least_recently_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("firstlight.generation.batch._MOST_RECORDED", 2)
    recorder = Recorder(monkeypatch)
    steps = recorder.steps()

    def step(reach: int) -> tuple[int, int]:
        found = steps([3], [5], 1, reach)
        assert found.tolist() == [[3000.0 + reach, 5000.0 + reach]]
        return recorder.plain, recorder.recorded

    assert [step(1), step(1), step(2), step(2)] == [(1, 0), (1, 1), (2, 1), (2, 2)]
    assert step(1) == (2, 2)
    assert [step(3), step(1), step(2)] == [(3, 2), (3, 2), (4, 2)]
