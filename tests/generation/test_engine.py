from __future__ import annotations

import dataclasses
import inspect
import math
from pathlib import Path

import pytest
import safetensors.torch
import torch

from builders import draw_weights
from firstlight.checkpoint.checkpoint import Checkpoint, save_checkpoint
from firstlight.errors import CheckpointError, ConfigError, ModelError, TokenizerError
from firstlight.generation.config import SamplingConfig
from firstlight.generation.engine import GenerationStream, generate, load
from firstlight.lora.loading import LoadedModel
from firstlight.models import GPT2Config, LlamaConfig, Model, ModelConfig, empty_model
from firstlight.tokenizer import Tokenizer, train_tokenizer
from firstlight.weights.huggingface import model_files, sampling_settings
from firstlight.weights.loading import weights_to_save
from generated import generate_ids

CONTEXT = 48
# Both models have more ids than the tokenizer, as with padded vocabularies.
LLAMA = LlamaConfig(
    vocab_size=352,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=CONTEXT,
)
GPT2 = GPT2Config(
    vocab_size=352,
    hidden_size=12,
    num_hidden_layers=2,
    num_attention_heads=3,
    max_position_embeddings=CONTEXT,
)
GREEDY = SamplingConfig(max_new_tokens=20, temperature=0)


def new_model(config: ModelConfig) -> Model:
    """Return a model with weights large enough that continuations are not constant."""
    model = empty_model(config).eval()
    draw_weights(model, 1, 0.6)
    return model


@pytest.fixture(params=[LLAMA, GPT2], ids=["llama", "gpt2"])
def model(request: pytest.FixtureRequest) -> Model:
    return new_model(request.param)


@pytest.fixture
def loaded(model: Model, tokenizer: Tokenizer) -> LoadedModel:
    return LoadedModel(model, tokenizer, (), Path("a-model"))


def greedy_by_full_passes(model: Model, prompt_ids: list[int], count: int) -> list[int]:
    """Reference implementation: run the whole text through the model for every new token, without a
    cache.
    """
    ids = list(prompt_ids)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt_ids) :]


# Choice of tokens


@pytest.mark.parametrize("prompt_ids", [[3], [5, 9, 301], list(range(20, 47))])
def test_generate_greedy_takes_most_likely_token_of_each_full_pass(
    model: Model, prompt_ids: list[int]
) -> None:
    count = min(20, CONTEXT - len(prompt_ids))
    expected = greedy_by_full_passes(model, prompt_ids, count)
    assert len(set(expected)) > 1 or count == 1
    assert list(generate_ids(model, prompt_ids, GREEDY)) == expected


def test_generate_settings_are_fields_of_sampling_config() -> None:
    # Arguments are matched by name, so a different name on one side would be ignored silently.
    given = set(inspect.signature(generate).parameters) - {"checkpoint", "prompt", "compile"}
    assert given <= {field.name for field in dataclasses.fields(SamplingConfig)}


def test_generate_stops_before_end_token(model: Model) -> None:
    unstopped = list(generate_ids(model, [3], GREEDY))
    end = unstopped[7]
    expected = unstopped[: unstopped.index(end)]
    assert list(generate_ids(model, [3], GREEDY, (999, end))) == expected
    assert list(generate_ids(model, [3], GREEDY, (unstopped[0],))) == []


def test_generate_stops_after_max_new_tokens(model: Model) -> None:
    for count in (1, 2, 13):
        config = SamplingConfig(max_new_tokens=count, temperature=0)
        assert len(list(generate_ids(model, [3], config))) == count


def test_generate_stops_at_end_of_context(model: Model) -> None:
    """The token at the last position of the context is predicted, and no position beyond it is
    used.
    """
    config = SamplingConfig(max_new_tokens=10_000, temperature=0)
    for length in (1, CONTEXT - 1):
        prompt_ids = [i % 300 + 1 for i in range(length)]
        assert len(list(generate_ids(model, prompt_ids, config))) == CONTEXT - length


def test_generate_max_new_tokens_does_not_determine_memory(model: Model) -> None:
    config = SamplingConfig(max_new_tokens=10**12, temperature=0)
    assert next(generate_ids(model, [3], config)) == greedy_by_full_passes(model, [3], 1)[0]


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 500])
def test_generate_prompt_filling_context_raises_config_error(model: Model, length: int) -> None:
    with pytest.raises(
        ConfigError, match=f"prompt has {length} tokens.* context of {CONTEXT} tokens"
    ):
        next(generate_ids(model, [1] * length, GREEDY))


def test_generate_empty_token_list_raises_config_error(model: Model) -> None:
    with pytest.raises(ConfigError, match="the prompt has no tokens"):
        next(generate_ids(model, [], GREEDY))


def test_generate_id_beyond_vocabulary_raises_model_error(model: Model) -> None:
    with pytest.raises(ModelError, match="token id 352, but the model's vocabulary has only 352"):
        next(generate_ids(model, [1, 352], GREEDY))


