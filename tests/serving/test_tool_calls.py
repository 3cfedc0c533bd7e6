"""Tool calls and reasoning in chat responses, with a decoder that returns scripted answers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from live import Direct, events, live, new_direct
from test_server_api import POSTS, body_for, refused
from tiny import WatchedDecoder, tiny_loaded, tiny_tokenizer
from torch import Tensor

from firstlight.lora.loading import LoadedModel
from firstlight.tokenizer import Tokenizer
from waiting import PATIENCE_SECONDS

#: A short version of Qwen's format: tools, calls and their results, reasoning, `enable_thinking`.
TEMPLATE = (
    "{% if tools %}T{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.name }} "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function.arguments.a }}</tool_call>{% endfor %}"
    "<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant"
    "{% if enable_thinking is false %}<think></think>{% elif enable_thinking %}<think>"
    "{% endif %}{{ reasoning_effort }}{% endif %}"
)
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
CALL = '{"name": "f", "arguments": {"a": 1}}'
CALLING = f"<think>Hm</think>So <tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"


def tool_tokenizer(template: str = TEMPLATE) -> Tokenizer:
    """Return the tiny tokenizer with a template that supports tools."""
    return tiny_tokenizer().extended(MARKERS, template)


class ScriptedDecoder(WatchedDecoder):
    """A decoder that answers every prompt with the same tokens and an end token."""

    def __init__(self, answer: str) -> None:
        super().__init__()
        self.max_tokens = 1000
        tokenizer = tool_tokenizer()
        self._script = tokenizer.encode(answer, special_tokens=True)
        self._script.append(tokenizer.special_tokens["<|im_end|>"])

    def add_many(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Add prompts like a decoder. `lengths` are the lengths of the answers."""
        self.prompts += map(list, prompts)
        self.lengths += [0] * len(prompts)
        return self._said(self.lengths[-len(prompts) :])

    def step(self, token_ids: Sequence[int]) -> Tensor:
        """Return the next tokens like a decoder."""
        self.lengths = [length + 1 for length in self.lengths]
        return self._said(self.lengths)

    def _said(self, places: Sequence[int]) -> Tensor:
        ids = torch.tensor([self._script[place] for place in places])
        return torch.nn.functional.one_hot(ids, tool_tokenizer().vocab_size) * 99.0


def answering(answer: str) -> Direct:
    """Create an application that returns this answer."""
    loaded = LoadedModel(tiny_loaded().model, tool_tokenizer(), (), tiny_loaded().folder)
    return new_direct(ScriptedDecoder(answer), loaded=loaded)


@pytest.fixture(scope="module")
def calling() -> Iterator[Direct]:
    """Create an application that calls tools."""
    app = answering(CALLING)
    yield app
    app.close()


def asked(direct: Direct, **fields: Any) -> Any:
    """Return the only choice of a response, not streamed or assembled from its chunks."""
    answer = direct.ask(POSTS[1], body_for(POSTS[1], **{"max_tokens": 200, **fields}))
    assert answer.status == 200, answer.body
    if not fields.get("stream"):
        return answer.json["choices"][0]
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    chunks = [chunk["choices"][0] for chunk in events(answer.body)]
    for chunk in chunks:
        for call in chunk["delta"].pop("tool_calls", ()):
            assert call.pop("index") == len(message["tool_calls"])
            message["tool_calls"].append(call)
        for name, text in chunk["delta"].items():
            message[name] = message.get(name, "") + text
    assert {chunk["finish_reason"] for chunk in chunks[:-1]} == {None}
    return {"message": message, "finish_reason": chunks[-1]["finish_reason"]}


def prompt_of(direct: Direct, **fields: Any) -> str:
    """Return the prompt of a request as text."""
    direct.decoder.prompts.clear()
    asked(direct, **fields)
    (ids,) = direct.decoder.prompts
    return tool_tokenizer().decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("stream", [False, True])
def test_chat_with_tools_separates_calls_and_reasoning(calling: Direct, stream: bool) -> None:
    choice = asked(calling, tools=[TOOL], stream=stream)
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["role"], message["content"]) == ("assistant", "So")
    assert message["reasoning_content"] == "Hm"
    calls = message["tool_calls"]
    assert [call["function"] for call in calls] == [{"name": "f", "arguments": '{"a": 1}'}] * 2
    assert [call["type"] for call in calls] == ["function"] * 2
    assert len({call["id"] for call in calls}) == 2
    assert all(call["id"].isalnum() and len(call["id"]) == 9 for call in calls)


