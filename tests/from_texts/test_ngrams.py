"""Tests of the measures of how hard a text is to learn: bits per character of xz and of n-gram
models.
"""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from firstlight.from_texts.held_out import HeldOut
from firstlight.from_texts.ngrams import TextSample
from firstlight.from_texts.ngrams import ngram_bits as bits_by_context
from firstlight.planner.advise import defaults
from firstlight.planner.advise.law import Hardness


def codes(text: str) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array([ord(character) for character in text], np.uint64)


def ngram_bits(
    train: np.ndarray[tuple[int], np.dtype[np.uint64]],
    test: np.ndarray[tuple[int], np.dtype[np.uint64]],
) -> float:
    return bits_by_context(train, test, 3)[-1]


def noise(length: int, alphabet: str, seed: int = 0) -> str:
    return "".join(random.Random(seed).choices(alphabet, k=length))


def test_ngram_bits_match_witten_bell_estimate() -> None:
    # "ab" contains each letter once, and "a" follows each of the contexts of one, two and three
    # characters at the beginning of a text once.
    alone = (1 + 2 * 2**-21) / (2 + 2)
    for _ in range(3):
        alone = (1 + alone) / 2
    assert ngram_bits(codes("ab"), codes("a")) == pytest.approx(-math.log2(alone))


@pytest.mark.parametrize("alphabet", ["abcd", "\u3042\u3044\u3046\u3048", "\U0001f600\U0001f601ab"])
def test_ngram_bits_of_random_text_equal_log_of_alphabet(alphabet: str) -> None:
    train, test = noise(50_000, alphabet), noise(5000, alphabet, seed=1)
    assert ngram_bits(codes(train), codes(test)) == pytest.approx(2.0, abs=0.01)


def test_ngram_bits_of_letter_determined_by_context_are_near_zero() -> None:
    assert ngram_bits(codes("abcbabcbd" * 2000), codes("abcbabcbd" * 100)) < 0.3
    assert ngram_bits(codes("abcbd" * 2000), codes("abcbd" * 100)) < 0.01


def test_ngram_bits_unknown_context_backs_off_to_shorter_one() -> None:
    known = ngram_bits(codes("abcd" * 500), codes("abcd" * 50))
    new = ngram_bits(codes("abcd" * 500), codes("xabcd" * 50))
    # The new letter costs 19 bits (one of 2^21 code points, with four known letters), plus the cost
    # of a new letter after contexts of zero to three letters. The next letter costs two bits, as
    # without a context.
    unseen = 19 + math.log2(2004) + 3 * math.log2(501)
    assert new - known == pytest.approx((unseen + 2) / 5, abs=0.2)


def test_hardness_of_held_out_documents_uses_other_documents() -> None:
    sample = TextSample()
    for number in range(20):
        text = noise(20_000, "abcd", number) if number % 10 else noise(20_000, "ab", number)
        sample.add(str(number).encode(), text, 18_000)
    held = frozenset({b"0", b"10"})
    assert sample.hardness(HeldOut(held, 0.1)).ngram_bits_per_character == pytest.approx(
        2.0, abs=0.02
    )
    others = frozenset({b"3", b"4"})
    assert sample.hardness(HeldOut(others, 0.1)).ngram_bits_per_character == pytest.approx(
        2.0, abs=0.08
    )


def test_hardness_of_held_out_ends_uses_the_beginnings() -> None:
    sample = TextSample()
    sample.add(b"one", noise(180_000, "abcd") + "a" * 20_000, 180_000)
    sample.add(b"two", noise(180_000, "abcd", seed=1) + "abcdabcd" * 2500, 180_000)
    ends = sample.hardness(HeldOut(None, 0.1)).ngram_bits_per_character
    assert ends == pytest.approx(2.0, abs=0.04)
    only_two = sample.hardness(
        HeldOut(None, 0.1, whole=frozenset({b"one"}))
    ).ngram_bits_per_character
    assert only_two != ends


