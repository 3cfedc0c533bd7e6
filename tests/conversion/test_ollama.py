"""Tests of Modelfiles for Ollama: their templates render the same texts as the tokenizer's
templates.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from datetime import date
from typing import Any

import pytest

from firstlight.conversion.ollama import modelfile, ollama_template
from firstlight.tokenizer import Tokenizer, train_tokenizer

SHORT = [{"role": "user", "content": "Hi"}]
LONG = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
]
JINJA = {
    "ChatML": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + "
    "'<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}",
    "Llama 3": "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + "
    "'<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}",
    # Meta's template for Llama 2, without its error messages.
    "Llama 2": "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
    "{% set system = messages[0]['content'] %}{% else %}{% set rest = messages %}"
    "{% set system = false %}{% endif %}{% for m in rest %}"
    "{% if loop.index0 == 0 and system != false %}"
    "{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m['content'] %}"
    "{% else %}{% set content = m['content'] %}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}"
    "{% endif %}{% endfor %}",
    # The templates of SmolLM2 and Qwen2.5, which add a default system message.
    "ChatML with default": "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "<|im_start|>system\nYou are a lighthouse.<|im_end|>\n{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    # Gemma 3's template: the system message is in the first question.
    "Gemma": "{{ bos_token }}{% set first = '' %}{% if messages[0]['role'] == 'system' %}"
    "{% set first = messages[0]['content'] + '\n\n' %}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else 'user' }}\n"
    "{{ first if loop.first else '' }}{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    # Mistral's template since v0.3: the system message is in the last question.
    "Mistral": "{% if messages[0]['role'] == 'system' %}{% set s = messages[0]['content'] %}"
    "{% set messages = messages[1:] %}{% endif %}{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}[INST]{% if loop.last and s %}{{ s + '\n\n' }}{% endif %}"
    "{{ m['content'] }}[/INST]{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}",
    "DeepSeek": "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ m['content'] }}"
    "{% elif m['role'] == 'user' %}{{ '<|User|>' + m['content'] }}{% else %}"
    "{{ '<|Assistant|>' + m['content'].split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}",
    # The template of gpt-oss: the date, and a different token after the last answer than after
    # earlier answers.
    "gpt-oss": "<|start|>system<|message|>Current date: {{ strftime_now('%Y-%m-%d') }}<|end|>"
    "{% for m in messages %}{% if m['role'] == 'system' %}<|start|>developer<|message|>"
    "# Instructions\n\n{{ m['content'] }}<|end|>{% elif m['role'] == 'user' %}"
    "<|start|>user<|message|>{{ m['content'] }}<|end|>{% else %}"
    "<|start|>assistant<|channel|>final<|message|>"
    "{{ m['content'] }}{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    # Gemma 2's template.
    "without system": "{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('no system messages') }}{% endif %}{{ m['role'] }}: {{ m['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
}
STOPS = {
    "ChatML": ("<|im_end|>", "<|im_start|>"),
    "Llama 3": ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    "Llama 2": ("</s>", "<s>"),
    "ChatML with default": ("<|im_end|>", "<|im_start|>"),
    "Gemma": ("<end_of_turn>", "<start_of_turn>"),
    "Mistral": ("</s>", "[INST]"),
    "DeepSeek": ("</s>", "<|User|>"),
    "gpt-oss": ("<|return|>",),
    "without system": ("user:",),
}


def go(template: str, messages: Sequence[dict[str, str]]) -> str:
    """Render a template like Go's text/template, for the few actions that are used here."""
    tokens = re.split(r"\{\{ (.*?) \}\}", template, flags=re.S)
    system = "\n\n".join(m["content"] for m in messages if m["role"] == "system")
    variables: dict[str, Any] = {"$.System": system, "$.Messages": messages}
    functions: dict[str, Any] = {
        "and": lambda a, b: a and b,
        "eq": operator.eq,
        "lt": operator.lt,
        "len": len,
        "slice": lambda items, start: items[start:],
    }

    def value(words: list[str]) -> Any:
        """Return the value of an expression, removing its words from the list."""
        word = words.pop(0)
        if word == "(":
            name, arguments = words.pop(0), []
            while words[0] != ")":
                arguments.append(value(words))
            words.pop(0)
            return functions[name](*arguments)
        if word in variables:
            return variables[word]
        return word.strip('"') if word.startswith('"') else int(word)

    def expression(text: str) -> Any:
        words = re.findall(r'"[^"]*"|[()]|[^\s()]+', text)
        return value(["(", *words, ")"] if words[0] in functions else words)

    def run(i: int, shown: bool) -> tuple[str, int]:
        """Return the text up to the action that ends the block, and the position of that action."""
        out = ""
        while i < len(tokens):
            if i % 2 == 0:
                out += tokens[i] if shown else ""
            else:
                action = tokens[i]
                if action == "end" or action.startswith("else"):
                    return out, i
                if action == "range $i, $m := .Messages":
                    start = i + 1
                    for number, message in enumerate(messages):
                        variables["$i"] = number
                        variables["$m.Role"] = message["role"]
                        variables["$m.Content"] = message["content"]
                        text, i = run(start, shown)
                        out += text
                elif action.startswith("if "):
                    text, i = branch(i, shown, action.removeprefix("if "))
                    out += text
                elif action == "currentDate":
                    out += date.today().isoformat()
                else:
                    out += expression(action) if shown else ""
            i += 1
        return out, i

    def branch(i: int, shown: bool, condition: str) -> tuple[str, int]:
        is_met = shown and bool(expression(condition))
        text, i = run(i + 1, is_met)
        if tokens[i].startswith("else"):
            rest, i = branch(
                i,
                shown and not is_met,
                tokens[i].removeprefix("else if ").replace("else", "eq 1 1"),
            )
            text += rest
        return text, i

    return run(0, True)[0]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|return|>"]
    special += ["<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>", "<end_of_turn>"]
    return train_tokenizer(["hello there"], 280, special_tokens=special)


