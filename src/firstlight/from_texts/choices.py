"""Choose the settings of a new model's run: the vocabulary, the model size, the batch size, the
learning rates and the schedule.

The choices depend on the text, the machine and the length of the run. Each choice has a recipe key,
a value, and a sentence that explains the value. Values set by the user are not changed, and the
remaining settings are chosen to match them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from firstlight.console import counted, rounded
from firstlight.errors import ConfigError
from firstlight.from_texts.plan import (
    STATE_BYTES,
    Choice,
    Choices,
    PartFacts,
    RunFacts,
    compile_ways,
    expected_range,
    given_batch,
    given_keys,
    given_unit,
)
from firstlight.from_texts.request import HEADS, Request, parameters_of
from firstlight.from_texts.scan import CorpusFacts
from firstlight.hardware.compiling import Compiling
from firstlight.planner.advise import defaults
from firstlight.planner.advise.defaults import new_model_rates
from firstlight.planner.advise.law import (
    Length,
    MachineFacts,
    ModelSize,
    TextFacts,
    expected_bits,
    longer_text,
    vocabulary_for,
)
from firstlight.planner.advise.model import (
    batch_and_rate,
    batch_tokens,
    best_model,
    tokens_in_time,
    usual_text,
)


def choose_vocabulary(facts: CorpusFacts, fixed: Mapping[str, Any]) -> Choice:
    """Choose the vocabulary size for a corpus.

    Args:
        facts: facts about the corpus.
        fixed: values given by the user, keyed by `section.key`.
    """
    if given := fixed.get("model.vocab_size"):
        return Choice("model.vocab_size", int(given), "given")
    size = vocabulary_for(facts.total_bytes)
    reason = f"for {rounded(facts.total_bytes)} bytes of text"
    # The minimum vocabulary has 256 byte tokens, one token per common character, and the same
    # number of tokens for combinations of characters.
    signs = 256 + 2 * facts.common_characters
    if size < signs:
        size = min(1 << math.ceil(math.log2(signs)), defaults.VOCABULARIES[-1][1])
        reason = f"the text has {facts.common_characters:,} common characters"
    return Choice("model.vocab_size", size, reason)


def check_given(request: Request) -> None:
    """Reject invalid values set by the user before any text is read. Values that no candidate model
    supports are also rejected.

    Raises:
        ConfigError: see `Request.check` and `choose`.
        TokenizerError: the requested vocabulary size is too small.
    """
    from firstlight.tokenizer import require_vocab_size

    request.check()
    fixed = request.fixed
    vocab_size = int(fixed.get("model.vocab_size") or defaults.VOCABULARIES[0][1])
    require_vocab_size(vocab_size)
    # Choose settings for ordinary text on a machine with enough memory for every model, because
    # this choice raises an error if the user's values contradict each other. A parameter count
    # (--size 10M) is not checked here, because its validity can depend on the actual vocabulary of
    # the text.
    machine = MachineFacts("this machine", "cpu", [(1e9, 1e3)], usable_bytes=1 << 62)
    size = request.size if request.size in defaults.SIZES else None
    text = usual_text(vocab_size, None)
    choose(text, machine, request.training_length(), fixed, size=size)


@dataclass(frozen=True)
class _Candidate:
    """A candidate model and its run. It also contains the expected bits per byte on held-out text
    and the duration of the shortest acceptable training loop."""

    shape: ModelSize
    run: RunFacts
    bits: float
    least_seconds: float

    @property
    def flops(self) -> float:
        return self.shape.flops_per_token

    @property
    def layer_parameters(self) -> float:
        return self.shape.layer_parameters

    @property
    def seconds(self) -> float:
        return self.run.tokens / self.run.rate + self.run.way.seconds


def choose(
    text: TextFacts,
    machine: MachineFacts,
    length: Length,
    fixed: Mapping[str, Any] | None = None,
    size: str | None = None,
) -> Choices:
    """Choose all settings of a run.

    Args:
        text: counted or estimated facts about the prepared text.
        machine: the machine to train on.
        length: length of the run in time, tokens or steps.
        fixed: values given by the user, keyed by `section.key`.
        size: a name in `defaults.SIZES`, or a parameter count such as "10M"; None to choose the
            size.

    Raises:
        ConfigError: the size is unknown, no model fits in memory, or values given by the user
            contradict each other.
    """
    # The requested vocab_size is ignored here, because the tokenizer may have fewer tokens. The
    # actual number of tokens is `text.vocab_size`.
    given = {key: value for key, value in (fixed or {}).items() if value is not None}
    fixed = {key: value for key, value in given.items() if key != "model.vocab_size"}
    best, count = _best_of_all(text, machine, length, fixed, size=size)
    items = [
        *_model_choices(best.shape, _reason_of_width(best, size, fixed, count), fixed),
        *_step_choices(best, text, machine, fixed),
        *_length_choices(best, length, text, fixed),
        *best.run.other_choices(machine, text.val_tokens),
    ]
    epochs = best.run.tokens / max(text.train_tokens, 1.0)

    def with_text(more: TextFacts) -> _Candidate:
        return _best_of_all(more, machine, length, fixed, size=size)[0]

    # With a different vocabulary size, the parameter count given by the user could select a
    # different model, or no valid model at all.
    keeps_vocabulary = size is not None or any(key.startswith("model.") for key in given)
    within = (
        "with the same number of tokens" if length.seconds is None else "within the same budget"
    )
    return replace(
        best.run.choices(items, fixed, best.shape.parameters, epochs),
        bits_per_byte=expected_range(best.bits, text, fixed),
        least_seconds=best.least_seconds,
        advice=_advice(best, text, with_text, within, keeps_vocabulary=keeps_vocabulary),
    )


def _best_of_all(
    text: TextFacts,
    machine: MachineFacts,
    length: Length,
    fixed: Mapping[str, Any],
    *,
    size: str | None,
) -> tuple[_Candidate, int]:
    """Return the best candidate and the number of candidates. For the arguments, see `choose`.

    Raises:
        ConfigError: see `choose`.
    """
    shapes = candidate_shapes(text.vocab_size, fixed, size)
    candidates, problem = [], None
    for shape in shapes:
        try:
            candidates.append(_candidate(shape, text, machine, length, fixed=fixed))
        except ConfigError as error:  # the tokens per step are not a multiple of seq_len
            problem = problem or error
    if problem is not None and not candidates:
        raise problem
    fitting = [one for one in candidates if one.shape.state_bytes <= machine.usable_bytes]
    if not fitting:
        raise ConfigError(
            f"{rounded(candidates[0].shape.parameters)} parameters need more memory than is free "
            f"on {machine.name}: choose a smaller --size"
        )

    def in_time(seconds: float) -> list[_Candidate]:
        time = Length(seconds)
        return [_candidate(one.shape, text, machine, time, fixed=fixed) for one in fitting]

    return best_model(fitting, text, length.seconds is not None, in_time), len(candidates)


def _candidate(
    shape: ModelSize,
    text: TextFacts,
    machine: MachineFacts,
    length: Length,
    *,
    fixed: Mapping[str, Any],
) -> _Candidate:
    """Return a candidate model and its run, including the batch size, the number of steps that fit
    in the available time, and the expected loss. Long runs use longer sequences."""
    given = given_batch(fixed, shape.seq_len)
    unit = given_unit(fixed, shape.seq_len)
    size = STATE_BYTES * shape.parameters
    part_facts = PartFacts(shape.seq_len, text.val_tokens, size, fixed)

    def tokens_at(rate: float, way: Compiling) -> float:
        if length.seconds is None:
            return length.tokens or 0.0
        # Reserve the usual fraction of the time for evaluations and checkpoints, even if they need
        # more. `plan --budget` reserves the same fraction and therefore chooses the same model. The
        # actual length of the run depends on the speed that is measured during the run.
        left = way.left_of(length.seconds)
        return tokens_in_time(rate, left, text, fixed.get("schedule.epochs"))

    batch, rate, way = batch_and_rate(
        lambda step, way: machine.tokens_per_second(shape.flops_per_token, step, way),
        tokens_at,
        lambda tokens: given or -(-batch_tokens(tokens, shape.seq_len) // unit) * unit,
        compile_ways(machine, fixed, (shape.hidden_size, shape.num_hidden_layers)),
        length.steps,
    )
    tokens = tokens_at(rate, way)
    steps = length.steps or max(round(tokens / batch), 1)
    left = None if length.seconds is None else way.left_of(length.seconds)
    parts = part_facts.parts_of_run(rate, steps * batch, left)
    run = RunFacts(steps, batch, shape.seq_len, rate, parts, way)
    # A batch size set by the user may be a multiple of the short sequence length but not of the
    # long sequence length.
    context = fixed.get("model.max_position_embeddings", defaults.LONG_SEQ_LEN)
    tokens_given = fixed.get("batch.global_batch_tokens", 0)
    fits = tokens_given % (defaults.LONG_SEQ_LEN * unit // shape.seq_len) == 0
    fits = fits and context >= defaults.LONG_SEQ_LEN
    is_short = shape.seq_len < defaults.LONG_SEQ_LEN and "data.seq_len" not in fixed
    if is_short and fits and run.tokens >= defaults.LONG_RUN_TOKENS:
        longer = replace(shape, seq_len=defaults.LONG_SEQ_LEN)
        return _candidate(longer, text, machine, length, fixed=fixed)
    bits = expected_bits(shape.layer_parameters, run.tokens * text.bytes_per_token, text)
    rate = machine.tokens_per_second(shape.flops_per_token, given or unit)
    most = tokens_in_time(math.inf, 1.0, text, fixed.get("schedule.epochs"))
    return _Candidate(shape, run, bits, part_facts.least_seconds(rate, most, given or unit))


def _reason_of_width(
    best: _Candidate, size: str | None, fixed: Mapping[str, Any], candidates: int
) -> str:
    """Return text that explains why the best candidate's width was chosen. `candidates` is the
    number of candidates."""
    if size is not None:
        return "the given size" if size in defaults.SIZES else f"the size nearest to {size}"
    if candidates == 1:
        return "the only size that fits the given values"
    reason = "lowest expected loss for this text and length of the run"
    if given := [f"--{key} {fixed[key]}" for key in HEADS if fixed.get(key)]:
        reason += f" among the sizes that fit {' and '.join(given)}"
    return reason


def _model_choices(shape: ModelSize, reason: str, fixed: Mapping[str, Any]) -> Iterator[Choice]:
    """Yield the choices of the `model` section.

    Args:
        shape: chosen model size.
        reason: text that explains the choice of the width.
        fixed: values given by the user, keyed by `section.key`.
    """
    layout = {key: value for key, value in defaults.LAYOUT.items() if key.startswith("model.")}
    reasons = {
        "model.model_type": "Llama's layers with query and key norms: stable at high rates",
        "model.tie_word_embeddings": "an untied head learns faster at these sizes",
    }
    for key, value in layout.items():
        yield Choice(key, value, reasons.get(key, ""))
    yield Choice("model.vocab_size", shape.vocab_size, "size of the tokenizer")
    yield Choice("model.hidden_size", shape.hidden_size, reason)
    yield Choice("model.num_hidden_layers", shape.num_hidden_layers, "usual for this hidden size")
    heads = head_count(shape.hidden_size, fixed)
    yield Choice("model.num_attention_heads", heads, f"head dimension {defaults.HEAD_DIM}")
    if fixed.get("model.model_type", layout["model.model_type"]) == layout["model.model_type"]:
        yield Choice("model.intermediate_size", shape.intermediate_size, "8/3 of the hidden size")
    yield Choice("model.max_position_embeddings", shape.seq_len, "same as data.seq_len")


def _step_choices(
    best: _Candidate, text: TextFacts, machine: MachineFacts, fixed: Mapping[str, Any]
) -> Iterator[Choice]:
    shape = best.shape
    characters = shape.seq_len * text.bytes_per_token / text.bytes_per_character
    kept = f"about {characters:,.0f} characters of context"
    yield Choice("data.seq_len", shape.seq_len, kept)
    yield best.run.micro_batch(machine, fixed)
    tokens = rounded(best.run.tokens)
    reason = f"grows with the square root of the run's {tokens} tokens"
    yield Choice("batch.global_batch_tokens", best.run.batch_tokens, reason)
    name = str(fixed.get("optimizer.name", "muon"))
    rates = new_model_rates(name, shape.hidden_size, given_keys("optimizer", fixed))
    for key, value in _layout(fixed).items():
        if key.startswith(("optimizer.", "init.")) and key.partition(".")[2] not in rates:
            yield Choice(key, value, _OPTIMIZER_REASONS.get(key, ""))
    if name == "lion":
        yield Choice("optimizer.betas", [0.9, 0.99], "default of Lion")
    reasons = dict(_RATE_REASONS)
    if name != "muon":
        reasons["learning_rate"] = f"usual for {name} and this hidden size"
    for key, value in rates.items():
        yield Choice(f"optimizer.{key}", value, reasons.get(key, ""))


def _uses_muon(fixed: Mapping[str, Any]) -> bool:
    return bool(fixed.get("optimizer.name", "muon") == "muon")


def _layout(fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Return `defaults.LAYOUT` without the keys that conflict with the user's settings for the
    optimizer and the embeddings."""
    unfit = set[str]()
    if not _uses_muon(fixed):
        unfit |= {key for key in defaults.LAYOUT if key.startswith("optimizer.")}
    if fixed.get("model.tie_word_embeddings"):
        unfit.add("init.head_std")
    return {key: value for key, value in defaults.LAYOUT.items() if key not in unfit}


