"""Write Modelfiles for Ollama.

A Modelfile contains the chat template in the syntax of Go templates, the stop strings and the
context length.

Ollama can't use the Jinja template of the tokenizer. To build an equivalent Go template, this
module renders conversations with the Jinja template and extracts the text around each message. The
Go template is then verified on different conversations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from types import MappingProxyType
from typing import Any

from firstlight.errors import FirstlightError
from firstlight.tokenizer import Tokenizer
from firstlight.weights.huggingface import end_ids, generation_config, sampling_settings

Messages = Sequence[Mapping[str, str]]

#: Maximum context length, in tokens, that is written to a Modelfile. There is a limit because
#: Ollama allocates the KV cache for the full context when it loads a model.
_MOST_CONTEXT = 32_768

#: Contents of the messages in the conversations from which a template is extracted. They are easy
#: to find in the rendered text, because they do not occur in templates.
_SYSTEM = "System-7f3a"
_FIRST = "First-7f3a"
_ANSWER = "Answer-7f3a"
_SECOND = "Second-7f3a"
#: Roles of the messages in a conversation after the system message.
_TURNS = ("user", "assistant", "user", "assistant", "user")
#: Contents of the messages in the conversations on which the template is verified.
_CONTENTS = (
    "When does the sun rise?",
    "At six.\nIn winter, at eight.",
    "And set?",
    "At nine.",
    "Thanks!",
)


@dataclass(frozen=True)
class OllamaTemplate:
    """The text that a chat template adds around the messages of a conversation.

    Attributes:
        head: text before the first user message in a conversation without a system message.
        system_head: text before the system message. It replaces `head`. If `is_last` is True, it
            follows the text before the last user message instead. None if the template does not
            support system messages.
        system_end: text between the system message and the user message that follows it.
        user: text before each user message except the first.
        assistant: text between a user message and the assistant message that follows it.
        assistant_end: text after an assistant message, if another user message follows.
        prompt: text after the last user message, at the end of the prompt.
        is_last: True if the system message is rendered together with the last user message, as in
            Mistral's templates.
        stops: strings at which Ollama stops generation.
    """

    head: str
    system_head: str | None
    system_end: str
    user: str
    assistant: str
    assistant_end: str
    prompt: str
    is_last: bool
    stops: tuple[str, ...]

    def render(self, messages: Messages) -> str:
        """Return the text that the Go template renders for these messages."""
        system = "\n\n".join(m["content"] for m in messages if m["role"] == "system")
        has_system = bool(system) and self.system_head is not None
        shown = f"{self.system_head}{system}{self.system_end}"
        text = ""
        for i, message in enumerate(messages):
            if message["role"] == "user":
                is_shown = has_system and (i == len(messages) - 1 if self.is_last else i < 2)
                if self.is_last or not is_shown:
                    text += self.head if i < 2 else self.user
                text += shown * is_shown + message["content"]
            elif message["role"] == "assistant":
                text += self.assistant + message["content"] + self.assistant_end
        return text + self.prompt

    @property
    def go(self) -> str:
        """The template in the syntax of Go templates."""
        question = f"{{{{ if lt $i 2 }}}}{self.head}{{{{ else }}}}{self.user}{{{{ end }}}}"
        system = f"{self.system_head}{{{{ $.System }}}}{self.system_end}"
        if self.system_head is not None and self.is_last:
            question += (
                "{{ if and $.System (eq (len (slice $.Messages $i)) 1) }}" + system + "{{ end }}"
            )
        elif self.system_head is not None:
            rest = question.removeprefix("{{ ")
            question = "{{ if and $.System (lt $i 2) }}" + system + "{{ else " + rest
        return (
            '{{ range $i, $m := .Messages }}{{ if eq $m.Role "user" }}'
            f"{question}{{{{ $m.Content }}}}"
            '{{ else if eq $m.Role "assistant" }}'
            f"{self.assistant}{{{{ $m.Content }}}}{self.assistant_end}"
            f"{{{{ end }}}}{{{{ end }}}}{self.prompt}"
        )


def ollama_template(tokenizer: Tokenizer) -> OllamaTemplate | None:
    """Return a Go template that renders the same text as the tokenizer's chat template, or None if
    no such template could be found.

    The beginning-of-sequence token is not part of the rendered text if llama.cpp adds it.
    """
    try:
        template = _observed(tokenizer)
        for count in (1, 3, 5):
            turns = [
                {"role": role, "content": content}
                for role, content in zip(_TURNS[:count], _CONTENTS[:count], strict=True)
            ]
            conversations = [turns]
            if template.system_head is not None:
                conversations.append([{"role": "system", "content": "You are a lamp."}, *turns])
            for messages in conversations:
                if template.render(messages) != _rendered(tokenizer, messages):
                    return None
    except (FirstlightError, ValueError):
        return None
    # Reject these strings. Go would interpret them as template actions, or as the end of the
    # template.
    parts = [part for part in vars(template).values() if isinstance(part, str)]
    is_taken = any(mark in part for mark in ("{{", "}}", '"""') for part in parts)
    return None if is_taken or "{{{" in template.go else template


def _rendered(tokenizer: Tokenizer, messages: Messages, *, prompt: bool = True) -> str:
    """Render messages with the tokenizer's chat template. The beginning-of-sequence token is
    omitted if llama.cpp adds it.
    """
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=prompt)
    return text.removeprefix(tokenizer.bos_token or "") if tokenizer.add_bos else text