def chatting(tokenizer: Tokenizer, template: str | None) -> Tokenizer:
    return Tokenizer(
        tokenizer.backend,
        bos_token="<s>",
        eos_token="</s>",
        config={"chat_template": template} if template else {},
    )


@pytest.mark.parametrize("name", JINJA)
def test_go_template_renders_like_tokenizer_template(tokenizer: Tokenizer, name: str) -> None:
    own = chatting(tokenizer, JINJA[name])
    template = ollama_template(own)
    assert template is not None
    for messages in (SHORT, LONG, LONG[1:], [*LONG, *LONG[2:]]):
        if name == "without system" and messages[0]["role"] == "system":
            continue
        expected = own.apply_chat_template(messages, add_generation_prompt=True)
        assert go(template.go, messages) == expected
    assert template.stops == STOPS[name]


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        ("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}", []),
        (
            JINJA["ChatML"].replace("m['content']", "m['content'].replace('sun', 'moon')"),
            ["im_end"],
        ),
        (JINJA["ChatML"].replace("assistant\n", "{{ '{{' }}"), []),
        ("{{ raise_exception('no') }}", []),
    ],
)
def test_ollama_template_unsupported_template_is_omitted_with_note(
    tokenizer: Tokenizer, template: str, ends: list[str]
) -> None:
    own = chatting(tokenizer, template)
    assert ollama_template(own) is None
    content, (note,) = modelfile("a.gguf", own, 512)
    stops = ["</s>", *(f"<|{end}|>" for end in ends)]
    lines = "".join(f'PARAMETER stop "{stop}"\n' for stop in stops)
    assert content == f"FROM ./a.gguf\n{lines}PARAMETER num_ctx 512\n"
    assert "does more than add texts around the messages" in note


def test_modelfile_template_with_date_uses_ollama_date(tokenizer: Tokenizer) -> None:
    content, notes = modelfile("a.gguf", chatting(tokenizer, JINJA["gpt-oss"]), 512)
    assert content.count("Current date: {{ currentDate }}<|end|>") == 2
    assert notes == []


def test_modelfile_template_without_system_messages_has_note(tokenizer: Tokenizer) -> None:
    content, (note,) = modelfile("a.gguf", chatting(tokenizer, JINJA["without system"]), 512)
    assert "$.System" not in content
    assert note == "the chat template does not support system messages: Ollama omits them"


def test_modelfile_has_template_stops_and_context(tokenizer: Tokenizer) -> None:
    content, notes = modelfile("a.gguf", chatting(tokenizer, JINJA["ChatML"]), 131_072)
    assert notes == []
    assert content == (
        "FROM ./a.gguf\n"
        'TEMPLATE """{{ range $i, $m := .Messages }}{{ if eq $m.Role "user" }}'
        "{{ if and $.System (lt $i 2) }}<|im_start|>system\n{{ $.System }}<|im_end|>\n"
        "<|im_start|>user\n{{ else if lt $i 2 }}<|im_start|>user\n"
        "{{ else }}<|im_start|>user\n{{ end }}{{ $m.Content }}"
        '{{ else if eq $m.Role "assistant" }}<|im_end|>\n<|im_start|>assistant\n'
        "{{ $m.Content }}<|im_end|>\n{{ end }}{{ end }}<|im_end|>\n<|im_start|>assistant\n"
        '"""\n'
        'PARAMETER stop "<|im_end|>"\n'
        'PARAMETER stop "<|im_start|>"\n'
        'PARAMETER stop "</s>"\n'
        "PARAMETER num_ctx 32768\n"
    )


@pytest.mark.parametrize("adds", [True, False])
def test_ollama_template_omits_token_added_by_llama_cpp(tokenizer: Tokenizer, adds: bool) -> None:
    own = chatting(tokenizer, JINJA["Gemma"])
    own.add_bos = adds
    template = ollama_template(own)
    assert template is not None
    assert go(template.go, LONG).startswith("<start_of_turn>" if adds else "<s><start_of_turn>")


def test_modelfile_without_chat_template_passes_prompt_through(tokenizer: Tokenizer) -> None:
    for own in (None, chatting(tokenizer, None)):
        content, (note,) = modelfile("a.gguf", own, 64)
        assert 'TEMPLATE """{{ .Prompt }}"""\n' in content
        assert "no chat template" in note