def test_generate_builds_no_graph_and_leaves_no_gradient(model: Model) -> None:
    list(generate_ids(model, [3], GREEDY))
    assert all(p.grad is None for p in model.parameters())
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_generate_stream_consumer_is_not_in_inference_mode(model: Model) -> None:
    for _ in generate_ids(model, [3], GREEDY):
        assert not torch.is_inference_mode_enabled()


# Text


def test_generate_result_joins_prompt_and_text(loaded: LoadedModel, tokenizer: Tokenizer) -> None:
    prompt = "the star falls"
    result = generate(loaded, prompt, max_new_tokens=20, temperature=0)
    prompt_ids = tokenizer.encode(prompt)
    assert result.prompt == prompt
    assert result.prompt_tokens == len(prompt_ids)
    assert result.token_ids == greedy_by_full_passes(loaded.model, prompt_ids, 20)
    assert result.finish_reason == "length"
    together = tokenizer.decode(prompt_ids + result.token_ids)
    assert together == prompt + result.text


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("prompt", ["", "the ", "日本 🙂"])
def test_generate_stream_pieces_join_to_text(
    loaded: LoadedModel, tokenizer: Tokenizer, seed: int, prompt: str
) -> None:
    """This also holds if pieces end inside a character."""
    config = SamplingConfig(max_new_tokens=30, temperature=4.0, seed=seed)
    stream = GenerationStream(loaded, prompt, config)
    pieces = list(stream)
    result = stream.result
    assert result is not None
    assert "".join(pieces) == result.text
    assert all(pieces)
    prompt_ids = tokenizer.encode_prompt(prompt)
    assert prompt + result.text == tokenizer.decode(prompt_ids + result.token_ids)


def test_generate_ids_unknown_to_tokenizer_add_no_text(
    loaded: LoadedModel, tokenizer: Tokenizer
) -> None:
    """Ids that pad the vocabulary can be sampled, and must not end the generation."""
    prompt_ids = tokenizer.encode("the")
    padded = 0
    for seed in range(6):
        result = generate(loaded, "the", max_new_tokens=30, temperature=4.0, seed=seed)
        assert len(result.token_ids) == 30
        known = [i for i in result.token_ids if i < tokenizer.vocab_size]
        assert "the" + result.text == tokenizer.decode(prompt_ids + known)
        padded += 30 - len(known)
    assert padded


def test_generate_stream_result_is_unavailable_before_end(loaded: LoadedModel) -> None:
    stream = GenerationStream(loaded, "the", SamplingConfig(max_new_tokens=9, seed=0))
    results = [stream.result for _ in stream]
    assert results
    assert set(results) == {None}
    assert stream.result is not None


def test_finish_reason_is_stop_at_end_token_even_in_last_position(
    loaded: LoadedModel,
) -> None:
    unstopped = generate(loaded, "the", max_new_tokens=20, temperature=0).token_ids
    first_seen = [i for i, token_id in enumerate(unstopped) if token_id not in unstopped[:i]]
    place = first_seen[-1]
    ended = LoadedModel(loaded.model, loaded.tokenizer, (unstopped[place],), loaded.folder)
    result = generate(ended, "the", max_new_tokens=place + 1, temperature=0)
    assert (result.token_ids, result.finish_reason) == (unstopped[:place], "stop")
    result = generate(ended, "the", max_new_tokens=max(place, 1), temperature=0)
    assert result.finish_reason == "length"


def test_finish_reason_is_length_at_end_of_context(loaded: LoadedModel) -> None:
    result = generate(loaded, "the", max_new_tokens=1000, temperature=0)
    assert result.finish_reason == "length"
    assert result.prompt_tokens + len(result.token_ids) == CONTEXT


def test_generate_empty_prompt_starts_from_document_separator(
    loaded: LoadedModel, tokenizer: Tokenizer
) -> None:
    assert tokenizer.eos_token_id is not None
    result = generate(loaded, "", max_new_tokens=9, temperature=0)
    assert result.prompt_tokens == 1
    assert result.token_ids == greedy_by_full_passes(loaded.model, [tokenizer.eos_token_id], 9)


@pytest.mark.parametrize("prompt", ["", "the star"])
def test_generate_prompt_starts_with_bos_if_tokenizer_adds_it(
    model: Model, texts: list[str], prompt: str
) -> None:
    backend = train_tokenizer(texts, 320, special_tokens=("</s>", "<s>")).backend
    tokenizer = Tokenizer(backend, bos_token="<s>", eos_token="</s>", add_bos=True)
    prompt_ids = [1, *tokenizer.encode(prompt)]
    result = generate(
        LoadedModel(model, tokenizer, (), Path()), prompt, max_new_tokens=9, temperature=0
    )
    assert result.prompt_tokens == len(prompt_ids)
    assert result.token_ids == greedy_by_full_passes(model, prompt_ids, 9)


