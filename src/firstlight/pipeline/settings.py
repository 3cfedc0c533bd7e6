"""The numbers behind the choices for new models: layouts, learning rates, shapes, and expected
losses.

They were measured on models of 0.8 to 5 million parameters that trained on the source of Python's
standard library (`firstlight bench learning`); larger ones follow the published laws named here.
"""

from __future__ import annotations

from typing import Any

from firstlight.optim.new_model import MODEL, NEW_MODEL

#: Model, initial weights, optimizer and schedule of every new model, by key of the recipe.
LAYOUT: dict[str, Any] = {
    f"{section}.{key}": value
    for section, values in {"model": MODEL, **NEW_MODEL}.items()
    for key, value in values.items()
}

#: AdamW's rate where a person takes another optimizer than Muon: `nanogpt-tuned` of the benchmark.
ADAMW_RATE = 2e-3

#: (hidden_size, num_hidden_layers) of the models to choose from, smallest first. Widths are
#: multiples of 64, the size of a head.
SHAPES = (
    *((64, 2), (64, 4), (128, 3), (128, 4), (192, 4), (256, 4), (256, 6), (320, 6), (384, 6)),
    *((384, 8), (448, 8), (512, 8), (576, 10), (640, 10), (704, 12), (768, 12), (896, 14)),
    *((1024, 16), (1152, 18), (1280, 20), (1536, 20), (1792, 22), (2048, 24), (2304, 26)),
)
HEAD_DIM = 64

#: Names of shapes for `--size`.
SIZES = {
    "tiny": (128, 4),
    "small": (256, 6),
    "medium": (512, 8),
    "large": (768, 12),
    "xl": (1280, 20),
}

#: Size of the vocabulary by bytes of text: (upper limit of bytes, tokens).
VOCABULARIES = (
    *((150e3, 512), (500e3, 1024), (3e6, 2048), (40e6, 4096), (400e6, 8192), (4e9, 16384)),
    (float("inf"), 32768),
)
#: Bytes of Latin text for a token, by the size of the vocabulary.
BYTES_PER_TOKEN = {512: 1.9, 1024: 2.35, 2048: 2.8, 4096: 3.3, 8192: 3.7, 16384: 4.1, 32768: 4.4}

#: Tokens of a sequence by width of the model: (up to so wide, tokens).
SEQ_LENS = ((320, 256), (640, 512), (1 << 30, 1024))

#: Tokens of a step for a run of so many tokens; it grows with the root of the run's length, as the
#: noise of the gradient does at a falling loss (McCandlish et al. 2018).
BATCH_TOKENS, BATCH_AT_TOKENS = 2048, 700_000
MOST_BATCH_TOKENS = 524_288

#: Tokens of a forward pass that keep a device busy.
MICRO_BATCH_TOKENS = {"cpu": 2048, "cuda": 32_768, "mps": 8192}

#: Expected bits for a character of held-out text: FLOOR g^FLOOR_POWER + A / parameters^ALPHA +
#: B g^B_POWER / characters^BETA, where g is gzip's bits for a character of the text over those for
#: one of the standard library. Parameters are those of the layers, characters those read.
#: ALPHA, BETA and A are near those of Hoffmann et al. 2022; the others were fitted to 20 runs of
#: 0.1 to 3.2 million parameters on 0.4 to 11 MB of the standard library, Shakespeare, WikiText-2,
#: Arabic and C++, of which 18 lie within EXPECTED_RANGE (C++ is 15 % below it).
FLOOR, A, ALPHA, B, BETA = 0.604, 6.5, 0.27, 45.5, 0.28
GZIP_OF_LIBRARY, FLOOR_POWER, B_POWER = 1.867, 1.341, -0.243
#: Measured over expected bits, least and most.
EXPECTED_RANGE = (0.92, 1.09)

#: Passes over the text up to which another is nearly as good as new text (Muennighoff et al. 2023
#: have four, of larger models and texts), and after which the held-out loss rises: on 85,000 tokens
#: with 9 parameters each from 4 to 5 on, on 400,000 with 2 each from 4 on, with or without dropout.
#: At 12 passes it was far higher.
GOOD_EPOCHS, MOST_EPOCHS = 2.0, 4.0
#: The largest model whose expected bits are within this share of the least is taken: what is
#: expected of very small ones is the least certain.
INDIFFERENT = 0.005
#: Parameters of the layers for each token of the text, at most: a larger model learns it by heart.
MOST_PARAMETERS_A_TOKEN = 8.0
#: Weight decay, and weight decay where the text is read more often than `GOOD_EPOCHS`.
WEIGHT_DECAY, REPEATED_WEIGHT_DECAY = 0.1, 0.3

#: Shares of the run's time: all evaluations together; and evaluations of a run.
EVALUATION_SHARE, EVALUATIONS = 0.06, 4
#: Speed of an evaluation over that of training.
EVALUATION_SPEED = 3.0
#: Seconds of a run from which on compiling, which takes about a minute, is repaid on a GPU.
COMPILE_SECONDS = 600.0

#: Fine-tuning: the rate of AdamW for a model 2,000 wide. That of all weights falls with the width
#: (Yang et al. 2022); of 7e-4, 2e-3 and 5e-3, a model 64 wide was best with 2e-3.
TUNING_RATE, TUNING_WIDTH = 5e-5, 2000
#: The rate of adapters as a multiple of it, and its power of the width (Schulman et al. 2025, "LoRA
#: Without Regret", fitted to Llama models of 1 billion parameters and more).
ADAPTER_MULTIPLE, ADAPTER_POWER = 10.0, 0.781
#: Rank and scale of adapters.
ADAPTER_RANK, ADAPTER_ALPHA = 16, 32.0
#: Passes over conversations, at most: of so many conversations and more, and of few.
CHAT_EPOCHS, CHAT_EPOCHS_OF_FEW, MANY_CHATS = 3.0, 10.0, 1000
#: Steps that a short fine-tuning has, and tokens of a step, at most.
TUNING_STEPS, MOST_TUNING_BATCH = 200, 32_768
#: Share of the conversations that fit into a row where the longest is much longer; longest row that
#: is chosen for the longest.
USUAL_SHARE, LONGEST_ROW = 0.99, 2048
