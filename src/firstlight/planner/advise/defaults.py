"""Define the constants for choosing a model and its training settings. They include model layouts
and shapes, the formula for the expected loss, and learning rates by optimizer and width. The
constants are used by `plan --budget`, by `train TEXTS` and for fine-tuning.

Unless another source is given, the constants were measured with models of 0.8 to 5 million
parameters, trained on the source code of Python's standard library (`python -m benchmarks
learning`). For larger models, they are extrapolated with the published scaling laws that are cited
in this module.

Learning rates do not depend on the batch size, because they were measured with batch sizes that
grow with the length of the run, as in `model.batch_tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from firstlight.errors import ConfigError
from firstlight.optim.new_model import MODEL, NEW_MODEL, RATE_WIDTH

#: Settings of new models for the layout, initial weights, optimizer and schedule, keyed by
#: `section.key`.
LAYOUT: dict[str, Any] = {
    f"{section}.{key}": value
    for section, values in {"model": MODEL, **NEW_MODEL}.items()
    for key, value in values.items()
}

#: (hidden_size, num_hidden_layers) of the candidate models, smallest first. All widths are
#: multiples of 64, which is the head dimension.
SHAPES = (
    (64, 2),
    (64, 4),
    (128, 3),
    (128, 4),
    (192, 4),
    (256, 4),
    (256, 6),
    (320, 6),
    (384, 6),
    (384, 8),
    (448, 8),
    (512, 8),
    (576, 10),
    (640, 10),
    (704, 12),
    (768, 12),
    (896, 14),
    (1024, 16),
    (1152, 18),
    (1280, 20),
    (1536, 20),
    (1792, 22),
    (2048, 24),
    (2304, 26),
    (2560, 28),
    (3072, 28),
    (3584, 30),
    (4096, 32),
    (5120, 40),
    (6144, 48),
    (7168, 60),
    (8192, 80),
)
HEAD_DIM = 64

#: (hidden_size, num_hidden_layers) for each value of `--size`.
SIZES = {
    "tiny": (128, 4),
    "small": (256, 6),
    "medium": (512, 8),
    "large": (768, 12),
    "xl": (1280, 20),
}

#: Vocabulary size for each size of text, as (maximum bytes of text, vocabulary size). In runs of a
#: few minutes that read 1 MB of text four times, a vocabulary of 512 tokens gave fewer bits per
#: byte than a vocabulary of 1,024 tokens. The difference was 0.8% on Shakespeare and 0.6% on
#: WikiText-2. The sizes for 1.5 to 10 MB are interpolated.
VOCABULARIES = (
    (1.5e6, 512),
    (3e6, 1024),
    (10e6, 2048),
    (40e6, 4096),
    (400e6, 8192),
    (4e9, 16384),
    (float("inf"), 32768),
)
#: Mean bytes per token of text in Latin script, by vocabulary size.
BYTES_PER_TOKEN = {512: 1.9, 1024: 2.35, 2048: 2.8, 4096: 3.3, 8192: 3.7, 16384: 4.1, 32768: 4.4}

#: Sequence length for each model width, as (maximum hidden_size, sequence length in tokens).
SEQ_LENS = ((320, 256), (640, 512), (1 << 30, 1024))
#: Runs of at least LONG_RUN_TOKENS tokens use sequences of at least LONG_SEQ_LEN tokens. In runs of
#: 6.3 million tokens, a 1.9M-parameter model trained on the standard library reached 1.085 bits per
#: byte with sequences of 512 tokens and 1.142 with sequences of 256 tokens. With a different seed,
#: the results were 1.129 and 1.168. In runs of 3.4 million tokens, the same model reached 1.260
#: bits per byte with sequences of 512 tokens and 1.247 with sequences of 256 tokens.
LONG_RUN_TOKENS, LONG_SEQ_LEN = 5_000_000, 512

#: BATCH_TOKENS is the number of tokens per step for a run of BATCH_AT_TOKENS tokens. The number of
#: tokens per step grows with the square root of the run's tokens, up to MOST_BATCH_TOKENS, because
#: the gradient noise scale grows as the loss falls (McCandlish et al. 2018). In runs of 6.3 million
#: tokens (standard library, 1.9M parameters, one run each), 4,096 tokens per step gave the same
#: bits per byte as 2,048, and 4.2% fewer than 8,192. In runs of 3.4 million tokens, 4,096 tokens
#: per step gave 4.4% fewer bits per byte than 2,048.
BATCH_TOKENS, BATCH_AT_TOKENS = 2048, 1_600_000
MOST_BATCH_TOKENS = 524_288

#: Number of tokens per forward pass that is large enough to keep a device busy, by kind of device.
MICRO_BATCH_TOKENS = {"cpu": 2048, "cuda": 32_768, "mps": 8192}

#: Expected bits per character of held-out text:
#:
#:     FLOOR x^FLOOR_POWER + A / parameters^ALPHA + B / max(x, 1) / characters^BETA
#:
#: The result is multiplied by (n-gram bits / NGRAM_BITS)^NGRAM_POWER. If xz's bits per character
#: exceed DENSE_XZ_BITS, it is also divided by (xz's bits per character / DENSE_XZ_BITS).
#:
#: Here, x is xz's bits per character on a sample of the text, divided by xz's bits per character on
#: the standard library (XZ_OF_LIBRARY). The formula uses max(x, 1) in the last term, because text
#: that xz compresses better than the standard library is not harder to learn. "parameters" is the
#: number of parameters in the layers, and "characters" is the number of characters that are read
#: during training. The n-gram bits and xz's bits are those in `law.Hardness`. The n-gram bits are
#: at least LEAST_NGRAM_BITS.
#:
#: ALPHA, BETA and A are close to the values in Hoffmann et al. 2022. They were fitted, together
#: with B, to 28 runs with 0.6 to 7.6 million parameters. The runs read 0.9 to 44 MB of the standard
#: library, Shakespeare, WikiText-2, and Debian's documents in eight languages.
#:
#: The other constants were determined from 149 runs of 64,000 to 1.5 million tokens on 116 texts,
#: and from seven runs of 2 to 12.7 million tokens on the first three texts named above. The 116
#: texts were source code in 30 languages, prose, manuals, web pages, messages, data files, tables,
#: word lists and dictionaries. A fifth of the texts were in Chinese, Japanese, Korean, Arabic,
#: Persian, Hebrew, Russian, Greek, Hindi, Bengali, Urdu, Tamil, Telugu or Khmer. The n-gram bits of
#: all these texts were 0.6 to 6.4.
FLOOR = 0.66
A = 6.5
ALPHA = 0.27
B = 49.0
BETA = 0.28
XZ_OF_LIBRARY, FLOOR_POWER = 1.72, 1.45
NGRAM_BITS = 2.24
NGRAM_POWER = 0.95
LEAST_NGRAM_BITS = 0.1
DENSE_XZ_BITS = 2.8
#: Ranges of the ratio of measured to expected bits, as (lowest, highest). EXPECTED_RANGE covers 111
#: of the 116 runs on usual texts. UNUSUAL_RANGE covers 31 of the 33 runs on unusual texts, whose
#: `law.Hardness.long_ngram_ratio` is outside USUAL_LONG_NGRAMS. Most unusual texts are tables,
#: sorted lists and repetitive data. In the remaining runs, the ratios were 0.5 to 1.5.
EXPECTED_RANGE, UNUSUAL_RANGE = (0.84, 1.18), (0.6, 1.3)
USUAL_LONG_NGRAMS = (0.78, 1.16)

#: Up to GOOD_EPOCHS passes over the text, repeated text is nearly as good as new text. Muennighoff
#: et al. 2023 find four passes, for larger models and larger texts. MOST_EPOCHS is the maximum
#: number of passes. With a weight decay of 0.1 to 0.3, the held-out loss rose after 4 to 5 passes
#: with 85,000 tokens and 9 parameters per token, and after 4 passes with 400,000 tokens and 2
#: parameters per token. It rose both with and without dropout. After 12 passes, the held-out loss
#: was much higher. With a weight decay of 3.0, six passes gave 0.2% fewer bits than four passes
#: (one run each).
GOOD_EPOCHS, MOST_EPOCHS = 2.0, 4.0
#: For a text with fewer bytes than this, the plan warns that the text is too small to learn a
#: language from.
LITTLE_TEXT = 50_000
#: To show the benefit of more text, the plan reports the expected decrease in bits per byte with
#: this many times as much text.
MORE_TEXT = 10.0
#: Tolerances for choosing the model. The plan chooses the largest model whose expected bits exceed
#: the lowest expected bits by at most the tolerance, because the estimates for very small models
#: are the least certain. INDIFFERENT is a fraction of the lowest bits. INDIFFERENT_SHARE is a
#: fraction of the difference between the lowest bits and `law.least_bits`. The smaller of the two
#: tolerances applies. For large models, INDIFFERENT_SHARE is the smaller tolerance. The resulting
#: ratio of tokens to parameters is then similar to the published value of 20 (Hoffmann et al.
#: 2022).
INDIFFERENT, INDIFFERENT_SHARE = 0.005, 0.03
#: Maximum number of layer parameters per token of the text. Larger models memorise the text. After
#: four passes over 1 MB (Shakespeare, vocabulary of 512 tokens), 15 parameters per token with a
#: weight decay of 2.5 gave 1.1% fewer bits than 6 parameters per token with 2.0. Higher values were
#: not measured.
MOST_PARAMETERS_A_TOKEN = 16.0
#: WEIGHT_DECAY is the usual weight decay. A higher weight decay is used if there are more than
#: `GOOD_EPOCHS` passes over the text and the model has at least REPEATED_PARAMETERS layer
#: parameters per token of the text. It is REPEATED_WEIGHT_DECAY with Muon and REPEATED_ADAMW_DECAY
#: with other optimizers. With fewer parameters per token, the weight decay is proportionally lower,
#: down to WEIGHT_DECAY, because a model that is small relative to its text does not memorise it.
#:
#: Measurements with Muon after four passes over 1 MB (Shakespeare, vocabulary of 1,024 tokens):
#: with 7.5 parameters per token, a weight decay of 2.0 gave 0.9% fewer bits than 1.0, and 3.0 gave
#: 0.1% fewer than 2.0. With 18 parameters per token, 2.5 gave 1.9% fewer than 1.0. After four
#: passes over the standard library with 0.25 parameters per token, 0.1 gave 5.4% fewer bits than
#: 2.0. Between 0.25 and 3 parameters per token, the weight decay is interpolated. AdamW's value was
#: not remeasured. All results are from one run each.
WEIGHT_DECAY = 0.1
REPEATED_WEIGHT_DECAY = 2.0
REPEATED_ADAMW_DECAY = 0.3
REPEATED_PARAMETERS = 3.0

#: If the measured speed differs from the assumed speed by more than this factor, the model is
#: chosen again.
OTHER_SPEED = 1.5
#: The plan reports that a run ends early if the limit on passes over the text ends it before this
#: fraction of the available time has passed.
EARLY = 0.8
#: OTHER_SECONDS is the number of seconds that a command is expected to spend on imports, on
#: measuring the machine's speed, on the first evaluation and on the report. PREPARED_PER_SECOND is
#: the number of bytes of text that are read and prepared per second. With 1.1 MB of text
#: (Shakespeare) on 2 cores, all work other than training took 11 s.
OTHER_SECONDS, PREPARED_PER_SECOND = 10.0, 4e6
#: Minimum number of bytes of text to prepare. Text with fewer bytes is prepared in full. For a run
#: that reads more text, the required amount is prepared.
PREPARED_BYTES = 64 << 20
#: Usual fraction of a run's time that is spent on evaluations, sample texts and checkpoints in
#: total.
EVALUATION_SHARE = 0.06
#: Each entry contains the number of evaluations (not counting the evaluation before the first
#: step), the number of sample texts per evaluation, the number of tokens per sample text, and the
#: maximum fraction of the run's time for evaluations. The first entry whose evaluations fit in the
#: maximum fraction is used. If no entry fits, the last one is used.
PARTS = (
    (4, 3, 64, EVALUATION_SHARE),
    (2, 3, 64, 0.1),
    (2, 1, 64, 0.1),
    (1, 1, 64, 0.1),
    (1, 1, 32, 0.1),
)
#: Maximum number of checkpoints of a run without a time budget, and of a run that ends early
#: because of its limit on passes. See also `training.time_budget.save_interval`.
MOST_SAVES = 6
#: Fraction of the evaluation time (`EVALUATION_SHARE` or the value in `PARTS`) that is spent on
#: computing the validation loss.
LOSS_SHARE = 2 / 3
#: USUAL_ROWS is the usual minimum number of rows per evaluation. If time is short, the minimum is
#: LEAST_ROWS rows and LEAST_EVALUATED tokens.
USUAL_ROWS = 16
LEAST_ROWS, LEAST_EVALUATED = 2, 2048
#: A budget is accepted if it allows at least this number of steps. Fewer steps are accepted if
#: there is not enough data for this number.
LEAST_STEPS = 8

#: `lora.rank` and `lora.alpha`.
ADAPTER_RANK, ADAPTER_ALPHA = 16, 32.0
#: Maximum number of passes over the conversations. It is CHAT_EPOCHS if there are at least
#: MANY_CHATS conversations, and CHAT_EPOCHS_OF_FEW otherwise.
CHAT_EPOCHS = 3.0
CHAT_EPOCHS_OF_FEW = 10.0
MANY_CHATS = 1000
#: Settings for preference pairs (DPO): the learning rate as a multiple of the learning rate for
#: conversations, and the maximum number of passes over the pairs. Higher learning rates make all
#: answers less likely, including the preferred answers.
PAIR_MULTIPLE, PAIR_EPOCHS = 0.05, 3.0
#: Number of steps in a short fine-tuning run, and maximum number of tokens per step.
TUNING_STEPS, MOST_TUNING_BATCH = 200, 32_768
#: Rows are long enough for the longest conversation if it has at most LONGEST_ROW tokens.
#: Otherwise, USUAL_SHARE is the minimum fraction of the conversations that must fit in a row.
USUAL_SHARE, LONGEST_ROW = 0.99, 2048

# Learning rates
#: Learning rates of new models by optimizer, for a hidden_size of `RATE_WIDTH`. AdamW's rate comes
#: from the `nanogpt-tuned` setting in `python -m benchmarks learning`. Lion uses a third to a tenth
#: of AdamW's rate (Chen et al. 2023). Adafactor's steps are relative to the size of the parameters.
NEW_MODEL_RATES: dict[str, dict[str, float]] = {
    "muon": {
        key: NEW_MODEL["optimizer"][key]
        for key in ("learning_rate", "muon_learning_rate", "head_lr_multiple", "vector_lr_multiple")
    },
    "adamw": {"learning_rate": 2e-3},
    "adamw8bit": {"learning_rate": 2e-3},
    "paged_adamw8bit": {"learning_rate": 2e-3},
    "lion": {"learning_rate": 4e-4},
    "adafactor": {"learning_rate": 1e-2},
}
#: A model is young if it was trained on fewer than YOUNG_TOKENS tokens per parameter. Models that
#: were trained for longer are more sensitive to high learning rates (Springer et al. 2025,
#: "Overtrained Language Models Are Harder to Fine-Tune", arXiv:2503.19206). The young models that
#: were measured had read 0.04 to 1.2 tokens per parameter, SmolLM2-135M and Gemma 3 270M more than
#: 10,000. The limit itself was not measured.
YOUNG_TOKENS = 20
#: For fine-tuning all weights, TUNING_RATE is AdamW's learning rate for a hidden_size of
#: TUNING_WIDTH, and YOUNG_TUNING_RATE the one of young models. They are inversely proportional to
#: the width (Yang et al. 2022). With three times TUNING_RATE, Gemma 3 270M needed more bits for a
#: new text, for new conversations and for the kept text than before training. For young models of
#: width 64, 2e-3 was the best of 7e-4, 2e-3 and 5e-3.
TUNING_RATE = 1.7e-5
YOUNG_TUNING_RATE = 5e-5
TUNING_WIDTH = 2000
#: Learning rate of young models on plain text, for widths up to YOUNG_TEXT_WIDTH. For larger
#: widths, it is inversely proportional to the width. It was measured with models of width 64, 192
#: and 320 (docs/finetuning.md). Adapters use ADAPTER_TEXT_MULTIPLE times their usual rate.
YOUNG_TEXT_RATE = 2.4e-3
YOUNG_TEXT_WIDTH = 320
ADAPTER_TEXT_MULTIPLE = 3.0
#: Learning rate of each optimizer for fine-tuning, as a multiple of AdamW's learning rate. For
#: Lion, the multiple is the same as for new models.
TUNING_MULTIPLES = {"adamw": 1.0, "adamw8bit": 1.0, "paged_adamw8bit": 1.0, "lion": 0.2}
#: For fine-tuning adapters, ADAPTER_RATE is the learning rate for a hidden_size of TUNING_WIDTH.
#: For other widths, it is proportional to width^-ADAPTER_POWER. This relation was fitted to Llama
#: models with at least 1 billion parameters (Schulman et al. 2025, "LoRA Without Regret").
ADAPTER_RATE, ADAPTER_POWER = 5e-4, 0.781


def new_model_rates(
    name: str, hidden_size: int, given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the learning rates of a new model, as keys of the `optimizer` section.

    The measured rates are converted to the model's width as described for `optimizer.tuned_width`.

    Args:
        name: name of the optimizer.
        hidden_size: width of the model.
        given: values of the `optimizer` section that are set by the user. If they include learning
            rates, the rates apply to this model or, if the user has also set `tuned_width`, to
            models of that width.

    Raises:
        ConfigError: no learning rate is known for the optimizer, and the user has not set one.
    """
    # Imported here, because it imports torch, and `train TEXTS` must print its first line before
    # torch is loaded.
    from firstlight.optim.config import OPTIMIZERS, OptimizerConfig

    given = given or {}
    width = given.get("tuned_width") or hidden_size
    follows_width = "tuned_width" in OPTIMIZERS[name].options
    if name != "muon" and "learning_rate" in given:
        rates = {"learning_rate": given["learning_rate"]}
    else:
        _require_known(name, NEW_MODEL_RATES, given)
        measured: dict[str, Any] = {"name": name, **NEW_MODEL_RATES[name]}
        if follows_width:
            measured["tuned_width"] = RATE_WIDTH
        config = OptimizerConfig(**measured).for_width(width)
        keys = [*NEW_MODEL_RATES[name]]
        if follows_width and name != "muon":
            # Only the learning rate of matrices changes with the width. These keys keep the
            # learning rates of embeddings and vectors unchanged.
            keys += ["embedding_lr_multiple", "vector_lr_multiple"]
        rates = {key: float(f"{getattr(config, key):.3g}") for key in keys}
    return {**rates, "tuned_width": width} if follows_width else rates


