"""The scheduler: batching, order, and failures of single requests."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from tiny import (
    CONTEXT,
    Collected,
    WatchedDecoder,
    new_scheduler,
    new_sequence,
    tiny_loaded,
    tiny_tokenizer,
)
from torch import Tensor

from firstlight.errors import ConfigError, ModelError
from firstlight.generation.engine import generate
from firstlight.serving.scheduler import QueueFullError, ScheduledSequence, Scheduler, StoppedError


@contextmanager
def scheduling(
    decoder: WatchedDecoder, *, max_queue: int = 100
) -> Iterator[tuple[Scheduler, Collected]]:
    """Run a scheduler that stops at the end of the block."""
    collected = Collected()
    scheduler = new_scheduler(decoder, collected, max_queue=max_queue)
    try:
        yield scheduler, collected
    finally:
        decoder.release()
        scheduler.stop()


PROMPTS = ["the star falls", "a stone under the river, and", "one", "日本 🙂", "the"]


def test_scheduler_texts_are_unaffected_by_joining_and_leaving_jobs() -> None:
    generator = random.Random(3)
    values = [
        {
            "max_new_tokens": generator.randint(1, 40),
            "temperature": generator.choice([0.0, 1.0]),
            "seed": number,
            "top_k": generator.choice([0, 20]),
        }
        for number in range(40)
    ]
    with scheduling(WatchedDecoder(3)) as (scheduler, collected):
        sequences = [new_sequence(PROMPTS[n % 5], **config) for n, config in enumerate(values)]
        for sequence in sequences:
            scheduler.submit([sequence])
        collected.wait(*sequences)
    for number, sequence in enumerate(sequences):
        alone = generate(tiny_loaded(), PROMPTS[number % 5], **values[number])  # type: ignore[arg-type]
        assert collected.text(sequence) == alone.text
        assert sequence.text.token_ids == alone.token_ids
        updates = collected.updates[sequence]
        assert sum(update.tokens for update in updates) == len(alone.token_ids)
        assert [update.finish_reason for update in updates if update.ended] == ["length"]


def test_scheduler_texts_join_and_leave_running_batch_independently() -> None:
    decoder = WatchedDecoder(4, held=True)
    with scheduling(decoder) as (scheduler, collected):
        long, short = new_sequence(max_new_tokens=20), new_sequence("one", max_new_tokens=3)
        scheduler.submit([long])
        decoder.allow(5)
        decoder.wait_for(lambda: decoder.steps == 5)
        scheduler.submit([short])
        decoder.allow(3)
        collected.wait(short)
        assert not collected.ended(long)
        # Both got a token in the same delivery, so they were in one batch.
        assert [long, short] in collected.batches
        decoder.allow(20)
        collected.wait(long)
    assert decoder.steps == 19


def test_scheduler_delivers_all_updates_of_a_step_together() -> None:
    with scheduling(WatchedDecoder(4)) as (scheduler, collected):
        sequences = [new_sequence(max_new_tokens=6) for _ in range(4)]
        scheduler.submit(sequences)
        collected.wait(*sequences)
    assert collected.batches[0] == sequences
    assert len(collected.batches) == 6


def test_scheduler_delivers_first_token_before_next_step() -> None:
    decoder = WatchedDecoder(2, held=True)
    with scheduling(decoder) as (scheduler, collected):
        sequence = new_sequence()
        scheduler.submit([sequence])
        collected.wait_for(lambda: sequence in collected.updates)
        assert (len(collected.updates[sequence]), decoder.steps) == (1, 0)


def test_scheduler_serves_texts_in_order_of_arrival() -> None:
    """A steady stream of short texts does not delay an earlier text."""
    decoder = WatchedDecoder(2)
    with scheduling(decoder, max_queue=1000) as (scheduler, collected):
        generator = random.Random(0)
        sequences = [new_sequence(max_new_tokens=generator.randint(1, 12)) for _ in range(200)]
        for number, sequence in enumerate(sequences):
            sequence.text.prompt_ids.append(number % 320)  # identifies the text
        started: list[ScheduledSequence] = []
        order: list[ScheduledSequence] = []

        def submit(part: Sequence[ScheduledSequence]) -> None:
            for sequence in part:
                with scheduler._changed:  # the order in which they are queued
                    order.append(sequence)
                    scheduler.submit([sequence])

        threads = [threading.Thread(target=submit, args=(sequences[n::4],)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        collected.wait(*sequences)
        for batch in collected.batches:
            started.extend(sequence for sequence in batch if sequence not in started)
    assert started == order


def test_scheduler_long_prompt_lets_others_continue_before_next_joins() -> None:
    decoder = WatchedDecoder(4, held=True)
    decoder.pass_tokens = 30
    with scheduling(decoder) as (scheduler, collected):
        first = new_sequence(max_new_tokens=30)
        scheduler.submit([first])
        collected.wait_for(lambda: first in collected.updates)
        others = [new_sequence("the star " * 20, max_new_tokens=9) for _ in range(2)]
        assert len(others[0].text.prompt_ids) >= 30
        scheduler.submit(others)
        decoder.allow(1)
        decoder.wait_for(lambda: len(decoder.prompts) == 2)
        decoder.wait_for(lambda: decoder.steps == 1)
        decoder.allow(1)  # together with the second
        decoder.wait_for(lambda: len(decoder.prompts) == 3)
        assert decoder.steps == 2
        decoder.release()
        collected.wait(first, *others)


def test_scheduler_queue_is_bounded_and_accepts_all_or_none() -> None:
    decoder = WatchedDecoder(2, held=True)
    with scheduling(decoder, max_queue=3) as (scheduler, collected):
        first = [new_sequence() for _ in range(4)]
        scheduler.submit(first)
        with pytest.raises(QueueFullError):
            scheduler.submit([new_sequence(), new_sequence()])
        last = new_sequence()
        scheduler.submit([last])
        decoder.wait_for(lambda: len(decoder.prompts) == 2)
        assert (scheduler.running, scheduler.waiting) == (2, 3)
        with pytest.raises(QueueFullError, match="3 texts are already waiting"):
            scheduler.submit([new_sequence()])
        decoder.release()
        collected.wait(*first, last)
        again = new_sequence()
        scheduler.submit([again])
        collected.wait(again)


@pytest.mark.parametrize("others", [0, 2])
def test_scheduler_cancelled_job_is_removed_within_two_steps(others: int) -> None:
    decoder = WatchedDecoder(4, held=True)
    with scheduling(decoder) as (scheduler, collected):
        kept = [new_sequence("one", max_new_tokens=12) for _ in range(others)]
        dropped = new_sequence(max_new_tokens=50)
        scheduler.submit([dropped, *kept])
        decoder.allow(3)
        decoder.wait_for(lambda: decoder.steps == 3)
        scheduler.cancel([dropped])
        decoder.allow(9)  # if none is left, only a step already in progress is completed
        collected.wait(*kept)
        decoder.release()
        after = new_sequence("one")
        scheduler.submit([after])
        collected.wait(after)
        assert len(dropped.text.token_ids) <= 3 + 1 + 2
        assert not collected.ended(dropped)
        assert all(len(sequence.text.token_ids) == 12 for sequence in kept)
        assert (scheduler.running, scheduler.waiting) == (0, 0)


def test_scheduler_cancelled_waiting_job_frees_place_immediately() -> None:
    decoder = WatchedDecoder(1, held=True)
    with scheduling(decoder, max_queue=1) as (scheduler, collected):
        first, second, third = new_sequence(), new_sequence(), new_sequence()
        scheduler.submit([first])
        scheduler.submit([second])
        scheduler.cancel([second, second])
        scheduler.submit([third])
        decoder.release()
        collected.wait(first, third)
        scheduler.cancel([first, second, third])  # canceling a finished sequence has no effect
    assert second not in collected.updates


def test_scheduler_job_with_non_finite_logits_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = WatchedDecoder(4)
    plain = WatchedDecoder.step

    def damaged(self: WatchedDecoder, token_ids: Sequence[int]) -> Tensor:
        logits_BV = plain(self, token_ids).clone()
        if self.steps == 3:
            logits_BV[1] = float("nan")
        return logits_BV

    monkeypatch.setattr(WatchedDecoder, "step", damaged)
    with scheduling(decoder) as (scheduler, collected):
        sequences = [new_sequence(prompt, max_new_tokens=9) for prompt in PROMPTS[:4]]
        scheduler.submit(sequences)
        collected.wait(*sequences)
        errors = [collected.updates[sequence][-1].error for sequence in sequences]
        assert [error is None for error in errors] == [True, False, True, True]
        assert isinstance(errors[1], ModelError)
        for sequence, prompt in zip(sequences, PROMPTS, strict=False):
            if sequence is not sequences[1]:
                alone = generate(tiny_loaded(), prompt, max_new_tokens=9, temperature=0)
                assert collected.text(sequence) == alone.text
        after = new_sequence()
        scheduler.submit([after])
        collected.wait(after)
        assert (scheduler.running, len(decoder)) == (0, 0)


def test_scheduler_prompt_rejected_by_decoder_fails_alone() -> None:
    decoder = WatchedDecoder(4)
    with scheduling(decoder) as (scheduler, collected):
        good, bad, other = new_sequence(), new_sequence(), new_sequence("one")
        bad.text.prompt_ids.clear()
        scheduler.submit([good, bad, other])
        collected.wait(good, bad, other)
        assert isinstance(collected.updates[bad][-1].error, ConfigError)
        assert collected.updates[good][-1].finish_reason == "length"
        assert (
            collected.text(other)
            == generate(tiny_loaded(), "one", max_new_tokens=8, temperature=0).text
        )
        assert len(decoder) == 0


def test_scheduler_prompt_failing_after_joint_start_fails_alone() -> None:
    decoder = WatchedDecoder(4)
    with scheduling(decoder) as (scheduler, collected):
        # Prompts to be scored join one at a time: the first has joined when the second fails.
        good, bad = (new_sequence(prompt_logprobs=0) for _ in range(2))
        bad.text.prompt_ids[0] = 10**6
        scheduler.submit([good, bad])
        collected.wait(good, bad)
        assert isinstance(collected.updates[bad][-1].error, ModelError)
        assert collected.updates[good][-1].finish_reason == "length"
        assert (scheduler.running, len(decoder)) == (0, 0)


def test_scheduler_failed_step_ends_its_texts_and_continues() -> None:
    decoder = WatchedDecoder(2)

    def fail(token_ids: list[int]) -> None:
        if decoder.steps == 2:
            decoder.steps += 1
            raise torch.OutOfMemoryError("out of memory")

    decoder.before_step = fail
    with scheduling(decoder) as (scheduler, collected):
        sequences = [new_sequence(), new_sequence("one")]
        scheduler.submit(sequences)
        collected.wait(*sequences)
        assert all(
            isinstance(collected.updates[j][-1].error, torch.OutOfMemoryError) for j in sequences
        )
        after = new_sequence()
        scheduler.submit([after])
        collected.wait(after)
        assert collected.updates[after][-1].finish_reason == "length"


def test_scheduler_text_filling_its_row_ends_with_length() -> None:
    decoder = WatchedDecoder(2)
    with scheduling(decoder) as (scheduler, collected):
        sequence = new_sequence("the", max_new_tokens=10_000)
        scheduler.submit([sequence])
        collected.wait(sequence)
    assert collected.updates[sequence][-1].finish_reason == "length"
    assert (
        len(sequence.text.prompt_ids) + len(sequence.text.token_ids)
        == CONTEXT
        == decoder.max_tokens
    )


def test_scheduler_stop_fails_remaining_jobs_and_accepts_no_more() -> None:
    decoder = WatchedDecoder(1, held=True)
    collected = Collected()
    scheduler = new_scheduler(decoder, collected)
    running, waiting = new_sequence(), new_sequence()
    scheduler.submit([running, waiting])
    decoder.wait_for(lambda: len(decoder.prompts) == 1)
    stopper = threading.Thread(target=scheduler.stop)
    stopper.start()
    decoder.release()
    stopper.join()
    for sequence in (running, waiting):
        assert isinstance(collected.updates[sequence][-1].error, StoppedError)
    with pytest.raises(StoppedError):
        scheduler.submit([new_sequence()])
    assert not scheduler.alive


def test_scheduler_start_raises_error_of_decoder_creation() -> None:
    def fail() -> WatchedDecoder:
        raise MemoryError("no room for the keys and values")

    scheduler = Scheduler(fail, max_queue=1, deliver=lambda updates: None)
    with pytest.raises(MemoryError, match="no room"):
        scheduler.start()
    scheduler.stop()


def test_scheduler_unexpected_error_ends_all_texts_and_is_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    decoder = WatchedDecoder(1)

    def fail(token_ids: list[int]) -> None:
        raise SystemExit("broken")

    decoder.before_step = fail
    with scheduling(decoder) as (scheduler, collected):
        sequences = [new_sequence(), new_sequence()]
        scheduler.submit(sequences)
        collected.wait(*sequences)
        scheduler.stop()
        assert not scheduler.alive
    assert isinstance(collected.updates[sequences[1]][-1].error, StoppedError)
    assert "the scheduler failed: SystemExit: broken" in capsys.readouterr().err


def test_scheduler_delivers_logprobs_with_their_tokens() -> None:
    with scheduling(WatchedDecoder(2)) as (scheduler, collected):
        sequence = new_sequence(logprobs=2)
        scheduler.submit([sequence])
        collected.wait(sequence)
    found = [entry for update in collected.updates[sequence] for entry in update.logprobs]
    assert found == sequence.text.logprobs
    assert [entry.token_id for entry in found] == sequence.text.token_ids
    assert len(tiny_tokenizer().decode(sequence.text.token_ids)) > 0
