"""Conversations: the same text and ids as transformers gives for the saved folder."""

from __future__ import annotations

import inspect
import json
import random
from pathlib import Path
from typing import Any

import pytest

from builders import slow_but
from firstlight.tokenizer import Tokenizer
from firstlight.tokenizer.chat_template import CHAT_TEMPLATES, required_tokens

_WORDS = (
    *("hello", "the star", "  two spaces", "\n", "\n\n", "\t", " ", "é", "日本", "🙂", "<b>&amp;"),
    *("{{ 7*7 }}", "{% for x in y %}", "{# note #}", "{{ bos_token }}", "[INST]", "<<SYS>>\n"),
    *("<|im_end|>\n", "<|im_start|>system", "<|eot_id|>", "</s>", "<|endoftext|>", "'\"\\n"),
)

#: Jinja features used by templates of other models, each with a separate part.
_FURTHER = {
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ m.content | trim | upper }}{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ '<é>' | tojson }}",
    "blocks": "{% for m in messages %}\n    {% if true %}\n  {{ m.role }}\n    {% endif %}\n"
    "{%- endfor +%}\n\n",
    "namespace": "{% set ns = namespace(n=0, s='') %}{% for m in messages %}{% set ns.n = ns.n + 1 "
    "%}{% set ns.s = ns.s ~ m.role[0] %}{% endfor %}{{ ns.n * 2 }}{{ ns.s }}{{ 7 % 4 }}",
    "macro": "{% macro turn(m, end='!') %}{{ m['content'].replace('t', 'TT') }}{{ end }}"
    "{% endmacro %}{% for m in messages[::-1] %}{{ turn(m) }}{{ turn(m, end=eos_token) }}"
    "{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}{{ tools is none }}{{ documents is none }}{{ nothing }}",
    "filters": "{{ messages | map(attribute='role') | join('; ') }}{{ 'a\nb' | indent(2) }}"
    "{{ '%s-%02d' | format('x', 3) }}{{ '%s' % 'y' }}{{ '{:>4}'.format(1) }}{{ 'aa' | "
    "replace('a', 'b', 1) }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    "{{ ', '.join(['p', 'q']) }}{{ 'a,b'.split(',')[-1] }}{{ dict(a=1) }}{{ [1] * 3 }}",
    "variables": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}|{{ image_token }}"
    "|{{ add_generation_prompt }}",
    "scopes": "{% with a = messages[0].content, b = 2 %}{{ a }}{{ b ** 3 }}{% endwith %}"
    "{% set block %}x{{ 1 }}{% endset %}{{ block }}{% macro quote() %}<{{ caller('q') }}>"
    "{% endmacro %}{% call(y, z='d') quote() %}{{ y }}{{ z }}{% endcall %}",
}


def draw_conversations(count: int, *, alternating: bool, seed: int) -> list[list[dict[str, str]]]:
    """Draw conversations of 1 to 7 messages. `alternating` ones have a system message, if any,
    followed by alternating turns.
    """
    generator = random.Random(seed)
    conversations = []
    for _ in range(count):
        turns = generator.randint(1, 6)
        roles = [("user", "assistant")[i % 2] for i in range(turns)]
        if generator.random() < 0.5:
            roles.insert(0, "system")
        if not alternating:
            roles = generator.choices(("system", "user", "assistant", "tool"), k=len(roles))
        conversations.append(
            [
                {
                    "role": role,
                    "content": "".join(generator.choices(_WORDS, k=generator.randrange(6))),
                }
                for role in roles
            ]
        )
    return conversations


def with_template(tokenizer: Tokenizer, template: str, tokens: tuple[str, ...] = ()) -> Tokenizer:
    return tokenizer.extended([*tokens, "<|pad|>"], template)