@pytest.mark.slow
def test_hardness_sample_of_large_corpus_is_evenly_spread() -> None:
    """Its middle is a different text, which a sample of the beginning or the end would miss."""
    sample = TextSample()
    for number in range(120):
        letters = "efghijkl" if 40 <= number < 80 else "abcd"
        sample.add(str(number).encode(), noise(100_000, letters, number), 90_000)
    held = frozenset({b"60"})
    assert sample.hardness(HeldOut(held, 0.01)).ngram_bits_per_character == pytest.approx(
        3.0, abs=0.05
    )


def test_hardness_of_too_little_held_out_text_uses_other_documents() -> None:
    sample = TextSample()
    for number in range(20):
        sample.add(str(number).encode(), noise(8000, "abcd", number), 7200)
    sample.add(b"held", "a" * 100, 90)
    held = frozenset({b"held"})
    assert sample.hardness(HeldOut(held, 0.01)).ngram_bits_per_character == pytest.approx(
        2.0, abs=0.05
    )


@pytest.mark.parametrize("text", ["", "a", "ab"])
def test_hardness_without_held_out_text_uses_defaults(text: str) -> None:
    sample = TextSample()
    sample.add(b"", text, len(text))
    found = sample.hardness(HeldOut(None, 0.1))
    assert (found.ngram_bits_per_character, found.long_ngram_ratio) == (defaults.NGRAM_BITS, 1.0)


def test_long_ngram_ratio_distinguishes_repetitive_text_from_lists() -> None:
    def of(text: str) -> Hardness:
        sample = TextSample()
        sample.add(b"", text, len(text) * 9 // 10)
        return sample.hardness(HeldOut(None, 0.1))

    # Eight letters determine which word continues, but three letters do not.
    words = [noise(8, "ab", seed) + noise(8, "ab", seed + 99) for seed in range(9)]
    repeated = "".join(random.Random(0).choices(words, k=20_000))
    assert of(repeated).long_ngram_ratio < 0.6
    # A longer context was seen only once, and does not predict the next digit.
    numbers = random.Random(0).choices(range(10**6), k=10_000)
    table = "".join(f"{row:06};{number:06};N;\n" for row, number in enumerate(numbers))
    assert of(table).long_ngram_ratio > 1.5


def test_hardness_of_single_letter_text_is_minimum() -> None:
    sample = TextSample()
    sample.add(b"", "a" * 100_000, 90_000)
    found = sample.hardness(HeldOut(None, 0.1))
    assert found.ngram_bits_per_character == defaults.LEAST_NGRAM_BITS
    assert found.long_ngram_ratio == 1.0


def test_xz_bits_cover_all_parts_of_text() -> None:
    # The first half of the text is a single repeated letter.
    sample = TextSample()
    text = "a" * 80_000 + noise(80_000, "abcd")
    sample.add(b"", text, len(text))
    assert sample.hardness(HeldOut(None, 0.1)).xz_bits_per_byte == pytest.approx(1.1, abs=0.1)


def test_held_out_xz_bits_are_measured_separately() -> None:
    sample = TextSample()
    sample.add(b"", "a" * 80_000 + noise(20_000, "abcd"), 80_000)
    found = sample.hardness(HeldOut(None, 0.2))
    assert found.xz_bits_per_byte < 0.1
    assert found.held_out_xz_bits_per_byte == pytest.approx(2.4, abs=0.1)


def test_hardness_of_short_documents_is_measured_separately() -> None:
    """Each document begins in one of four ways; its continuation is then determined."""
    lines = [letter + "ijklmnopqrstuvwxyz" for letter in noise(20_000, "abcd")]
    sample = TextSample()
    for number, line in enumerate(lines):
        sample.add(str(number).encode(), line, 17)
    held = frozenset(str(number).encode() for number in range(0, 20_000, 10))
    # Two bits for the first of 20 characters, including the newline.
    assert sample.hardness(HeldOut(held, 0.1)).ngram_bits_per_character == pytest.approx(
        2 / 20, abs=0.005
    )
