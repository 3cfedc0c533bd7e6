"""Small random models of every family, here and in transformers, from the same draws."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
import transformers
from torch import Tensor, nn

from firstlight.models import (
    FAMILIES,
    GPT2Config,
    LlamaConfig,
    Model,
    ModelConfig,
    MoEConfig,
    empty_model,
)
from firstlight.tokenizer import Tokenizer
from firstlight.weights.huggingface import model_files
from firstlight.weights.loading import weights_to_save

transformers.utils.logging.disable_progress_bar()

VOCABULARY = 53
TOKENS = 40
NAMES = list(FAMILIES)

T = TypeVar("T")
#: Chooses one of some values: `random.Random(seed).choice`, or hypothesis.
Choose = Callable[[Sequence[Any]], Any]

_HF_CONFIGS = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "granite": transformers.GraniteConfig,
    "mixtral": transformers.MixtralConfig,
    "qwen3_moe": transformers.Qwen3MoeConfig,
}


def draw(family: str, seed: int) -> ModelConfig:
    """The config of a seed."""
    return draw_config(family, random.Random(seed).choice)


def draw_config(family: str, choose: Choose) -> ModelConfig:
    """1 to 3 layers, odd sizes, all kinds of heads, rotary scalings far beyond their original
    context, tied or not."""
    if family == "gpt2":
        return _draw_gpt2(choose)
    kv_heads = choose((1, 2, 3))
    heads = kv_heads * choose((1, 2, 3, 5))
    layers = choose((1, 2, 3))
    keys: dict[str, Any] = {
        "model_type": family,
        "vocab_size": VOCABULARY,
        # transformers refuses other widths of Llamas, though their heads' size is given, too.
        "hidden_size": heads * choose((2, 3, 4)) + (0 if family == "llama" else choose((0, 1))),
        "intermediate_size": choose((11, 32)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": choose((2, 6, 8)),
        "max_position_embeddings": 64,
        "rms_norm_eps": choose((1e-6, 1e-5, 1e-3)),
        "rope_theta": choose((50.0, 10_000.0, 500_000.0)),
        "rope_scaling": _draw_rope(choose),
        "tie_word_embeddings": choose((True, False)),
    }
    if family in ("llama", "granite", "qwen3", "qwen3_moe"):
        keys["attention_bias"] = choose((True, False))
    if family in ("llama", "granite"):
        keys["mlp_bias"] = choose((True, False))
    else:
        keys["sliding_window"] = choose((None, 7, 100))
    if family == "granite":
        keys["embedding_multiplier"] = choose((1.0, 6.0, 12.0))
        keys["attention_multiplier"] = choose((None, 0.0078125, 0.3, 1.0))
        keys["residual_multiplier"] = choose((1.0, 0.22))
        keys["logits_scaling"] = choose((1.0, 3.0, 8.0))
    if family in ("qwen2", "qwen3") and keys["sliding_window"]:
        keys["max_window_layers"] = choose(range(layers))
    if family in ("mixtral", "qwen3_moe"):
        keys |= _draw_experts(family, layers, choose)
        return MoEConfig(**keys)
    return LlamaConfig(**keys)


def _draw_gpt2(choose: Choose) -> GPT2Config:
    heads = choose((1, 2, 3, 5))
    return GPT2Config(
        vocab_size=VOCABULARY,
        hidden_size=heads * choose((3, 4, 7, 8)),
        intermediate_size=choose((0, 13, 24)),
        num_hidden_layers=choose((1, 2, 3)),
        num_attention_heads=heads,
        max_position_embeddings=choose((TOKENS, 64)),
        activation_function=choose(("gelu_new", "gelu")),
        layer_norm_epsilon=choose((1e-5, 1e-3)),
        tie_word_embeddings=choose((True, False)),
    )


def _draw_rope(choose: Choose) -> dict[str, Any] | None:
    kind = choose((None, "linear", "llama3"))
    if kind is None:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": choose((2.0, 3.5))}
    return {
        "rope_type": "llama3",
        "factor": choose((8.0, 32.0)),
        "low_freq_factor": 1.0,
        "high_freq_factor": choose((2.0, 4.0)),
        "original_max_position_embeddings": choose((8, 16, 32)),
    }


def _draw_experts(family: str, layers: int, choose: Choose) -> dict[str, Any]:
    experts = choose((1, 3, 4, 9))
    keys = {
        "num_experts": experts,
        "num_experts_per_tok": choose(range(1, min(experts, 4) + 1)),
        "router_aux_loss_coef": choose((0.0, 0.02, 1.0)),
    }
    if family == "mixtral":
        return keys
    sparse_step = choose(range(1, layers + 1))
    first = choose((True, False)) and sparse_step == 1 and layers > 1
    return keys | {
        "moe_intermediate_size": choose((8, 9)),
        "norm_topk_prob": choose((True, False)),
        "decoder_sparse_step": sparse_step,
        "mlp_only_layers": [0] if first else [],
    }


def hf_config(config: ModelConfig) -> Any:
    """transformers' own config object, put together without a file of firstlight's."""
    if isinstance(config, GPT2Config):
        return transformers.GPT2Config(
            vocab_size=config.vocab_size,
            n_embd=config.hidden_size,
            # transformers' way of saying 4 n_embd is None
            n_inner=None
            if config.intermediate_size == 4 * config.hidden_size
            else config.intermediate_size,
            n_layer=config.num_hidden_layers,
            n_head=config.num_attention_heads,
            n_positions=config.max_position_embeddings,
            layer_norm_epsilon=config.layer_norm_epsilon,
            activation_function=config.activation_function,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            tie_word_embeddings=config.tie_word_embeddings,
            bos_token_id=None,
            eos_token_id=None,
        )
    rope = config.rope_scaling.model_dump() if config.rope_scaling else {"rope_type": "default"}
    family = config.model_type
    keys = set(type(config).model_fields) - {"model_type", "rope_theta", "rope_scaling"}
    if family not in ("llama", "granite"):
        keys -= {"mlp_bias"}
    if family != "granite":
        keys -= {"embedding_multiplier", "attention_multiplier", "residual_multiplier"}
        keys -= {"logits_scaling"}
    if family not in ("llama", "granite", "qwen3", "qwen3_moe"):
        keys -= {"attention_bias"}
    values = {name: getattr(config, name) for name in keys}
    if family in ("llama", "granite", "mistral", "mixtral", "qwen3_moe"):
        del values["max_window_layers"]
    if family in ("llama", "granite"):
        del values["sliding_window"]
    if family.startswith("qwen"):
        values["use_sliding_window"] = config.sliding_window is not None
    if "max_window_layers" in values and config.sliding_window is None:
        values["max_window_layers"] = config.num_hidden_layers
    if family == "mixtral":
        values["num_local_experts"] = values.pop("num_experts")
        for name in (
            *("moe_intermediate_size", "norm_topk_prob"),
            *("decoder_sparse_step", "mlp_only_layers"),
        ):
            del values[name]
    return _HF_CONFIGS[family](
        **values,
        rope_parameters={"rope_theta": config.rope_theta, **rope},
        bos_token_id=None,
        eos_token_id=None,
    )


@torch.no_grad()
def randomize(model: nn.Module, seed: int) -> None:
    """Weights under which every parameter matters and logits are of the order of 1."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.3, generator=generator)
        if parameter.dim() == 1:
            parameter.add_(0.7)