def finetuning_rate(
    name: str,
    hidden_size: int,
    given: Mapping[str, Any],
    *,
    adapters: bool,
    young: bool = False,
    text: bool = False,
) -> float:
    """Return the learning rate for fine-tuning, which is higher for narrower and for young models.

    Args:
        name: name of the optimizer.
        hidden_size: width of the model.
        given: values of the `optimizer` section that are set by the user.
        adapters: True to fine-tune adapters, False to fine-tune all weights.
        young: True for a model that was trained on few tokens (`YOUNG_TOKENS`).
        text: True to train on plain text, False to train on conversations or preference pairs.

    Raises:
        ConfigError: no learning rate is known for the optimizer, and the user has not set one.
    """
    if "learning_rate" in given:
        return float(given["learning_rate"])
    _require_known(name, TUNING_MULTIPLES, given)
    ratio = TUNING_WIDTH / hidden_size
    if adapters:
        rate = ADAPTER_RATE * ratio**ADAPTER_POWER
        rate *= ADAPTER_TEXT_MULTIPLE if young and text else 1.0
    elif young and text:
        rate = YOUNG_TEXT_RATE * min(1.0, YOUNG_TEXT_WIDTH / hidden_size)
    else:
        rate = (YOUNG_TUNING_RATE if young else TUNING_RATE) * ratio
    return float(f"{rate * TUNING_MULTIPLES[name]:.2g}")


def _require_known(name: str, rates: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    if name not in rates and "learning_rate" not in given:
        raise ConfigError(
            f"there is no default learning rate for --optimizer.name {name}: set "
            "--optimizer.learning_rate"
        )
