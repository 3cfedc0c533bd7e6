"""Small files that ask for much: tokenizers, chat templates, adapters and archives, by name."""

from __future__ import annotations

from typing import Any

from hostile_folders import adapter
from hostile_place import Build, change_json
from hostile_texts import template
from hostile_texts import tokenizer as spoiled_tokenizer

# Tokenizers


def encoding(**sections: Any) -> Build:
    """A tokenizer.json with other sections, which encodes and decodes some texts."""
    return spoiled_tokenizer(
        lambda _, folder: change_json(folder / "tokenizer.json", lambda t: t.update(sections)),
        "encode",
    )


def replace(old: str, new: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def normalizers(*steps: dict[str, Any]) -> Build:
    return encoding(normalizer={"type": "Sequence", "normalizers": steps})


def split(pattern: str) -> Build:
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return encoding(pre_tokenizer=step)


def added(content: str, number: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": 1000 + number, "content": content, "special": True, **flags}


def words(kind: str, **settings: Any) -> Build:
    """A tokenizer of three words."""
    vocabulary = {"a": 0, "b": 1, "<|endoftext|>": 2}
    return encoding(model={"type": kind, "vocab": vocabulary, **settings})


_BERT = {"type": "BertProcessing", "sep": ["a", 0], "cls": ["a", 0]}
_WORD_PIECE = {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
_MILLION = 10**6

_TOKENIZERS: dict[str, Build] = {
    "six replacements by a hundred": normalizers(*[replace("a", "a" * 100)] * 6),
    "two letters that grow in turn": normalizers(
        *[replace("a", "b" * 10), replace("b", "a" * 10)] * 4
    ),
    "a replacement of nothing": normalizers(*[replace("", "a" * 50, "Regex")] * 3),
    "a decoder's replacement of one letter": encoding(
        decoder={"type": "Sequence", "decoders": [replace(r"\x68", "y" * 9000, "Regex")]}
    ),
    "a long text before each": normalizers({"type": "Prepend", "prepend": "a" * _MILLION}),
    "100,000 steps of a normalizer": normalizers(*[{"type": "Lowercase"}] * 100_000),
    "bytes as characters of bytes": normalizers(*[{"type": "ByteLevel"}] * 20),
    "bytes as characters of bytes in a split": encoding(
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [{"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}]
            * 20,
        }
    ),
    "six replacements in a decoder": encoding(
        decoder={"type": "Sequence", "decoders": [replace("a", "a" * 100)] * 6}
    ),
    "10,000 frames around a text": encoding(
        post_processor={"type": "Sequence", "processors": [_BERT] * 10_000}
    ),
    "a pattern that panics": split("(a+)+$"),
    "a pattern that panics on choices": split("(a|aa)+$"),
    "a pattern that panics on spaces": split(r"(\s+\s?)+$"),
    "a pattern of 300,000 characters": split("|".join(f"x{i}+y" for i in range(40_000))),
    "a decoder that panics": encoding(
        decoder={"type": "Strip", "content": "a", "start": 2**63, "stop": 2**63}
    ),
    "words of no length": encoding(pre_tokenizer={"type": "FixedLength", "length": 0}),
    "WordPiece without its unknown token": words("WordPiece", unk_token="[UNK]", **_WORD_PIECE),
    "WordLevel without its unknown token": words("WordLevel", unk_token="[UNK]"),
    "BPE without its unknown token": words("BPE", unk_token="[UNK]", merges=[]),
    "Unigram without an unknown token": encoding(
        model={"type": "Unigram", "unk_id": None, "vocab": [["a", 0.0], ["<|endoftext|>", -1.0]]}
    ),
    "Unigram with a token of three megabytes": encoding(
        model={"type": "Unigram", "unk_id": 0, "vocab": [["a" * 3 * _MILLION, 0.0], ["b", 0.0]]}
    ),
    "added tokens of a megabyte": encoding(
        added_tokens=[added(chr(97 + i) * _MILLION, i) for i in range(20)]
    ),
    "an added token of id 2^32 - 1": encoding(added_tokens=[added("zz", 2**32 - 1001)]),
    "a tokenizer.json of 5,000,000 lists": spoiled_tokenizer(
        lambda _, folder: (folder / "tokenizer.json").write_text(
            '{"model": {"vocab": {}}, "x": [' + "[]," * 5_000_000 + "[]]}"
        )
    ),
}

# Chat templates

_LONG = "{% set x = 'a b c. ' * 1400000 %}"
#: What takes long on a text of ten million characters, or a list of many references to it.
_EXPRESSIONS = (
    *("x | urlencode", "x | title", "x | wordcount", "x | unique | list", "x | sort", "x | min"),
    *("([x] * 100000) | sort", "([x] * 100000) | string", "([x] * 100000) ~ ''", "x | list"),
    *("([x] * 100000) | tojson", "([x] * 100000) | map('upper') | list", "x.split()"),
    *("([x] * 99) | tojson(indent=9)", "'%(a)s' * 999 % {'a': x}", "('{0}' * 999).format(x)"),
    *("('a' * 9999999).rfind('b' ~ 'a' * 99999)", "('a' * 9999999).strip('b' * 99999 ~ 'a')"),
    *("x.encode('punycode')", "(x ~ 'b') in [x ~ 'c'] * 100000", "(x | safe).striptags()"),
    "[x] * 1000000000",
    *("x | selectattr('y') | list", "x | map(attribute='y') | list", "x | groupby('y')"),
    "[" + ", ".join(["x | upper"] * 200) + "]",
    "[" + ", ".join(f"x[{i}:]" for i in range(200)) + "]",
)
_TEMPLATES: dict[str, Build] = {
    **{
        f"a template of {expression[:50]}": template(
            _LONG + "{% for i in range(1000) %}{% if " + expression + " %}{% endif %}{% endfor %}"
        )
        for expression in _EXPRESSIONS
    },
    "a template of rounds in rounds": template(
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "a template that calls itself twice": template(
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a template that doubles a text": template(
        "{% set n = namespace(x='abc') %}"
        "{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
    ),
    "a template of a number of 10^9 digits": template("{{ 9 ** (9 ** 9) }}"),
    "a template of 100,000 expressions": template("{{ a.b }}" * 10**5),
    "a template of 30,000 blocks": template("{% if a %}{% endif %}" * 30_000 + "{{ 1 / 0 }}"),
    "a template that rounds to 10^9 digits": template(
        "{{ 5.5 | round(precision=10**9, method='ceil') }}"
    ),
    "a template that divides long numbers": template(
        "{{ ('f' * 9000000) | int(0, 16) // ('f' * 4000000) | int(0, 16) }}"
    ),
    "a template that refuses in ten megabytes": template(_LONG + "{{ raise_exception(x) }}"),
    "a template that refuses in a terminal's commands": template(
        "{{ raise_exception('\\x1b[2J\\r\\n') }}"
    ),
    "a template of many long names": template(
        _LONG + "".join(f"{{% set y{i} = x ~ '{i}' %}}" for i in range(300))
    ),
    "a template of many long blocks": template(
        _LONG + "".join(f"{{% set y{i} %}}{{{{ x }}}}{i}{{% endset %}}" for i in range(300))
    ),
}

# Adapters


def patterned(**settings: Any) -> Build:
    return adapter(lambda *_: None, **settings)


_ADAPTERS: dict[str, Build] = {
    "an adapter of rank 0 by pattern": patterned(rank_pattern={"q_proj": 0}),
    "an adapter of a negative rank by pattern": patterned(rank_pattern={"q_proj": -3}),
    "an adapter of rank 2,000,000": patterned(r=2_000_000),
    "an adapter of rank 10^18": patterned(r=10**18),
    "an adapter of rank 10^400": patterned(rank_pattern={"q_proj": 10**400}),
    "an adapter of alpha 0": patterned(lora_alpha=0),
    "an adapter of a negative alpha by pattern": patterned(alpha_pattern={"q_proj": -1}),
    "an adapter of 200,000 patterns": patterned(
        rank_pattern={f"layers.{i}.q_proj": 2 for i in range(200_000)}
    ),
    "an adapter of a pattern of five megabytes": patterned(rank_pattern={"q" * 5 * _MILLION: 2}),
    "an adapter of many choices": patterned(rank_pattern={"(.?)" * 40 + "!": 2}),
    "an adapter of a kind of ten megabytes": patterned(peft_type="x" * 10 * _MILLION),
}

BOMBS: dict[str, Build] = {**_TOKENIZERS, **_TEMPLATES, **_ADAPTERS}
