"""Tiny models for the server's tests, and a decoder that tests can observe and pause."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from builders import make_texts
from firstlight.generation.batch import BatchDecoder
from firstlight.generation.config import SamplingConfig
from firstlight.generation.continuation import Continuation
from firstlight.lora.loading import LoadedModel
from firstlight.models import LlamaConfig, Model, empty_model
from firstlight.serving.scheduler import ScheduledSequence, Scheduler, Update
from firstlight.tokenizer import Tokenizer, train_tokenizer
from firstlight.tokenizer.chat_template import CHAT_TEMPLATES
from waiting import PATIENCE_SECONDS

CONTEXT = 96
#: Seconds after which a waiting test fails.
PATIENCE = PATIENCE_SECONDS


@functools.cache
def tiny_tokenizer() -> Tokenizer:
    """Return a tokenizer with 320 tokens and ChatML's special tokens."""
    plain = train_tokenizer(make_texts(120), 320)
    return plain.extended(["<|im_start|>", "<|im_end|>"], CHAT_TEMPLATES["chatml"])


@functools.cache
def tiny_model() -> Model:
    """Return a Llama model with varied continuations, mostly words: single bytes, most of the
    tokenizer's tokens, are unlikely.
    """
    config = LlamaConfig(
        vocab_size=tiny_tokenizer().vocab_size,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
    )
    model = empty_model(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.4, generator=generator)
        model.lm_head.weight[:257] *= 0.1
    return model


def tiny_loaded(*, eos: bool = False) -> LoadedModel:
    """Return the tiny model without end tokens unless `eos` is set, so that texts have the
    requested length.
    """
    tokenizer = tiny_tokenizer()
    ends = (tokenizer.separator_id,) if eos else ()
    return LoadedModel(tiny_model(), tokenizer, ends, Path("/a/folder/tiny"))


class WatchedDecoder(BatchDecoder):
    """A decoder that counts its steps. While it is held, each step waits until the test allows it.

    Attributes:
        steps: number of completed steps.
        prompts: all prompts that joined, in order.
    """

    def __init__(self, max_sequences: int = 4, *, held: bool = False) -> None:
        super().__init__(tiny_model(), max_sequences, CONTEXT)
        self.steps = 0
        self.prompts: list[list[int]] = []
        self.before_step: Callable[[list[int]], None] = lambda token_ids: None
        self._held = held
        self._allowed = threading.Semaphore(0)
        self._done = threading.Condition()

    def add(
        self,
        prompt_ids: Sequence[int],
        on_logits: Callable[[Tensor], None] | None = None,
        *,
        may_fill: bool = False,
    ) -> Tensor:
        """Add a prompt."""
        self._note([prompt_ids])
        return super().add(prompt_ids, on_logits, may_fill=may_fill)

    def _add_padded(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        self._note(prompts)
        return super()._add_padded(prompts)

    def _note(self, prompts: Sequence[Sequence[int]]) -> None:
        with self._done:
            self.prompts += map(list, prompts)
            self._done.notify_all()

    def step(self, token_ids: Sequence[int]) -> Tensor:
        """Run a step once it is allowed."""
        if self._held:
            assert self._allowed.acquire(timeout=PATIENCE), "the test forgot a decoder"
        self.before_step(list(token_ids))
        logits_BV = super().step(token_ids)
        with self._done:
            self.steps += 1
            self._done.notify_all()
        return logits_BV

    def allow(self, steps: int = 1) -> None:
        """Allow this many more steps."""
        self._allowed.release(steps)

    def release(self) -> None:
        """Stop holding the decoder."""
        self._held = False
        self._allowed.release(1)

    def wait_for(self, what: Callable[[], bool]) -> None:
        """Wait until a condition on steps or prompts is true."""
        with self._done:
            assert self._done.wait_for(what, PATIENCE), (
                f"waited {PATIENCE:g} s for steps or prompts; seen last: {self.steps} steps, "
                f"prompts {self.prompts}"
            )


class Collected:
    """The updates that a scheduler delivers, by sequence.

    Attributes:
        batches: the sequences of each delivery.
    """

    def __init__(self) -> None:
        self.batches: list[list[ScheduledSequence]] = []
        self.updates: dict[ScheduledSequence, list[Update]] = {}
        self._changed = threading.Condition()

    def deliver(self, updates: list[Update]) -> None:
        """Store updates; passed to the scheduler."""
        with self._changed:
            self.batches.append([update.sequence for update in updates])
            for update in updates:
                self.updates.setdefault(update.sequence, []).append(update)
            self._changed.notify_all()

    def wait_for(self, what: Callable[[], bool]) -> None:
        """Wait until a condition on deliveries is true."""
        with self._changed:
            assert self._changed.wait_for(what, PATIENCE), (
                f"waited {PATIENCE:g} s for deliveries; seen last: {list(self.updates.values())}"
            )

    def ended(self, sequence: ScheduledSequence) -> bool:
        """Return True if the last update of a sequence has been delivered."""
        return any(update.ended for update in self.updates.get(sequence, ()))

    def wait(self, *sequences: ScheduledSequence) -> None:
        """Wait for the end of sequences."""
        self.wait_for(lambda: all(self.ended(sequence) for sequence in sequences))

    def text(self, sequence: ScheduledSequence) -> str:
        """Return the text of a sequence, joined from its pieces."""
        return "".join(update.piece for update in self.updates[sequence])


def new_sequence(prompt: str = "the star", **config: object) -> ScheduledSequence:
    """Create a sequence of 8 greedy tokens, unless `config` differs."""
    loaded = tiny_loaded()
    values = {"max_new_tokens": 8, "temperature": 0.0, **config}
    text = Continuation(
        tiny_tokenizer().encode_prompt(prompt),
        SamplingConfig(**values),  # type: ignore[arg-type]
        context=CONTEXT,
        eos_token_ids=loaded.eos_token_ids,
        tokenizer=loaded.tokenizer,
    )
    return ScheduledSequence(text, lambda update: None)


def new_scheduler(
    decoder: BatchDecoder, collected: Collected, *, max_queue: int = 100
) -> Scheduler:
    """Create a running scheduler."""
    scheduler = Scheduler(lambda: decoder, max_queue=max_queue, deliver=collected.deliver)
    scheduler.start()
    return scheduler
