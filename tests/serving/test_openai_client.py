"""OpenAI's client with a server on a port."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from live import KEY, Live, live
from tiny import CONTEXT, WatchedDecoder, tiny_loaded, tiny_model, tiny_tokenizer

from firstlight.generation.batch import BatchDecoder
from firstlight.generation.config import SamplingConfig
from firstlight.generation.engine import continuation, generate, pieces_of
from firstlight.serving.request import fingerprint_of
from waiting import PATIENCE_SECONDS

openai = pytest.importorskip("openai")

PROMPT = "the star falls"
MESSAGES: list[Any] = [
    {"role": "system", "content": "a light"},
    {"role": "user", "content": "the first dawn"},
]


def client_of(server: Live, key: str = KEY.decode()) -> Any:
    """Create a client without retries."""
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_SECONDS
    )


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    """Run a server with a key, for all tests of this file that do not block it."""
    with live(api_key=KEY) as running:
        yield running


@pytest.fixture
def client(server: Live) -> Iterator[Any]:
    """Create a client with the right key."""
    with client_of(server) as one:
        yield one


def alone(prompt: str = PROMPT, **config: Any) -> str:
    """Return the result of firstlight.generate."""
    return generate(tiny_loaded(), prompt, **config).text


def chat_alone(max_new_tokens: int) -> str:
    """Return the model's answer to the conversation."""
    ids = tiny_tokenizer().encode_chat(MESSAGES, add_generation_prompt=True)
    config = SamplingConfig(max_new_tokens=max_new_tokens, temperature=0)
    text = continuation(tiny_loaded(), ids, config)
    return "".join(pieces_of(text, BatchDecoder(tiny_model(), 1, CONTEXT)))


def test_openai_models_lists_loaded_model(client: Any) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "firstlight")
    assert client.models.retrieve("tiny").created == model.created
    with pytest.raises(openai.NotFoundError, match="no such model: use 'tiny'"):
        client.models.retrieve("gpt-4")


def test_openai_completion_returns_text_and_usage(client: Any) -> None:
    found = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=9, temperature=0)
    assert found.id.startswith("cmpl-")
    assert (found.object, found.model) == ("text_completion", "tiny")
    (choice,) = found.choices
    assert choice.text == alone(max_new_tokens=9, temperature=0)
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    prompt_tokens = len(tiny_tokenizer().encode_prompt(PROMPT))
    assert found.usage.prompt_tokens == prompt_tokens
    assert found.usage.completion_tokens == 9
    assert found.usage.total_tokens == prompt_tokens + 9


def test_openai_completion_stream_joins_to_text(client: Any) -> None:
    chunks = list(
        client.completions.create(
            model="tiny",
            prompt=PROMPT,
            max_tokens=20,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *pieces, last = chunks
    assert "".join(c.choices[0].text for c in pieces) == alone(max_new_tokens=20, temperature=0)
    assert len(pieces) > 5
    assert [c.choices[0].finish_reason for c in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in pieces)
    assert len({chunk.id for chunk in chunks}) == 1
    assert (last.choices, last.usage.completion_tokens) == ([], 20)


def test_openai_chat_returns_message_and_usage(client: Any) -> None:
    found = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=9, temperature=0
    )
    assert (found.object, found.id[:9]) == ("chat.completion", "chatcmpl-")
    (choice,) = found.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == chat_alone(9)
    assert choice.finish_reason == "length"
    ids = tiny_tokenizer().encode_chat(MESSAGES, add_generation_prompt=True)
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(ids), 9)
    # The response can be sent back unchanged.
    again = client.chat.completions.create(
        model="tiny",
        messages=[*MESSAGES, choice.message, {"role": "user", "content": "one"}],
        max_tokens=2,
    )
    assert again.usage.prompt_tokens > len(ids) + 9


def test_openai_chat_stream_joins_to_message(client: Any) -> None:
    first, *chunks, last, usage = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=20,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    text = "".join(chunk.choices[0].delta.content for chunk in chunks)
    assert text == chat_alone(20)
    assert (last.choices[0].finish_reason, last.choices[0].delta.content) == ("length", None)
    assert usage.usage.completion_tokens == 20


def test_openai_chat_ends_at_end_of_turn_token(
    client: Any, server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = tiny_tokenizer().special_tokens["<|im_end|>"]
    plain = WatchedDecoder.step

    def ending(self: WatchedDecoder, token_ids: list[int]) -> Any:
        logits_BV = plain(self, token_ids).clone()
        if len(self._stored[0]) >= length + 4:
            logits_BV[:, end] = 100.0
        return logits_BV

    monkeypatch.setattr(WatchedDecoder, "step", ending)
    length = len(tiny_tokenizer().encode_chat(MESSAGES, add_generation_prompt=True))
    found = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0)
    (choice,) = found.choices
    assert choice.finish_reason == "stop"
    assert found.usage.completion_tokens == 4
    assert choice.message.content == chat_alone(4)


