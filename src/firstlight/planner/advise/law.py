"""Compute the expected loss with a scaling law, and define the classes that describe the machine,
the text and the model when a model is chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from firstlight.hardware.compiling import NOT_COMPILED, Compiler, Compiling
from firstlight.planner.advise import defaults

#: The constant R* of Muennighoff et al. 2023 (arXiv 2305.16264): see `worth_of_bytes`.
_WORTH_OF_REPETITION = 15.39


@dataclass(frozen=True)
class Length:
    """The length of a run, specified by one of three quantities.

    Attributes:
        seconds: duration of the training loop in seconds.
        tokens: number of tokens to train on.
        steps: number of optimizer steps.
    """

    seconds: float | None = None
    tokens: float | None = None
    steps: int | None = None


@dataclass(frozen=True)
class MachineFacts:
    """Facts about a machine.

    Attributes:
        name: name of the device.
        kind: "cpu", "cuda" or "mps".
        rates: pairs (training FLOPs per token, tokens per second) for models of several sizes,
            smallest model first.
        usable_bytes: memory that a run can use, in bytes.
        origin: where the rates come from, as shown to the user.
        compiler: properties of torch.compile on this machine; None if torch.compile does not
            support this device.
        steps: pairs (training FLOPs per token, seconds of a step with few tokens) for models of
            several sizes, smallest model first. On a GPU, a step with few tokens takes as long as
            launching its kernels. The list is empty for a CPU, because a step with few tokens is
            short there. Both `steps` and `rates` apply to training without torch.compile.
        is_busy: True if other programs kept the cores busy while the speed was measured.
    """

    name: str
    kind: str
    rates: Sequence[tuple[float, float]]
    usable_bytes: int
    origin: str = "measured"
    compiler: Compiler | None = None
    steps: Sequence[tuple[float, float]] = ()
    is_busy: bool = False

    def times(self, factor: float) -> MachineFacts:
        """Return a copy of these facts with the speed multiplied by `factor`."""
        rates = [(flops, factor * rate) for flops, rate in self.rates]
        steps = [(flops, seconds / factor) for flops, seconds in self.steps]
        return replace(self, rates=rates, steps=steps)

    def tokens_per_second(
        self, flops: float, step_tokens: float = math.inf, mode: Compiling = NOT_COMPILED
    ) -> float:
        """Estimate the training speed of a model in tokens per second.

        The time per token is interpolated linearly between the models in `rates`. For smaller and
        larger models, it is extrapolated, but it is never less than half of the smallest model's
        time. If `rates` contains a single model, the time is proportional to the FLOPs.

        Args:
            flops: training FLOPs per token of the model.
            step_tokens: tokens per step; by default, enough to keep the device busy.
        """
        seconds = [(size, 1 / rate) for size, rate in self.rates]
        if len(seconds) == 1:
            rate = seconds[0][0] / seconds[0][1] / flops
        else:
            rate = 1 / max(_on_line(seconds, flops), min(one for _, one in seconds) / 2)
        rate *= mode.gain
        if not self.steps or step_tokens == math.inf:
            return rate
        least = self.steps[0][1] if len(self.steps) == 1 else _on_line(self.steps, flops)
        return min(rate, mode.launch_gain * step_tokens / max(least, self.steps[0][1] / 2))


def _on_line(points: Sequence[tuple[float, float]], place: float) -> float:
    """Return the value at `place` by linear interpolation between (place, value) points, which must
    be sorted by place. Before the first point and after the last point, the value is extrapolated.
    The slope is never negative."""
    index = next((i for i, (one, _) in enumerate(points[1:-1], 1) if one > place), -1)
    (low, first), (high, second) = points[index - 1], points[index]
    return first + max((second - first) / (high - low), 0.0) * (place - low)


@dataclass(frozen=True)
class Hardness:
    """Measures of how difficult a text is to learn.

    Attributes:
        xz_bits_per_byte: size of the sample's training text after compression with xz, in bits per
            byte.
        ngram_bits_per_character: bits per character of an n-gram model on the sample's held-out
            text; at least `defaults.LEAST_NGRAM_BITS`. The model uses contexts of three characters
            and is trained on the sample's training text.
        long_ngram_ratio: bits per character of an n-gram model with contexts of eight characters,
            divided by `ngram_bits_per_character`.
        held_out_xz_bits_per_byte: size of the held-out text after compression with xz, in bits per
            byte; 8 if unknown. It is measured on the sample and, once the text is prepared, on all
            of the held-out text.
    """

    xz_bits_per_byte: float
    ngram_bits_per_character: float
    long_ngram_ratio: float
    held_out_xz_bits_per_byte: float = 8.0


#: Hardness of the standard library's source code, for which the law's constants were fitted.
USUAL_HARDNESS = Hardness(defaults.XZ_OF_LIBRARY, defaults.NGRAM_BITS, 1.0)


@dataclass(frozen=True)
class TextFacts:
    """Counted or estimated facts about prepared text.

    Attributes:
        vocab_size: vocabulary size of the tokenizer.
        train_tokens: number of tokens in the training split.
        bytes_per_token: mean UTF-8 bytes of text per token.
        hardness: difficulty of learning the text.
        val_tokens: number of tokens in the validation split.
        bytes_per_character: mean UTF-8 bytes of text per character.
    """

    vocab_size: int
    train_tokens: float
    bytes_per_token: float
    hardness: Hardness
    val_tokens: float
    bytes_per_character: float = 1.0

    @property
    def is_unusual(self) -> bool:
        """True if the loss on the text is difficult to predict, because longer contexts either
        improve an n-gram model much more than usual or make it worse. Most text of this kind
        consists of tables, sorted lists or repetitive data."""
        low, high = defaults.USUAL_LONG_NGRAMS
        return not low <= self.hardness.long_ngram_ratio <= high


def usual_intermediate_size(hidden_size: int) -> int:
    """Return the inner width of a gated MLP: 8/3 of hidden_size, rounded up to a multiple of 64."""
    return math.ceil(hidden_size * 8 / 3 / 64) * 64


@dataclass(frozen=True)
class ModelSize:
    """Dimensions of a model, which determine its numbers of parameters and FLOPs.

    Attributes:
        hidden_size, num_hidden_layers: width and depth.
        vocab_size: vocabulary size.
        seq_len: sequence length in tokens.
    """

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    seq_len: int

    @property
    def intermediate_size(self) -> int:
        """Inner width of the MLP."""
        return usual_intermediate_size(self.hidden_size)

    @property
    def layer_parameters(self) -> int:
        """Number of parameters in the layers' matrices."""
        width = self.hidden_size
        return self.num_hidden_layers * (4 * width**2 + 3 * width * self.intermediate_size)

    @property
    def parameters(self) -> int:
        """Number of parameters, including the embedding and the head but not the norms."""
        return self.layer_parameters + 2 * self.vocab_size * self.hidden_size

    @property
    def state_bytes(self) -> int:
        """Minimum memory for training in bytes, which is the size of the weights, gradients and two
        moments in fp32."""
        return 16 * self.parameters

    @property
    def flops_per_token(self) -> float:
        """Training FLOPs per token. They consist of six FLOPs for each weight that is used in a
        matrix product, and the FLOPs of attention."""
        products = self.layer_parameters + self.vocab_size * self.hidden_size
        attention = self.num_hidden_layers * self.hidden_size * self.seq_len
        return 6.0 * (products + attention)


