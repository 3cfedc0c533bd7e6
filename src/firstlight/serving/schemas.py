"""What a request may say: OpenAI's fields and our own, each with its bounds.

Every field either does what it says or is refused by name; only those that change nothing about
an answer are accepted without effect.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

#: Answers to one prompt; prompts of one request.
MOST_CHOICES, MOST_PROMPTS = 8, 64
MOST_MESSAGES, MOST_PARTS = 512, 64
MOST_STOPS, LONGEST_STOP = 4, 256
MOST_LOGPROBS, MOST_CHAT_LOGPROBS = 5, 20
MOST_BIASES = 1024
#: Token ids of one prompt: more than any context.
_MOST_IDS = 200_000


def _whole(value: Any) -> Any:
    """2.0 is an integer for JSON Schema, and so here."""
    return int(value) if type(value) is float and value.is_integer() else value


_WHOLE = BeforeValidator(_whole)
_Text = Annotated[str, Field(max_length=256)]
_TokenIds = Annotated[
    list[Annotated[int, Field(ge=0), _WHOLE]], Field(fail_fast=True, min_length=1)
]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_TokenId = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Nothing = Annotated[list[Any], Field(max_length=0)] | None


class _Strict(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class StreamOptions(_Strict):
    """`stream_options`.

    Attributes:
        include_usage: one more chunk at the end, with the numbers of tokens.
        include_obfuscation: has no effect; nothing is padded.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class PlainFormat(_Strict):
    """A `response_format` without a schema.

    Attributes:
        type: "text" is any text, "json_object" any JSON object.
    """

    type: Literal["text", "json_object"]


class NamedSchema(_Strict):
    """The schema of a `response_format`.

    Attributes:
        name, description: have no effect.
        schema_: JSON Schema; none is any object.
        strict: has no effect: the schema is always kept to.
    """

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class SchemaFormat(_Strict):
    """A `response_format` with a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class GenerationRequest(_Strict):
    """What both kinds of requests have.

    Attributes:
        model: the name that `/v1/models` gives, or none.
        stream: pieces as they are made, as server-sent events.
        max_tokens: at most so many new ones for each choice; what the context has no room for is
            cut.
        n: so many answers, each with a seed of its own: `seed`, `seed + 1`, ...
        temperature: 0 takes the likeliest token.
        top_k, min_p, repetition_penalty: not OpenAI's; see `SamplingConfig`.
        stop: texts that end an answer and are no part of it.
        seed: the same seed gives the same answer.
        frequency_penalty, presence_penalty: see `SamplingConfig`.
        logit_bias: numbers by token id, added to the logits of these tokens.
        response_format: JSON as an answer, by a schema.
        user ... prompt_cache_retention: OpenAI's fields that say nothing about the answer:
            accepted, without effect.
    """

    model: _Text | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1), _WHOLE] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES), _WHOLE] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31), _WHOLE] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    stop: (
        Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
        | Annotated[
            list[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]],
            Field(max_length=MOST_STOPS),
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), _WHOLE] | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    logit_bias: Annotated[dict[_TokenId, _Bias], Field(max_length=MOST_BIASES)] | None = None
    response_format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = (
        None
    )
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def schema_asked(self) -> dict[str, Any] | None:
        """The schema that the answer must keep to, if there is one."""
        if isinstance(self.response_format, SchemaFormat):
            return self.response_format.json_schema.schema_ or {"type": "object"}
        plain = self.response_format
        return None if plain is None or plain.type == "text" else {"type": "object"}


class CompletionRequest(GenerationRequest):
    """The body of `/v1/completions`.

    Attributes:
        prompt: a text, several, or token ids, which may be control tokens.
        max_tokens: see `GenerationRequest`; 0 adds nothing, for `echo`.
        logprobs: log-probabilities of the tokens chosen and of so many likeliest ones.
        echo: the prompt comes before what is added, and its log-probabilities before the others.
    """

    max_tokens: Annotated[int, Field(ge=0), _WHOLE] | None = None
    echo: bool | None = None
    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[_TokenIds, Field(max_length=_MOST_IDS)]
        | Annotated[list[_TokenIds], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS), _WHOLE] | None = None


class TextPart(_Strict):
    """A part of a message's content; only texts are read."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """One message of a conversation.

    Attributes:
        role: "developer" is OpenAI's newer word for "system".
        content: a text, or parts that are joined.
        refusal ... tool_calls: what clients send back of an answer of ours, where it is empty.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: (
        str | Annotated[list[TextPart], Field(fail_fast=True, min_length=1, max_length=MOST_PARTS)]
    )
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: _Nothing = None
    tool_calls: _Nothing = None

    def plain(self) -> dict[str, str]:
        """As a chat template reads it."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(GenerationRequest):
    """The body of `/v1/chat/completions`.

    Attributes:
        messages: the conversation so far.
        max_completion_tokens: OpenAI's newer name of `max_tokens`.
        logprobs: log-probabilities of the tokens chosen.
        top_logprobs: and of so many likeliest ones.
        parallel_tool_calls: has no effect, since there are no tools.
    """

    messages: Annotated[
        list[Message], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)
    ]
    max_completion_tokens: Annotated[int, Field(ge=1), _WHOLE] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_CHAT_LOGPROBS), _WHOLE] | None = None
    parallel_tool_calls: bool | None = None


#: OpenAI's fields that would change the answer, and that are refused unless their value asks for
#: nothing. null asks for nothing in any of them.
REFUSED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
    "moderation": (),
}