_OPTIMIZER_REASONS = {
    "init.residual_projections": "every layer starts as the identity",
    "optimizer.name": "Muon for the layers' matrices, AdamW for the rest: needs fewer steps",
}
#: Reasons for Muon's learning rates, as shown to the user.
_RATE_REASONS = {
    "learning_rate": "learning rate of the embedding",
    "muon_learning_rate": "learning rate of the layers' matrices; falls "
    "with the square root of the hidden size",
    "head_lr_multiple": "learning rate of the head, as a multiple; falls with the hidden size",
    "tuned_width": "the hidden size for which the learning rates were chosen",
}


def _length_choices(
    best: _Candidate, length: Length, text: TextFacts, fixed: Mapping[str, Any]
) -> Iterator[Choice]:
    run = best.run
    schedule = {k: v for k, v in _layout(fixed).items() if k.startswith("schedule.")}
    reasons = {
        "schedule.kind": "constant learning rate after the warm-up, then decay",
        "schedule.decay_fraction": "linear decay to zero over this fraction of the steps",
    }
    epochs = run.tokens / max(text.train_tokens, 1.0)
    if length.seconds is not None:
        minutes = round(length.seconds / 60, 3)
        reason, most = "training time within the budget", defaults.MOST_EPOCHS
        if run.seconds < defaults.EARLY * length.seconds:
            reason = "upper limit; the epoch limit ends the run earlier"
        else:
            # Raise the limit on epochs, so that the run uses all of its time even if steps are
            # faster than measured.
            most /= defaults.EARLY
        yield Choice("schedule.max_minutes", minutes, reason)
        # The limit on epochs is also set for runs that are expected to stay far below it. A machine
        # that was busy while its speed was measured can be several times as fast during the run.
        if epochs > defaults.MOST_EPOCHS / 16 or "schedule.epochs" in fixed:
            reason = (
                f"at most {most:g} passes over the text: more would bring little benefit or cause "
                "overfitting"
            )
            yield Choice("schedule.epochs", most, reason)
    else:
        passes = f"{run.tokens:,} tokens, {counted(epochs, 'epoch', '.2g')}"
        yield Choice("schedule.max_steps", run.steps, passes)
    yield run.warmup(2)
    # Together, the warm-up and the decay must not take more steps than the run has.
    rising = fixed.get("schedule.warmup_ratio", 0.0)
    schedule["schedule.decay_fraction"] = min(schedule["schedule.decay_fraction"], 1 - rising)
    for key, value in schedule.items():
        yield Choice(key, value, reasons.get(key, ""))
    decay = defaults.WEIGHT_DECAY
    reason = f"{counted(epochs, 'epoch', '.2g')}: little is memorised"
    if epochs > defaults.GOOD_EPOCHS:
        most = (
            defaults.REPEATED_WEIGHT_DECAY if _uses_muon(fixed) else defaults.REPEATED_ADAMW_DECAY
        )
        size = best.shape.layer_parameters / text.train_tokens / defaults.REPEATED_PARAMETERS
        decay = max(decay, float(f"{most * min(size, 1.0):.2g}"))
        is_more = decay > defaults.WEIGHT_DECAY
        why = "more decay against overfitting" if is_more else "the model is too small to overfit"
        reason = f"{counted(epochs, 'epoch', '.2g')}: {why}"
    yield Choice("optimizer.weight_decay", decay, reason)