def worth_of_bytes(read: float, unique: float) -> float:
    """Return the number of bytes of new text that would reduce the loss as much as reading a
    shorter text repeatedly.

    Source: Muennighoff et al. 2023 (arXiv 2305.16264), equation 5.

    Args:
        read: number of bytes that training reads, including repetitions.
        unique: number of bytes of the text, without repetitions.
    """
    if read <= unique:
        return read
    repeats = read / unique - 1
    return unique * (1 + _WORTH_OF_REPETITION * (1 - math.exp(-repeats / _WORTH_OF_REPETITION)))


def expected_bits(parameters: float, read: float, text: TextFacts) -> float:
    """Return the expected bits per byte on held-out text after training. The formula is documented
    in `defaults`.

    Args:
        parameters: number of parameters in the layers' matrices.
        read: bytes of text read during training, including repetitions.
        text: facts about the text.
    """
    unique = max(text.train_tokens * text.bytes_per_token, 1.0)
    size = text.bytes_per_character
    characters = max(worth_of_bytes(read, unique) / size, 1.0)
    xz = text.hardness.xz_bits_per_byte * size
    relative = xz / defaults.XZ_OF_LIBRARY
    bits: float = defaults.FLOOR * math.pow(relative, defaults.FLOOR_POWER)
    bits += defaults.A / parameters**defaults.ALPHA
    # Without the lower limit of 1, the expected bits would be highest for the text that is easiest
    # to learn.
    bits += defaults.B / max(relative, 1.0) / characters**defaults.BETA
    ngrams = text.hardness.ngram_bits_per_character / defaults.NGRAM_BITS
    bits *= math.pow(ngrams, defaults.NGRAM_POWER)
    bits /= max(xz / defaults.DENSE_XZ_BITS, 1.0)
    # A uniform guess among the 256 byte values costs 8 bits.
    return min(bits / size, 8.0)


def least_bits(text: TextFacts) -> float:
    """Return the expected bits per byte of a model of unlimited size trained on unlimited text."""
    return expected_bits(math.inf, math.inf, replace(text, train_tokens=math.inf))


def vocabulary_for(text_bytes: float) -> int:
    """Return the usual vocabulary size for a text of this many bytes."""
    return next(tokens for most, tokens in defaults.VOCABULARIES if text_bytes <= most)


def latin_bytes_per_token(vocab_size: int) -> float:
    """Return the mean bytes per token of text in Latin script, for the nearest known vocabulary
    size."""
    sizes = defaults.BYTES_PER_TOKEN
    return sizes[min(sizes, key=lambda size: abs(math.log(size / vocab_size)))]


def longer_text(text: TextFacts, factor: float, *, keeps_vocabulary: bool) -> TextFacts:
    """Return facts about a longer text of the same kind.

    Args:
        text: facts about the text.
        factor: length of the longer text divided by the length of `text`; above 1.
        keeps_vocabulary: True to keep the vocabulary size of `text`; False to use the usual
            vocabulary size for the longer text.
    """
    whole = factor * (text.train_tokens + text.val_tokens) * text.bytes_per_token
    size = text.vocab_size
    if not keeps_vocabulary:
        size = max(size, vocabulary_for(whole))
    longer = latin_bytes_per_token(size) / latin_bytes_per_token(text.vocab_size)
    return replace(
        text,
        vocab_size=size,
        bytes_per_token=longer * text.bytes_per_token,
        train_tokens=factor * text.train_tokens / longer,
        val_tokens=factor * text.val_tokens / longer,
    )
