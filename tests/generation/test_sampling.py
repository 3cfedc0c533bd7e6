from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from firstlight.errors import ConfigError
from firstlight.generation.config import SamplingConfig
from firstlight.generation.sampling import (
    draw,
    filter_probabilities,
    sample_rows,
    uniform_numbers,
)
from generated import sample

logits_lists = st.lists(st.integers(-400, 400), min_size=1, max_size=12).map(
    lambda values: [value / 40 for value in values]
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def slow_probabilities(logits: list[float], temperature: float, k: int, p: float) -> list[float]:
    """Reference implementation in plain Python."""
    scaled = [value / temperature for value in logits]
    if 0 < k < len(logits):
        last_kept = sorted(scaled, reverse=True)[k - 1]
        scaled = [value if value >= last_kept else -math.inf for value in scaled]
    powers = [math.exp(value - max(scaled)) for value in scaled]
    probabilities = [power / sum(powers) for power in powers]
    kept, total = set(), 0.0
    for index in sorted(range(len(logits)), key=lambda i: -probabilities[i]):
        if p < 1:
            assume(abs(total - p) > 1e-5)  # At the boundary, rounding decides.
            if total >= p:
                break
        kept.add(index)
        total += probabilities[index]
    return [q / total if i in kept else 0.0 for i, q in enumerate(probabilities)]


@given(
    logits=logits_lists,
    temperature=st.floats(0.05, 5),
    k=st.integers(0, 14),
    p=st.floats(0.01, 1),
)
@settings(max_examples=200)
def test_filter_probabilities_match_definition(
    logits: list[float], temperature: float, k: int, p: float
) -> None:
    config = SamplingConfig(temperature=temperature, top_k=k, top_p=p)
    found = filter_probabilities(torch.tensor(logits), config)
    assert found.dtype == torch.float32
    assert found.sum().item() == pytest.approx(1, abs=1e-5)
    expected = slow_probabilities(logits, temperature, k, p)
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


@given(
    logits=logits_lists,
    temperature=st.floats(0, exclude_min=True, allow_infinity=False),
    k=st.integers(0, 14),
    p=st.floats(0, 1, exclude_min=True),
)
@settings(max_examples=200)
def test_sample_every_allowed_setting_returns_token(
    logits: list[float], temperature: float, k: int, p: float
) -> None:
    """Even the smallest possible temperatures act like temperature 0 and do not give NaN."""
    config = SamplingConfig(temperature=temperature, top_k=k, top_p=p)
    found = filter_probabilities(torch.tensor(logits), config)
    assert found.sum().item() == pytest.approx(1, abs=1e-5)
    assert 0 <= sample(torch.tensor(logits), config, generator()) < len(logits)


@given(logits=logits_lists)
def test_sample_temperature_zero_takes_most_likely_without_drawing(logits: list[float]) -> None:
    random = generator()
    before = random.get_state()
    config = SamplingConfig(temperature=0, top_k=3, top_p=0.1)
    token_id = sample(torch.tensor(logits), config, random)
    assert logits[token_id] == max(logits)
    assert torch.equal(random.get_state(), before)


@pytest.mark.parametrize("settings_", [{"temperature": 1e-30}, {"top_k": 1}, {"top_p": 1e-9}])
def test_filter_probabilities_narrowest_settings_keep_most_likely(
    settings_: dict[str, Any],
) -> None:
    logits = torch.tensor([0.5, 2.0, 1.9, -3.0])
    config = SamplingConfig(**{"temperature": 1.0, **settings_})
    assert filter_probabilities(logits, config).tolist() == [0, 1, 0, 0]


@given(logits=logits_lists, temperature=st.floats(0.05, 5), p=st.floats(0.001, 1))
def test_filter_probabilities_min_p_keeps_share_of_most_likely(
    logits: list[float], temperature: float, p: float
) -> None:
    powers = [math.exp((value - max(logits)) / temperature) for value in logits]
    assume(all(abs(math.log(power) - math.log(p)) > 1e-4 for power in powers if power > 0))
    config = SamplingConfig(temperature=temperature, min_p=p)
    found = filter_probabilities(torch.tensor(logits), config)
    kept = [power if power >= p else 0.0 for power in powers]
    assert found.tolist() == pytest.approx([one / sum(kept) for one in kept], abs=1e-5)


def test_filter_probabilities_top_k_keeps_ties() -> None:
    config = SamplingConfig(temperature=1.0, top_k=2)
    found = filter_probabilities(torch.tensor([1.0, 3.0, 1.0, 0.0]), config)
    assert [q > 0 for q in found.tolist()] == [True, True, True, False]


def test_filter_probabilities_top_p_applies_after_top_k() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    # Of 0.5 and 0.3, the first has 62.5 % of the mass: enough for 0.6, although 50 % would not be.
    config = SamplingConfig(temperature=1.0, top_k=2, top_p=0.6)
    assert filter_probabilities(logits, config).tolist() == [1, 0, 0]
    config = SamplingConfig(temperature=1.0, top_p=0.6)
    expected = torch.tensor([5 / 8, 3 / 8, 0])
    torch.testing.assert_close(filter_probabilities(logits, config), expected)


def test_filter_probabilities_forbidden_tokens_stay_forbidden() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0])
    for temperature in (1e-40, 0.5, 1e30):
        found = filter_probabilities(logits, SamplingConfig(temperature=temperature))
        assert found.tolist() == [0, 0.5, 0, 0.5]


