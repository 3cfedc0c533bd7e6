"""Recognise text whose characters are not those that its author wrote.

A font without a correct map of its characters replaces letters by others, and a wrong encoding
replaces them by pairs such as "Ã¼". Nothing but the text itself is needed to recognise this. A
model of n-grams of the other files can't do it: a text in another language is as strange to the
model as replaced letters are. In all languages with vowels, however, vowels and consonants
alternate. The vowels that the pairs of letters show are the written vowels, unless letters were
replaced. Code, names, and lists of numbers follow the same rule or show no vowels at all.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter

#: A long text is judged by this number of parts with this number of characters.
_PARTS, _PART = 8, 16_000
#: Letters with a vowel's sound in the Latin, Greek and Cyrillic alphabets, without their accents.
_VOWELS = frozenset("aeiouyæœøıəɛɔαεηιουωаеиоуыэюяєіӕәөүұѣ")
_LETTERS = re.compile(r"[^\W\d_]+")
_WORDS = re.compile(r"[a-z\u00df-\u00f6\u00f8-\u024f]+|[\u03ac-\u03ff]+|[\u0430-\u052f]+")
#: Minimum number of pairs of letters in different words. Each limit was found with 10,300 texts in
#: more than 100 languages, none of which is taken for nonsense (docs/architecture.md).
_FEWEST_PAIRS = 60
#: Maximum share of found vowels that are written vowels. Text has 0.5 to 1.
_LEAST_AGREEMENT = 0.4
#: Correlations between being a vowel and following a vowel: maximum for the found vowels, and
#: minimum for the written vowels in a long text. Text has -0.7 to -0.3 for both.
_ALTERNATING, _NOT_ALTERNATING = -0.3, -0.28
#: Control characters, halves of characters, and characters for private use: minimum number and
#: maximum share in the text.
_STRANGE = re.compile(
    r"[\x01-\x07\x0e-\x1a\x1c-\x1f\x7f-\x84\x86-\x9f\ud800-\uf8ff\ufffd\U000f0000-\U0010ffff]"
)
_FEWEST_STRANGE, _MOST_STRANGE = 4, 0.05
#: The characters of Windows-1252 and Latin-1 for the later bytes of a character in UTF-8, and
#: characters in UTF-8 that were decoded as one of the two.
_LATER = "[\x80-\xbfŒœŠšŸŽžƒˆ˜–—‘’‚“”„†‡•…‰‹›€™]"
_GARBLED = re.compile(f"[Â-ß]{_LATER}|[à-ï]{_LATER}{{2}}|[ð-ô]{_LATER}{{3}}|[\x80-\x9f\ufffd]")
#: Minimum number of garbled characters, and minimum shares of them in the text and in its
#: characters outside of ASCII.
_FEWEST_GARBLED = 4
_GARBLED_OF_TEXT, _GARBLED_OF_OTHERS = 0.002, 0.5
#: Minimum share of accented letters in text of another alphabet that was decoded as Latin.
#: Vietnamese has 0.3.
_ACCENTED = 0.5
_ADVICE = (
    "export it again in UTF-8, or recognise the text of a PDF with ocrmypdf --force-ocr IN OUT"
)


def nonsense_in(text: str) -> str:
    """Return what is wrong with the characters of a text and what would help, or "" if they can be
    the characters that its author wrote."""
    step = max(len(text) // _PARTS, _PART)
    text = "".join(text[start : start + _PART] for start in range(0, len(text), step))
    if not text.strip():
        return ""
    length = len("".join(text.split()))
    strange = len(_STRANGE.findall(text))
    garbled = list(_GARBLED.finditer(text))
    size = sum(len(match[0]) for match in garbled)
    others = sum(map(len, re.findall(r"[^\x00-\x7f]+", text)))
    letters = sum(map(len, _LETTERS.findall(text)))
    accented = len(re.findall(r"[À-ÖØ-öø-ÿ]", text))
    is_garbled = len(garbled) >= max(_FEWEST_GARBLED, _GARBLED_OF_TEXT * length)
    if is_garbled and size >= _GARBLED_OF_OTHERS * others:
        return f"its encoding was not recognised ({_example(text, garbled[0].start())}): {_ADVICE}"
    if strange > max(_FEWEST_STRANGE, _MOST_STRANGE * length):
        return f"{strange / length:.0%} of its characters are not text: {_ADVICE}"
    if accented > max(_FEWEST_PAIRS, _ACCENTED * letters):
        return f"its encoding was not recognised ({_example(text, 0)}): {_ADVICE}"
    if _has_replaced_letters(text, letters):
        return f"its letters were replaced by others ({_example(text, 0)}): {_ADVICE}"
    return ""


def _example(text: str, start: int) -> str:
    """Return the beginning of the text, or of the text at a position, as an example."""
    start = text.rfind(" ", 0, start) + 1
    return repr(" ".join(text[start : start + 200].split())[:20].strip())


def _has_replaced_letters(text: str, count: int) -> bool:
    """Return True if the vowels that the pairs of letters show are not written vowels.

    Args:
        text: the text.
        count: number of its letters.
    """
    decomposed = unicodedata.normalize("NFD", text.lower())
    found = _WORDS.findall(re.sub("[\u0300-\u036f]", "", decomposed))
    if 2 * sum(map(len, found)) < count:
        return False
    # Each word counts once, because a list may repeat a strange word many times.
    pairs = Counter(pair for word in set(found) for pair in itertools.pairwise(word))
    total = pairs.total()
    if total < _FEWEST_PAIRS:
        return False
    vowels, letters = _vowels(pairs)
    written = sum(letters[letter] for letter in vowels & _VOWELS)
    alternation, shown = _correlation(pairs, _VOWELS), _correlation(pairs, vowels)
    return (
        written < _LEAST_AGREEMENT * sum(letters[letter] for letter in vowels)
        and shown < _ALTERNATING
        # The second term is twice the standard error.
        and alternation > _NOT_ALTERNATING + 2 / total**0.5
    )


def _vowels(pairs: Counter[tuple[str, str]]) -> tuple[set[str], Counter[str]]:
    """Find the vowels with the algorithm of Sukhotin (1962): the letter with the most different
    neighbours is a vowel, and the neighbours of a vowel are less likely to be vowels. Return the
    vowels and the numbers of all letters."""
    letters: Counter[str] = Counter()
    beside: Counter[tuple[str, str]] = Counter()
    score: Counter[str] = Counter()
    for (first, second), count in pairs.items():
        letters[first] += count
        letters[second] += count
        if first != second:
            beside[first, second] += count
            beside[second, first] += count
            score[first] += count
            score[second] += count
    vowels: set[str] = set()
    while score and (best := max(score, key=score.__getitem__)) and score[best] > 0:
        vowels.add(best)
        del score[best]
        for letter in score:
            score[letter] -= 2 * beside[best, letter]
    return vowels, letters


def _correlation(pairs: Counter[tuple[str, str]], vowels: frozenset[str] | set[str]) -> float:
    """Return the correlation between two letters of a pair, as vowels (1) or consonants (0)."""
    total = pairs.total()
    first = sum(count for (one, _), count in pairs.items() if one in vowels) / total
    second = sum(count for (_, one), count in pairs.items() if one in vowels) / total
    both = sum(count for pair, count in pairs.items() if vowels.issuperset(pair)) / total
    spread = (first * (1 - first) * second * (1 - second)) ** 0.5
    return (both - first * second) / spread if spread else 0.0