def hf_model(config: ModelConfig, seed: int) -> Any:
    # Its grouped products need sizes of multiples of 16 bytes.
    model = transformers.AutoModelForCausalLM.from_config(
        hf_config(config), experts_implementation="eager"
    ).eval()
    randomize(model, seed)
    return model


def own_model(config: ModelConfig, seed: int) -> Model:
    model = empty_model(config)
    randomize(model, seed)
    return model.eval()


def write_folder(folder: Path, model: Model, tokenizer: Tokenizer) -> Path:
    """A model folder, as a checkpoint is one."""
    folder.mkdir(exist_ok=True)
    for name, content in model_files(model.config, tokenizer).items():
        (folder / name).write_text(content, encoding="utf-8")
    safetensors.torch.save_file(
        weights_to_save(model), folder / "model.safetensors", metadata={"format": "pt"}
    )
    return folder


def some_ids(seed: int, rows: int = 2, tokens: int = TOKENS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (rows, tokens), generator=generator)


def assert_same_logits(own: Model, theirs: Any, seed: int = 0) -> None:
    ids = some_ids(seed)
    with torch.no_grad():
        logits, expected = own(ids), theirs(ids).logits
    assert expected.abs().max() > 0.05, "the comparison would say nothing"
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


def load_in_transformers(folder: Path) -> Any:
    """The model; every tensor of the file must have found its place, and none be left over."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, experts_implementation="eager"
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[problem], problem
    return model.eval()
