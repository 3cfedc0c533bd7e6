"""Request processing: from a request's body to the token sequences to continue."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from firstlight.console import own_version
from firstlight.errors import ConfigError, InputError, MissingDependencyError, TokenizerError
from firstlight.generation.chat import turn_end_ids
from firstlight.generation.config import SamplingConfig
from firstlight.generation.continuation import Continuation
from firstlight.generation.engine import tokenizer_of
from firstlight.generation.sampling import require_biased_tokens
from firstlight.generation.structured import Constraint, Grammars, SchemaError
from firstlight.models import Model
from firstlight.serving.access import RequestError, unsupported_schema
from firstlight.serving.request import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    read_request,
)
from firstlight.serving.response import (
    ChatFormat,
    CompletionFormat,
    Echo,
    ResponseFormat,
    TokenTexts,
)
from firstlight.tokenizer.parts import most_bytes_per_token
from firstlight.weights.huggingface import LoadedModel

#: OpenAI's default of `max_tokens` for completions. Without it, a chat's answer may fill the
#: context.
_COMPLETION_TOKENS = 16


@dataclass(frozen=True)
class PreparedRequest:
    """A checked and encoded request.

    Attributes:
        texts: new continuations: all choices of the first prompt, then those of the second, ...
        prompt_tokens: number of tokens of all prompts together.
        response: format of the response.
        stream: True to send chunks while the texts are generated.
        includes_usage: True to end a stream with the numbers of tokens.
    """

    texts: list[Continuation]
    prompt_tokens: int
    response: ResponseFormat
    stream: bool
    includes_usage: bool


class RequestProcessor:
    """Checks and encodes requests. `completion` and `chat` can take seconds, so they should be
    called in a separate thread.

    Args:
        loaded: a model with a tokenizer.
        name: the model's name for clients.
        context: greatest number of tokens of a text, prompt and answer together.
        capacity: greatest number of texts of one request.
    """

    def __init__(self, loaded: LoadedModel, name: str, *, context: int, capacity: int) -> None:
        self._loaded, self.name, self.context = loaded, name, context
        self._tokenizer = tokenizer_of(loaded)
        self._texts = TokenTexts(self._tokenizer)
        self._most_bytes = most_bytes_per_token(self._tokenizer.backend)
        self._grammars: Grammars | None = None
        self._making_grammars = threading.Lock()
        self._fingerprint = fingerprint_of(loaded.model)
        self.capacity, self.vocab_size = capacity, loaded.model.config.vocab_size
        self.has_chat = self._tokenizer.chat_template is not None
        self._ends = loaded.eos_token_ids
        ends = (*loaded.eos_token_ids, *turn_end_ids(self._tokenizer))
        self._chat_ends = tuple(dict.fromkeys(ends))

    def completion(self, body: bytes) -> PreparedRequest:
        """Prepare a body sent to `/v1/completions`.

        Raises:
            RequestError: the request is invalid.
            ModelError: the file of the weights was changed.
        """
        request = read_request(CompletionRequest, body)
        self._check_common(request)
        most = _COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        scored = request.logprobs if request.echo else None
        if most == 0 and scored is None:
            scored = 0
        several: Sequence[str | list[int] | int]
        several = [request.prompt] if isinstance(request.prompt, str) else request.prompt
        if isinstance(several[0], int):
            several = [several]  # type: ignore[list-item]
        self._require_few(len(several), request.n or 1, "prompt")
        for one in several:
            if isinstance(one, str):
                self._require_short([one], bool(most), "prompt")
        prompts = [self._encoded(one) for one in several]  # type: ignore[arg-type]
        wanted = {"max_new_tokens": most, "logprobs": request.logprobs, "prompt_logprobs": scored}
        texts = self._continuations(request, prompts, wanted, self._ends)
        response = CompletionFormat(
            self.name,
            self._fingerprint,
            None if request.logprobs is None else self._texts,
            includes_usage=request.includes_usage,
            echoes=self._echoes(request, texts) if request.echo else (),
        )
        return _prepared(request, texts, response)

    def _echoes(self, request: CompletionRequest, texts: Sequence[Continuation]) -> list[Echo]:
        """The prompt of each choice, for a request with `echo`. Prompts of token ids are
        decoded."""
        given = [request.prompt] if isinstance(request.prompt, str) else request.prompt
        found = []
        for index, text in enumerate(texts):
            prompt = given[index // (request.n or 1)] if isinstance(given[0], str) else None
            if not isinstance(prompt, str):
                prompt = self._tokenizer.decode(text.prompt_ids)
            found.append(Echo(prompt, text))
        return found

    def chat(self, body: bytes) -> PreparedRequest:
        """Prepare a body sent to `/v1/chat/completions`.

        Raises:
            RequestError: the request is invalid.
            ModelError: the file of the weights was changed.
        """
        if not self.has_chat:
            raise RequestError(
                400,
                "this model has no chat template, so it can't take messages: send its text as "
                "prompt to /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        request = read_request(ChatRequest, body)
        self._check_common(request)
        if request.top_logprobs is not None and not request.logprobs:
            raise RequestError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        most = request.max_completion_tokens
        if None not in (most, request.max_tokens) and most != request.max_tokens:
            raise RequestError(
                400,
                "max_tokens and max_completion_tokens differ: give one of them",
                param="max_tokens",
            )
        self._require_few(1, request.n or 1, "messages")
        messages = [message.plain() for message in request.messages]
        try:
            prompt_ids = self._tokenizer.encode_chat(
                messages,
                add_generation_prompt=True,
                # Checked after rendering, because a template may leave out messages or parts.
                check=lambda pieces: self._require_short(pieces, True, "messages"),
            )
        except (InputError, TokenizerError) as error:
            raise RequestError(400, f"messages: {error}", param="messages") from None
        wanted = {
            "max_new_tokens": most or request.max_tokens or self.context,
            "logprobs": (request.top_logprobs or 0) if request.logprobs else None,
        }
        texts = self._continuations(request, [prompt_ids], wanted, self._chat_ends)
        response = ChatFormat(
            self.name,
            self._fingerprint,
            self._texts if request.logprobs else None,
            includes_usage=request.includes_usage,
        )
        return _prepared(request, texts, response)

    def _check_common(self, request: GenerationRequest) -> None:
        """Check the fields that completions and chats have in common.

        Raises:
            RequestError, ModelError: see `completion`.
        """
        self._loaded.require_unchanged()
        if request.model is not None and request.model != self.name:
            raise RequestError(
                404,
                f"the model '{request.model}' does not exist: this server has '{self.name}'",
                param="model",
                code="model_not_found",
            )
        if request.stream_options is not None and not request.stream:
            raise RequestError(400, "stream_options needs stream: true", param="stream_options")

    def _encoded(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            try:
                return self._tokenizer.encode_prompt(prompt)
            except (InputError, TokenizerError) as error:
                raise RequestError(400, f"prompt: {error}", param="prompt") from None
        if max(prompt) >= self.vocab_size:
            raise RequestError(
                400,
                f"prompt has the token id {max(prompt)}, and the model has {self.vocab_size} "
                f"tokens: send ids from 0 to {self.vocab_size - 1}",
                param="prompt",
            )
        return prompt

    def _continuations(
        self,
        request: GenerationRequest,
        prompts: list[list[int]],
        wanted: dict[str, int | None],
        end_ids: tuple[int, ...],
    ) -> list[Continuation]:
        """Create the continuations of all choices, in the order of `PreparedRequest.texts`.

        Args:
            request: the request.
            prompts: token ids of each prompt.
            wanted: fields of `SamplingConfig` that completions and chats compute differently.
            end_ids: tokens that end a text.

        Raises:
            RequestError: a prompt is empty, too long or can't be decoded; a bias is for an id
                beyond the vocabulary; or a schema is not supported.
        """
        param = "messages" if isinstance(request, ChatRequest) else "prompt"
        choices = request.n or 1
        self._require_room(prompts, bool(wanted["max_new_tokens"]), param)
        make_constraint = self._constraints(request.schema_asked)
        if request.schema_asked is not None:
            end_ids = self._chat_ends  # the tokens that the grammar ends with
        samplings = [_sampling(request, n, wanted) for n in range(choices)]
        try:
            require_biased_tokens(samplings[0], self.vocab_size)
        except ConfigError as error:
            raise RequestError(400, str(error), param="logit_bias") from None
        try:
            return [
                Continuation(
                    prompt_ids,
                    sampling,
                    context=self.context,
                    eos_token_ids=end_ids,
                    tokenizer=self._tokenizer,
                    constraint=make_constraint(),
                )
                for prompt_ids in prompts
                for sampling in samplings
            ]
        except TokenizerError as error:  # the prompt's ids can't be decoded
            raise RequestError(400, f"{param}: {error}", param=param) from None

    def _require_few(self, prompts: int, choices: int, param: str) -> None:
        """Refuse a request for more than `capacity` texts."""
        if prompts * choices > self.capacity:
            raise RequestError(
                400,
                f"the request asks for {prompts * choices} answers, and this server computes at "
                f"most {self.capacity} at a time: ask for fewer",
                param="n" if prompts == 1 else param,
            )

    def _require_short(self, pieces: Sequence[str], is_generating: bool, param: str) -> None:
        """Refuse a text that can't fit into the context, by its number of bytes, before it is
        encoded.

        Args:
            pieces: parts of the text that are encoded separately.
            is_generating: True if there must be room for a new token.
            param: field of the request that has the text.
        """
        if self._most_bytes is None:
            return
        # Lone surrogates are refused later, with their position.
        sizes = (len(piece.encode(errors="surrogatepass")) for piece in pieces)
        tokens = sum(-(-size // self._most_bytes) for size in sizes)
        if tokens + is_generating > self.context:
            raise self._too_long(param, f"at least {tokens}")

    def _too_long(self, param: str, tokens: int | str) -> RequestError:
        return RequestError(
            400,
            f"{param} has {tokens} tokens, and the context has {self.context}, for prompt and "
            "answer together: shorten it",
            param=param,
            code="context_length_exceeded",
        )

    def _require_room(self, prompts: list[list[int]], is_generating: bool, param: str) -> None:
        for prompt_ids in prompts:
            if not prompt_ids:
                raise RequestError(400, f"{param} has no tokens: send a text", param=param)
            if len(prompt_ids) + is_generating > self.context:
                raise self._too_long(param, len(prompt_ids))

    def _constraints(self, schema: dict[str, Any] | None) -> Callable[[], Constraint | None]:
        """A factory of the choices' constraints; they are None without a schema.

        Raises:
            RequestError: the schema is not supported, or llguidance is not installed.
        """
        if schema is None:
            return lambda: None
        try:
            with self._making_grammars:
                if self._grammars is None:
                    vocabulary = self._texts.vocabulary(self.vocab_size, self._chat_ends)
                    self._grammars = Grammars(vocabulary)
            grammars = self._grammars
            grammars.constraint(schema)
        except MissingDependencyError as error:
            raise RequestError(
                400, str(error), param="response_format", code="unsupported_parameter"
            ) from None
        except SchemaError as error:
            raise unsupported_schema(str(error)) from None
        return lambda: grammars.constraint(schema)

    def close(self) -> None:
        """End the processes that follow schemas."""
        if self._grammars is not None:
            self._grammars.close()


def _prepared(
    request: GenerationRequest, texts: list[Continuation], response: ResponseFormat
) -> PreparedRequest:
    tokens = sum(len(text.prompt_ids) for text in texts[:: request.n or 1])
    return PreparedRequest(texts, tokens, response, bool(request.stream), request.includes_usage)


def fingerprint_of(model: Model) -> str:
    """`system_fingerprint` of a model: a short hash of its config, the versions of firstlight and
    torch, and some of the first and last elements of every tensor.

    Training changes these elements, too; reading all weights would take as long as loading them.
    """
    found = hashlib.sha256(f"{own_version()} {torch.__version__} {model.config}".encode())
    for name, tensor in model.state_dict().items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for end in (0, -1) if tensor.numel() else ():
            row = tensor
            while row.ndim > 1:
                row = row[end]
            # On the CPU, because Apple's GPUs do not support fp64.
            found.update(row.reshape(-1)[:16].cpu().double().numpy().tobytes())
    return f"fp_{found.hexdigest()[:12]}"


def _sampling(request: GenerationRequest, choice: int, wanted: dict[str, Any]) -> SamplingConfig:
    """The sampling settings of choice number `choice`, with OpenAI's defaults."""
    seed = request.seed
    try:
        return SamplingConfig(
            # Compared with None, because 0 is a valid value: greedy decoding.
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=request.top_k or 0,
            min_p=request.min_p or 0.0,
            repetition_penalty=request.repetition_penalty or 1.0,
            stop=request.stop_texts,
            frequency_penalty=request.frequency_penalty or 0.0,
            presence_penalty=request.presence_penalty or 0.0,
            logit_bias={int(i): bias for i, bias in (request.logit_bias or {}).items()},
            # The remainder, because OpenAI allows negative seeds.
            seed=None if seed is None else (seed + choice) % 2**63,
            **wanted,
        )
    except ConfigError as error:
        raise RequestError(400, str(error)) from None
