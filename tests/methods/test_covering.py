from __future__ import annotations

from itertools import combinations

import pytest
from covering import Choice, Pair, covering_set, legal_pairs, pairs_of
from hypothesis import given
from hypothesis import strategies as st


def factors_of(sizes: list[int]) -> dict[str, list[str]]:
    return {f"f{i}": [f"v{value}" for value in range(size)] for i, size in enumerate(sizes)}


def covered(rows: list[dict[str, str]]) -> set[Pair]:
    return set().union(*map(pairs_of, rows))


@given(st.lists(st.integers(1, 4), min_size=2, max_size=6))
def test_covering_set_contains_every_pair_of_values(sizes: list[int]) -> None:
    factors = factors_of(sizes)
    legal = legal_pairs(factors, lambda *_: False)
    assert len(legal) == sum(a * b for a, b in combinations(sizes, 2))
    rows = covering_set(factors, legal)
    assert covered(rows) == legal
    assert all(list(row) == list(factors) for row in rows)


@given(st.lists(st.integers(2, 4), min_size=2, max_size=5), st.data())
def test_covering_set_omits_refused_pairs_only(sizes: list[int], data: st.DataObject) -> None:
    factors = factors_of(sizes)
    # The first value of each factor is compatible with everything, so every legal pair is part of a
    # combination.
    choices = [(name, value) for name, values in factors.items() for value in values[1:]]
    everything = [frozenset(p) for p in combinations(choices, 2) if p[0][0] != p[1][0]]
    refused = set(data.draw(st.lists(st.sampled_from(everything), unique=True)))
    legal = legal_pairs(factors, lambda one, other: frozenset((one, other)) in refused)
    assert covered(covering_set(factors, legal)) == legal


def test_covering_set_is_far_smaller_than_all_combinations() -> None:
    factors = factors_of([5, 4, 4, 3, 2, 2, 2, 2])
    rows = covering_set(factors, legal_pairs(factors, lambda *_: False))
    assert 20 <= len(rows) <= 28  # at least 5 x 4; all combinations are 3,840


def test_covering_set_uncompletable_pair_raises_value_error() -> None:
    factors = factors_of([2, 2, 1])

    def refused(one: Choice, other: Choice) -> bool:
        return {one, other} == {("f0", "v1"), ("f2", "v0")}

    with pytest.raises(ValueError, match="no combination holds"):
        covering_set(factors, legal_pairs(factors, refused))


def test_covering_set_same_input_gives_same_result() -> None:
    factors = factors_of([3, 3, 2, 2])
    legal = legal_pairs(factors, lambda *_: False)
    assert covering_set(factors, legal) == covering_set(factors, {*sorted(legal, key=sorted)})


def test_covering_set_with_wanted_pairs_covers_only_those() -> None:
    factors = factors_of([3, 3, 3])
    legal = legal_pairs(factors, lambda *_: False)
    wanted = {pair for pair in legal if ("f0", "v2") in pair}
    rows = covering_set(factors, legal, wanted)
    assert len(rows) == 3
    assert wanted <= covered(rows)
