"""Which of several endings a model holds to be the likeliest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from firstlight.errors import InputError
from firstlight.evaluation.estimates import mean_and_error
from firstlight.evaluation.likelihood import TokenPair, encode_choices, likelihoods
from firstlight.evaluation.results import Metric
from firstlight.models import Model
from firstlight.tokenizer import Tokenizer


@dataclass(frozen=True)
class Item:
    """A question.

    Attributes:
        context: the text to go on with; not empty.
        choices: the endings, without the space before them; none of them empty.
        gold: the number of the right one.
    """

    context: str
    choices: tuple[str, ...]
    gold: int


@dataclass(frozen=True)
class Answer:
    """What a model made of an item.

    Attributes:
        logprobs: of each ending after the context.
        acc: whether the right one has the highest.
        acc_norm: whether the right one has the highest for each of its characters.
    """

    logprobs: tuple[float, ...]
    acc: bool
    acc_norm: bool


def encode_items(
    items: Sequence[Item], tokenizer: Tokenizer, context_tokens: int, where: str
) -> list[TokenPair]:
    """All endings of all items with their contexts, in order.

    Args:
        context_tokens: what the model's context has room for.
        where: what messages call the items.

    Raises:
        InputError: an ending is longer than the model's context, or adds no token to its context.
    """
    pairs: list[TokenPair] = []
    for number, item in enumerate(items, start=1):
        # Contexts are held once for all endings.
        encoded = encode_choices(tokenizer, item.context, [f" {c}" for c in item.choices])
        for pair in encoded:
            count = len(pair.continuation)
            if not 0 < count <= context_tokens:
                raise InputError(
                    f"{where}: an ending of item {number} has {count} tokens, and the model's "
                    f"context has room for 1 to {context_tokens}: leave the item out"
                )
        pairs += encoded
    return pairs


def answer_items(
    model: Model,
    items: Sequence[Item],
    pairs: Sequence[TokenPair],
    *,
    batch_size: int,
    on_pairs: Callable[[int, int], None] | None = None,
) -> list[Answer]:
    """What a model makes of each item.

    Args:
        model: in evaluation mode.
        items: the questions.
        pairs: from `encode_items`.
        batch_size, on_pairs: see `likelihoods`.

    Raises:
        ModelError: the model's outputs are no numbers.
    """
    scored = likelihoods(model, pairs, batch_size=batch_size, on_pairs=on_pairs)
    logprobs = iter([likelihood.logprob for likelihood in scored])
    return [_answer(item, tuple(next(logprobs) for _ in item.choices)) for item in items]


def _answer(item: Item, logprobs: tuple[float, ...]) -> Answer:
    """Of equals, the first counts, as numpy's argmax has it. lm-evaluation-harness's acc_norm
    divides by characters; by bytes, it calls it acc_bytes."""
    per_character = [p / len(c) for p, c in zip(logprobs, item.choices, strict=True)]
    return Answer(
        logprobs,
        logprobs.index(max(logprobs)) == item.gold,
        per_character.index(max(per_character)) == item.gold,
    )


def accuracies(answers: Sequence[Answer]) -> dict[str, Metric]:
    """`acc` and `acc_norm` over the items."""
    return {
        "acc": Metric(*mean_and_error([float(answer.acc) for answer in answers])),
        "acc_norm": Metric(*mean_and_error([float(answer.acc_norm) for answer in answers])),
    }
