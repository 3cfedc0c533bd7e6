"""Write GGUF files in the quantised formats of llama.cpp, and measure how much accuracy the model
loses.

llama.cpp quantises a GGUF file whose weights have not been rounded. It can use an importance
matrix, which specifies which columns of each weight matrix are most important. The importance of a
column is the mean square of its inputs on a calibration text. Most formats with fewer than three
bits require an importance matrix.

The quantised file is then run in llama.cpp. Its perplexity on a fixed text is compared with that of
the source model.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firstlight.conversion.check import check_dtype, logits_of
from firstlight.errors import ConfigError, MissingDependencyError, ModelError
from firstlight.models import Model, build_model
from firstlight.tokenizer import Tokenizer
from firstlight.weights.gguf.metadata import supported_model
from firstlight.weights.gguf.tensors import tensor_rules
from firstlight.weights.huggingface import config_from_hf
from firstlight.weights.loading import fill

#: Value of llama.cpp's `enum llama_ftype` for each quantised format.
QUANTISED = {
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 8,
    "q5_1": 9,
    "q2_k": 10,
    "q3_k_s": 11,
    "q3_k_m": 12,
    "q3_k_l": 13,
    "q4_k_s": 14,
    "q4_k_m": 15,
    "q5_k_s": 16,
    "q5_k_m": 17,
    "q6_k": 18,
    "q2_k_s": 21,
    "iq2_xxs": 19,
    "iq2_xs": 20,
    "iq3_xs": 22,
    "iq3_xxs": 23,
    "iq1_s": 24,
    "iq4_nl": 25,
    "iq3_s": 26,
    "iq3_m": 27,
    "iq2_s": 28,
    "iq2_m": 29,
    "iq4_xs": 30,
    "iq1_m": 31,
}

#: Largest allowed relative increase in perplexity, keyed by the number of bits in a format's name.
#: The limits are loose. For the model stories260K, the perplexity increased by at most 6 %.
#: However, the rows of this model are so short that llama.cpp uses at least 4 bits in every format.
PERPLEXITY_LIMITS = {"6": 0.05, "5": 0.1, "4": 0.25, "3": 0.75, "2": 3.0, "1": 15.0}

#: Maximum number of tokens on which the perplexity is measured, and number of tokens in a row of
#: the calibration text.
_ROW_TOKENS = 512
#: Maximum number of rows of a calibration text that are used (32,768 tokens).
_CALIBRATION_ROWS = 64

#: Text on which the perplexity is measured. It consists of a story, a recipe, an explanation and a
#: program.
EVALUATION_TEXT = """\
The lighthouse had been dark for eleven years when Anna found the key. It lay in her grandfather's \
desk, wrapped in a page of an old newspaper, and beside it lay a letter with her name on it. She \
read the letter twice. Then she put on her coat, took the lamp from the hook behind the door, and \
went down to the harbour, where the boats were knocking against each other in the wind. Nobody \
asked her where she was going. The sea was rough, but the tide was with her, and before it was \
quite dark she stood on the rock and looked up at the tower.

To bake a simple bread you need five hundred grams of flour, three hundred and fifty grams of warm \
water, ten grams of salt and a little yeast. Mix everything with a spoon, cover the bowl and wait \
until the dough has doubled, which takes about two hours in a warm kitchen and a whole night in a \
cold one. Fold it four times, shape it into a ball, and let it rest for another half an hour. Bake \
it in a very hot oven until the crust is dark brown and the loaf sounds hollow when you knock on it.

Plants take in carbon dioxide from the air and water from the soil. With the energy of sunlight \
they make sugar out of both, and give off oxygen. At night, when there is no light, they burn a \
part of the sugar again, as animals do. Most of what a tree is made of came out of the air.

def average(values):
    if not values:
        raise ValueError("an empty list has no average")
    return sum(values) / len(values)