def test_generate_empty_prompt_without_start_token_raises(
    model: Model, tokenizer: Tokenizer
) -> None:
    loaded = LoadedModel(model, Tokenizer(tokenizer.backend), (), Path())
    with pytest.raises(TokenizerError, match="neither bos_token nor eos_token"):
        generate(loaded, "")
    assert generate(loaded, "the", max_new_tokens=2).token_ids


def test_generate_model_without_tokenizer_raises_and_names_folder(model: Model) -> None:
    loaded = LoadedModel(model, None, (), Path("some/folder"))
    with pytest.raises(ModelError, match="some/folder has no tokenizer"):
        generate(loaded, "the")


def test_generate_control_token_in_prompt_is_plain_text(loaded: LoadedModel) -> None:
    result = generate(loaded, "<|endoftext|>", max_new_tokens=1, temperature=0)
    assert result.prompt_tokens > 1


# Seeds


def test_generate_same_seed_gives_same_text(loaded: LoadedModel) -> None:
    def ids(seed: int) -> list[int]:
        return generate(loaded, "the", max_new_tokens=20, temperature=1.5, seed=seed).token_ids

    assert ids(3) == ids(3)
    assert ids(3) != ids(4)


def test_generate_drawn_seed_is_reported_and_repeats_text(loaded: LoadedModel) -> None:
    first = generate(loaded, "the", max_new_tokens=20, temperature=1.5)
    again = generate(loaded, "the", max_new_tokens=20, temperature=1.5, seed=first.seed)
    assert again == first
    assert generate(loaded, "the", max_new_tokens=2).seed != first.seed


def test_generate_leaves_torch_generator_unchanged(loaded: LoadedModel) -> None:
    before = torch.get_rng_state()
    generate(loaded, "the", max_new_tokens=5, temperature=1.0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "values", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}, {"max_new_tokens": 0}]
)
def test_generate_settings_out_of_range_raise_config_error(
    loaded: LoadedModel, values: dict[str, float]
) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        generate(loaded, "the", **values)  # type: ignore[arg-type]


def test_sampling_settings_of_model_replace_defaults_only(loaded: LoadedModel) -> None:
    assert sampling_settings({"top_k": -1}) == {"top_k": 0}
    assert sampling_settings({"top_k": math.inf})["top_k"] > 320
    own = {"do_sample": True, "top_k": 5.0, "repetition_penalty": 1.5, "min_p": None}
    model = dataclasses.replace(loaded, generation=own)
    assert model.sampling == {"temperature": 1.0, "top_k": 5, "repetition_penalty": 1.5}
    expected = generate(
        loaded, "the", max_new_tokens=20, temperature=1.0, top_k=2, repetition_penalty=1.5, seed=1
    )
    assert generate(model, "the", max_new_tokens=20, top_k=2, seed=1) == expected
    greedy = dataclasses.replace(loaded, generation={"do_sample": False, "temperature": 0.6})
    assert greedy.sampling == {"temperature": 0.0}
    assert generate(greedy, "the", beams=2, seed=1) == generate(loaded, "the", beams=2, seed=1)
    wrong = dataclasses.replace(loaded, generation={"top_p": 0})
    with pytest.raises(ConfigError, match=r"generation_config.json: top_p must be"):
        generate(wrong, "the")


# Loading


def write_checkpoint(run: Path, step: int, model: Model, tokenizer: Tokenizer) -> Path:
    content = Checkpoint(model_files(model.config, tokenizer), weights_to_save(model), {}, {})
    return save_checkpoint(run, step, content)


def test_load_run_folder_uses_newest_complete_checkpoint(
    tmp_path: Path, model: Model, tokenizer: Tokenizer
) -> None:
    run = tmp_path / "run"
    older = write_checkpoint(run, 9, model, tokenizer)
    newest = write_checkpoint(run, 10, model, tokenizer)
    incomplete = run / "checkpoints" / "step-00000011"
    incomplete.mkdir()
    (incomplete / "config.json").write_text("{}")
    assert load(run).folder == newest
    assert load(older).folder == older
    assert load(str(newest)).folder == newest


def test_load_damaged_checkpoint_raises_checkpoint_error(
    tmp_path: Path, model: Model, tokenizer: Tokenizer
) -> None:
    folder = write_checkpoint(tmp_path / "run", 5, model, tokenizer)
    weights = safetensors.torch.load((folder / "model.safetensors").read_bytes())
    weights = {name: tensor + 1 for name, tensor in weights.items()}
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    for name in (folder, tmp_path / "run"):
        with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
            load(name)


def test_load_run_without_checkpoint_raises_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="has no complete checkpoint yet"):
        load(tmp_path)


def test_generate_accepts_folder(tmp_path: Path, model: Model, tokenizer: Tokenizer) -> None:
    folder = write_checkpoint(tmp_path / "run", 5, model, tokenizer)
    result = generate(folder, "the", max_new_tokens=4, temperature=0)
    assert result.token_ids == greedy_by_full_passes(model, tokenizer.encode("the"), 4)
