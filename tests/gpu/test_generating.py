"""Texts generated on a device: compiled, in batches, and by a server."""

from __future__ import annotations

import http.client
import json
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny import (
    CONTEXT,
    PATIENCE,
    Collected,
    new_scheduler,
    new_sequence,
    tiny_loaded,
    tiny_tokenizer,
)

from firstlight.generation import batch
from firstlight.generation.batch import BatchDecoder, RecordedSteps
from firstlight.generation.config import SamplingConfig
from firstlight.generation.engine import generate, generate_batch
from firstlight.generation.few_rows import use_few_rows
from firstlight.lora.loading import LoadedModel
from firstlight.models import GPT2Config, LlamaConfig, ModelConfig, MoEConfig, empty_model
from firstlight.models.moe import reads_rows_of_experts

_SIZES: dict[str, Any] = {
    "vocab_size": tiny_tokenizer().vocab_size,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
}
_GROUPED: dict[str, Any] = {**_SIZES, "num_key_value_heads": 1}
_FAMILIES: dict[str, ModelConfig] = {
    "gpt2": GPT2Config(**_SIZES),
    "llama": LlamaConfig(**_GROUPED),
    "mistral": LlamaConfig(**_GROUPED, model_type="mistral", sliding_window=30),
    "mixtral": MoEConfig(**_GROUPED, model_type="mixtral", num_experts=4, num_experts_per_tok=2),
}
PROMPTS = [
    "the star",
    "a light first dawn " * 9,
    "bird",
    "stone never runs under the old river and",
    "22 333",
    "dawn " * 30,
]