def test_chat_with_tool_choice_none_hides_tools(calling: Direct) -> None:
    choice = asked(calling, tools=[TOOL], tool_choice="none")
    assert (choice["finish_reason"], choice["message"]["tool_calls"]) == ("stop", None)
    assert '"name"' not in prompt_of(calling, tools=[TOOL], tool_choice="none")
    assert prompt_of(calling, tools=[TOOL]).startswith(f"T{json.dumps([TOOL])}<|im_start|>user")


def test_chat_truncated_in_tool_call_keeps_its_text(calling: Direct) -> None:
    choice = asked(calling, tools=[TOOL], max_tokens=12)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith("So<tool_call>{")
    assert choice["message"]["tool_calls"] is None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_chat_with_forced_tool_returns_one_call_of_that_tool(choice: Any) -> None:
    pytest.importorskip("llguidance")
    app = new_direct(loaded=answering_model())
    try:
        found = asked(app, tools=[{**TOOL, "x": 1}], tool_choice=choice, seed=1)
    finally:
        app.close()
    ((call,), content) = found["message"]["tool_calls"], found["message"]["content"]
    assert (found["finish_reason"], content) == ("tool_calls", None)
    assert call["function"]["name"] == "f"
    assert json.loads(call["function"]["arguments"]) in ({"a": 1}, {"a": 2})


def test_chat_forced_tools_keep_their_own_definitions() -> None:
    pytest.importorskip("llguidance")
    tools = []
    for name, where in (("f", "$defs/A"), ("g", "definitions/A"), ("h", "$defs/A")):
        place, _, key = where.partition("/")
        parameters: dict[str, Any] = {"required": ["a"], "additionalProperties": False}
        parameters |= {"properties": {"a": {"$ref": f"#/{where}"}}, place: {key: {"const": name}}}
        tools.append({"type": "function", "function": {"name": name, "parameters": parameters}})
    app = new_direct(loaded=answering_model())
    try:
        found = [asked(app, tools=tools, tool_choice="required", seed=seed) for seed in range(6)]
    finally:
        app.close()
    calls = [one["message"]["tool_calls"][0]["function"] for one in found]
    assert len({call["name"] for call in calls}) > 1
    assert all(json.loads(call["arguments"]) == {"a": call["name"]} for call in calls)


def answering_model() -> LoadedModel:
    """Return the tiny model, whose vocabulary only has ChatML's tokens."""
    plain = "{% if tools %}T{% endif %}{{ messages[0].content }}"
    tokenizer = tiny_tokenizer().extended([], plain)
    return LoadedModel(tiny_loaded().model, tokenizer, (), tiny_loaded().folder)


def test_chat_unusable_tools_are_rejected(calling: Direct) -> None:
    chat = POSTS[1]
    for fields, param in (
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [TOOL], "tool_choice": "g"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL] * 129}, "tools"),
    ):
        refused(calling, chat, body_for(chat, **fields), param, None)
    named = {"type": "function", "function": {"name": "g"}}
    content = body_for(chat, tools=[TOOL], tool_choice=named)
    assert "needs a tool named 'g'" in refused(calling, chat, content, "tool_choice", None)
    app = new_direct()
    try:
        content = body_for(chat, tools=[TOOL])
        message = refused(app, chat, content, "tools", "unsupported_parameter")
        calls = [{"function": {"name": "f", "arguments": "{}"}}]
        content = body_for(chat, messages=[{"role": "assistant", "tool_calls": calls}])
        lost = refused(app, chat, content, "messages", "unsupported_parameter")
    finally:
        app.close()
    assert "does not support tools" in message
    assert "does not support tool calls" in lost


def test_chat_messages_with_calls_results_and_reasoning_reach_template(calling: Direct) -> None:
    called = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 7}'}}
    messages = [
        {"role": "user", "content": "hi", "name": "Ann", "id": "1"},
        {"role": "assistant", "tool_calls": [called], "reasoning": "why", "refusal": None},
        {"role": "tool", "tool_call_id": "x", "name": "f", "content": "<|im_end|>"},
    ]
    assert prompt_of(calling, messages=messages) == (
        "<|im_start|>user Ann hi<|im_end|>"
        "<|im_start|>assistant  <think>why</think><tool_call>7</tool_call><|im_end|>"
        "<|im_start|>tool f <|im_end|><|im_end|><|im_start|>assistant"
    )
    (ids,) = calling.decoder.prompts
    assert ids.count(tool_tokenizer().special_tokens["<|im_end|>"]) == 3  # the result is text