def transformers_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_chat_template_text_of_200_conversations_matches_transformers(
    tmp_path: Path, tokenizer: Tokenizer, name: str
) -> None:
    ours = with_template(tokenizer, CHAT_TEMPLATES[name], required_tokens(name))
    ours.save_pretrained(tmp_path)
    theirs = transformers_tokenizer(tmp_path)
    for number, messages in enumerate(
        draw_conversations(200, alternating=name == "llama2", seed=len(name))
    ):
        prompt = number % 2 == 1
        text = ours.apply_chat_template(messages, add_generation_prompt=prompt)
        assert text == theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt
        )
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(
            text, special_tokens=True
        )


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_chat_template_ids_of_200_conversations_match_transformers(
    tmp_path: Path, tokenizer: Tokenizer, name: str
) -> None:
    """Newer transformers versions have another way to keep message text from becoming control
    tokens.
    """
    ours = with_template(tokenizer, CHAT_TEMPLATES[name], required_tokens(name))
    ours.save_pretrained(tmp_path)
    theirs = transformers_tokenizer(tmp_path)
    if "sanitize_control_tokens" not in inspect.signature(theirs.apply_chat_template).parameters:
        pytest.skip("this transformers can't keep the text of messages text")
    for messages in draw_conversations(200, alternating=name == "llama2", seed=1 + len(name)):
        encoded = theirs.apply_chat_template(messages, sanitize_control_tokens=True)
        assert ours.encode_chat(messages) == encoded["input_ids"]


@pytest.mark.parametrize("what", _FURTHER)
def test_chat_template_with_other_jinja_features_matches_transformers(
    tmp_path: Path, tokenizer: Tokenizer, what: str
) -> None:
    ours = with_template(tokenizer, _FURTHER[what])
    ours.config |= {"pad_token": "<|pad|>", "extra_special_tokens": {"image_token": "<|pad|>"}}
    ours.save_pretrained(tmp_path)
    theirs = transformers_tokenizer(tmp_path)
    for messages in draw_conversations(20, alternating=False, seed=0):
        text = ours.apply_chat_template(messages)
        assert text == theirs.apply_chat_template(messages, tokenize=False)


def test_chat_template_is_found_where_transformers_finds_it(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    tokenizer.save_pretrained(tmp_path)
    config_path = tmp_path / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    messages = [{"role": "user", "content": "hi"}]

    def check(expected: str) -> None:
        ours = Tokenizer.from_pretrained(tmp_path)
        assert ours.apply_chat_template(messages) == expected
        theirs = transformers_tokenizer(tmp_path)
        assert theirs.apply_chat_template(messages, tokenize=False) == expected

    config_path.write_text(json.dumps(config | {"chat_template": "config"}), encoding="utf-8")
    check("config")
    listed = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "listed"}]
    config_path.write_text(json.dumps(config | {"chat_template": listed}), encoding="utf-8")
    check("listed")
    (tmp_path / "chat_template.jinja").write_text("file", encoding="utf-8")
    check("file")


@pytest.mark.parametrize(
    "kind", slow_but(["trained", "llama2"], ["trained", "llama3", "llama2", "gpt2"])
)
def test_extended_tokenizer_has_same_tokens_in_transformers(
    tmp_path: Path, tokenizer: Tokenizer, kind: str, request: pytest.FixtureRequest
) -> None:
    if kind == "trained":
        before = tokenizer
    else:
        shared = request.getfixturevalue("shared")
        before = Tokenizer.from_pretrained(shared / "models" / f"{kind}-tokenizer")
    ours = before.extended(["<|one|>", "<two>"], CHAT_TEMPLATES["chatml"])
    ours.save_pretrained(tmp_path)
    theirs = transformers_tokenizer(tmp_path)
    first = before.vocab_size
    assert len(theirs) == first + 2
    assert theirs("<|one|>", add_special_tokens=False)["input_ids"] == [first]
    text = "ab <two>the <|one|>\n é"
    ids = ours.encode(text, special_tokens=True)
    assert theirs(text, add_special_tokens=False)["input_ids"] == ids
    assert {first, first + 1} <= set(ids)
    assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
    plain = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert ours.encode(text) == before.encode(text) == plain