@pytest.mark.parametrize("stream", [False, True])
def test_openai_stop_text_ends_answer(client: Any, stream: bool) -> None:
    whole = alone(max_new_tokens=40, temperature=1, seed=4)
    stop = whole[30:33]
    place = whole.find(stop)
    assert place > 0
    found = client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=40,
        seed=4,
        stop=["never there", stop],
        stream=stream,
    )
    chunks = list(found) if stream else [found]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole[:place]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_openai_seed_repeats_text_of_local_generation(client: Any) -> None:
    texts = [
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=30, seed=seed)
        .choices[0]
        .text
        for seed in (7, 7, 8)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0] == alone(max_new_tokens=30, temperature=1.0, seed=7)


def test_openai_without_seed_gives_different_texts(client: Any) -> None:
    found = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=40, n=3)
    assert len({choice.text for choice in found.choices}) == 3


def test_openai_extra_settings_are_accepted(client: Any) -> None:
    extras = {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.3}
    found = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=30, seed=1, temperature=1.5, extra_body=extras
    )
    assert found.choices[0].text == alone(
        max_new_tokens=30, temperature=1.5, seed=1, top_k=5, min_p=0.01, repetition_penalty=1.3
    )
    plain = alone(max_new_tokens=30, temperature=1.5, seed=1)
    assert found.choices[0].text != plain


def test_openai_penalties_and_biases_match_generate(client: Any) -> None:
    penalties: dict[str, Any] = {"frequency_penalty": 1.2, "presence_penalty": -0.3}
    found = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=30, seed=1, logit_bias={"9": 1.5}, **penalties
    )
    expected = alone(max_new_tokens=30, temperature=1.0, seed=1, logit_bias={9: 1.5}, **penalties)
    assert found.choices[0].text == expected
    assert expected != alone(max_new_tokens=30, temperature=1.0, seed=1)
    chat = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=6, logit_bias={"70": 100}, temperature=0
    )
    assert chat.choices[0].message.content == tiny_tokenizer().decode([70]) * 6


def test_openai_several_prompts_give_several_choices(client: Any) -> None:
    prompts = [PROMPT, "one", "a stone under"]
    found = client.completions.create(
        model="tiny", prompt=prompts, n=2, max_tokens=12, seed=3, stream=False
    )
    expected = [
        alone(prompt, max_new_tokens=12, temperature=1.0, seed=seed)
        for prompt in prompts
        for seed in (3, 4)
    ]
    assert [choice.text for choice in found.choices] == expected
    assert [choice.index for choice in found.choices] == list(range(6))
    assert found.usage.prompt_tokens == sum(
        len(tiny_tokenizer().encode_prompt(prompt)) for prompt in prompts
    )
    assert found.usage.completion_tokens == 6 * 12
    pieces = [""] * 6
    for chunk in client.completions.create(
        model="tiny", prompt=prompts, n=2, max_tokens=12, seed=3, stream=True
    ):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    assert pieces == expected


@pytest.mark.parametrize("several", [False, True])
def test_openai_prompt_may_be_token_ids(client: Any, several: bool) -> None:
    ids = tiny_tokenizer().encode_prompt(PROMPT)
    found = client.completions.create(
        model="tiny", prompt=[ids, ids] if several else ids, max_tokens=9, temperature=0
    )
    assert len(found.choices) == 1 + several
    assert all(c.text == alone(max_new_tokens=9, temperature=0) for c in found.choices)


@pytest.mark.parametrize("stream", [False, True])
def test_openai_completion_returns_log_probabilities(client: Any, stream: bool) -> None:
    found = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=30, temperature=1, seed=2, logprobs=3, stream=stream
    )
    chunks = list(found) if stream else [found]
    text = "".join(chunk.choices[0].text for chunk in chunks)
    tokens, values, tops, offsets = (
        [
            entry
            for chunk in chunks
            for entry in getattr(chunk.choices[0].logprobs, name)  # none is null
        ]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    )
    expected = generate(
        tiny_loaded(), PROMPT, max_new_tokens=30, temperature=1, seed=2, logprobs=3
    ).logprobs
    assert expected is not None
    assert values == pytest.approx([entry.logprob for entry in expected], abs=1e-4)
    assert len(tokens) == len(tops) == len(offsets) == 30
    for token, offset, value, top in zip(tokens, offsets, values, tops, strict=True):
        assert top[token] == pytest.approx(value)
        assert len(top) in (3, 4)
        if not token.startswith("bytes:"):
            assert text[offset : offset + len(token)] == token


