"""Rows of several documents: each token sees only its own document, and is predicted from it
alone.
"""

from __future__ import annotations

import itertools
import math
import tempfile
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from builders import draw_weights
from firstlight.checkpoint.checkpoint import Checkpoint, save_checkpoint
from firstlight.data.corpus import TokenDataset, num_rows
from firstlight.data.loader import Batch, rows_to_batch
from firstlight.data.shards import ShardWriter
from firstlight.errors import DataError
from firstlight.evaluation.perplexity import evaluate, evaluate_split
from firstlight.files.atomic import write_json
from firstlight.models import GPT2Config, LlamaConfig, Model, ModelConfig, MoEConfig, empty_model
from firstlight.tokenizer import Tokenizer
from firstlight.weights.huggingface import model_files
from firstlight.weights.loading import weights_to_save

BOS, EOS = 1, 2
CPU = torch.device("cpu")
#: (bos, eos) around each text
STYLES = {"eos": (None, EOS), "bos-eos": (BOS, EOS), "bos": (BOS, None), "none": (None, None)}
styles = pytest.mark.parametrize("style", STYLES)

_SHAPE: dict[str, Any] = {"vocab_size": 31, "num_hidden_layers": 2, "max_position_embeddings": 64}
GPT2 = GPT2Config(hidden_size=18, num_attention_heads=3, **_SHAPE)
LLAMA = LlamaConfig(hidden_size=24, num_attention_heads=6, num_key_value_heads=2, **_SHAPE)
EXPERTS = MoEConfig(
    hidden_size=24, num_attention_heads=6, num_experts=4, num_experts_per_tok=2, **_SHAPE
)
MODELS = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "sliding-window": LLAMA.model_copy(update={"sliding_window": 4}),
    "experts": EXPERTS,
}
models = pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)


def make_split(
    folder: Path, texts: Sequence[Sequence[int]], style: str, shard_tokens: int = 10**6
) -> TokenDataset:
    """Write a training split of these texts, with the style's tokens around each. "none" also
    accepts empty texts.
    """
    bos, eos = STYLES[style]
    with ShardWriter(folder, "train", np.dtype("<u2"), shard_tokens) as writer:
        for document in documents_of(texts, style):
            writer.write(np.array(document, dtype="<u2"))
    split = {
        "documents": len(texts),
        "tokens": sum(len(document) for document in documents_of(texts, style)),
        "text_bytes": sum(map(len, texts)),
        "shards": writer.shards,
    }
    manifest = {
        "format": "firstlight-tokens",
        "version": 1,
        "vocab_size": 200,
        "tokenizer_sha256": "",
        "bos_token_id": bos,
        "eos_token_id": eos,
        "splits": {"train": split},
    }
    write_json(folder / "manifest.json", manifest)
    return TokenDataset(folder, "train")


def documents_of(texts: Sequence[Sequence[int]], style: str) -> list[list[int]]:
    before, after = ([] if token is None else [token] for token in STYLES[style])
    return [[*before, *text, *after] for text in texts]


def batch_of(dataset: TokenDataset, seq_len: int, fill_id: int = 0) -> Batch:
    """Return all rows of a split, masked by document."""
    rows = list(range(num_rows(dataset.num_tokens, seq_len)))
    return rows_to_batch(dataset, rows, seq_len, fill_id, document_masking=True)


def ids_of(batch: Batch) -> list[list[int]]:
    assert batch.document_ids is not None
    return batch.document_ids.tolist()


