"""Schemathesis against the server's own OpenAPI document, over a socket: no 5xx, what is documented
is what comes, valid requests are accepted and invalid ones refused.

What it found is kept as examples in tests/serving/test_document.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from scale import cases

from builders import make_texts
from firstlight.generation.batch import BatchDecoder
from firstlight.lora.loading import LoadedModel
from firstlight.models import LlamaConfig, empty_model
from firstlight.serving.config import ServerOptions, listening_socket, url_for
from firstlight.serving.server import new_server
from firstlight.serving.service import Service
from firstlight.tokenizer import train_tokenizer
from firstlight.tokenizer.chat_template import CHAT_TEMPLATES
from waiting import PATIENCE_SECONDS, wait_until

schemathesis = pytest.importorskip("schemathesis")

# What schemathesis and its dependencies warn of is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

#: Room for any text that is likely to be drawn.
_CONTEXT = 2048
_TOO_LONG = "context_length_exceeded"


class _ShortDecoder(BatchDecoder):
    """Its texts end soon, since no request has to say how many tokens it wants.

    Attributes:
        steps: done so far.
    """

    steps = 0

    def step(self, token_ids: Sequence[int]) -> torch.Tensor:
        """As a decoder does; every now and then, the end token is the likeliest."""
        self.steps += 1
        logits_BV = super().step(token_ids).clone()
        if self.steps % 16 == 0:
            logits_BV[:, 0] = 1000.0
        return logits_BV


def small_loaded() -> LoadedModel:
    """A random model with an end token and a chat template."""
    plain = train_tokenizer(make_texts(120), 320)
    tokenizer = plain.extended(["<|im_start|>", "<|im_end|>"], CHAT_TEMPLATES["chatml"])
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=_CONTEXT,
    )
    model = empty_model(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.2)
    return LoadedModel(model, tokenizer, (0,), Path("small"))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server on a port of this machine."""
    options = ServerOptions(port=0, model_name="small", shutdown_timeout=0)
    loaded = small_loaded()
    service = Service(loaded, options, lambda: _ShortDecoder(loaded.model, 8, _CONTEXT))
    with listening_socket(options.host, options.port) as listening:
        service.start()
        ready = threading.Event()
        server = new_server(service, ready.set)
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        wait_until("the server", ready.is_set)
        yield url_for(listening)
        server.should_exit = True
        thread.join(PATIENCE_SECONDS)
        service.stop()


@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_server_fuzzed_bodies_are_answered_as_documented(url: str, path: str, mode: str) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operation = schema[path]["POST"]
    strategy = operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode))
    count = 0

    @settings(
        max_examples=cases(15, 250),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def ask(case: Any) -> None:
        nonlocal count
        response = case.call(timeout=120)
        # Bounds that no schema can state: texts have too many tokens together, the token of a bias
        # is beyond the vocabulary, or the model's chat template has no place for tools.
        error = response.json()["error"] if response.status_code == 400 else {}
        message = str(error.get("message"))
        if "does not support" in message:
            assert error["code"] == "unsupported_parameter"
            count += 1
        elif error.get("code") != _TOO_LONG and "contains token id" not in message:
            case.validate_response(response)
            count += 1

    ask()
    assert count >= cases(15, 250) // 2


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/{model}", "/health", "/metrics"])
def test_server_fuzzed_routes_without_body_follow_documentation(url: str, path: str) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    strategy = schema[path]["GET"].as_strategy()

    @settings(max_examples=cases(5, 100), deadline=None, database=None)
    @given(case=strategy)
    def ask(case: Any) -> None:
        case.call_and_validate(timeout=120)

    ask()
