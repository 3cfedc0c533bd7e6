"""Choose the model that learns the most within a budget, and its batch size.

A larger model learns more from each token, but sees fewer tokens in the same time. The best balance
is computed from the scaling law for the expected loss (`law.py`) and from the speed at which a
model of each size trains on the available hardware.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pydantic import ValidationError

from firstlight.errors import ConfigError
from firstlight.hardware.compiling import NOT_COMPILED, Compiling, best_compile_mode
from firstlight.planner.advise import defaults
from firstlight.planner.advise.law import (
    USUAL_HARDNESS,
    TextFacts,
    expected_bits,
    latin_bytes_per_token,
    least_bits,
    usual_intermediate_size,
)

if TYPE_CHECKING:
    from firstlight.models import ModelConfig

#: Minimum number of steps in a run. A smaller batch is used if a run would have fewer steps,
#: because the warm-up and decay of the learning rate need enough steps.
_FEWEST_STEPS = 100


def batch_tokens(tokens: float, seq_len: int) -> int:
    """Return the number of tokens per step. It is a power of two and grows with the square root of
    the number of tokens in the run. It is smaller if the run would otherwise have fewer than
    `_FEWEST_STEPS` steps, but it is never less than one sequence."""
    wanted = defaults.BATCH_TOKENS * math.sqrt(max(tokens, 1.0) / defaults.BATCH_AT_TOKENS)
    wanted = min(max(wanted, defaults.BATCH_TOKENS), defaults.MOST_BATCH_TOKENS)
    batch = 1 << round(math.log2(wanted))
    while batch > seq_len and 0 < tokens < _FEWEST_STEPS * batch:
        batch //= 2
    return max(batch, seq_len)


def tokens_in_time(
    rate: float,
    seconds: float,
    text: TextFacts,
    epochs: float | None = None,
) -> float:
    """Return the number of tokens that a run of a given duration reads.

    Args:
        rate: training speed in tokens per second.
        seconds: duration of the run, including evaluations.
        text: facts about the text.
        epochs: maximum number of passes over the text; None for `defaults.MOST_EPOCHS`.
    """
    most = (defaults.MOST_EPOCHS if epochs is None else epochs) * text.train_tokens
    return min(rate * max(seconds, 0.0) * (1 - defaults.EVALUATION_SHARE), most)


def batch_and_rate(
    rate: Callable[[float, Compiling], float],
    tokens_at: Callable[[float, Compiling], float],
    batch_for: Callable[[float], int],
    modes: Sequence[Compiling],
    steps: int | None = None,
) -> tuple[int, float, Compiling]:
    """Return the tokens per step, the tokens per second and the fastest compilation mode of a run.

    The batch size depends on the number of tokens in the run, which depends on the speed, which in
    turn depends on the batch size. All three are therefore computed iteratively.

    Args:
        rate: function that receives (tokens per step, compilation mode) and returns tokens per
            second.
        tokens_at: function that receives (tokens per second, compilation mode) and returns the
            number of tokens in the run.
        batch_for: function that receives the number of tokens in the run and returns the tokens per
            step.
        modes: compilation modes to choose from, including no compilation.
        steps: number of steps in the run; None if the length of the run is given in tokens or as a
            duration.
    """

    def found(mode: Compiling) -> tuple[int, float]:
        reached = rate(math.inf, mode)
        # Two iterations are enough. The batch size grows only with the square root of the number of
        # tokens, so the second iteration hardly changes it.
        for _ in range(2):
            batch = batch_for(tokens_at(reached, mode))
            reached = rate(batch, mode)
        return batch, reached

    batch, plain = found(NOT_COMPILED)
    tokens = steps * batch if steps else tokens_at(plain, NOT_COMPILED)
    best = best_compile_mode(modes, lambda mode: tokens / rate(batch, mode))
    return (*found(best), best)


class Trained(Protocol):
    """A candidate model and its run.

    Attributes:
        flops: training FLOPs per token.
        bits: expected bits per byte on held-out text after the run.
        seconds: total duration of the run's steps in seconds.
        layer_parameters: number of parameters in the layers' matrices.
    """

    @property
    def flops(self) -> float: ...
    @property
    def bits(self) -> float: ...
    @property
    def seconds(self) -> float: ...
    @property
    def layer_parameters(self) -> float: ...


T = TypeVar("T", bound=Trained)


def best_model(
    candidates: Sequence[T],
    text: TextFacts,
    is_timed: bool,
    in_time: Callable[[float], Sequence[T]],
) -> T:
    """Return the best candidate that is not too large for the text.

    With a time budget, the best candidate is the largest model whose expected loss is close to the
    lowest expected loss. With a given number of tokens or steps, the largest model would always
    have the lowest loss. In this case, each candidate is treated as if the duration of its run were
    a time budget, and the result is the largest candidate that would be the best within its own
    budget.

    Args:
        candidates: models that fit in memory, smallest first.
        text: facts about the text.
        is_timed: True if the candidates' runs have a time budget.
        in_time: function that receives a duration and returns all candidates with runs of this
            duration.
    """
    most = defaults.MOST_PARAMETERS_A_TOKEN * text.train_tokens
    general = [one for one in candidates if one.layer_parameters <= most] or candidates[:1]
    least = least_bits(text)
    if is_timed:
        return _largest_of_the_best(general, least)
    best = general[0]
    for one in general[1:]:
        known = {other.layer_parameters for other in general}
        rivals = [other for other in in_time(one.seconds) if other.layer_parameters in known]
        if _largest_of_the_best(rivals, least).flops < one.flops:
            break
        best = one
    return best


def _largest_of_the_best(candidates: Sequence[T], least: float) -> T:
    lowest = min(one.bits for one in candidates)
    share = defaults.INDIFFERENT_SHARE * max(lowest - least, 0.0)
    most = lowest + min(defaults.INDIFFERENT * lowest, share)
    return max((one for one in candidates if one.bits <= most), key=lambda one: one.flops)


@dataclass(frozen=True)
class Suggestion:
    """The suggested model and run for a budget.

    Attributes:
        config: config of the model.
        parameters: number of the model's parameters.
        active_parameters: number of parameters used per token; lower than `parameters` in a mixture
            of experts.
        layer_parameters: number of active parameters in the layers' matrices.
        flops: training FLOPs per token.
        tokens: number of tokens in the run.
        global_batch_tokens, max_steps: suggested values of these recipe keys.
        seconds: expected duration of the run in seconds, including compilation.
        bits: expected bits per byte on held-out text at the end of the run.
        epochs: number of passes over the available text; None if its size is unknown.
        mode: compilation mode of the run.
    """

    config: ModelConfig
    parameters: int
    active_parameters: int
    layer_parameters: int
    flops: float
    tokens: int
    global_batch_tokens: int
    max_steps: int
    seconds: float
    bits: float
    epochs: float | None
    mode: Compiling = NOT_COMPILED

    @property
    def bits_per_byte(self) -> tuple[float, float]:
        """Lowest and highest expected bits per byte on held-out text of usual hardness."""
        low, high = defaults.EXPECTED_RANGE
        return low * self.bits, min(high * self.bits, 8.0)


def usual_text(vocab_size: int, tokens: float | None) -> TextFacts:
    """Return facts about a text of which only the number of tokens is known.

    Args:
        vocab_size: vocabulary size of the tokenizer.
        tokens: number of tokens. None if the number is unknown or is more than any run can read.
    """
    train = math.inf if tokens is None else float(tokens)
    return TextFacts(
        vocab_size, train, latin_bytes_per_token(vocab_size), USUAL_HARDNESS, val_tokens=0.0
    )


#: Function that receives (model, tokens per step, compilation mode). It returns the training speed
#: in tokens per second, or None if the model does not fit in memory.
Rate = Callable[["Suggestion", float, Compiling], float | None]


def suggest(
    rate: Rate,
    models: Iterable[ModelConfig],
    text: TextFacts,
    *,
    seq_len: int,
    seconds: float | None = None,
    tokens: float | None = None,
    epochs: float | None = None,
    modes: Callable[[ModelConfig], Sequence[Compiling]] = lambda _: (NOT_COMPILED,),
) -> Suggestion:
    """Return the best model for a budget.

    Args:
        rate: function that returns the training speed of a model; see `Rate`.
        models: candidate models, smallest first; see `model_ladder`.
        text: facts about the text.
        seq_len: sequence length in tokens.
        seconds, tokens: budget as time or as tokens; exactly one of them is set.
        epochs: maximum number of passes over the text if there is a time budget; None for
            `defaults.MOST_EPOCHS`.
        modes: function that receives a model and returns the compilation modes to choose from,
            including no compilation.

    Raises:
        ConfigError: the smallest model does not fit in memory, or `seconds` and `tokens` are both
            set or both missing.
    """
    if (seconds is None) is (tokens is None):
        raise ConfigError("the budget must be either a time or a number of tokens: set one of them")
    fitting: list[Suggestion] = []
    for config in models:
        model = _without_run(config, seq_len)
        # The models are sorted by size, so larger models do not fit either.
        if rate(model, math.inf, NOT_COMPILED) is None:
            break
        fitting.append(model)
    if not fitting:
        raise ConfigError(
            "none of the candidate models fits this budget and memory: allow more time or tokens, "
            "or use a GPU with more memory"
        )

    def in_time(time: float | None) -> list[Suggestion]:
        def tokens_at(reached: float, mode: Compiling) -> float:
            if time is not None:
                return tokens_in_time(reached, mode.left_of(time), text, epochs)
            assert tokens is not None
            return tokens

        return [
            _with_run(one, rate, tokens_at, text, seq_len=seq_len, modes=modes(one.config))
            for one in fitting
        ]

    return best_model(in_time(seconds), text, seconds is not None, in_time)


def _without_run(config: ModelConfig, seq_len: int) -> Suggestion:
    """Return a suggestion that contains a model but not yet the length of its run."""
    # Imported here, because it imports torch, and `train TEXTS` must print its first line before
    # torch is loaded.
    from firstlight.models.accounting import count_parameters, meta_model, train_flops_per_token

    model = meta_model(config)
    count = count_parameters(model)
    return Suggestion(
        config=config,
        parameters=count.total,
        active_parameters=count.active,
        layer_parameters=count.active - _other_parameters(model, config),
        flops=train_flops_per_token(model, seq_len),
        tokens=0,
        global_batch_tokens=0,
        max_steps=0,
        seconds=0.0,
        bits=math.inf,
        epochs=None,
    )


def _with_run(
    model: Suggestion,
    rate: Rate,
    tokens_at: Callable[[float, Compiling], float],
    text: TextFacts,
    *,
    seq_len: int,
    modes: Sequence[Compiling],
) -> Suggestion:
    """Return the suggestion for a model, including the batch size, number of steps and duration of
    the run."""

    def rate_of(batch: float, mode: Compiling) -> float:
        found = rate(model, batch, mode)
        assert found is not None
        return found

    batch, reached, mode = batch_and_rate(
        rate_of, tokens_at, lambda n: batch_tokens(n, seq_len), modes
    )
    steps = max(round(tokens_at(reached, mode) / batch), 1)
    seconds = steps * batch / reached + mode.seconds
    found = replace(model, global_batch_tokens=batch, seconds=seconds, mode=mode)
    return with_steps(found, steps, text)


def _other_parameters(model: Any, config: ModelConfig) -> int:
    """Return the number of parameters in the embedding, head, norms and biases."""
    tables = 1 if config.tie_word_embeddings else 2
    vectors: int = sum(p.numel() for p in model.parameters() if p.dim() < 2)
    return int(tables * config.vocab_size * config.hidden_size) + vectors


def with_steps(found: Suggestion, steps: int, text: TextFacts) -> Suggestion:
    """Return the suggestion with a different number of steps. All values that depend on this number
    are updated, except `global_batch_tokens` and `seconds`.

    Args:
        found: the suggestion.
        steps: the new number of steps.
        text: facts about the text.
    """
    tokens = steps * found.global_batch_tokens
    return replace(
        found,
        tokens=tokens,
        max_steps=steps,
        bits=expected_bits(found.layer_parameters, tokens * text.bytes_per_token, text),
        epochs=tokens / text.train_tokens if text.train_tokens < math.inf else None,
    )


#: Config keys for sizes that are proportional to the width.
_PROPORTIONAL_SIZES = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "kv_lora_rank",
    "q_lora_rank",
)


def model_ladder(model: ModelConfig, *, cuts: int = 1) -> Iterator[ModelConfig]:
    """Yield variants of a model in different sizes, smallest first.

    The variants belong to the same model family. The sizes of MLPs and experts are proportional to
    the width, and the number of key-value heads is proportional to the number of heads. All other
    keys keep their values, such as the head dimension, the number of experts, the context length,
    and whether the head is tied.

    Args:
        cuts: number of processes among which the key-value heads must be divided evenly. The number
            of key-value heads is rounded to the nearest number that can be divided evenly. If there
            is no such number, this requirement is ignored.

    Raises:
        ConfigError: no variant is valid together with the other keys of the model.
    """
    ladder: dict[tuple[int, int], ModelConfig] = {}
    problem = ""
    for hidden, layers in defaults.SHAPES:
        try:
            config = _resized(model, hidden, layers, cuts)
        except ValidationError as error:
            # For example, a model with experts in every tenth layer can't have fewer than ten
            # layers.
            problem = str(error.errors()[0]["msg"])
            continue
        ladder[config.hidden_size, layers] = config
    if not ladder:
        raise ConfigError(f"the model section is valid only at its current size: {problem}")
    yield from ladder.values()


def _resized(model: ModelConfig, hidden: int, layers: int, cuts: int) -> ModelConfig:
    """Return a variant of the model with approximately this width and exactly this number of
    layers. For the other arguments, see `model_ladder`.

    Raises:
        ValidationError: the model's other keys are invalid with these sizes.
    """
    values: dict[str, Any] = model.model_dump()
    width = model.hidden_size
    depth = model.num_hidden_layers
    heads = model.num_attention_heads
    count = max(round(hidden * heads / width), 1)
    # Round the width to the nearest multiple of the head dimension.
    hidden = hidden if width % heads else count * width // heads
    changes = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": count,
        "max_window_layers": round(values.get("max_window_layers", 0) * layers / depth),
        "first_k_dense_replace": min(values.get("first_k_dense_replace", 0), layers - 1),
        "mlp_only_layers": [i for i in values.get("mlp_only_layers", ()) if i < layers],
    }
    for key in _PROPORTIONAL_SIZES:
        if values.get(key) == usual_intermediate_size(width):
            changes[key] = usual_intermediate_size(hidden)
            continue
        size = (values.get(key) or 0) * hidden / width
        step = 16 if size < 256 else 64 if size < 2560 else 256
        changes[key] = math.ceil(size / step) * step or None
    if "num_key_value_heads" in values:
        usual = count * values["num_key_value_heads"] / heads
        possible = [n for n in range(1, count + 1) if count % n == 0]
        shared = [n for n in possible if n % cuts == 0] or possible
        changes["num_key_value_heads"] = min(shared, key=lambda n: abs(n - usual))
    if "linear_num_key_heads" in values:
        keys = values["linear_num_key_heads"]
        changes["linear_num_key_heads"] = max(round(keys * count / heads), 1)
        each = values["linear_num_value_heads"] // keys
        changes["linear_num_value_heads"] = each * changes["linear_num_key_heads"]
    for key in ("layer_types", "no_rope_layers"):
        # Lists with one entry per layer are extended by repetition, because they usually repeat a
        # pattern.
        listed = values.get(key)
        changes[key] = listed and [listed[i % depth] for i in range(layers)]
    known = {key: value for key, value in changes.items() if key in values}
    return type(model).model_validate(values | known)