def pieces(
    texts: Sequence[Sequence[int]], style: str, seq_len: int
) -> list[tuple[list[int], list[int]]]:
    """Return (inputs, labels) of each single document, split at the same positions as the stream's
    rows.
    """
    found = []
    position = 0
    for number, document in enumerate(documents_of(texts, style)):
        first = position
        position += len(document)
        if style == "eos" and number > 0:  # the document's text is predicted from the preceding eos
            document, first = [EOS, *document], first - 1
        rows: dict[int, tuple[list[int], list[int]]] = {}
        for place, (token, label) in enumerate(itertools.pairwise(document), first):
            inputs, labels = rows.setdefault(place // seq_len, ([], []))
            inputs.append(token)
            labels.append(label)
        found += list(rows.values())
    return found


def valid(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """Return (inputs, labels) of each document in each row of a batch, where there are labels."""
    found = []
    for inputs, labels, numbers in zip(
        batch.input_ids.tolist(), batch.labels.tolist(), ids_of(batch), strict=True
    ):
        for number in range(max(numbers) + 1):
            places = [i for i, n in enumerate(numbers) if n == number and labels[i] != -100]
            if places:
                found.append(([inputs[i] for i in places], [labels[i] for i in places]))
    return found


def ready(config: ModelConfig) -> Model:
    """Return an fp64 model in which every parameter affects the output."""
    model = empty_model(config).double().eval()
    draw_weights(model, 0, 0.3)
    return model


def loss_in_fp64(
    model: Model, input_ids: Tensor, labels: Tensor, document_ids: Tensor | None
) -> Tensor:
    """Return the summed loss without training's cast to fp32."""
    logits = model(input_ids, document_ids=document_ids)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def random_texts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, longest + 1, count)
    return [generator.integers(3, 31, size).tolist() for size in sizes]


# Document of each token


def test_document_masking_eos_starts_next_document(tmp_path: Path) -> None:
    dataset = make_split(tmp_path, [[5, 6, 7], [8], [9, 10]], "eos")
    batch = batch_of(dataset, 8)
    assert batch.input_ids.tolist() == [[5, 6, 7, EOS, 8, EOS, 9, 10]]
    assert batch.labels.tolist() == [[6, 7, EOS, 8, EOS, 9, 10, EOS]]
    assert ids_of(batch) == [[0, 0, 0, 1, 1, 2, 2, 2]]
    assert batch.num_valid == 8


def test_document_masking_bos_is_not_predicted_from_previous_document(tmp_path: Path) -> None:
    dataset = make_split(tmp_path, [[5, 6], [8], [9]], "bos-eos")
    batch = batch_of(dataset, 9)
    assert batch.input_ids.tolist() == [[BOS, 5, 6, EOS, BOS, 8, EOS, BOS, 9]]
    assert batch.labels.tolist() == [[5, 6, EOS, -100, 8, EOS, -100, 9, EOS]]
    assert ids_of(batch) == [[0, 0, 0, 0, 1, 1, 1, 2, 2]]
    assert batch.num_valid == 7


def test_document_masking_without_separators_predicts_no_text_from_another(tmp_path: Path) -> None:
    dataset = make_split(tmp_path, [[5, 6, 7], [8], [9, 10]], "none")
    batch = batch_of(dataset, 5)
    assert batch.labels.tolist() == [[6, 7, -100, -100, 10]]
    assert ids_of(batch) == [[0, 0, 0, 1, 2]]


@pytest.mark.parametrize(
    "seq_len, ids, labels",
    [
        # Documents start with the second row, in its middle, and at its last input.
        (3, [[0, 0, 0], [0, 0, 0], [0, 0, 0]], [[4, 5, -100], [7, 8, -100], [10, 11, 12]]),
        (4, [[0, 0, 0, 1], [0, 0, 1, 1], [0, 1, 1, 1]], None),
        (5, [[0, 0, 0, 1, 1], [0, 1, 1, 1, 2]], None),
    ],
)
def test_document_ids_restart_in_each_row(
    tmp_path: Path, seq_len: int, ids: list[list[int]], labels: list[list[int]] | None
) -> None:
    texts = [[3, 4, 5], [6, 7, 8], [9, 10, 11, 12]]
    batch = batch_of(make_split(tmp_path, texts, "none"), seq_len)
    assert ids_of(batch) == ids
    assert labels is None or batch.labels.tolist() == labels


@pytest.mark.parametrize("seq_len", [2, 3, 4, 5])
def test_document_masking_eos_at_row_edge_starts_next_document(
    tmp_path: Path, seq_len: int
) -> None:
    dataset = make_split(tmp_path, [[5, 6, 7], [8, 9]], "eos")  # 5 6 7 eos 8 9 eos
    expected = {
        2: [[0, 0], [0, 1], [0, 0]],
        3: [[0, 0, 0], [0, 0, 0]],
        4: [[0, 0, 0, 1], [0, 0, 1, 1]],
        5: [[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]],
    }
    batch = batch_of(dataset, seq_len)
    assert ids_of(batch) == expected[seq_len]
    assert batch.num_valid == 6


def test_document_masking_padding_of_last_row_is_own_document(tmp_path: Path) -> None:
    batch = batch_of(make_split(tmp_path, [[5, 6, 7], [8, 9]], "bos-eos"), 6, fill_id=30)
    assert batch.input_ids.tolist()[1] == [8, 9, 30, 30, 30, 30]
    assert batch.labels.tolist()[1] == [9, EOS, -100, -100, -100, -100]
    assert ids_of(batch)[1] == [0, 0, 1, 1, 1, 1]


def test_document_masking_empty_documents_change_nothing(tmp_path: Path) -> None:
    texts = [[], [3, 4], [], [], [5], [6, 7, 8], []]
    for folder in ("with", "without"):
        (tmp_path / folder).mkdir()
    plain = [text for text in texts if text]
    found = batch_of(make_split(tmp_path / "with", texts, "none", shard_tokens=2), 4)
    expected = batch_of(make_split(tmp_path / "without", plain, "none"), 4)
    assert ids_of(found) == ids_of(expected)
    assert torch.equal(found.labels, expected.labels)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    seq_len=st.integers(1, 12),
    shard_tokens=st.integers(1, 30),
    style=st.sampled_from(list(STYLES)),
)
def test_document_masking_labels_are_those_of_single_documents(
    lengths: list[int], seq_len: int, shard_tokens: int, style: str
) -> None:
    """Wherever rows and shards split documents, the valid labels are those of single documents."""
    tokens = iter(range(3, 3 + sum(lengths)))
    texts = [[next(tokens) for _ in range(length)] for length in lengths]
    with tempfile.TemporaryDirectory() as folder:
        dataset = make_split(Path(folder), texts, style, shard_tokens)
        if dataset.num_tokens < 2:
            return
        batch = batch_of(dataset, seq_len)
    expected = pieces(texts, style, seq_len)
    assert sorted(valid(batch)) == sorted(expected)
    assert batch.num_valid == sum(len(labels) for _, labels in expected)
    for numbers in ids_of(batch):
        assert numbers[0] == 0
        assert all(b - a in (0, 1) for a, b in itertools.pairwise(numbers))


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=12),
    shard_tokens=st.integers(1, 20),
    data=st.data(),
)
def test_document_starts_match_written_documents(
    lengths: list[int], shard_tokens: int, data: st.DataObject
) -> None:
    texts = [[3] * length for length in lengths]
    starts = np.cumsum([0, *lengths])[:-1].tolist()
    total = sum(lengths)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(0, total + 2))
    with tempfile.TemporaryDirectory() as folder:
        dataset = make_split(Path(folder), texts, "none", shard_tokens)
        found = dataset.document_starts(slice(start, stop)).tolist()
    assert sorted(set(found)) == sorted(
        {s - start for s in starts if start <= s < min(stop, total)}
    )
    assert found == sorted(found)