def _advice(
    best: _Candidate,
    text: TextFacts,
    with_text: Callable[[TextFacts], _Candidate],
    within: str,
    *,
    keeps_vocabulary: bool,
) -> str:
    """Return a sentence about the expected benefit of more text. Return "" if the text is long
    enough and the run does not repeat it many times.

    Args:
        best: chosen model and its run.
        text: facts about the text.
        with_text: function that receives facts about a different text. It returns the model that
            would be chosen for a run of the same length on that text.
        within: length of the run, described in words.
        keeps_vocabulary: True to keep the vocabulary size for the longer text.
    """
    size = text.train_tokens * text.bytes_per_token
    if size < defaults.LITTLE_TEXT:
        return (
            f"{rounded(size)} bytes are too few to learn a language: the model will repeat parts "
            "of the text; with about 1 MB or more, it also writes new words and sentences"
        )
    epochs = best.run.tokens / text.train_tokens
    if epochs <= defaults.GOOD_EPOCHS:
        return ""
    plenty = longer_text(text, defaults.MORE_TEXT, keeps_vocabulary=keeps_vocabulary)
    other = with_text(plenty)
    gain = 1 - other.bits / best.bits
    # Do not suggest more text than the longer run would read.
    factor = min(defaults.MORE_TEXT, other.run.tokens * plenty.bytes_per_token / size)
    whole = size + text.val_tokens * text.bytes_per_token
    return (
        f"{rounded(factor * whole)} bytes of similar text instead of {rounded(whole)} would lower "
        f"the bits per byte by {f'about {100 * gain:.0f}%' if gain >= 0.01 else 'less than 1%'} "
        f"{within}"
    )


