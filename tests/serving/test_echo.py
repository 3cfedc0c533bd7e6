"""`echo` with log-probabilities, which lm-evaluation-harness's local-completions model uses for
scoring.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from live import Direct, events, new_direct
from test_server_api import refused
from tiny import CONTEXT, WatchedDecoder, tiny_model, tiny_tokenizer

from firstlight.generation import batch
from firstlight.generation.batch import BatchDecoder
from firstlight.generation.config import SamplingConfig
from firstlight.generation.continuation import Continuation
from firstlight.generation.engine import pieces_of

PATH = "/v1/completions"
PROMPT = "the star falls 日本"


@pytest.fixture(scope="module")
def direct() -> Iterator[Direct]:
    """Create an application for this machine."""
    app = new_direct()
    yield app
    app.close()


def asked(direct: Direct, **fields: Any) -> list[dict[str, Any]]:
    """Return the choices of a greedy completion with echo."""
    answer = direct.ask(PATH, {"echo": True, "temperature": 0, **fields})
    assert answer.status == 200, answer.body
    found: list[dict[str, Any]] = answer.json["choices"]
    return found


@torch.no_grad()
def expected_logprobs(ids: list[int]) -> list[float]:
    """Return the log-probabilities of all tokens but the first, from one forward pass."""
    logprobs_TV = tiny_model()(torch.tensor([ids]))[0, :-1].log_softmax(-1)
    found: list[float] = logprobs_TV.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    return found


def require_scored(choice: dict[str, Any], ids: list[int], top: int) -> None:
    """Check that the log-probabilities are the model's and belong to the right tokens, and that the
    most likely tokens are listed.
    """
    found = choice["logprobs"]
    assert {len(values) for values in found.values()} == {len(ids)}
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    assert found["token_logprobs"][1:] == pytest.approx(expected_logprobs(ids), abs=1e-5)
    pairs = zip(found["token_logprobs"][1:], found["top_logprobs"][1:], strict=True)
    for logprob, likeliest in pairs:
        assert top <= len(likeliest) <= top + 1 or len(likeliest) == 1
        assert logprob in likeliest.values()
        assert logprob <= max(likeliest.values())
    starts = [*found["text_offset"], len(choice["text"])]
    for token, first, last in zip(found["tokens"], starts, starts[1:], strict=False):
        if not token.startswith("bytes:"):
            assert choice["text"][first:last] == token


@pytest.mark.parametrize("max_tokens", [0, 1, 6])
def test_echo_returns_prompt_with_log_probabilities_first(direct: Direct, max_tokens: int) -> None:
    (plain,) = asked(direct, prompt=PROMPT, echo=False, max_tokens=6)
    ids = tiny_tokenizer().encode_prompt(PROMPT)
    config = SamplingConfig(max_new_tokens=6, temperature=0)
    text = Continuation(ids, config, context=CONTEXT)
    list(pieces_of(text, BatchDecoder(tiny_model(), 1, CONTEXT)))
    whole = [*ids, *text.token_ids[:max_tokens]]
    for prompt in (PROMPT, ids):
        answer = direct.ask(
            PATH,
            {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": max_tokens,
             "temperature": 0},
        )  # fmt: skip
        (choice,) = answer.json["choices"]
        assert choice["text"].startswith(PROMPT)
        assert plain["text"].startswith(choice["text"].removeprefix(PROMPT).rstrip("\ufffd"))
        assert choice["finish_reason"] == "length"
        require_scored(choice, whole, 2)
        usage = answer.json["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), max_tokens)


def test_echo_without_log_probabilities_returns_text_only(direct: Direct) -> None:
    (choice,) = asked(direct, prompt=PROMPT, max_tokens=0)
    assert (choice["text"], choice["logprobs"]) == (PROMPT, None)
    (choice,) = asked(direct, prompt=PROMPT, max_tokens=0, echo=False)
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    (choice,) = asked(direct, prompt=PROMPT, max_tokens=2, echo=False, logprobs=1)
    assert len(choice["logprobs"]["tokens"]) == 2


def test_echo_supports_batches_of_unequal_prompts(direct: Direct) -> None:
    prompts = ["one", PROMPT, "a stone under the river, and", "x"] * 2
    ids = [tiny_tokenizer().encode_prompt(prompt) for prompt in prompts]
    for given in (prompts, ids):
        found = asked(direct, prompt=given, logprobs=0, max_tokens=0, n=2)
        assert [choice["index"] for choice in found] == list(range(16))
        for index, choice in enumerate(found):
            assert choice["text"] == prompts[index // 2]
            require_scored(choice, ids[index // 2], 1)


def test_echo_stream_begins_with_prompt(direct: Direct) -> None:
    fields = {"prompt": [PROMPT, "one"], "logprobs": 1, "max_tokens": 5, "seed": 3}
    whole = asked(direct, **fields)
    answer = direct.ask(PATH, {"echo": True, "temperature": 0, "stream": True, **fields})
    chunks = [chunk["choices"][0] for chunk in events(answer.body)]
    for index, prompt in enumerate((PROMPT, "one")):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        assert own[0]["text"] == prompt
        assert len(own[0]["logprobs"]["tokens"]) == len(tiny_tokenizer().encode_prompt(prompt))
        assert "".join(chunk["text"] for chunk in own) == whole[index]["text"]
        for name, values in whole[index]["logprobs"].items():
            assert [value for chunk in own for value in chunk["logprobs"][name]] == values


def test_echo_long_prompts_are_scored_in_parts(
    direct: Direct, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "_MOST_LOGITS", 7 * tiny_tokenizer().vocab_size)
    ids = [257 + (7 * n) % 60 for n in range(CONTEXT)]
    (choice,) = asked(direct, prompt=ids, logprobs=1, max_tokens=0)
    require_scored(choice, ids, 1)


def test_echo_prompt_may_fill_context_with_zero_new_tokens(direct: Direct) -> None:
    full = [5] * CONTEXT
    (choice,) = asked(direct, prompt=full, logprobs=0, max_tokens=0)
    assert len(choice["logprobs"]["tokens"]) == CONTEXT
    (choice,) = asked(direct, prompt=full[1:], logprobs=0, max_tokens=9)
    assert len(choice["logprobs"]["tokens"]) == CONTEXT
    for ids, most in ((full, 1), ([*full, 5], 0)):
        content = {"prompt": ids, "echo": True, "logprobs": 0, "max_tokens": most}
        refused(direct, PATH, content, "prompt", "context_length_exceeded")


def test_echo_single_token_prompt_has_no_log_probability(direct: Direct) -> None:
    (choice,) = asked(direct, prompt=[5], logprobs=3, max_tokens=0)
    assert choice["logprobs"]["token_logprobs"] == [None]


def test_echo_non_finite_weights_return_500(monkeypatch: pytest.MonkeyPatch) -> None:
    app = new_direct(WatchedDecoder(1))
    monkeypatch.setattr(app.decoder.model, "forward", lambda ids, **_: torch.full(
        (1, ids.shape[1], 322), float("nan")))  # fmt: skip
    try:
        answer = app.ask(PATH, {"prompt": "x y", "echo": True, "logprobs": 1, "max_tokens": 0})
        assert (answer.status, answer.error["type"]) == (500, "server_error")
    finally:
        app.close()


def test_echo_duplicate_token_text_keeps_highest_log_probability() -> None:
    """Clients use the highest value to find out if a token was the most likely one."""
    from firstlight.generation.continuation import TokenLogprob
    from firstlight.serving.response import LogprobsWriter, TokenTexts

    class Same(TokenTexts):
        def name(self, token_id: int) -> str:
            return "a"

    entry = TokenLogprob(7, -3.0, ((8, -0.5),))
    written = LogprobsWriter(Same(tiny_tokenizer()), None).write([entry])
    assert written.top_logprobs == [{"a": -0.5}]