def test_document_search_memory_does_not_grow_with_corpus(tmp_path: Path) -> None:
    count = 200_000
    dataset = make_split(tmp_path, [[3]] * count, "eos")
    rows = [0, 77, 199]
    rows_to_batch(dataset, rows, 1000, 0, document_masking=True)
    tracemalloc.start()
    try:
        batch = rows_to_batch(dataset, rows, 1000, 0, document_masking=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert ids_of(batch)[1][-1] == 500
    assert peak < 4 * count, "the offsets alone are eight bytes a document"


def test_document_masking_disabled_gives_no_document_ids(tmp_path: Path) -> None:
    dataset = make_split(tmp_path, [[5, 6], [8], [9]], "bos-eos")
    batch = rows_to_batch(dataset, [0], 9, 0)
    assert batch.document_ids is None
    assert batch.labels.tolist() == [[5, 6, EOS, BOS, 8, EOS, BOS, 9, EOS]]


def test_document_ids_move_with_batch(tmp_path: Path) -> None:
    batch = batch_of(make_split(tmp_path, [[5, 6], [8]], "eos"), 4)
    assert batch.document_ids is not None
    assert batch.document_ids.dtype == torch.int32
    moved = batch.to(torch.device("meta"))
    assert moved.document_ids is not None
    assert moved.document_ids.device.type == moved.labels.device.type == "meta"


# Model output


@models
@styles
def test_document_masking_packed_losses_equal_those_of_single_documents(
    tmp_path: Path, config: ModelConfig, style: str
) -> None:
    """Losses and gradients equal those of a separate forward pass for each document."""
    texts, seq_len = random_texts(14, 12), 16
    model = ready(config)
    batch = batch_of(make_split(tmp_path, texts, style), seq_len)
    assert len(batch.input_ids) > 3
    assert max(max(numbers) for numbers in ids_of(batch)) > 1

    packed = loss_in_fp64(model, batch.input_ids, batch.labels, batch.document_ids)
    packed.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    alone = torch.zeros((), dtype=torch.float64)
    for inputs, labels in pieces(texts, style, seq_len):
        loss = loss_in_fp64(model, torch.tensor([inputs]), torch.tensor([labels]), None)
        loss.backward()  # type: ignore[no-untyped-call]
        alone += loss.detach()

    assert float(packed.detach()) == pytest.approx(float(alone), rel=1e-12)
    assert len(gradients) == len(dict(model.named_parameters()))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-10)