def candidate_shapes(
    vocab_size: int, fixed: Mapping[str, Any], size: str | None = None
) -> list[ModelSize]:
    """Return the shapes of the candidate models. These are the shapes in `defaults.SHAPES` or, if
    `size` is given, a single shape. A width or depth set by the user is used for all candidates. If
    the user sets the number of attention heads, all widths are divisible by this number.

    Args:
        vocab_size: vocabulary size of the tokenizer.
        fixed: values given by the user, keyed by `section.key`.
        size: a name in `defaults.SIZES`, or a parameter count such as "10M"; None for all
            candidates.

    Raises:
        ConfigError: the size is unknown, or no width is divisible by the given number of heads.
    """
    known = defaults.SHAPES if size is None else _of_size(size, vocab_size, fixed)
    width, depth = fixed.get("model.hidden_size"), fixed.get("model.num_hidden_layers")
    pairs = dict.fromkeys((width or w, depth or d) for w, d in known)
    fitting = [(w, d) for w, d in pairs if _fits_heads(w, fixed)]
    if not fitting:
        given = " and ".join(f"--{key} {fixed[key]}" for key in HEADS if key in fixed)
        widths = ", ".join(dict.fromkeys(str(w) for w, _ in pairs))
        step = 2 * fixed[HEADS[0]] if HEADS[0] in fixed else defaults.HEAD_DIM * fixed[HEADS[1]]
        raise ConfigError(
            f"none of the hidden sizes {widths} fits {given}: set --model.hidden_size to a "
            f"multiple of {step}"
        )
    return [ModelSize(w, d, vocab_size, _seq_len(w, fixed)) for w, d in fitting]