@pytest.mark.parametrize("stream", [False, True])
def test_openai_chat_returns_log_probabilities(client: Any, stream: bool) -> None:
    found = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=20,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        stream=stream,
    )
    chunks = list(found) if stream else [found]
    entries = [
        entry
        for chunk in chunks
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content
    ]
    assert len(entries) == 20
    content = b"".join(bytes(entry.bytes) for entry in entries)
    assert content.decode(errors="replace") == chat_alone(20)
    for entry in entries:
        assert bytes(entry.bytes).decode(errors="replace") == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob  # greedy
        assert entry.top_logprobs[1].logprob <= entry.logprob <= 0
    bare = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=2, logprobs=True, temperature=0
    )
    assert [entry.top_logprobs for entry in bare.choices[0].logprobs.content] == [[], []]


def test_openai_max_tokens_is_capped_to_context(client: Any) -> None:
    found = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=10_000)
    assert found.choices[0].finish_reason == "length"
    assert found.usage.total_tokens == CONTEXT
    chat = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0)
    assert chat.usage.total_tokens == CONTEXT


def test_openai_completion_max_tokens_defaults_to_16(client: Any) -> None:
    assert client.completions.create(model="tiny", prompt="").usage.completion_tokens == 16


def test_openai_errors_have_client_exception_classes(server: Live, client: Any) -> None:
    with client_of(server, "wrong") as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x", suffix="y")
    assert caught.value.param == "suffix"
    assert caught.value.code == "unsupported_parameter"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="the star " * 200)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert caught.value.code == "model_not_found"
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id.startswith("req_")
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert (caught.value.code, caught.value.type) == ("model_not_found", "invalid_request_error")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="x")


def test_openai_requests_have_ids_and_answers_model_fingerprint(client: Any) -> None:
    fingerprint = fingerprint_of(tiny_model())
    assert re.fullmatch("fp_[0-9a-f]{12}", fingerprint)
    ids = set()
    for stream in (False, True):
        fields = {"model": "tiny", "max_tokens": 2, "stream": stream}
        for ask, content in (
            (client.completions, {"prompt": "x"}),
            (client.chat.completions, {"messages": MESSAGES}),
        ):
            raw = ask.with_raw_response.create(**fields, **content)
            ids.add(raw.headers["x-request-id"])
            parsed = raw.parse()
            chunks = list(parsed) if stream else [parsed]
            assert {chunk.system_fingerprint for chunk in chunks} == {fingerprint}
    assert len(ids) == 4
    assert all(re.fullmatch("req_[0-9a-f]{32}", one) for one in ids)


def test_fingerprint_depends_on_weights() -> None:
    model: Any = copy.deepcopy(tiny_model())
    before = fingerprint_of(model)
    assert before == fingerprint_of(tiny_model())
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[-1, 3] += 1e-3
    assert fingerprint_of(model) != before
    assert fingerprint_of(model.bfloat16()) != before


def test_openai_full_queue_raises_rate_limit_error() -> None:
    decoder = WatchedDecoder(1, held=True)
    with live(decoder, max_queue=0) as server, client_of(server) as client:
        first = client.completions.create(model="tiny", prompt="x", max_tokens=9, stream=True)
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="tiny", prompt="x")
        assert caught.value.response.headers["retry-after"] == "1"
        assert caught.value.code == "queue_full"
        decoder.release()
        assert list(first)[-1].choices[0].finish_reason == "length"
        assert server.sample("firstlight_queue_refusals_total") == 1
        # There is a free place again.
        client.completions.create(model="tiny", prompt="x")


def test_openai_error_during_stream_raises_api_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(token_ids: list[int]) -> None:
        if decoder.steps == 5:
            raise RuntimeError("in /some/folder")

    decoder = WatchedDecoder(1)
    decoder.before_step = fail
    with live(decoder) as server, client_of(server) as client:
        stream = client.completions.create(model="tiny", prompt="x", max_tokens=30, stream=True)
        with pytest.raises(openai.APIError, match="its log for the reason") as caught:
            list(stream)
        assert "folder" not in str(caught.value)


def test_openai_eight_concurrent_requests_match_single_ones(client: Any, server: Live) -> None:
    def ask(seed: int) -> str:
        found = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=40, seed=seed)
        return str(found.choices[0].text)

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(ask, range(24)))
    assert texts == [alone(max_new_tokens=40, temperature=1.0, seed=seed) for seed in range(24)]
