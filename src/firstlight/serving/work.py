"""From what a request asks for to the texts that are to be continued."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from firstlight.errors import ConfigError, InputError, MissingDependencyError, TokenizerError
from firstlight.generation.chat import turn_end_ids
from firstlight.generation.continuation import Continuation
from firstlight.generation.engine import tokenizer_of
from firstlight.generation.sampling import SamplingConfig, require_biased_tokens
from firstlight.generation.structured import Constraint, Grammars, SchemaError
from firstlight.models import Model
from firstlight.report.text import own_version
from firstlight.serving.answers import AnswerFormat, ChatFormat, CompletionFormat, Echo
from firstlight.serving.bodies import read_request
from firstlight.serving.problems import RequestError, schema_problem, too_long
from firstlight.serving.schemas import ChatRequest, CompletionRequest, GenerationRequest
from firstlight.serving.token_text import TokenTexts
from firstlight.weights.huggingface import LoadedModel

#: Tokens of a completion that doesn't say, as OpenAI's. A chat's answer may fill the context.
_COMPLETION_TOKENS = 16


@dataclass(frozen=True)
class Work:
    """What one request asks for.

    Attributes:
        texts: one for each choice: those of the first prompt, those of the second, ...
        prompt_tokens: of all prompts.
        answer: how the answer is told.
        stream: piece by piece.
        tells_usage: whether a stream ends with the numbers of tokens.
    """

    texts: list[Continuation]
    prompt_tokens: int
    answer: AnswerFormat
    stream: bool
    tells_usage: bool


class Workshop:
    """Makes work of requests. Its methods take their time: they are for threads of their own.

    Args:
        loaded: with a tokenizer.
        name: of the model, for clients.
        context: tokens of a text, prompt and answer together.
        capacity: how many texts there may be at a time.
    """

    def __init__(self, loaded: LoadedModel, name: str, *, context: int, capacity: int) -> None:
        self._loaded, self.name, self.context = loaded, name, context
        self._tokenizer = tokenizer_of(loaded)
        self._texts = TokenTexts(self._tokenizer)
        self._grammars: Grammars | None = None
        self._making_grammars = threading.Lock()
        self._fingerprint = fingerprint_of(loaded.model)
        self._capacity = capacity
        self._ends = loaded.eos_token_ids
        ends = (*loaded.eos_token_ids, *turn_end_ids(self._tokenizer))
        self._chat_ends = tuple(dict.fromkeys(ends))

    def completion(self, body: bytes) -> Work:
        """What a body sent to `/v1/completions` asks for.

        Raises:
            RequestError: it can't be done.
            ModelError: the model can't be used any more.
        """
        request = read_request(CompletionRequest, body)
        self._require_usual(request)
        most = _COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        scored = request.logprobs if request.echo else None
        if most == 0 and scored is None:
            scored = 0
        texts = self._continuations(
            request,
            self._prompts(request.prompt),
            _Wanted(most, request.logprobs, scored),
            self._ends,
        )
        answer = CompletionFormat(
            self.name,
            self._fingerprint,
            None if request.logprobs is None else self._texts,
            tells_usage=_tells_usage(request),
            echoes=self._echoes(request, texts) if request.echo else (),
        )
        return _work(request, texts, answer)

    def _echoes(self, request: CompletionRequest, texts: Sequence[Continuation]) -> list[Echo]:
        """The prompts that the choices begin with: texts as they were given, ids decoded."""
        given = [request.prompt] if isinstance(request.prompt, str) else request.prompt
        found = []
        for index, text in enumerate(texts):
            prompt = given[index // (request.n or 1)] if isinstance(given[0], str) else None
            if not isinstance(prompt, str):
                prompt = self._tokenizer.decode(text.prompt_ids)
            found.append(Echo(prompt, text))
        return found

    def chat(self, body: bytes) -> Work:
        """What a body sent to `/v1/chat/completions` asks for.

        Raises:
            RequestError: it can't be done.
            ModelError: the model can't be used any more.
        """
        if self._tokenizer.chat_template is None:
            raise RequestError(
                400,
                "this model has no chat template, so it can't take messages: send its text as "
                "prompt to /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        request = read_request(ChatRequest, body)
        self._require_usual(request)
        if request.top_logprobs is not None and not request.logprobs:
            raise RequestError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        most = request.max_completion_tokens
        if None not in (most, request.max_tokens) and most != request.max_tokens:
            raise RequestError(
                400,
                "max_tokens and max_completion_tokens differ: give one of them",
                param="max_tokens",
            )
        prompt_ids = self._encoded_chat(request)
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        wanted = _Wanted(most or request.max_tokens or self.context, logprobs)
        answer = ChatFormat(
            self.name,
            self._fingerprint,
            self._texts if request.logprobs else None,
            tells_usage=_tells_usage(request),
        )
        texts = self._continuations(request, [prompt_ids], wanted, self._chat_ends)
        return _work(request, texts, answer)

    def _require_usual(self, request: GenerationRequest) -> None:
        """What both kinds of requests must keep to.

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

    def _prompts(self, prompt: str | list[str] | list[int] | list[list[int]]) -> list[list[int]]:
        """Ids of one or more prompts."""
        several: Sequence[str | list[int] | int]
        several = [prompt] if isinstance(prompt, str) else prompt
        if isinstance(several[0], int):
            several = [several]  # type: ignore[list-item]
        return [self._encoded(one) for one in several]  # type: ignore[arg-type]

    def _encoded(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            try:
                return self._tokenizer.encode_prompt(prompt)
            except (InputError, TokenizerError) as error:
                raise RequestError(400, f"prompt: {error}", param="prompt") from None
        size = self._loaded.model.config.vocab_size
        if max(prompt) >= size:
            raise RequestError(
                400,
                f"prompt holds the token id {max(prompt)}, and the model has {size} tokens",
                param="prompt",
            )
        return prompt

    def _encoded_chat(self, request: ChatRequest) -> list[int]:
        messages = [message.plain() for message in request.messages]
        try:
            return self._tokenizer.encode_chat(messages, add_generation_prompt=True)
        except (InputError, TokenizerError) as error:
            raise RequestError(400, f"messages: {error}", param="messages") from None

    def _continuations(
        self,
        request: GenerationRequest,
        prompts: list[list[int]],
        wanted: _Wanted,
        end_ids: tuple[int, ...],
    ) -> list[Continuation]:
        """The choices of each prompt.

        Raises:
            RequestError: there are too many, a prompt is empty, too long or can't be decoded, or a
                bias is for a token that the model doesn't have.
        """
        param = "messages" if isinstance(request, ChatRequest) else "prompt"
        choices = request.n or 1
        if len(prompts) * choices > self._capacity:
            raise RequestError(
                400,
                f"{len(prompts) * choices} answers are asked for, and this server takes "
                f"{self._capacity} at a time",
                param="n" if len(prompts) == 1 else param,
            )
        for prompt_ids in prompts:
            if not prompt_ids:
                raise RequestError(400, f"{param} has no tokens to go on from", param=param)
            if len(prompt_ids) + (wanted.max_tokens > 0) > self.context:
                raise too_long(len(prompt_ids), self.context, param)
        constraint = self._constraints(request.schema_asked)
        if request.schema_asked is not None:
            end_ids = self._chat_ends  # which the grammar ends with
        samplings = [_sampling(request, n, wanted) for n in range(choices)]
        try:
            require_biased_tokens(samplings[0], self._loaded.model.config.vocab_size)
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
                    constraint=constraint(),
                )
                for prompt_ids in prompts
                for sampling in samplings
            ]
        except TokenizerError as error:  # the prompt's ids make no text
            raise RequestError(400, f"{param}: {error}", param=param) from None

    def _constraints(self, schema: dict[str, Any] | None) -> Callable[[], Constraint | None]:
        """What makes the constraint of each choice.

        Raises:
            RequestError: the schema can't be followed, or not here.
        """
        if schema is None:
            return lambda: None
        try:
            with self._making_grammars:
                if self._grammars is None:
                    self._grammars = Grammars(
                        self._texts.vocabulary(
                            self._loaded.model.config.vocab_size, self._chat_ends
                        )
                    )
            grammars = self._grammars
            grammars.constraint(schema)
        except MissingDependencyError as error:
            raise RequestError(
                400, str(error), param="response_format", code="unsupported_parameter"
            ) from None
        except SchemaError as error:
            raise schema_problem(str(error)) from None
        return lambda: grammars.constraint(schema)

    def close(self) -> None:
        """End the processes that follow schemas."""
        if self._grammars is not None:
            self._grammars.close()