def test_chat_template_kwargs_and_reasoning_effort_are_template_variables(
    calling: Direct,
) -> None:
    for fields, end in (
        ({"chat_template_kwargs": {"enable_thinking": False}}, "<think></think>"),
        ({"reasoning_effort": "none"}, "<think></think>"),
        ({"reasoning_effort": "high"}, "high"),
        ({"chat_template_kwargs": {"reasoning_effort": "<|im_end|>"}}, "<|im_end|>"),
    ):
        assert prompt_of(calling, **fields).endswith(f"assistant{end}")
    (ids,) = calling.decoder.prompts
    assert ids[-1] != tool_tokenizer().special_tokens["<|im_end|>"]


def test_chat_continue_final_message_omits_end_of_turn(calling: Direct) -> None:
    # This includes the part of the token after the message.
    for said in ("<|im_end|> a", "<", "|", "d", "en"):
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": said}]
        plain = prompt_of(calling, messages=messages, add_generation_prompt=False)
        assert plain.endswith(f"{said}<|im_end|>")
        for fields in ({}, {"add_generation_prompt": False}):
            asked_for = {"messages": messages, "continue_final_message": True, **fields}
            assert prompt_of(calling, **asked_for) == plain.removesuffix("<|im_end|>")
    for changes, field in (
        ({"add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "messages"),
    ):
        content = body_for(POSTS[1], **{**asked_for, **changes})
        assert "continue_final_message" in refused(calling, POSTS[1], content, field, None)


def test_chat_answer_to_prompt_opening_reasoning_starts_with_reasoning() -> None:
    app = answering("Hm</think>So")
    try:
        message = asked(app, chat_template_kwargs={"enable_thinking": True})["message"]
    finally:
        app.close()
    assert (message["reasoning_content"], message["content"]) == ("Hm", "So")


def test_chat_vendor_fields_are_ignored_and_counted_in_log(
    calling: Direct, capsys: pytest.CaptureFixture[str]
) -> None:
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    fields = {
        "provider": {"a": 1}, "cache_prompt": None, "plugins": [],
        "messages": [{"role": "user", "content": [part], "annotations": [1]}],
        "stream_options": {"continuous_usage_stats": True}, "stream": True,
        "chat_template_kwargs": {"enable_thinkin": True},
    }  # fmt: skip
    for _ in range(11):
        asked(calling, **fields)
    said = capsys.readouterr().err
    for name in (
        "provider",
        "messages.annotations",
        "messages.content.cache_control",
        "stream_options.continuous_usage_stats",
        "chat_template_kwargs.enable_thinkin",
    ):
        for count in ("1 request", "10 requests"):
            assert said.count(f"ignored field {name}: {count} so far\n") == 1
    assert said.count("ignored") == 10


def test_chat_model_settings_are_request_defaults() -> None:
    loaded = dataclasses.replace(tiny_loaded(), generation={"temperature": 0.0, "top_k": 4})
    app, plain = new_direct(loaded=loaded), new_direct()
    try:
        for fields in ({}, {"temperature": 1.5, "seed": 2}):
            body = body_for(POSTS[1], max_tokens=20, **fields)
            expected = body_for(POSTS[1], max_tokens=20, top_k=4, **{"temperature": 0.0, **fields})
            found = app.ask(POSTS[1], body).json["choices"]
            assert found == plain.ask(POSTS[1], expected).json["choices"]
    finally:
        app.close()
        plain.close()


def test_openai_client_calls_tool_and_sends_result(
    capsys: pytest.CaptureFixture[str],
) -> None:
    openai = pytest.importorskip("openai")
    loaded = LoadedModel(tiny_loaded().model, tool_tokenizer(), (), tiny_loaded().folder)
    with live(ScriptedDecoder(CALLING), loaded=loaded) as server:
        client = openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_SECONDS
        )
        asked: dict[str, Any] = {"model": "tiny", "tools": [TOOL], "max_tokens": 200}
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        message = client.chat.completions.create(messages=messages, **asked).choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "5"} for call in message.tool_calls
        ]
        messages += [message, *results]
        again = client.chat.completions.create(messages=messages, **asked)
        assert again.choices[0].finish_reason == "tool_calls"
        with client.chat.completions.stream(messages=messages, **asked) as stream:
            final = stream.get_final_completion().choices[0]
        assert [call.function.arguments for call in final.message.tool_calls] == ['{"a": 1}'] * 2
    assert "ignored" not in capsys.readouterr().err
