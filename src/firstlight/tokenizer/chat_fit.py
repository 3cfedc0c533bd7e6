"""A tokenizer and a chat template put together, where they fit."""

from __future__ import annotations

import itertools
import re
import shlex

from firstlight.errors import InputError, TokenizerError
from firstlight.tokenizer.chat_template import find_template
from firstlight.tokenizer.tokenizer import Tokenizer

__all__ = ["require_end", "turn_end_ids", "with_chat_template"]

#: What is written like this is a control token in all templates known, but for models that were
#: trained on its characters: their tokenizers come with the template.
_CONTROL_TOKEN = re.compile(r"<\|[^<>|\s]{1,64}\|>|<(?:start|end)_of_\w{1,32}>")

_CONVERSATION = [
    {"role": "user", "content": "1"},
    {"role": "assistant", "content": "2"},
]


def with_chat_template(
    tokenizer: Tokenizer, template: str | None, folder: str = "DIR"
) -> Tokenizer:
    """The tokenizer with the template that is meant.

    Args:
        template: a built-in one's name, a .jinja file; None is the tokenizer's own.
        folder: where the tokenizer is, for the message.

    Raises:
        InputError: there is no such template.
        TokenizerError: it can't be used: it does not compile, or writes special tokens that the
            tokenizer lacks; or the tokenizer has none of its own.
    """
    if template is None:
        if tokenizer.chat_template is None:
            raise TokenizerError(
                f"the tokenizer of {folder} has no chat template: name one with data.template "
                "(prepare: --template): chatml, llama3, alpaca or a .jinja file; alpaca needs no "
                "tokens of its own"
            )
        _try_out(tokenizer)
        return tokenizer
    text, required = find_template(template)
    fitted = tokenizer.extended([], text)
    written = _try_out(fitted)
    missing = [
        token
        for token in dict.fromkeys([*required, *_CONTROL_TOKEN.findall(written)])
        if token not in tokenizer.special_tokens
    ]
    if missing:
        source = shlex.quote(folder)
        # Those of a built-in template are added with it.
        named = "" if required else f" --add {' '.join(map(shlex.quote, missing))}"
        raise TokenizerError(
            f"the chat template {template} writes {' '.join(missing)}, which the tokenizer of "
            f"{folder} does not have as special tokens: add them with `firstlight tokenizer extend "
            f"{source}{named} --chat-template {shlex.quote(template)} --out NEW`, and take "
            "data.tokenizer NEW (prepare: --tokenizer NEW); the model's embedding grows by itself"
        )
    if "eos_token" in text and tokenizer.eos_token is None:
        raise TokenizerError(
            f"the chat template {template} ends turns with eos_token, which the tokenizer of "
            f"{folder} does not name: set it in tokenizer_config.json"
        )
    return fitted


def _try_out(tokenizer: Tokenizer) -> str:
    """What an ordinary conversation becomes; "" where the template refuses it, being for others."""
    try:
        return tokenizer.apply_chat_template(_CONVERSATION)
    except InputError:
        return ""


def turn_end_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The special tokens that end an assistant's turn under the tokenizer's chat template: the
    first one that the template writes after what the assistant says. Empty where there is no
    template, or where turns end in plain text.

    Such a token need not be among the model's end tokens: `<|im_end|>` of a template that was
    added later is none, and an answer would go on into turns of its own.
    """
    if tokenizer.chat_template is None:
        return ()
    question, again = {"role": "user", "content": "1"}, {"role": "user", "content": "2"}
    for more in ([], [again]):  # some templates end a turn only where another one begins
        try:
            # Two answers without a character in common: what both texts end with comes after.
            one, other = (
                tokenizer.encode_chat([question, {"role": "assistant", "content": text}, *more])
                for text in ("3", "4")
            )
        except (InputError, TokenizerError):
            continue
        if one == other:  # a template that leaves the last answer out
            continue
        pairs = zip(reversed(one), reversed(other), strict=False)
        same = [token_id for token_id, _ in itertools.takewhile(lambda p: p[0] == p[1], pairs)]
        after = same[::-1]
        for place, token_id in enumerate(after):
            if token_id in tokenizer.special_token_ids:
                # A turn that ends in text, as "USER:", is not ended by what follows that.
                return () if tokenizer.decode(after[:place]).strip() else (token_id,)
    return ()


def require_end(ids: list[int], learned: list[bool], tokenizer: Tokenizer) -> str | None:
    """What to warn of if the last token that an example learns ends nothing; else None."""
    last = next((i for i, own in zip(ids[::-1], learned[::-1], strict=True) if own), None)
    if last is None or last in tokenizer.special_token_ids:
        return None
    return (
        "the chat template writes no special token after what the assistant says: the model does "
        "not learn to end its answers with one"
    )
