"""Settings for text generation. This module does not import torch, so that the command line can
import `SamplingConfig` without a delay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from firstlight.errors import ConfigError

#: Maximum number of beams. It is limited because each beam has a separate key-value cache.
_MOST_BEAMS = 64


@dataclass(frozen=True)
class SamplingConfig:
    """Settings for sampling, beam search and the length of the generated text.

    Attributes:
        max_new_tokens: maximum number of new tokens.
        temperature: divisor of the logits; a higher temperature gives unlikely tokens more
            probability; 0 always chooses the most likely token.
        top_k: number of most likely tokens to choose from; 0 disables this. If several tokens are
            as likely as the last of these tokens, all of them are kept.
        top_p: probability mass to choose from: only the smallest set of most likely tokens whose
            probabilities sum to at least this value is kept; 1 disables this (Holtzman et al.
            2020). Applied after temperature and top_k.
        seed: random seed; the same seed gives the same text. By default, a seed is drawn at random.
        min_p: minimum probability of a token, relative to the probability of the most likely token;
            0 disables this (Nguyen et al. 2024). Applied after temperature and before top_k and
            top_p.
        repetition_penalty: divisor of the positive logits, and factor of the negative logits, of
            tokens that the prompt or the new text contains; 1 disables the penalty (Keskar et al.
            2019).
        stop: texts that end the continuation; they are not part of it.
        logprobs: number of most likely tokens whose log-probabilities are returned for each new
            token, in addition to the log-probability of that token; None returns none.
        frequency_penalty: number from -2 to 2 that is subtracted from a token's logit for each time
            that the token was chosen; 0 disables the penalty. Defined as in OpenAI's API.
        presence_penalty: number from -2 to 2 that is subtracted from the logit of each token that
            was chosen before; 0 disables the penalty. Defined as in OpenAI's API.
        logit_bias: mapping from token id to a number from -100 to 100 that is added to the token's
            logit.
        prompt_logprobs: number of most likely tokens whose log-probabilities are returned for each
            token of the prompt, in addition to the log-probability of that token; None returns
            none. If set, `max_new_tokens` may be 0.
        slide: continue beyond the model's context. When the context is full, its most recent half
            becomes the new prompt, and older text is dropped.
        slide_tokens: number of oldest tokens that `slide` drops each time the context is full,
            instead of half of the context. With 1, as in LLMs-from-scratch, each additional token
            is computed from the full context, which is slower.
        beams: number of beams; 1 disables beam search. Beam search does not sample. It returns the
            text with the highest mean log-probability per token among the texts that it finds.
        choices: number of most likely tokens that are returned for each new token, with their
            probability according to the model and their sampling probability (after penalties,
            biases, temperature, top_k, top_p and min_p); None returns none.

    Raises:
        ConfigError: a value is out of range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    prompt_logprobs: int | None = None
    slide: bool = False
    slide_tokens: int | None = None
    beams: int = 1
    choices: int | None = None

    def __post_init__(self) -> None:
        least = 1 if self.prompt_logprobs is None else 0
        biases_fit = all(i >= 0 and -100 <= bias <= 100 for i, bias in self.logit_bias.items())
        limits = (
            ("max_new_tokens", self.max_new_tokens >= least, f"at least {least}"),
            ("temperature", 0 <= self.temperature < float("inf"), "0 or above"),
            ("top_k", self.top_k >= 0, "0 (off) or above"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 (off) and 1"),
            (
                "repetition_penalty",
                0 < self.repetition_penalty < float("inf"),
                "above 0 (1 is off)",
            ),
            ("stop", all(self.stop), "strings of at least one character"),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "0 or above"),
            ("prompt_logprobs", (self.prompt_logprobs or 0) >= 0, "0 or above"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            ("logit_bias", biases_fit, "a mapping of token ids to numbers from -100 to 100"),
            ("beams", 1 <= self.beams <= _MOST_BEAMS, f"between 1 (off) and {_MOST_BEAMS}"),
            ("choices", self.choices is None or self.choices >= 1, "at least 1"),
            ("slide_tokens", self.slide_tokens is None or self.slide_tokens >= 1, "at least 1"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "between 0 and 2^63"),
        )
        for name, fine, allowed in limits:
            if not fine:
                raise ConfigError(f"{name} must be {allowed}, not {getattr(self, name)}")
        if self.beams > 1:
            self._require_beams()
        if self.slide_tokens is not None and not self.slide:
            raise ConfigError("slide_tokens requires slide: enable slide, or omit slide_tokens")
        if self.slide and self.prompt_logprobs is not None:
            raise ConfigError(
                "slide drops old text, but prompt_logprobs needs all of it: use only one of them"
            )

    def _require_beams(self) -> None:
        """Raise an error for settings that beam search can't apply because it does not sample."""
        changed = {
            "temperature": self.temperature not in (0, SamplingConfig.temperature),
            "top_k": self.top_k > 0,
            "top_p": self.top_p < 1,
            "min_p": self.min_p > 0,
            "slide": self.slide,
            "choices": self.choices is not None,
            "logprobs": self.logprobs is not None,
            "stop": bool(self.stop),
            "prompt_logprobs": self.prompt_logprobs is not None,
        }
        if unfit := [name for name, is_set in changed.items() if is_set]:
            raise ConfigError(f"beam search does not support {unfit[0]}: omit beams or {unfit[0]}")