def _observed(tokenizer: Tokenizer) -> OllamaTemplate:
    """Determine the text that the tokenizer's template renders around the messages.

    Raises:
        FirstlightError: the template fails on a conversation of user and assistant messages.
        ValueError: a message does not occur in the rendered text, or is not where it is expected.
    """
    turns = [
        {"role": role, "content": content}
        for role, content in zip(_TURNS, (_FIRST, _ANSWER, _SECOND), strict=False)
    ]
    head, prompt = _around(_rendered(tokenizer, turns[:1]), _FIRST)
    _, assistant, joint, _ = _around(_rendered(tokenizer, turns), _FIRST, _ANSWER, _SECOND)
    # Some templates add a different token after the last assistant message than after earlier ones.
    *_, end = _around(_rendered(tokenizer, turns[:2], prompt=False), _FIRST, _ANSWER)
    if not joint.startswith(end):
        shared = (n for n in range(len(joint) + 1) if head.endswith(joint[n:]))
        assistant_end = joint[: next(shared)]
    else:
        assistant_end = end
    user = joint[len(assistant_end) :]
    template = OllamaTemplate(
        head=head,
        system_head=None,
        system_end="",
        user=user,
        assistant=assistant,
        assistant_end=assistant_end,
        prompt=prompt,
        is_last=False,
        stops=_stops(tokenizer, end, user if assistant_end == end else ""),
    )
    try:
        text = _rendered(tokenizer, [{"role": "system", "content": _SYSTEM}, *turns])
    except FirstlightError:  # Gemma 2's template, for example, rejects system messages.
        return template
    if _SYSTEM not in text:
        return template
    if is_last := text.find(_SYSTEM) > text.find(_ANSWER):
        *_, before, system_end, _ = _around(text, _ANSWER, _SYSTEM, _SECOND)
        before = before.removeprefix(assistant_end + user)
    else:
        before, system_end, _ = _around(text, _SYSTEM, _FIRST)
    return dataclasses.replace(template, system_head=before, system_end=system_end, is_last=is_last)


def _around(text: str, *contents: str) -> list[str]:
    """Split a string at all of `contents`, and return the parts before, between and after them.
    Each of `contents` must occur exactly once, and they must occur in the given order.

    Raises:
        ValueError: one of `contents` does not occur exactly once, or not in the given order.
    """
    parts = []
    for content in contents:
        if text.count(content) != 1:
            raise ValueError(content)
        before, text = text.split(content)
        parts.append(before)
    return [*parts, text]


def _stops(tokenizer: Tokenizer, end: str, user: str) -> tuple[str, ...]:
    """Return the strings that end an assistant message. These are the special tokens between an
    assistant message and the next user message. If there are none, the entire text before the user
    message is used.
    """
    found = sorted(
        (place, token)
        for token in tokenizer.special_tokens
        if (place := (end + user).find(token)) >= 0
    )
    stops = [token for _, token in found]
    if user.strip() and not any(token in user for token in tokenizer.special_tokens):
        stops.append(user.strip().split("\n")[0])
    return tuple(stops)


def modelfile(
    file: str,
    tokenizer: Tokenizer | None,
    context: int,
    generation: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[str, list[str]]:
    """Return the content of the Modelfile for a GGUF file, and notes for the user.

    Args:
        file: name of the GGUF file in the same folder.
        tokenizer: tokenizer of the model, if any.
        context: context length of the model in tokens.
        generation: content of the model's generation_config.json.
    """
    lines, notes = [f"FROM ./{file}"], []
    template = None
    if tokenizer is None or tokenizer.chat_template is None:
        lines.append('TEMPLATE """{{ .Prompt }}"""')
        notes.append("there is no chat template: the Modelfile passes the prompt unchanged")
    else:
        template = ollama_template(tokenizer)
        if template is None:
            notes.append(
                "the chat template does more than add texts around the messages: the Modelfile "
                "has no TEMPLATE, so write one in Go's syntax (https://docs.ollama.com/template)"
            )
        else:
            # If the rendered text contains today's date in this format, the template inserted it,
            # as the template of gpt-oss does.
            go = template.go.replace(date.today().isoformat(), "{{ currentDate }}")
            lines.append(f'TEMPLATE """{go}"""')
            if date.today().strftime("%d %b %Y") in go:
                notes.append(
                    "the chat template contains the current date, which will remain today's "
                    "date in Ollama"
                )
            if template.system_head is None:
                notes.append(
                    "the chat template does not support system messages: Ollama omits them"
                )
    stops = list(template.stops) if template else []
    if tokenizer is not None:
        ends = end_ids(generation_config(tokenizer, generation))
        stops += [text for i in ends if (text := tokenizer.backend.id_to_token(i)) is not None]
    # Stop strings are enclosed in quotation marks in a Modelfile, so they can't contain any.
    lines += [f'PARAMETER stop "{stop}"' for stop in dict.fromkeys(stops) if '"' not in stop]
    for name, value in sampling_settings(generation).items():
        lines.append(f"PARAMETER {name.replace('repetition', 'repeat')} {value}")
    lines.append(f"PARAMETER num_ctx {min(context, _MOST_CONTEXT)}")
    return "\n".join(lines) + "\n", notes
