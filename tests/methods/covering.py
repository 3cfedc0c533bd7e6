"""A small set of combinations that contains every legal pair of values.

Greedy, one combination at a time, as AETG does (Cohen et al. 1997), but always the same set for
the same input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

#: A factor and its value.
Choice = tuple[str, str]
Pair = frozenset[Choice]


def legal_pairs(
    factors: Mapping[str, Sequence[str]], refused: Callable[[Choice, Choice], bool]
) -> set[Pair]:
    """Return every pair of values of two factors that is not refused."""
    return {
        frozenset((one, other))
        for a, b in combinations(factors, 2)
        for one in [(a, value) for value in factors[a]]
        for other in [(b, value) for value in factors[b]]
        if not refused(one, other)
    }


def pairs_of(row: Mapping[str, str]) -> set[Pair]:
    """Return the pairs in a combination."""
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def covering_set(
    factors: Mapping[str, Sequence[str]], legal: set[Pair], wanted: set[Pair] | None = None
) -> list[dict[str, str]]:
    """Return combinations (one value per factor) that contain legal pairs only and each wanted pair
    at least once.

    If several values cover equally many pairs, the first in the factor's list is used.

    Args:
        factors: names and values; at least two factors.
        legal: the legal pairs, from `legal_pairs`.
        wanted: the legal pairs to cover, or None for all.

    Raises:
        ValueError: a legal pair is not part of any combination of legal pairs.
    """
    missing = set(legal if wanted is None else wanted)
    rows = []
    while missing:
        start = min(missing, key=sorted)
        row = _completed(factors, legal, missing, dict(sorted(start)))
        if row is None:
            raise ValueError(f"no combination holds {sorted(start)}")
        missing -= pairs_of(row)
        rows.append({name: row[name] for name in factors})
    return rows


def _completed(
    factors: Mapping[str, Sequence[str]], legal: set[Pair], missing: set[Pair], row: dict[str, str]
) -> dict[str, str] | None:
    """Complete the row, starting with the factor that has the fewest possible values, or return
    None if that is impossible.
    """
    possible = {
        name: [value for value in values if _fits((name, value), row, legal)]
        for name, values in factors.items()
        if name not in row
    }
    if not possible:
        return row
    name = min(possible, key=lambda factor: len(possible[factor]))

    def gain(value: str) -> int:
        return sum(frozenset(((name, value), choice)) in missing for choice in row.items())

    for value in sorted(possible[name], key=gain, reverse=True):
        found = _completed(factors, legal, missing, {**row, name: value})
        if found is not None:
            return found
    return None


def _fits(choice: Choice, row: Mapping[str, str], legal: set[Pair]) -> bool:
    return all(frozenset((choice, other)) in legal for other in row.items())