@models
def test_document_masking_disabled_lets_documents_see_each_other(
    tmp_path: Path, config: ModelConfig
) -> None:
    batch = batch_of(make_split(tmp_path, random_texts(14, 12), "eos"), 16)
    model = ready(config)
    masked = loss_in_fp64(model, batch.input_ids, batch.labels, batch.document_ids)
    unmasked = loss_in_fp64(model, batch.input_ids, batch.labels, None)
    assert abs(float(masked.detach() - unmasked.detach())) > 1


@models
def test_document_masking_token_does_not_influence_other_documents(
    tmp_path: Path, config: ModelConfig
) -> None:
    batch = batch_of(make_split(tmp_path, [[5, 6, 7], [8, 9, 10], [11, 12]], "eos"), 10)
    assert ids_of(batch) == [[0, 0, 0, 1, 1, 1, 1, 2, 2, 2]]
    model = ready(config)
    changed = batch.input_ids.clone()
    changed[0, 5] = 20
    with torch.no_grad():
        before, after = (
            model(ids, document_ids=batch.document_ids)[0] for ids in (batch.input_ids, changed)
        )
    differs = [bool((a != b).any()) for a, b in zip(before, after, strict=True)]
    assert differs == [False] * 5 + [True] * 2 + [False] * 3


# Evaluation


@models
@styles
def test_evaluate_with_document_masking_equals_single_documents(
    tmp_path: Path, config: ModelConfig, style: str
) -> None:
    texts, seq_len = random_texts(14, 12), 16
    dataset = make_split(tmp_path, texts, style)
    model = ready(config)

    def loss_sum(input_ids: Tensor, labels: Tensor, document_ids: Tensor | None = None) -> Tensor:
        return loss_in_fp64(model, input_ids, labels, document_ids)

    result = evaluate_split(
        loss_sum, dataset, seq_len=seq_len, batch_size=3, device=CPU, document_masking=True
    )
    alone = pieces(texts, style, seq_len)
    with torch.no_grad():
        expected = sum(
            float(loss_sum(torch.tensor([inputs]), torch.tensor([labels])))
            for inputs, labels in alone
        )
    assert result.tokens == sum(len(labels) for _, labels in alone)
    assert result.loss == pytest.approx(expected / result.tokens, rel=1e-12)
    # every predictable byte was predicted, so bits per byte are exact
    if style in ("eos", "bos-eos"):
        bits = expected / math.log(2)
        assert result.bits_per_byte == pytest.approx(bits / dataset.text_bytes, rel=1e-12)


def test_evaluate_checkpoint_uses_document_masking_of_training(
    tmp_path: Path, data: Path, tokenizer: Tokenizer
) -> None:
    config = LLAMA.model_copy(update={"vocab_size": 320})
    weights = weights_to_save(ready(config).float())
    found = {}
    for trained in (True, False):
        state = {"data": {"dir": str(data), "seq_len": 64, "document_masking": trained}}
        content = Checkpoint(model_files(config, tokenizer), weights, {}, state)
        save_checkpoint(tmp_path / str(trained), 3, content)
        found[trained] = evaluate(tmp_path / str(trained), device="cpu")
    again = evaluate(tmp_path / "False", document_masking=True, device="cpu")
    assert again == found[True] != found[False]
    assert again.tokens == found[False].tokens == TokenDataset(data, "val").num_tokens


def test_evaluate_documents_of_one_token_raises_data_error(tmp_path: Path) -> None:
    dataset = make_split(tmp_path, [[5], [6], [7]], "none")
    with pytest.raises(
        DataError, match=r"no token to predict, because .* without document masking"
    ):
        evaluate_split(
            lambda *_, **__: torch.zeros(()),
            dataset,
            seq_len=4,
            batch_size=2,
            device=CPU,
            document_masking=True,
        )