@dataclass(frozen=True)
class _Wanted:
    """What the two kinds of requests say in different fields; see `SamplingConfig`."""

    max_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None = None


def _work(request: GenerationRequest, texts: list[Continuation], answer: AnswerFormat) -> Work:
    tokens = sum(len(text.prompt_ids) for text in texts[:: request.n or 1])
    return Work(texts, tokens, answer, bool(request.stream), _tells_usage(request))


def fingerprint_of(model: Model) -> str:
    """`system_fingerprint`: a short hash of the configuration, the versions of firstlight and
    torch, and the first and last values of every tensor, which training changes. Reading all
    weights would take as long as loading them."""
    found = hashlib.sha256(f"{own_version()} {torch.__version__} {model.config}".encode())
    for name, tensor in model.state_dict().items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for end in (0, -1) if tensor.numel() else ():
            row = tensor
            while row.ndim > 1:
                row = row[end]
            # To the CPU first: Apple's GPUs have no fp64.
            found.update(row.reshape(-1)[:16].cpu().double().numpy().tobytes())
    return f"fp_{found.hexdigest()[:12]}"


def _sampling(request: GenerationRequest, choice: int, wanted: _Wanted) -> SamplingConfig:
    """How one choice is made; what is not said is as OpenAI has it."""
    seed = request.seed
    try:
        return SamplingConfig(
            max_new_tokens=wanted.max_tokens,
            # 0 is greedy, and no lack of an answer.
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=request.top_k or 0,
            min_p=request.min_p or 0.0,
            repetition_penalty=request.repetition_penalty or 1.0,
            stop=request.stop_texts,
            frequency_penalty=request.frequency_penalty or 0.0,
            presence_penalty=request.presence_penalty or 0.0,
            logit_bias={int(i): bias for i, bias in (request.logit_bias or {}).items()},
            logprobs=wanted.logprobs,
            prompt_logprobs=wanted.prompt_logprobs,
            # Negative seeds are OpenAI's, too.
            seed=None if seed is None else (seed + choice) % 2**63,
        )
    except ConfigError as error:
        raise RequestError(400, str(error)) from None


def _tells_usage(request: GenerationRequest) -> bool:
    options = request.stream_options
    return options is not None and bool(options.include_usage)
