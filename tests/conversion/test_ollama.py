"""Modelfiles for Ollama: the templates render what the tokenizer's do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from firstlight.conversion.gguf.ollama import OLLAMA_TEMPLATES, known_template, modelfile
from firstlight.tokenizer import Tokenizer, train_tokenizer

SHORT = [{"role": "user", "content": "Hi"}]
LONG = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
]
EXPECTED = {
    "ChatML": (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n",
    ),
    "Llama 3": (
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHello.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "Llama 2": (
        "[INST] Hi [/INST]",
        "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello. </s><s>[INST] Bye [/INST]",
    ),
}
JINJA = {
    "ChatML": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + "
    "'<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}",
    "Llama 3": "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + "
    "'<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}",
    # Meta's for Llama 2, its errors left out.
    "Llama 2": "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
    "{% set system = messages[0]['content'] %}{% else %}{% set rest = messages %}"
    "{% set system = false %}{% endif %}{% for m in rest %}"
    "{% if loop.index0 == 0 and system != false %}"
    "{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m['content'] %}"
    "{% else %}{% set content = m['content'] %}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}"
    "{% endif %}{% endfor %}",
}


def go(template: str, messages: Sequence[dict[str, str]]) -> str:
    """The text that Go's text/template gives, of the few actions that are used here."""
    tokens = re.split(r"\{\{(.*?)\}\}", template, flags=re.S)
    system = "\n\n".join(m["content"] for m in messages if m["role"] == "system")
    variables: dict[str, Any] = {"$.System": system, ".Messages": messages}

    def value(word: str) -> Any:
        if word in variables:
            return variables[word]
        if word.startswith('"'):
            return word.strip('"')
        return int(word)

    def holds(words: list[str]) -> bool:
        text = " ".join(words)
        if text.startswith("and "):
            first, second = re.fullmatch(r"and (\S+) \((.*)\)", text).groups()  # type: ignore[union-attr]
            return bool(value(first)) and holds(second.split())
        operator, a, b = words
        return bool(value(a) == value(b) if operator == "eq" else value(a) < value(b))

    def run(i: int, shown: bool) -> tuple[str, int]:
        """Text up to the action that ends the block, and the place of that action."""
        out = ""
        while i < len(tokens):
            if i % 2 == 0:
                out += tokens[i] if shown else ""
            else:
                words = tokens[i].split()
                if words[0] in ("end", "else"):
                    return out, i
                if words[0] == "range":
                    start = i + 1
                    for number, message in enumerate(messages):
                        names = ("$i", "$m.Role", "$m.Content", ".Role", ".Content")
                        m = (message["role"], message["content"])
                        variables.update(zip(names, (number, *m, *m), strict=True))
                        text, i = run(start, shown)
                        out += text
                elif words[0] == "if":
                    text, i = branch(i, shown, words[1:])
                    out += text
                else:
                    out += value(words[0]) if shown else ""
            i += 1
        return out, i

    def branch(i: int, shown: bool, condition: list[str]) -> tuple[str, int]:
        is_met = shown and holds(condition)
        text, i = run(i + 1, is_met)
        words = tokens[i].split()
        if words[0] == "else":
            rest, i = branch(i, shown and not is_met, words[2:])
            text += rest
        return text, i

    return run(0, True)[0]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    special = ("<s>", "</s>", "<|im_end|>", "<|eot_id|>")
    return train_tokenizer(["hello there"], 280, special_tokens=special)


def chatting(tokenizer: Tokenizer, template: str | None) -> Tokenizer:
    return Tokenizer(
        tokenizer.backend,
        bos_token="<s>",
        eos_token="</s>",
        config={"chat_template": template} if template else {},
    )


@pytest.mark.parametrize("template", OLLAMA_TEMPLATES, ids=lambda template: template.name)
def test_templates_render_the_expected_texts(template: Any) -> None:
    for messages, expected in zip((SHORT, LONG), EXPECTED[template.name], strict=True):
        assert template.render(messages) == expected
        assert go(template.go, messages) == expected


@pytest.mark.parametrize("name", JINJA)
def test_a_tokenizers_template_is_known_by_what_it_renders(tokenizer: Tokenizer, name: str) -> None:
    own = chatting(tokenizer, JINJA[name])
    found = known_template(own)
    assert found is not None
    assert found.name == name
    begin = "<s>" if name != "ChatML" else ""
    for messages in (SHORT, LONG):
        expected = own.apply_chat_template(messages, add_generation_prompt=True)
        assert begin + go(found.go, messages) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m['content'] }}{% endfor %}",
        JINJA["ChatML"].replace("assistant", "bot"),
        "{{ raise_exception('no') }}",
    ],
)
def test_other_templates_are_left_out_with_a_note(tokenizer: Tokenizer, template: str) -> None:
    own = chatting(tokenizer, template)
    assert known_template(own) is None
    content, notes = modelfile("a.gguf", own, 512)
    assert content == 'FROM ./a.gguf\nPARAMETER stop "</s>"\nPARAMETER num_ctx 512\n'
    assert len(notes) == 1
    assert "renders otherwise than ChatML, Llama 3, Llama 2" in notes[0]


def test_the_modelfile_has_template_stops_and_context(tokenizer: Tokenizer) -> None:
    content, notes = modelfile("a.gguf", chatting(tokenizer, JINJA["ChatML"]), 131_072)
    assert notes == []
    assert content == (
        "FROM ./a.gguf\n"
        'TEMPLATE """{{ range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n'
        '{{ end }}<|im_start|>assistant\n"""\n'
        'PARAMETER stop "<|im_start|>"\n'
        'PARAMETER stop "<|im_end|>"\n'
        'PARAMETER stop "</s>"\n'
        "PARAMETER num_ctx 32768\n"
    )


def test_a_first_token_that_llama_cpp_does_not_add_is_written(tokenizer: Tokenizer) -> None:
    own = chatting(tokenizer, JINJA["Llama 2"])
    assert not own.add_bos
    assert 'TEMPLATE """<s>{{ range $i' in modelfile("a.gguf", own, 512)[0]


def test_a_model_without_chat_gets_the_prompt_as_it_is(tokenizer: Tokenizer) -> None:
    for own in (None, chatting(tokenizer, None)):
        content, (note,) = modelfile("a.gguf", own, 64)
        assert 'TEMPLATE """{{ .Prompt }}"""\n' in content
        assert "no chat template" in note
