"""lm-evaluation-harness's local-completions model with a server on a port."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from live import live
from tiny import CONTEXT, tiny_loaded, tiny_model, tiny_tokenizer

from firstlight.evaluation.scores import encode_choices, likelihoods
from firstlight.evaluation.tasks import accuracies, answer_items, encode_items, read_hellaswag
from firstlight.generation.batch import BatchDecoder
from firstlight.lora.loading import LoadedModel, load_model

pytest.importorskip("lm_eval")

# Warnings from the import and use of the harness and its dependencies do not concern firstlight.
pytestmark = pytest.mark.filterwarnings("ignore")


def local_completions(url: str, folder: Path, **options: Any) -> Any:
    """Create the harness model with the tokenizer of a folder."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    return LocalCompletionsAPI(
        base_url=f"{url}/v1/completions",
        model=options.pop("model", "tiny"),
        tokenizer=str(folder),
        tokenizer_backend="huggingface",
        **options,
    )


def requests(pairs: list[tuple[str, str]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=number)
        for number, pair in enumerate(pairs)
    ]


def drawn_pairs() -> list[tuple[str, str]]:
    """Draw contexts with two continuations each, including the model's own greedy one."""
    generator = random.Random(4)
    words = "the a light first dawn star river stone bird".split()
    loaded = tiny_loaded()
    found = []
    for count in (1, 2, 5, 9):
        context = " ".join(generator.choices(words, k=count))
        decoder = BatchDecoder(loaded.model, 1, CONTEXT)
        likeliest = int(decoder.add(tiny_tokenizer().encode_prompt(context)).argmax())
        greedy = tiny_tokenizer().decode([likeliest])
        found += [(context, " " + generator.choice(words)), (context, greedy)]
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 3},
        {"batch_size": 3, "tokenized_requests": False},
        {"batch_size": 1, "tokenized_requests": False},
        {"batch_size": 2, "num_concurrent": 3},
    ],
    ids=["ids", "texts", "one text", "concurrent"],
)
def test_lm_eval_client_log_likelihoods_match_built_in_ones(
    options: dict[str, Any], tmp_path: Path
) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    pairs = drawn_pairs()
    encoded = [encode_choices(tiny_tokenizer(), context, [end])[0] for context, end in pairs]
    expected = likelihoods(tiny_model(), encoded, batch_size=4)
    with live() as server:
        lm = local_completions(server.url, tmp_path, max_length=CONTEXT, **options)
        found = lm.loglikelihood(requests(pairs), disable_tqdm=True)
    assert [p for p, _ in found] == pytest.approx([one.logprob for one in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [one.is_greedy for one in expected]
    assert {one.is_greedy for one in expected} == {True, False}


@pytest.mark.parametrize("count", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_lm_eval_client_hellaswag_scores_match_built_in_scorer(shared: Path, count: int) -> None:
    folder = shared / "models" / "stories260K"
    loaded: LoadedModel = load_model(folder, dtype=torch.float32)
    assert loaded.tokenizer is not None
    items = read_hellaswag(shared / "data" / "hellaswag-val-2k.jsonl", count)
    context = loaded.model.config.max_position_embeddings
    pairs = encode_items(items, loaded.tokenizer, context, "")
    expected = answer_items(loaded.model, items, pairs, batch_size=32)
    asked = requests([(item.context, f" {end}") for item in items for end in item.choices])
    decoder: Any = _Released(loaded.model, 8, context)
    with live(decoder, loaded=loaded) as server:
        # The tokenizer adds <s> before a text, so the harness must do so, too.
        lm = local_completions(
            server.url, folder, batch_size=16, max_length=context, add_bos_token=True
        )
        scored = [p for p, _ in lm.loglikelihood(asked, disable_tqdm=True)]
    found = [scored[n : n + 4] for n in range(0, len(scored), 4)]
    best = [row.index(max(row)) == item.gold for row, item in zip(found, items, strict=True)]
    assert sum(best) / count == accuracies(expected)["acc"].value
    assert best == [answer.acc for answer in expected]
    for row, answer in zip(found, expected, strict=True):
        assert row == pytest.approx(answer.logprobs, abs=1e-4)


class _Released(BatchDecoder):
    """A plain decoder in place of a watched one."""

    def release(self) -> None:
        """Do nothing: this decoder is never held."""
