"""The best model size, number of tokens and batch for a given budget.

A larger model learns more from each token, and gets fewer tokens in the same time. The best balance
comes from scaling laws that were fitted to hundreds of runs, and from the speed at which a model of
each size trains on the hardware at hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from firstlight.errors import ConfigError
from firstlight.models import ModelConfig
from firstlight.models.accounting import count_parameters, meta_model, train_flops_per_token


@dataclass(frozen=True)
class ScalingLaw:
    """loss = irreducible + a / parameters^alpha + b / tokens^beta, in nats a token.

    Attributes:
        source: publication of the fit.
    """

    source: str
    irreducible: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """The loss, in nats a token, of a model with this number of parameters after training on
        this number of tokens, none of them repeated."""
        return float(
            self.irreducible + self.a / parameters**self.alpha + self.b / tokens**self.beta
        )


#: Two fits of the same runs (web text, a vocabulary of 32,000; arXiv 2203.15556 and 2404.10102).
#: Their difference is a lower bound of a loss's uncertainty.
LAWS = (
    ScalingLaw("Hoffmann et al. 2022, approach 3", 1.69, 406.4, 410.7, 0.34, 0.28),
    ScalingLaw("Besiroglu et al. 2024", 1.8172, 482.01, 2085.43, 0.3478, 0.3658),
)

#: The law by which models are compared: it agrees with the 20 tokens a parameter of Hoffmann et
#: al.'s approaches 1 and 2.
_DECIDING = LAWS[1]

#: Decay constant of the worth of repeated text, as a number of repetitions: R*_D of Muennighoff et
#: al. 2023, arXiv 2305.16264.
_WORTH_OF_REPETITION = 15.39


def expected_loss(parameters: float, tokens: float, vocab_size: int) -> tuple[float, float]:
    """The smallest and the largest loss by the scaling laws, in nats a token; at most the loss of a
    uniform guess, log(vocab_size)."""
    losses = [min(law.loss(parameters, tokens), math.log(vocab_size)) for law in LAWS]
    return min(losses), max(losses)


def worth_of_tokens(tokens: float, unique: float | None) -> float:
    """Number of tokens of new text that are worth as much as `tokens` read from repeated text.

    Args:
        tokens: tokens that are read, repetitions included.
        unique: tokens of the text; None if nothing is repeated.

    Source: Muennighoff et al. 2023, equation 5.
    """
    if unique is None or tokens <= unique:
        return tokens
    repeats = tokens / unique - 1
    return unique * (1 + _WORTH_OF_REPETITION * (1 - math.exp(-repeats / _WORTH_OF_REPETITION)))


#: Number of epochs beyond which more are worth next to nothing (Muennighoff et al. 2023).
MOST_EPOCHS = 40.0


def useful_tokens(tokens: float, unique: float | None, most_epochs: float = MOST_EPOCHS) -> float:
    """The number of tokens worth reading: at most `most_epochs` epochs of the text.

    Args:
        tokens: tokens that there is time for.
        unique: tokens of the text; None if nothing is repeated.
        most_epochs: largest number of epochs.
    """
    return tokens if unique is None else min(tokens, most_epochs * unique)


def batch_tokens(flops: float, seq_len: int) -> int:
    """Tokens of a step, for a run of this number of FLOPs; the number of sequences is a power of
    two.

    Source: DeepSeek LLM (Bi et al. 2024, arXiv 2401.02954), equation 1: 0.292 x FLOPs^0.3271.
    """
    rows = max(0.2920 * flops**0.3271 / seq_len, 1.0)
    return seq_len * (1 << round(math.log2(rows)))


@dataclass(frozen=True)
class Suggestion:
    """The suggested model and run for a budget.

    Attributes:
        config: config of the model.
        parameters: number of the model's parameters.
        active_parameters: number of parameters that are used for a token: fewer than all in a
            mixture of experts.
        tokens: tokens of the run.
        global_batch_tokens, max_steps: suggested values of the recipe's keys.
        seconds: duration at the expected rate.
        loss: smallest and largest expected loss at the end, nats a token.
        epochs: passes over the text at hand; None if its size is not known.
    """

    config: ModelConfig
    parameters: int
    active_parameters: int
    tokens: int
    global_batch_tokens: int
    max_steps: int
    seconds: float
    loss: tuple[float, float]
    epochs: float | None


def suggest(
    rate: Callable[[ModelConfig], float | None],
    models: Iterable[ModelConfig],
    *,
    seq_len: int,
    seconds: float | None = None,
    tokens: float | None = None,
    unique_tokens: float | None = None,
    most_epochs: float = MOST_EPOCHS,
) -> Suggestion:
    """The model of a budget with the least expected loss.

    Args:
        rate: function from a model to the tokens a second at which it trains here; None if it does
            not fit. Called for one model after the other until the expected loss gets worse.
        models: candidate models, smallest first; see `model_ladder`.
        seq_len: tokens of a sequence.
        seconds, tokens: the budget as time or as tokens; exactly one of them.
        unique_tokens: tokens of the text at hand; None if there is no limit.
        most_epochs: largest number of epochs of the text in a budget of time.

    Raises:
        ConfigError: not even the smallest model fits, or not exactly one budget is given.
    """
    if (seconds is None) is (tokens is None):
        raise ConfigError("give either a time or a number of tokens as the budget")
    best: tuple[float, Suggestion] | None = None
    for config in models:
        speed = rate(config)
        # The models are sorted by size: no larger one fits either.
        if speed is None:
            break
        in_time = useful_tokens(speed * (seconds or 0.0), unique_tokens, most_epochs)
        budget = tokens if tokens is not None else in_time
        one = _suggestion(config, speed, budget, seq_len, unique_tokens)
        worth = worth_of_tokens(one.tokens, unique_tokens)
        loss = _DECIDING.loss(one.active_parameters, worth)
        is_short = tokens is not None or worth < one.tokens
        if is_short and best is not None and worth < _TOKENS_A_PARAMETER * one.active_parameters:
            # If only tokens are limited, any larger model is better, but not worth its cost.
            break
        if best is not None and loss >= best[0]:
            break
        best = (loss, one)
    if best is None:
        raise ConfigError(
            "no model of the ladder fits this budget and memory: give more time or tokens, or a "
            "GPU with more memory"
        )
    return best[1]


#: Smallest number of tokens a parameter with a budget in tokens or little text (Hoffmann et al.
#: 2022).
_TOKENS_A_PARAMETER = 20.0


def _suggestion(
    config: ModelConfig, speed: float, budget: float, seq_len: int, unique: float | None
) -> Suggestion:
    model = meta_model(config)
    count = count_parameters(model)
    flops = train_flops_per_token(model, seq_len) * max(budget, 1.0)
    batch = batch_tokens(flops, seq_len)
    # A learning-rate schedule needs some steps, so a small budget gets smaller steps.
    while batch > seq_len and budget / batch < _FEWEST_STEPS:
        batch //= 2
    steps = max(int(budget / batch), 1)
    tokens = steps * batch
    return Suggestion(
        config=config,
        parameters=count.total,
        active_parameters=count.active,
        tokens=tokens,
        global_batch_tokens=batch,
        max_steps=steps,
        seconds=tokens / speed,
        loss=expected_loss(count.active, worth_of_tokens(tokens, unique), config.vocab_size),
        epochs=None if unique is None else tokens / unique,
    )


def with_steps(found: Suggestion, steps: int, unique_tokens: float | None = None) -> Suggestion:
    """The suggestion with another number of steps, and with the values that follow from it, except
    `global_batch_tokens` and `seconds`.

    Args:
        found: the suggestion.
        steps: the new number of steps.
        unique_tokens: tokens of the text at hand; None if there is no limit.
    """
    tokens = steps * found.global_batch_tokens
    worth = worth_of_tokens(tokens, unique_tokens)
    return replace(
        found,
        tokens=tokens,
        max_steps=steps,
        loss=expected_loss(found.active_parameters, worth, found.config.vocab_size),
        epochs=None if unique_tokens is None else tokens / unique_tokens,
    )


#: Smallest number of steps, unless a step is already a single sequence.
_FEWEST_STEPS = 200

#: (hidden_size, num_hidden_layers) of models from 1M to 70B parameters.
_SHAPES = (
    *((128, 4), (192, 5), (256, 6), (320, 6), (384, 8), (448, 8), (512, 8), (576, 10), (640, 10)),
    *((704, 12), (768, 12), (896, 14), (1024, 16), (1152, 18), (1280, 20), (1536, 20), (1792, 22)),
    *((2048, 24), (2304, 26), (2560, 28), (3072, 28), (3584, 30), (4096, 32), (5120, 40)),
    *((6144, 48), (7168, 60), (8192, 80)),
)


#: Keys of sizes that are proportional to the width.
_PROPORTIONAL_SIZES = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "kv_lora_rank",
    "q_lora_rank",
)


def model_ladder(model: ModelConfig, *, cuts: int = 1) -> Iterator[ModelConfig]:
    """Models of the same family in other sizes, smallest first.

    They keep all other keys of the model: the size of a head, the head's tie to the embedding, the
    numbers of experts, the context. The sizes of MLP and experts stay proportional to the width,
    and so does the number of key-value heads to that of the heads.

    Args:
        model: config of the model.
        cuts: number of processes among which the key-value heads are to be divided evenly. Their
            number is then the possible one that is nearest to the usual one; the usual one if none
            is possible.

    Raises:
        ConfigError: the family has none of these sizes with the model's other keys.
    """
    ladder: dict[tuple[int, int], ModelConfig] = {}
    problem = ""
    for hidden, layers in _SHAPES:
        try:
            config = _resized(model, hidden, layers, cuts)
        except ValidationError as error:
            # For instance a model with experts in every tenth layer has no smaller depth.
            problem = str(error.errors()[0]["msg"])
            continue
        ladder[config.hidden_size, layers] = config
    if not ladder:
        raise ConfigError(f"the model section is valid in its own size only: {problem}")
    yield from ladder.values()


def _resized(model: ModelConfig, hidden: int, layers: int, cuts: int) -> ModelConfig:
    """The model with about this width, and this number of layers; arguments as in `model_ladder`.

    Raises:
        ValidationError: the model's other keys are invalid with these sizes.
    """
    values: dict[str, Any] = model.model_dump()
    width, depth, heads = model.hidden_size, model.num_hidden_layers, model.num_attention_heads
    count = max(round(hidden * heads / width), 1)
    # The multiple of the width of a head that is nearest.
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
        # Lists of layers are mostly repetitions of a pattern.
        listed = values.get(key)
        changes[key] = listed and [listed[i % depth] for i in range(layers)]
    known = {key: value for key, value in changes.items() if key in values}
    return type(model).model_validate(values | known)
