"""Modelfiles for Ollama: the chat template in Go's syntax, stop texts and the context length.

Ollama renders conversations with a template of Go's `text/template`, not with the tokenizer's Jinja
template. Three common templates are known here in both forms. A tokenizer's template is compared
with them by the texts that it renders, not by its source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from firstlight.errors import FirstlightError
from firstlight.tokenizer import Tokenizer

Messages = Sequence[dict[str, str]]

#: Maximum context length in tokens that a Modelfile sets, since Ollama allocates the cache for the
#: whole context when it loads a model.
_MOST_CONTEXT = 32_768

#: Conversations by which a template is recognised; each is rendered with the start of an answer.
_CONVERSATIONS: tuple[Messages, ...] = (
    ({"role": "user", "content": "When does the sun rise?"},),
    (
        {"role": "system", "content": "You are a lamp."},
        {"role": "user", "content": "When does the sun rise?"},
        {"role": "assistant", "content": "At six.\nIn winter, at eight."},
        {"role": "user", "content": "And set?"},
    ),
)


@dataclass(frozen=True)
class OllamaTemplate:
    """A known chat template.

    Attributes:
        name: name of the template, for messages.
        go: the template in Go's syntax, without the token that begins a text (llama.cpp adds it).
        render: function from a conversation to the text that `go` renders.
        stops: texts at which Ollama ends an answer.
    """

    name: str
    go: str
    render: Callable[[Messages], str]
    stops: tuple[str, ...]


def _chatml(messages: Messages) -> str:
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return f"{text}<|im_start|>assistant\n"


def _llama3(messages: Messages) -> str:
    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    text = "".join(f"{head.format(m['role'])}{m['content']}<|eot_id|>" for m in messages)
    return text + head.format("assistant")


def _llama2(messages: Messages) -> str:
    text, system = "", ""
    for i, message in enumerate(messages):
        content = message["content"]
        if message["role"] == "system":
            system = f"<<SYS>>\n{content}\n<</SYS>>\n\n"
        elif message["role"] == "user":
            # The system prompt stands in the first user message.
            text += f"[INST] {system if i < 2 else ''}{content} [/INST]"
        else:
            text += f" {content} </s><s>"
    return text


OLLAMA_TEMPLATES = (
    OllamaTemplate(
        "ChatML",
        "{{ range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n"
        "{{ end }}<|im_start|>assistant\n",
        _chatml,
        ("<|im_start|>", "<|im_end|>"),
    ),
    OllamaTemplate(
        "Llama 3",
        "{{ range .Messages }}<|start_header_id|>{{ .Role }}<|end_header_id|>\n\n"
        "{{ .Content }}<|eot_id|>{{ end }}<|start_header_id|>assistant<|end_header_id|>\n\n",
        _llama3,
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    OllamaTemplate(
        "Llama 2",
        '{{ range $i, $m := .Messages }}{{ if eq $m.Role "user" }}[INST] '
        "{{ if and $.System (lt $i 2) }}<<SYS>>\n{{ $.System }}\n<</SYS>>\n\n{{ end }}"
        '{{ $m.Content }} [/INST]{{ else if eq $m.Role "assistant" }} {{ $m.Content }} </s><s>'
        "{{ end }}{{ end }}",
        _llama2,
        ("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"),
    ),
)


def known_template(tokenizer: Tokenizer) -> OllamaTemplate | None:
    """The known template that renders the same texts as the tokenizer's template; None if there is
    none."""
    begin = tokenizer.bos_token or ""
    try:
        rendered = [
            tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)
            for messages in _CONVERSATIONS
        ]
    except FirstlightError:
        return None
    for template in OLLAMA_TEMPLATES:
        texts = [template.render(messages) for messages in _CONVERSATIONS]
        if rendered == texts or rendered == [begin + text for text in texts]:
            return template
    return None


def modelfile(file: str, tokenizer: Tokenizer | None, context: int) -> tuple[str, list[str]]:
    """The text of the Modelfile for a GGUF file, and notes for the user.

    Args:
        file: name of the GGUF file in the same folder.
        tokenizer: the model's tokenizer, if any.
        context: the model's context length in tokens.
    """
    lines, notes = [f"FROM ./{file}"], []
    template = None
    if tokenizer is None or tokenizer.chat_template is None:
        lines.append('TEMPLATE """{{ .Prompt }}"""')
        notes.append("there is no chat template: the Modelfile's gives the prompt as it is")
    else:
        template = known_template(tokenizer)
        if template is None:
            names = [one.name for one in OLLAMA_TEMPLATES]
            notes.append(
                f"the chat template renders otherwise than {', '.join(names)}: the Modelfile has "
                "no TEMPLATE, write one in Go's syntax (https://docs.ollama.com/template)"
            )
        else:
            begins = tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
            begin = tokenizer.bos_token or ""
            # llama.cpp adds the token itself if the tokenizer does (`add_bos`).
            written = begin if begin and not tokenizer.add_bos and begins.startswith(begin) else ""
            lines.append(f'TEMPLATE """{written}{template.go}"""')
    end = None if tokenizer is None else tokenizer.eos_token
    stops = [*(template.stops if template else ()), *([end] if end else [])]
    lines += [f'PARAMETER stop "{stop}"' for stop in dict.fromkeys(stops)]
    lines.append(f"PARAMETER num_ctx {min(context, _MOST_CONTEXT)}")
    return "\n".join(lines) + "\n", notes