def loaded_of(family: str, device: torch.device, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Load a model with varied continuations."""
    model = empty_model(_FAMILIES[family]).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.15, generator=generator)
            # The factors of norms; a GPT-2's biases stay small.
            if parameter.dim() == 1 and name.endswith("weight"):
                parameter.add_(1.0)
        model.lm_head.weight[:257] *= 0.1
    model = model.to(dtype).to(device)
    use_few_rows(model)
    tiny = tiny_loaded()
    return LoadedModel(model, tiny.tokenizer, (), tiny.folder)


def greedy(loaded: LoadedModel, prompt: str, **options: Any) -> list[int]:
    return generate(loaded, prompt, temperature=0, **options).token_ids


needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler"
)


@needs_compiler
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        *(
            pytest.param(name, marks=pytest.mark.cuda_only("compiling takes a minute on a CPU"))
            for name in ("gpt2", "mistral", "mixtral")
        ),
    ],
)
def test_compiled_generation_on_device_matches_plain_greedy_text(
    family: str, device: torch.device
) -> None:
    """Recorded and replayed as CUDA graphs on a GPU, over two capacities of the cache."""
    torch._dynamo.reset()
    loaded = loaded_of(family, device)
    expected = greedy(loaded, PROMPTS[0], max_new_tokens=90)
    assert len(set(expected)) > 8
    assert greedy(loaded, PROMPTS[0], max_new_tokens=90, compile=True) == expected


@pytest.mark.cuda_only("CUDA graphs")
@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", torch.float32), ("llama", torch.bfloat16), ("mixtral", torch.bfloat16)],
)
@pytest.mark.parametrize("compile", [False, True])
def test_recorded_steps_match_plain_logits_with_joining_and_leaving_texts(
    compile: bool,
    family: str,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch._dynamo.reset()
    model = loaded_of(family, device, dtype).model
    if reads_rows_of_experts(model):
        pytest.skip("torch has no kernel for experts that finds their rows on this GPU")
    recorded = BatchDecoder(model, 4, 200, compile=compile)
    monkeypatch.setattr(batch, "_can_record", lambda *_: False)
    plain = BatchDecoder(model, 4, 200)
    bound = 1e-4 if dtype == torch.float32 else 5e-2
    if family == "mixtral":  # a token may visit another expert after rounding
        bound = 0.5

    def same(one: torch.Tensor, other: torch.Tensor) -> None:
        one, other = one.double(), other.double()
        assert float((one - other).norm() / other.norm()) < bound

    for size in range(1, 5):
        text = [(7 * size + i) % 300 for i in range(50 * size - 40)]
        same(recorded.add(text), plain.add(text))
        for step in range(4):
            ids = [(11 * step + row) % 300 for row in range(size)]
            same(recorded.step(ids), plain.step(ids))
    for decoder in (plain, recorded):
        decoder.remove(1)
        decoder.remove(0)
    earlier = []
    for step in range(8):
        ids = [step, 3]
        earlier.append((recorded.step(ids), plain.step(ids)))
    for found, expected in earlier:  # the returned tensors stay unchanged
        same(found, expected)
    steps = recorded._ragged
    assert isinstance(steps, RecordedSteps)
    assert sum(entry is not None for entry in steps._by_shape.values()) >= 4


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral"])
def test_batch_with_joining_and_leaving_texts_matches_single_generation(
    family: str, device: torch.device
) -> None:
    loaded = loaded_of(family, device)
    alone = [greedy(loaded, prompt, max_new_tokens=20) for prompt in PROMPTS]
    config = SamplingConfig(max_new_tokens=20, temperature=0)
    for size in (2, 3, 6):
        together = generate_batch(loaded, PROMPTS, config, batch_size=size)
        assert [text.token_ids for text in together] == alone


def test_generate_same_seed_on_device_repeats_text(device: torch.device) -> None:
    loaded, on_cpu = loaded_of("llama", device), loaded_of("llama", torch.device("cpu"))
    options: dict[str, Any] = {"temperature": 0.9, "top_k": 40, "max_new_tokens": 30}
    first = generate(loaded, PROMPTS[0], seed=7, **options)
    assert generate(loaded, PROMPTS[0], seed=7, **options).text == first.text
    assert generate(loaded, PROMPTS[0], seed=8, **options).text != first.text
    assert generate(on_cpu, PROMPTS[0], seed=7, **options).token_ids == first.token_ids
    config = SamplingConfig(seed=7, **options)
    for text in generate_batch(loaded, [PROMPTS[0]] * 3, config, batch_size=3):
        assert text.token_ids == first.token_ids


def test_generate_cached_prefix_on_device_is_reused(device: torch.device) -> None:
    model = loaded_of("llama", device).model
    decoder = BatchDecoder(model, 2, 200, reuse_prefixes=True)
    text = [(13 * i) % 300 for i in range(60)]
    decoder.add([7, 8])
    decoder.add(text)
    decoder.remove(0)  # the other text gets its row
    for more in ([5, 6], [9]):
        found = decoder.add([*text, *more])
        with torch.no_grad():
            whole = model(torch.tensor([[*text, *more]], device=device))[0, -1]
        torch.testing.assert_close(found, whole, atol=1e-3, rtol=1e-3)
        decoder.remove(1)


# Many texts at a time

_STREAMS = 64


def test_scheduler_sixty_four_texts_match_single_generation(device: torch.device) -> None:
    """With the server's scheduler, where texts join and leave at different times."""
    model = tiny_loaded().model
    on_device = empty_model(model.config).eval()
    on_device.load_state_dict(model.state_dict())
    on_device.to(device)
    prompts = [PROMPTS[i % 3][:30] + " dawn" * (i % 5) for i in range(_STREAMS)]
    lengths = [4 + i % 13 for i in range(_STREAMS)]

    def texts(most: int) -> list[str]:
        collected = Collected()
        scheduler = new_scheduler(BatchDecoder(on_device, most, CONTEXT), collected)
        try:
            sequences = [
                new_sequence(prompt, max_new_tokens=length)
                for prompt, length in zip(prompts, lengths, strict=True)
            ]
            scheduler.submit(sequences)
            collected.wait(*sequences)
            for sequence, length in zip(sequences, lengths, strict=True):
                last = collected.updates[sequence][-1]
                assert (last.error, last.finish_reason) == (None, "length")
                assert len(sequence.text.token_ids) == length
            return [collected.text(sequence) for sequence in sequences]
        finally:
            scheduler.stop()

    alone = texts(1)
    assert len(set(alone)) > 10
    assert texts(_STREAMS) == alone


@contextmanager
def served(loaded: LoadedModel, streams: int) -> Iterator[tuple[str, int]]:
    """Run a server on a port of this machine, and yield its address."""
    from firstlight.serving.config import ServerOptions, listening_socket
    from firstlight.serving.server import new_server
    from firstlight.serving.service import Service

    options = ServerOptions(port=0, model_name="tiny", max_batch_size=streams, shutdown_timeout=0)
    service = Service(loaded, options)
    with listening_socket(options.host, options.port) as listening:
        service.start()
        ready = threading.Event()
        server = new_server(service, ready.set)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            assert ready.wait(PATIENCE)
            host, port = listening.getsockname()[:2]
            yield host, port
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
            service.stop()
            assert not thread.is_alive()


def streamed(where: tuple[str, int], request: dict[str, Any]) -> str:
    """Return the text of a stream, which must end like OpenAI's streams."""
    connection = http.client.HTTPConnection(*where, timeout=PATIENCE)
    try:
        body = json.dumps({"stream": True, "temperature": 0, **request})
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", body, headers)
        response = connection.getresponse()
        text = response.read().decode()
        assert response.status == 200, text
    finally:
        connection.close()
    *events, end, rest = text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    pieces = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert pieces[-1]["finish_reason"] == "length"
    return "".join(piece["text"] for piece in pieces)


def at_once(where: tuple[str, int], requests: Sequence[dict[str, Any]]) -> list[str]:
    """Return the texts of streams that start together."""
    found: dict[int, str] = {}
    begin = threading.Barrier(len(requests))

    def ask(number: int) -> None:
        begin.wait(PATIENCE)
        found[number] = streamed(where, requests[number])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return [found[number] for number in range(len(requests))]


@pytest.mark.needs("fastapi", "uvicorn", "prometheus_client")
def test_server_sixty_four_streams_match_single_generation(device: torch.device) -> None:
    loaded = loaded_of("llama", device)
    requests: list[dict[str, Any]] = [
        {"prompt": PROMPTS[i % len(PROMPTS)], "max_tokens": 6 + i % 9} for i in range(_STREAMS)
    ]
    with served(loaded, _STREAMS) as where:
        texts = at_once(where, requests)
    for request, text in zip(requests, texts, strict=True):
        alone = generate(
            loaded, request["prompt"], temperature=0, max_new_tokens=request["max_tokens"]
        )
        assert text == alone.text
