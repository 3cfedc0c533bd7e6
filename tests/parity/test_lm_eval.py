"""lm-evaluation-harness: its transformers backend, its tasks with firstlight's model class, and the
built-in scorer give the same results.
"""

from __future__ import annotations

import json
import random
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn import own_model, write_folder
from tokenizers.processors import TemplateProcessing

from builders import slow_but
from firstlight.errors import ConfigError, InputError
from firstlight.evaluation.scores import TaskResult
from firstlight.evaluation.tasks import evaluate_tasks, item_of, read_hellaswag
from firstlight.lora.loading import LoadedModel, load_model
from firstlight.models import GPT2Config, LlamaConfig
from firstlight.tokenizer import Tokenizer, train_tokenizer

pytest.importorskip("lm_eval")

# Warnings from the import and use of the harness and its dependencies do not concern firstlight.
pytestmark = pytest.mark.filterwarnings("ignore")

CHAT = (
    "{{ bos_token or '' }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_WORDS = "the a light first dawn star river stone bird green small old sings falls runs".split()


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make every network access fail, and keep the user's cache unchanged."""

    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture(scope="module", params=["gpt2", "llama with bos"])
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> Path:
    """Return a random model with a context of 48 tokens, and a tokenizer that the harness can
    load.
    """
    if request.param == "gpt2":
        tokenizer = train_tokenizer(texts, 320)
        config: Any = GPT2Config(
            vocab_size=320,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=48,
        )
    else:
        backend = train_tokenizer(texts, 320, special_tokens=("</s>", "<s>")).backend
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        tokenizer = Tokenizer(backend, bos_token="<s>", eos_token="</s>", add_bos=True)
        config = LlamaConfig(
            vocab_size=320,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=48,
        )
    place = tmp_path_factory.mktemp("model")
    return write_folder(place, own_model(config, 3), tokenizer)


def hflm(folder: Path, **options: Any) -> Any:
    """Return the harness's own backend."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(str(folder), device="cpu", dtype="float32", batch_size=8, **options)


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type=kind, doc={}, arguments=args, idx=i)
        for i, args in enumerate(arguments)
    ]


def own_lm(folder: Path, batch_size: int = 4) -> Any:
    from firstlight.evaluation.tasks import harness_model

    return harness_model(load_model(folder, dtype=torch.float32), batch_size, None)


def words(generator: random.Random, count: int) -> str:
    return " ".join(generator.choices(_WORDS, k=count))


def pairs() -> list[tuple[str, str]]:
    """Return contexts and continuations: shared and single, truncated, empty, with spaces at the
    boundary.
    """
    generator = random.Random(5)
    found = [
        (context, f" {words(generator, generator.randint(1, 6))}")
        for context in (words(generator, n) for n in (1, 3, 3, 7, 12, 60))
        for _ in range(3)
    ]
    return [
        *found,
        ("", " the light"),
        ("", "dawn"),
        ("the star  ", "sings"),
        ("the star\n", " sings"),
        ("ä 🙂 日本", " ö"),
        ("<s> the old", " stone"),
        ("the old</s>", " stone"),
    ]


def test_lm_eval_loglikelihoods_match_its_own_backend(folder: Path) -> None:
    own = own_lm(folder).loglikelihood(requests("loglikelihood", pairs()))
    theirs = hflm(folder).loglikelihood(requests("loglikelihood", pairs()), disable_tqdm=True)
    assert [greedy for _, greedy in own] == [greedy for _, greedy in theirs]
    assert [p for p, _ in own] == pytest.approx([p for p, _ in theirs], abs=1e-4)
    assert min(p for p, _ in own) < -10


def test_lm_eval_rolling_loglikelihoods_match_its_own_backend(folder: Path) -> None:
    generator = random.Random(6)
    texts = [(words(generator, count),) for count in (1, 5, 40, 47, 48, 49, 150)]
    own = own_lm(folder).loglikelihood_rolling(requests("loglikelihood_rolling", texts))
    theirs = hflm(folder).loglikelihood_rolling(
        requests("loglikelihood_rolling", texts), disable_tqdm=True
    )
    assert own == pytest.approx(theirs, abs=1e-3, rel=1e-5)


def test_lm_eval_greedy_texts_match_its_own_backend(folder: Path) -> None:
    """One text at a time, because padding on the left shifts GPT-2's positions in transformers,
    too.
    """
    generator = random.Random(7)
    asked = [
        (words(generator, count), {"until": until, "max_gen_toks": most, "do_sample": False})
        for count in (1, 4, 9, 60)
        for most, until in ((9, []), (2, ["\n"]), (14, ["e", "qu"]), (5, []), (12, ["a light"]))
    ]
    own = own_lm(folder, batch_size=3).generate_until(requests("generate_until", asked))
    backend = hflm(folder)
    theirs = [
        text
        for args in asked
        for text in backend.generate_until(requests("generate_until", [args]), disable_tqdm=True)
    ]
    assert own == theirs
    assert len(set(own)) > 4
    assert any(len(text) > 10 for text in own)


def test_lm_eval_sampling_is_reproducible_and_differs_by_request(folder: Path) -> None:
    asked = [("the light", {"until": [], "max_gen_toks": 9, "do_sample": True, "temperature": 1.0})]
    lm = own_lm(folder)
    first = lm.generate_until(requests("generate_until", asked * 3))
    assert lm.generate_until(requests("generate_until", asked * 3)) == first
    assert len(set(first)) == 3


def test_lm_eval_unknown_generation_option_raises_config_error(folder: Path) -> None:
    asked = [("the light", {"until": [], "num_beams": 4})]
    with pytest.raises(ConfigError, match="generation_kwargs contain num_beams"):
        own_lm(folder).generate_until(requests("generate_until", asked))


def test_lm_eval_more_tokens_than_context_raises_input_error(folder: Path) -> None:
    with pytest.raises(InputError, match=r"requests 256 new tokens, .* has room for only 48"):
        own_lm(folder).generate_until(requests("generate_until", [("the light", {})]))
    long = requests("loglikelihood", [("the light", " the" * 60)])
    with pytest.raises(InputError, match=r"a text of \d+ tokens to score"):
        own_lm(folder).loglikelihood(long)


# HellaSwag with all three


def write_items(path: Path, count: int) -> Path:
    """Write items in the file's format, with a random correct ending."""
    generator = random.Random(8)
    rows = []
    for _ in range(count):
        endings = [words(generator, generator.randint(1, 8)) + "." for _ in range(4)]
        label = generator.randrange(4)
        context = f"{words(generator, generator.randint(2, 30))}. the  bird [step]"
        rows.append({"activity_label": "Dawn", "ctx": context, "endings": endings, "label": label})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_task(folder: Path, file: Path) -> Path:
    """Return the harness's hellaswag task on a file that has `ctx` instead of its two parts."""
    folder.mkdir()
    (folder / "own.py").write_text(
        "from lm_eval.tasks.hellaswag.utils import preprocess\n"
        "def process_docs(dataset):\n"
        "    return dataset.map(lambda doc: {\n"
        "        'query': preprocess(doc['activity_label'] + ': ' + doc['ctx']),\n"
        "        'choices': [preprocess(e) for e in doc['endings']], 'gold': doc['label']})\n"
    )
    (folder / "own.yaml").write_text(
        f"""task: own_hellaswag
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {json.dumps(str(file))}}}}}
output_type: multiple_choice
validation_split: validation
process_docs: !function own.process_docs
doc_to_text: "{{{{query}}}}"
doc_to_target: "{{{{label}}}}"
doc_to_choice: "choices"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""
    )
    return folder


def by_their_backend(
    model: Path, tasks: Path, limit: int | None, task: str = "own_hellaswag", **options: Any
) -> dict[str, float]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    found = simple_evaluate(
        hflm(model),
        tasks=[task],
        limit=limit,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        log_samples=True,
        **options,
    )
    figures = found["results"][task]
    return {
        name: figures[f"{name},none"]
        for name in ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr")
    } | {"samples": found["samples"][task]}


def assert_three_agree(model: Path, file: Path, tasks: Path, limit: int | None) -> TaskResult:
    """Check that the accuracies are equal, and the log-likelihoods equal up to rounding."""
    from firstlight.evaluation.tasks import answer_items, encode_items

    theirs = by_their_backend(model, tasks, limit)
    samples: Any = theirs.pop("samples")
    loaded = load_model(model, dtype=torch.float32)
    (own,) = evaluate_tasks(loaded, f"hellaswag,{file}", items=limit)
    (bridged,) = evaluate_tasks(
        loaded, "lm-eval:own_hellaswag", items=limit, task_folder=tasks, batch_size=16
    )
    assert (own.task, bridged.task) == ("hellaswag", "own_hellaswag")
    assert own.items == bridged.items == len(samples)
    assert own.figures() == pytest.approx(theirs, rel=1e-12)
    assert bridged.figures() == pytest.approx(theirs, rel=1e-12)
    assert bridged.item_scores == own.item_scores
    items = read_hellaswag(file, limit)
    context = loaded.model.config.max_position_embeddings
    assert loaded.tokenizer is not None
    pairs = encode_items(items, loaded.tokenizer, context, "")
    answers = answer_items(loaded.model, items, pairs, batch_size=32)
    expected = [[float(p[0]) for p in sample["filtered_resps"]] for sample in samples]
    np.testing.assert_allclose([a.logprobs for a in answers], expected, atol=1e-4, rtol=1e-6)
    return own


def test_hellaswag_three_scoring_paths_agree(folder: Path, tmp_path: Path) -> None:
    file = write_items(tmp_path / "items.jsonl", 40)
    result = assert_three_agree(folder, file, write_task(tmp_path / "tasks", file), None)
    assert 0 < result.metrics["acc"].value < 1
    assert result.metrics["acc"] != result.metrics["acc_norm"]


def _shared_agreement(shared: Path, tmp_path: Path, limit: int | None) -> TaskResult:
    file = shared / "data" / "hellaswag-val-2k.jsonl"
    tasks = write_task(tmp_path / "tasks", file)
    return assert_three_agree(shared / "models" / "stories260K", file, tasks, limit)


def test_hellaswag_score_of_trained_model_matches_lm_eval(shared: Path, tmp_path: Path) -> None:
    assert _shared_agreement(shared, tmp_path, 20).items == 20


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hellaswag_score_over_2000_items_matches_lm_eval(shared: Path, tmp_path: Path) -> None:
    result = _shared_agreement(shared, tmp_path, None)
    assert result.items == 2000
    assert result.metrics["acc"].value == pytest.approx(0.268)


def test_hellaswag_original_rows_are_formatted_like_lm_eval() -> None:
    import datasets
    from lm_eval.tasks.hellaswag.utils import process_docs

    rows = [
        {
            "ind": 4,
            "activity_label": "Removing ice from car",
            "ctx_a": "Then, the man writes over the snow  covering the window.",
            "ctx_b": "then",
            "ctx": "not looked at",
            "endings": [", the man adds wax.", " a [b] person", "x [title] Y", "[header] so"],
            "label": "3",
        },
        {
            "ind": 5,
            "activity_label": " Home and Garden",
            "ctx_a": "[header] How to  do [title] It [step] Well",
            "ctx_b": "",
            "ctx": "",
            "endings": ["a", "B  c", "d", "ÄÖ 🙂"],
            "label": "0",
        },
    ]
    for row, theirs in zip(rows, process_docs(datasets.Dataset.from_list(rows)), strict=True):
        item = item_of(row)
        assert item.context == theirs["query"]
        assert list(item.choices) == theirs["choices"]
        assert item.gold == theirs["gold"]


# The bridge


@pytest.fixture
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder, dtype=torch.float32)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    return write_task(tmp_path / "tasks", write_items(tmp_path / "items.jsonl", 6))


def test_lm_eval_bridge_writes_nothing_to_stdout_and_keeps_random_state(
    loaded: LoadedModel, tasks: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    expected = (torch.rand(3).tolist(), random.random(), np.random.rand())
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    seen: list[tuple[int, int]] = []
    evaluate_tasks(
        loaded,
        "lm-eval:own_hellaswag",
        task_folder=tasks,
        batch_size=8,
        on_texts=lambda done, total: seen.append((done, total)),
    )
    assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == expected
    assert capfd.readouterr().out == ""
    assert seen[-1] == (24, 24)
    assert len(seen) > 1


def test_lm_eval_task_evaluated_twice_gives_same_result(loaded: LoadedModel, tasks: Path) -> None:
    from firstlight.evaluation.tasks import ready_tasks

    (task,) = ready_tasks(["lm-eval:own_hellaswag"], loaded, items=4, task_folder=tasks)
    first = task.evaluate(loaded, batch_size=8)
    assert task.evaluate(loaded, batch_size=8) == first
    assert first[0].items == 4


@pytest.mark.parametrize("asked", slow_but([None], [True, None]))
def test_lm_eval_chat_template_is_applied_to_tasks_requesting_it(
    loaded: LoadedModel,
    tasks: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    asked: bool | None,
) -> None:
    """Prompts and scores equal those of the harness's own backend, also for an answer that is
    already started.
    """
    assert loaded.tokenizer is not None
    place = tmp_path / "chat"
    write_folder(place, loaded.model, loaded.tokenizer.extended([], CHAT))
    history = [{"role": r, "content": f"the {r}"} for r in ("system", "user", "assistant")]
    own, theirs = own_lm(place), hflm(place)
    for count, begins in ((2, True), (3, False)):
        expected = theirs.apply_chat_template(history[:count], add_generation_prompt=begins)
        assert own.apply_chat_template(history[:count], add_generation_prompt=begins) == expected
    text = (tasks / "own.yaml").read_text().replace("own_hellaswag", "chat_hellaswag")
    (tasks / "chat.yaml").write_text(f"{text}metadata: {{apply_chat_template: true}}\n")
    names = "lm-eval:own_hellaswag,chat_hellaswag"
    found = evaluate_tasks(place, names, task_folder=tasks, chat_template=asked, device="cpu")
    for result, applied in zip(found, (bool(asked), True), strict=True):
        options = {"apply_chat_template": applied, "fewshot_as_multiturn": applied}
        expected = by_their_backend(place, tasks, None, result.task, **options)
        assert result.chat_template == applied
        assert result.figures() == {name: expected[name] for name in result.figures()}
    said = capfd.readouterr().err
    assert ("not applied to own_hellaswag (add --apply-chat-template to apply it)" in said) != asked
    with pytest.raises(ConfigError, match="has no chat template"):
        evaluate_tasks(loaded, names, task_folder=tasks, chat_template=True)


def test_lm_eval_generation_task_is_scored(loaded: LoadedModel, tmp_path: Path) -> None:
    """Its output goes to stderr, and its standard error comes from the bootstrap if there is no
    formula.
    """
    (tmp_path / "asked.jsonl").write_text(
        "".join(json.dumps({"q": f"the {w}", "a": "the"}) + "\n" for w in _WORDS[:4])
    )
    place = tmp_path / "generating"
    place.mkdir()
    (place / "own.yaml").write_text(
        f"""task: own_generation
dataset_path: json
dataset_kwargs: {{data_files: {{test: {json.dumps(str(tmp_path / "asked.jsonl"))}}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{q}}}}"
doc_to_target: "{{{{a}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 5, do_sample: false}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""
    )
    (result,) = evaluate_tasks(loaded, "lm-eval:own_generation", task_folder=place)
    assert 0 <= result.metrics["exact_match"].value <= 1
    assert result.items == 4


def test_lm_eval_missing_task_folder_is_named(loaded: LoadedModel, tasks: Path) -> None:
    with pytest.raises(ConfigError, match=r"task folder .* does not exist"):
        evaluate_tasks(loaded, "lm-eval:own_hellaswag", task_folder=tasks / "nowhere")


def test_lm_eval_task_without_data_raises_input_error(loaded: LoadedModel, tmp_path: Path) -> None:
    place = write_task(tmp_path / "broken", tmp_path / "missing.jsonl")
    with pytest.raises(InputError, match="lm-eval:own_hellaswag can't be loaded"):
        evaluate_tasks(loaded, "lm-eval:own_hellaswag", task_folder=place)


@pytest.mark.slow
def test_lm_eval_unknown_task_is_named_with_nearest(loaded: LoadedModel, tasks: Path) -> None:
    """All tasks of the harness are listed first, which takes seconds."""
    with pytest.raises(ConfigError, match=r"unknown \(did you mean 'own_hellaswag'\?\)"):
        evaluate_tasks(loaded, "lm-eval:own_hellasweg", task_folder=tasks)