"""


def import_llama_cpp() -> Any:
    """Import and return the llama_cpp package.

    Raises:
        MissingDependencyError: the package is not installed.
    """
    try:
        import llama_cpp
    except ImportError:
        raise MissingDependencyError(
            "llama-cpp-python", "llama-cpp", "quantising for llama.cpp"
        ) from None
    return llama_cpp


def perplexity_limit(dtype: str) -> float:
    """Return the largest allowed increase in perplexity for a format, as a fraction of the
    perplexity of the source.
    """
    return PERPLEXITY_LIMITS[dtype.removeprefix("i")[1]]


def quantise(
    source: Path, out: Path, dtype: str, importance: Mapping[str, Tensor] | None = None
) -> None:
    """Quantise a GGUF file with llama.cpp.

    Args:
        source: GGUF file in f32, f16 or bf16.
        out: the file to write.
        dtype: one of `QUANTISED`.
        importance: importance matrix, a dict from the GGUF name of each weight matrix to the
            importance of its inputs, an fp32 tensor of shape [inputs]. None to quantise without an
            importance matrix.

    Raises:
        ModelError: llama.cpp fails, for example because the format needs an importance matrix.
        MissingDependencyError: llama-cpp-python is not installed.
    """
    library = import_llama_cpp().llama_cpp
    parameters = library.llama_model_quantize_default_params()
    parameters.ftype = QUANTISED[dtype]
    if importance is not None:
        # llama.cpp expects an array that ends with an empty entry. `arrays` keeps the data alive
        # during the call.
        arrays = {name: (ctypes.c_float * len(v))(*v.tolist()) for name, v in importance.items()}
        entries = (library.llama_model_imatrix_data * (len(arrays) + 1))()
        for place, (name, array) in zip(entries, arrays.items(), strict=False):
            place.name, place.size = name.encode("utf-8"), len(array)
            place.data = ctypes.cast(array, ctypes.POINTER(ctypes.c_float))
        parameters.imatrix = ctypes.cast(entries, ctypes.POINTER(library.llama_model_imatrix_data))
    with _said(library) as said:
        failed = library.llama_model_quantize(bytes(source), bytes(out), ctypes.byref(parameters))
    if failed:
        reason = next((line for line in reversed(said) if "failed" in line or "error" in line), "")
        needs = importance is None and any("matrix" in line for line in said)
        advice = ": specify a text with --calibration" if needs else ""
        raise ModelError(
            f"llama.cpp can't write this model as {dtype}{advice} "
            f"({' '.join(reason.split())[-200:] or 'no reason was reported'})"
        )


@contextlib.contextmanager
def _said(library: Any) -> Iterator[list[str]]:
    """Context manager that collects the log messages of llama.cpp in a list instead of printing
    them to stderr.
    """
    from llama_cpp._logger import llama_log_callback

    said: list[str] = []
    callback = library.llama_log_callback(
        lambda level, text, _: said.append(text.decode("utf-8", "replace"))
    )
    library.llama_log_set(callback, None)
    try:
        yield said
    finally:
        library.llama_log_set(llama_log_callback, None)


@torch.inference_mode()
def importance_matrix(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], tokenizer: Tokenizer, text: str
) -> dict[str, Tensor]:
    """Compute the importance matrix of a model. It contains the mean square of each input of each
    weight matrix on a calibration text.

    The matrices of experts, the embedding and the output head are omitted.

    Args:
        config: the model's config.json.
        tensors: weights, keyed by Hugging Face name.
        tokenizer: the model's tokenizer.
        text: calibration text. It is divided into rows of 512 tokens or, if the context length is
            smaller, of the context length. At most 64 rows are used.

    Returns:
        A dict from the GGUF name of each weight matrix to the mean squares of its inputs, an fp32
        tensor of shape [inputs].

    Raises:
        ConfigError: the text is shorter than one row.
    """
    own = config_from_hf(config, "the model")
    with torch.device("meta"):
        model: Model = build_model(own)
    fill(model, tensors, torch.float32)
    rows = min(_ROW_TOKENS, own.max_position_embeddings)
    ids = torch.tensor(tokenizer.encode(text))
    if len(ids) < rows:
        raise ConfigError(f"the calibration text has {len(ids)} tokens: use at least {rows}")
    modules = dict(model.named_modules())
    sums: dict[str, Tensor] = {}
    for rule in tensor_rules(supported_model(config)):
        module = modules.get(rule.sources[0].removesuffix(".weight"))
        if rule.gguf.startswith("blk.") and len(rule.gguf_shape) == 2 and module is not None:
            module.register_forward_pre_hook(_square_sums(sums, rule.gguf))
    count = 0
    model.eval()
    for row in torch.split(ids, rows)[:_CALIBRATION_ROWS]:
        if len(row) == rows:  # The last row may be shorter.
            model(row[None])
            count += rows
    return {name: total / count for name, total in sums.items()}


def _square_sums(sums: dict[str, Tensor], name: str) -> Any:
    """Return a forward pre-hook that adds the squares of a module's inputs to `sums[name]`. The
    inputs have the shape [..., inputs].
    """

    def add(_: nn.Module, inputs: Sequence[Tensor]) -> None:
        squares = inputs[0].float().square().flatten(0, -2).sum(0)
        sums[name] = sums[name] + squares if name in sums else squares

    return add


def evaluation_ids(tokenizer: Tokenizer, context: int) -> Tensor:
    """Return the first token ids of `EVALUATION_TEXT` as an int64 tensor of shape [1, T]. T is at
    most 512 and at most the context length.
    """
    start = [tokenizer.separator_id] if tokenizer.add_bos else []
    ids = [*start, *tokenizer.encode(EVALUATION_TEXT)]
    return torch.tensor([ids[: min(context, _ROW_TOKENS)]])


def perplexity(logits: Tensor, ids: Tensor) -> float:
    """Compute the perplexity of a sequence. The token ids are int64 of shape [1, T], and the logits
    have the shape [1, T, V].

    The first token is excluded, because there are no logits that predict it. The result is infinite
    if the loss exceeds 709 nats, because the exponential function then overflows in fp64.
    """
    return float(F.cross_entropy(logits[0, :-1].float(), ids[0, 1:]).double().exp())


def llama_cpp_logits(path: Path, ids: Tensor) -> Tensor:
    """Run a GGUF file in llama.cpp on token ids, which are int64 of shape [1, T]. Return fp32
    logits of shape [1, T, V].

    Raises:
        ModelError: llama.cpp can't open the file or compute the logits.
    """
    library = import_llama_cpp().llama_cpp
    tokens = ids[0].tolist()
    with _said(library), contextlib.ExitStack() as stack:
        settings = library.llama_model_default_params()
        # Do not repack the weights for AMX. If llama.cpp was built with GCC 12, the kernels for
        # repacked weights crash the process.
        settings.use_extra_bufts, settings.n_gpu_layers = False, 0
        model = library.llama_model_load_from_file(bytes(path), settings)
        if not model:
            raise ModelError(f"llama.cpp can't open {path.name}")
        stack.callback(library.llama_model_free, model)
        options = library.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = max(256, len(tokens))
        context = library.llama_init_from_model(model, options)
        if not context:
            raise ModelError(f"llama.cpp can't run {path.name}")
        stack.callback(library.llama_free, context)
        batch = library.llama_batch_init(len(tokens), 0, 1)
        stack.callback(library.llama_batch_free, batch)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = i
            batch.logits[i] = 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        if library.llama_decode(context, batch):
            raise ModelError(f"llama.cpp can't compute {path.name}")
        size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
        found = np.ctypeslib.as_array(library.llama_get_logits(context), (len(tokens), size))
        return torch.from_numpy(found.copy())[None]


@dataclass(frozen=True)
class QuantisationLoss:
    """Loss of accuracy caused by quantising a model.

    Attributes:
        source: perplexity of the source model on `EVALUATION_TEXT`.
        result: perplexity of the quantised file on `EVALUATION_TEXT`, computed from llama.cpp's
            logits.
        bits: size of the quantised file in bits, divided by the number of weights.
        difference: largest difference between the logits of the source and the quantised file. The
            mean at each position is subtracted first.
        largest: largest absolute logit of the source, after the same subtraction.
    """

    source: float
    result: float
    bits: float
    difference: float
    largest: float


def quantise_source(
    plain: Path,
    out: Path,
    dtype: str,
    *,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    text: str | None,
    limit: float | None,
) -> QuantisationLoss:
    """Quantise a GGUF file. Raise an error if the perplexity of the result is too high.

    Args:
        plain: GGUF file of the model whose weights have not been rounded. It is deleted.
        out: the file to write.
        dtype: one of `QUANTISED`.
        config, tensors, tokenizer: config, weights and tokenizer of the source model.
        text: calibration text for the importance matrix. None to quantise without an importance
            matrix.
        limit: largest allowed relative increase in perplexity. None to use the limit in
            `PERPLEXITY_LIMITS`.

    Raises:
        ConfigError: the calibration text is too short.
        ModelError: llama.cpp fails, or the perplexity rises by more than the limit.
    """
    importance = None
    if text is not None:
        importance = importance_matrix(config, tensors, tokenizer, text)
    quantise(plain, out, dtype, importance)
    plain.unlink()
    own = config_from_hf(config, "the model")
    ids = evaluation_ids(tokenizer, own.max_position_embeddings)
    expected = logits_of(config, tensors, ids, check_dtype(own))
    found = llama_cpp_logits(out, ids)
    before, after = perplexity(expected, ids), perplexity(found, ids)
    limit = perplexity_limit(dtype) if limit is None else limit
    if math.isinf(after) or not after <= before * (1 + limit):
        raise ModelError(
            f"{dtype} raises the perplexity on a fixed text from {before:.4g} to {after:.4g}, by "
            f"more than the allowed {limit:.0%}: choose a format with more bits, specify a text "
            "with --calibration, or allow more with --tolerance; nothing was written"
        )
    expected, found = (x - x.mean(-1, keepdim=True) for x in (expected, found))
    weights = sum(tensor.numel() for tensor in tensors.values())
    return QuantisationLoss(
        before,
        after,
        8 * out.stat().st_size / weights,
        float((expected - found).abs().max()),
        largest=float(expected.abs().max()),
    )
