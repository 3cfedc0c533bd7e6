"""Facts that settings are chosen from, and expectations from them: speed, and the loss of a
model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from firstlight.pipeline import settings
from firstlight.pipeline.scan import CorpusFacts, held_out_share

#: Readings of a text after which more add nothing: see `worth_of_bytes`.
_WORTH_OF_REPETITION = 15.39


@dataclass(frozen=True)
class Length:
    """Length of a run, by one of three measures.

    Attributes:
        seconds: time of the training loop.
        tokens: tokens that are read.
        steps: optimizer steps.
    """

    seconds: float | None = None
    tokens: float | None = None
    steps: int | None = None


@dataclass(frozen=True)
class MachineFacts:
    """Facts about a machine.

    Attributes:
        name: the device's name.
        kind: "cpu", "cuda" or "mps".
        rates: (FLOPs of a token, tokens a second) of some models in training, the smallest first.
        usable_bytes: memory that a run may take.
        origin: source of the rates, for people.
        compiles: True if torch.compile has code for it.
    """

    name: str
    kind: str
    rates: Sequence[tuple[float, float]]
    usable_bytes: int
    origin: str = "measured"
    compiles: bool = True

    def tokens_per_second(self, flops: float) -> float:
        """Rate of a model by its FLOPs for a token: a token's time is a line through the known
        times, and never less than that of the smallest."""
        seconds = [(size, 1 / rate) for size, rate in self.rates]
        if len(seconds) == 1:
            return seconds[0][0] / seconds[0][1] / flops
        place = next((i for i, (size, _) in enumerate(seconds[1:-1], 1) if size > flops), -1)
        (low, first), (high, second) = seconds[place - 1], seconds[place]
        slope = max((second - first) / (high - low), 0.0)
        return 1 / max(first + slope * (flops - low), min(first, 1 / self.rates[0][1]) / 2)


@dataclass(frozen=True)
class TextFacts:
    """Facts about prepared text, or an estimate of them.

    Attributes:
        vocab_size: number of tokens of the tokenizer.
        train_tokens: tokens of the training split.
        bytes_per_token: UTF-8 bytes of text for a token.
        gzip_bits_per_byte: bits per byte of the text by gzip -9.
        val_tokens: tokens of the validation split.
        bytes_per_character: UTF-8 bytes of text for a character.
    """

    vocab_size: int
    train_tokens: float
    bytes_per_token: float
    gzip_bits_per_byte: float
    val_tokens: float
    bytes_per_character: float = 1.0


@dataclass(frozen=True)
class ModelSize:
    """A model's size.

    Attributes:
        hidden_size, num_hidden_layers: width and depth.
        vocab_size: number of tokens.
        seq_len: tokens of a sequence.
    """

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    seq_len: int

    @property
    def intermediate_size(self) -> int:
        """Width inside the MLP: 8/3 of the model's, a multiple of 64."""
        return math.ceil(self.hidden_size * 8 / 3 / 64) * 64

    @property
    def layer_parameters(self) -> int:
        """Parameters of the layers' matrices."""
        width = self.hidden_size
        return self.num_hidden_layers * (4 * width**2 + 3 * width * self.intermediate_size)

    @property
    def parameters(self) -> int:
        """All parameters, embedding and head included, norms left out."""
        return self.layer_parameters + 2 * self.vocab_size * self.hidden_size

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and moments in fp32: the least that training takes."""
        return 16 * self.parameters

    @property
    def flops_per_token(self) -> float:
        """FLOPs of a token in training: six for each weight of a product, and attention's."""
        products = self.layer_parameters + self.vocab_size * self.hidden_size
        attention = self.num_hidden_layers * self.hidden_size * self.seq_len
        return 6.0 * (products + attention)


def worth_of_bytes(read: float, unique: float) -> float:
    """Bytes of new text that are worth as much as these bytes, which are read from less text
    repeatedly.

    Source: Muennighoff et al. 2023, equation 5.
    """
    if read <= unique:
        return read
    repeats = read / unique - 1
    return unique * (1 + _WORTH_OF_REPETITION * (1 - math.exp(-repeats / _WORTH_OF_REPETITION)))


def expected_bits(parameters: float, read: float, text: TextFacts) -> float:
    """Expected bits for a byte of held-out text.

    Args:
        parameters: parameters of the layers.
        read: bytes of text that training reads.
        text: the text.
    """
    unique = max(text.train_tokens * text.bytes_per_token, 1.0)
    size = text.bytes_per_character
    characters = max(worth_of_bytes(read, unique) / size, 1.0)
    gzip = text.gzip_bits_per_byte * size / settings.GZIP_OF_LIBRARY
    bits: float = settings.FLOOR * math.pow(gzip, settings.FLOOR_POWER)
    bits += settings.A / parameters**settings.ALPHA
    bits += settings.B * math.pow(gzip, settings.B_POWER) / characters**settings.BETA
    # A byte costs no more than guessing it.
    return min(bits / size, 8.0)


def estimated_text(facts: CorpusFacts, vocab_size: int) -> TextFacts:
    """Estimated facts of the text in tokens, before there is a tokenizer."""
    sizes = settings.BYTES_PER_TOKEN
    known = min(sizes, key=lambda size: abs(math.log(size / vocab_size)))
    # Characters of other scripts have more bytes, and as many letters to a token.
    per_token = sizes[known] * facts.bytes_per_character**0.8
    held = held_out_share(facts.text_bytes) * facts.text_bytes
    return TextFacts(
        vocab_size,
        (facts.total_bytes - held) / per_token,
        per_token,
        facts.gzip_bits_per_byte,
        held / per_token,
        facts.bytes_per_character,
    )