def test_filter_probabilities_half_precision_logits_use_fp32() -> None:
    logits = torch.randn(5000, generator=generator()).bfloat16()
    found = filter_probabilities(logits, SamplingConfig(temperature=0.7))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, (logits.float() / 0.7).softmax(-1), atol=1e-7, rtol=1e-4)


def test_sample_frequencies_match_probabilities() -> None:
    logits = torch.tensor([0.6, 0.3, 0.1, 1e-9]).log()
    random, config, draws = generator(), SamplingConfig(temperature=1.0), 4000
    counts = torch.zeros(4)
    for _ in range(draws):
        counts[sample(logits, config, random)] += 1
    for count, share in zip(counts.tolist(), (0.6, 0.3, 0.1, 0.0), strict=True):
        deviation = math.sqrt(share * (1 - share) / draws)
        assert count / draws == pytest.approx(share, abs=4 * deviation)


def test_sample_same_seed_repeats_draws() -> None:
    logits, config = torch.zeros(1000), SamplingConfig(temperature=1.0)

    def draws(seed: int) -> list[int]:
        random = generator(seed)
        return [sample(logits, config, random) for _ in range(10)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)


def test_sample_leaves_torch_generator_unchanged() -> None:
    """Sampling during a training run must not change the run."""
    before: Tensor = torch.get_rng_state()
    sample(torch.zeros(10), SamplingConfig(temperature=1.0), generator())
    assert torch.equal(torch.get_rng_state(), before)


def test_sample_does_not_modify_logits() -> None:
    logits = torch.tensor([1.0, 2.0, 3.0])
    filter_probabilities(logits, SamplingConfig(temperature=0.5, top_k=1, top_p=0.5))
    assert logits.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "values, message",
    [
        ({"temperature": -0.1}, "temperature must be 0 or above, not -0.1"),
        ({"temperature": math.inf}, "temperature must be 0 or above, not inf"),
        ({"temperature": math.nan}, "temperature must be 0 or above, not nan"),
        ({"top_k": -1}, r"top_k must be 0 \(off\) or above, not -1"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, not 0.0"),
        ({"top_p": 1.01}, "top_p must be above 0 and at most 1, not 1.01"),
        ({"top_p": math.nan}, "top_p must be above 0 and at most 1, not nan"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, not 0"),
        ({"seed": -1}, "seed must be between 0 and 2"),
        ({"seed": 2**63}, "seed must be between 0 and 2"),
    ],
)
def test_sampling_config_values_out_of_range_raise_and_are_named(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingConfig(**values)


def test_sampling_config_range_limits_are_allowed() -> None:
    SamplingConfig(max_new_tokens=1, temperature=0, top_k=0, top_p=1, seed=0)
    SamplingConfig(top_p=5e-324, top_k=10**9, seed=2**63 - 1)
    torch.Generator().manual_seed(2**63 - 1)


def uniform(generator: torch.Generator) -> float:
    """A single draw."""
    return float(torch.rand((), dtype=torch.float64, generator=generator))


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1])
def test_uniform_numbers_drawn_in_blocks_equal_single_draws(seed: int) -> None:
    alone = torch.Generator().manual_seed(seed)
    found = list(itertools.islice(uniform_numbers(seed), 150))
    assert found == [uniform(alone) for _ in range(150)]