#: Minimum head dimension of models whose width is chosen automatically.
_LEAST_HEAD = 16


def head_count(width: int, fixed: Mapping[str, Any]) -> int:
    """Return the number of attention heads for a width (hidden_size).

    Raises:
        ConfigError: the user set a width but not the number of heads, and the width is not a
            multiple of the head dimension.
    """
    if given := fixed.get(HEADS[0]):
        return int(given)
    size = defaults.HEAD_DIM
    if width % size:
        raise ConfigError(
            f"model.hidden_size {width} is not a multiple of the head dimension {size}: set it to "
            f"{math.ceil(width / size) * size}, or set --model.num_attention_heads"
        )
    return width // size


def _fits_heads(width: int, fixed: Mapping[str, Any]) -> bool:
    if not any(key in fixed for key in HEADS):
        return True
    if "model.hidden_size" in fixed:
        return True  # The model config checks this value.
    heads = head_count(width, fixed)
    # RoPE rotates pairs of dimensions, so the head dimension must be even. Models with very small
    # heads learn poorly.
    divides = width % (2 * heads) == 0 and width >= _LEAST_HEAD * heads
    return divides and heads % int(fixed.get(HEADS[1]) or heads) == 0


def _seq_len(width: int, fixed: Mapping[str, Any]) -> int:
    """Return the sequence length that the user has set. If the user has not set it, return the
    usual sequence length for the model's width, limited to the context length if the user has set
    one.
    """
    usual = next(seq_len for most, seq_len in defaults.SEQ_LENS if width <= most)
    context = fixed.get("model.max_position_embeddings") or usual
    return fixed.get("data.seq_len") or min(usual, context)


def _of_size(size: str, vocab_size: int, fixed: Mapping[str, Any]) -> Sequence[tuple[int, int]]:
    """Return a list with one shape for the given size. If `size` is a parameter count, this is the
    shape with the nearest parameter count whose width is valid with the number of heads that the
    user has set."""
    if size in defaults.SIZES:
        return [defaults.SIZES[size]]
    wanted = parameters_of(size)

    def parameters(shape: tuple[int, int]) -> int:
        return ModelSize(*shape, vocab_size, 256).parameters

    fitting = [one for one in defaults.SHAPES if _fits_heads(one[0], fixed)] or defaults.SHAPES
    nearest_shape = min(fitting, key=lambda one: abs(math.log(parameters(one) / wanted)))
    if not 0.5 <= parameters(nearest_shape) / wanted <= 2:
        first, last = (rounded(parameters(fitting[place])) for place in (0, -1))
        raise ConfigError(
            f"--size {size}: with this text's vocabulary, models have {first} to {last} "
            "parameters; for another size, set --model.hidden_size and --model.num_hidden_layers"
        )
    return [nearest_shape]