def drawn_index(weights: torch.Tensor, generator: torch.Generator) -> int:
    return int(draw(weights[None], torch.tensor([uniform(generator)], dtype=torch.float64)))


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-30, 0.1, 1.0, 3.0]), min_size=1, max_size=9).filter(
        any
    ),
    seed=st.integers(0, 2**32),
)
def test_drawn_index_never_selects_zero_probability(weights: list[float], seed: int) -> None:
    index = drawn_index(torch.tensor(weights), torch.Generator().manual_seed(seed))
    assert weights[index] > 0


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_drawn_index_extreme_random_numbers_select_possible_index(
    number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = torch.tensor(number, dtype=torch.float64)
    monkeypatch.setattr(torch, "rand", lambda *_, **__: drawn)
    weights = torch.tensor([0.0, 0.3, 0.0, 1e-20, 0.0])
    assert weights[drawn_index(weights, torch.Generator())] > 0
    assert drawn_index(torch.tensor([0.0, 0.3, 0.0, 0.3, 0.0]), torch.Generator()) == (
        1 if not number else 3
    )


def test_drawn_index_frequencies_match_weights() -> None:
    weights = torch.tensor([0.1, 0.0, 0.6, 0.3])
    random = torch.Generator().manual_seed(0)
    counts = torch.bincount(
        torch.tensor([drawn_index(weights, random) for _ in range(20_000)]), minlength=4
    )
    expected = weights * 20_000
    # Four standard deviations of a binomial count.
    assert (counts - expected).abs().le(4 * (expected * (1 - weights)).sqrt()).all()


@given(
    rows=st.integers(1, 5),
    config=st.builds(
        SamplingConfig,
        temperature=st.sampled_from([0, 0.3, 1, 4]),
        min_p=st.sampled_from([0, 0.1]),
        top_k=st.sampled_from([0, 3, 99]),
        top_p=st.sampled_from([0.2, 0.9, 1]),
    ),
    seed=st.integers(0, 99),
)
@settings(max_examples=100)
def test_sample_rows_equals_each_row_alone(rows: int, config: SamplingConfig, seed: int) -> None:
    logits = 3 * torch.randn(rows, 50, generator=generator(seed))
    together, alone = ([generator(seed + row) for row in range(rows)] for _ in range(2))
    for _ in range(3):
        numbers = torch.tensor([uniform(one) for one in together], dtype=torch.float64)
        found, probabilities = sample_rows(logits, config, numbers)
        pairs = zip(logits, alone, strict=True)
        assert found[:, 0].tolist() == [sample(row, config, one) for row, one in pairs]
        if probabilities is not None:
            assert torch.equal(probabilities, filter_probabilities(logits, config))


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_sample_non_finite_row_returns_id_in_vocabulary(temperature: float, bad: float) -> None:
    """On a GPU, an index beyond the vocabulary would end the program."""
    logits = torch.zeros(3, 9)
    logits[1, 4] = bad
    numbers = torch.full((3,), 0.5, dtype=torch.float64)
    found, _ = sample_rows(logits, SamplingConfig(temperature=temperature), numbers)
    assert found[1, 0] < 9
