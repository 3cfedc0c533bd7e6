"""Small random models of every family, in firstlight and transformers, from the same seeds."""

from __future__ import annotations

import random
from collections import Counter
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
    GptOssConfig,
    Model,
    ModelConfig,
    MoEConfig,
    empty_model,
)
from firstlight.models.llama_config import DecoderConfig
from firstlight.tokenizer import Tokenizer
from firstlight.weights.huggingface import model_files
from firstlight.weights.loading import weights_to_save

transformers.utils.logging.disable_progress_bar()

VOCABULARY = 53
TOKENS = 40
NAMES = list(FAMILIES)
#: Values that older releases compute differently are not drawn with them: a GPU machine has its own
#: release.
_RELEASE = tuple(int(number) for number in transformers.__version__.split(".")[:2])

T = TypeVar("T")
#: Chooses one of several values: `random.Random(seed).choice`, or hypothesis.
Choose = Callable[[Sequence[Any]], Any]

_HF_CONFIGS = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "ministral3": transformers.Ministral3Config,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "granite": transformers.GraniteConfig,
    "mixtral": transformers.MixtralConfig,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "smollm3": transformers.SmolLM3Config,
    "phi3": transformers.Phi3Config,
    "olmo2": transformers.Olmo2Config,
    "olmo3": transformers.Olmo3Config,
    "arcee": transformers.ArceeConfig,
    "glm4": transformers.Glm4Config,
    "gemma2": transformers.Gemma2Config,
    "gemma3_text": transformers.Gemma3TextConfig,
    "stablelm": transformers.StableLmConfig,
    "gpt_neox": transformers.GPTNeoXConfig,
    "nanochat": transformers.NanoChatConfig,
    "gpt_oss": transformers.GptOssConfig,
    "deepseek_v2": transformers.DeepseekV2Config,
    "deepseek_v3": transformers.DeepseekV3Config,
    "qwen3_next": transformers.Qwen3NextConfig,
    "qwen3_5_text": transformers.Qwen3_5TextConfig,
    "lfm2": transformers.Lfm2Config,
    "qwen3_5_moe_text": transformers.Qwen3_5MoeTextConfig,
}

_BIASES = ("attention_bias",)
_GEMMA = ("attention_bias", "sliding_window", "query_pre_attn_scalar", "final_logit_softcapping")
_EXPERTS = ("num_experts_per_tok", "router_aux_loss_coef")
_LATENT = (
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("num_experts", "num_experts_per_tok", "n_shared_experts", "moe_intermediate_size"),
    *("n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob"),
    *("first_k_dense_replace", "router_aux_loss_coef"),
)
_LINEAR = (
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads"),
)
_OF_DEEPSEEK = {"num_experts": "n_routed_experts", "router_aux_loss_coef": "aux_loss_alpha"}
#: Keys of a family in addition to the common keys, with the same name in firstlight and
#: transformers.
_OWN_KEYS: dict[str, tuple[str, ...]] = {
    "llama": ("attention_bias", "mlp_bias"),
    "mistral": ("sliding_window",),
    "ministral3": ("sliding_window",),
    "qwen2": ("sliding_window",),
    "qwen3": ("attention_bias", "sliding_window"),
    "granite": (
        *("attention_bias", "mlp_bias", "embedding_multiplier", "attention_multiplier"),
        *("residual_multiplier", "logits_scaling"),
    ),
    "mixtral": ("sliding_window", *_EXPERTS),
    "qwen3_moe": (
        *("attention_bias", "sliding_window", "num_experts", "moe_intermediate_size"),
        *("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", *_EXPERTS),
    ),
    "smollm3": ("attention_bias", "mlp_bias", "sliding_window", "no_rope_layers"),
    "phi3": ("sliding_window",),
    "olmo2": _BIASES,
    "olmo3": ("attention_bias", "sliding_window"),
    "arcee": ("attention_bias", "mlp_bias"),
    "glm4": _BIASES,
    "gemma2": (*_GEMMA, "attn_logit_softcapping"),
    "gemma3_text": _GEMMA,
    "stablelm": ("attention_bias", "qk_layernorm", "use_parallel_residual"),
    "gpt_neox": ("attention_bias", "use_parallel_residual", "hidden_act"),
    "nanochat": ("attention_bias", "final_logit_softcapping"),
    "gpt_oss": ("attention_bias", "sliding_window", "swiglu_alpha", "swiglu_limit", *_EXPERTS),
    "deepseek_v2": ("attention_bias", "mlp_bias", *_LATENT),
    "deepseek_v3": ("attention_bias", "rope_interleave", *_LATENT),
    "qwen3_next": (
        *("attention_bias", "num_experts", "moe_intermediate_size", "norm_topk_prob"),
        *("decoder_sparse_step", "mlp_only_layers", *_EXPERTS, *_LINEAR),
        "shared_expert_intermediate_size",
    ),
    "qwen3_5_text": ("attention_bias", *_LINEAR),
    "lfm2": ("conv_L_cache",),
    "qwen3_5_moe_text": (
        *("attention_bias", "num_experts", "moe_intermediate_size", *_EXPERTS, *_LINEAR),
        "shared_expert_intermediate_size",
    ),
}
#: transformers' names of keys that have another name in a family.
_OTHER_NAMES = {
    "lfm2": {"rms_norm_eps": "norm_eps"},
    "stablelm": {"rms_norm_eps": "layer_norm_eps", "attention_bias": "use_qkv_bias"},
    "gpt_neox": {"rms_norm_eps": "layer_norm_eps"},
    "deepseek_v2": _OF_DEEPSEEK,
    "deepseek_v3": _OF_DEEPSEEK,
}
#: Families whose heads divide the hidden size.
_LAYER_NORMS = ("stablelm", "gpt_neox")
_SHARES_WIDTH = ("phi3", "lfm2", *_LAYER_NORMS)
_DIVIDES_WIDTH = ("deepseek_v2", "llama", "arcee", "gemma2", "gemma3_text", *_SHARES_WIDTH)
#: Families with a sliding window in some of their layers.
_PATTERNS = ("olmo3", "gemma2", "gemma3_text", "gpt_oss")
#: Families with linear attention.
_DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def draw(family: str, seed: int) -> ModelConfig:
    """Return the config for a seed."""
    return draw_config(family, random.Random(seed).choice)


def spread(family: str, count: int) -> list[ModelConfig]:
    """Return this many configs, over which the values of each choice are spread evenly. With as
    many configs as a choice has values, all of these occur, in random combinations.

    Two choices between the same values within one config are distinguished by their order.
    """
    generator = random.Random(f"{family} {count}")
    left: dict[tuple[str, int], list[Any]] = {}
    made: Counter[str] = Counter()

    def choose(values: Sequence[T]) -> T:
        made[str(values)] += 1
        rest = left.setdefault((str(values), made[str(values)]), [])
        if not rest:
            rest.extend(generator.sample(values, len(values)))
        value: T = rest.pop()
        return value

    configs = []
    for _ in range(count):
        made.clear()
        configs.append(draw_config(family, choose))
    return configs


def draw_config(family: str, choose: Choose) -> ModelConfig:
    """Draw a config with 1 to 3 layers, odd sizes, all kinds of heads, rotary scalings far beyond
    the original context, and tied or untied heads.
    """
    if family == "gpt2":
        return _draw_gpt2(choose)
    kv_heads = choose((1, 2, 3))
    heads = kv_heads * choose((1, 2, 3, 5))
    if family in ("gpt_neox", "deepseek_v2", "deepseek_v3"):
        kv_heads = heads
    layers = choose((1, 2, 3))
    own = _OWN_KEYS[family]
    # transformers rejects other widths of some families, although the head dimension is set.
    width = choose((2, 4, 8) if family in ("phi3", "lfm2") else (2, 3, 4))
    if family in _LAYER_NORMS:
        # A LayerNorm over two numbers always gives 1 and -1.
        width = choose((4, 8))
    # In a head of two numbers, half of it can't be rotated, and a norm is only a sign.
    head_sizes = (6, 8) if family in _DELTA else (2, 6, 8)
    keys: dict[str, Any] = {
        "model_type": family,
        "vocab_size": VOCABULARY,
        "hidden_size": heads * width + (0 if family in _DIVIDES_WIDTH else choose((0, 1))),
        "intermediate_size": choose((11, 32)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width if family in _SHARES_WIDTH else choose(head_sizes),
        "max_position_embeddings": 64,
        # If a query meets no key, the norm of linear attention's output amplifies rounding errors.
        "rms_norm_eps": choose(((1e-5,) if family in _DELTA else (1e-6, 1e-5)) + (1e-3,)),
        "rope_theta": choose((50.0, 10_000.0, 500_000.0)),
        "tie_word_embeddings": choose((True, False)),
    }
    for name in ("attention_bias", "mlp_bias"):
        if name in own:
            keys[name] = choose((True, False))
    if "sliding_window" in own:
        keys["sliding_window"] = choose((None, 7, 100))
    if family.startswith("deepseek"):
        keys |= _draw_latent(family, layers, choose)
    rotary_dim = keys.get("qk_rope_head_dim", keys["head_dim"])
    if family in _LAYER_NORMS:
        keys["use_parallel_residual"] = choose((True, False))
    if family == "stablelm":
        keys["qk_layernorm"] = choose((True, False))
    if family == "gpt_neox":
        keys["hidden_act"] = choose(("gelu", "gelu_new", "gelu_fast"))
    if family in ("phi3", "glm4", "stablelm", "gpt_neox", *_DELTA):
        part = choose((0.5, 1.0) if rotary_dim > 2 else (1.0,))
        keys["partial_rotary_factor"] = part
        rotary_dim = int(rotary_dim * part)
    keys["rope_scaling"] = _draw_rope(family, rotary_dim, choose)
    if family == "ministral3" and "original_max_position_embeddings" in (
        keys["rope_scaling"] or {}
    ):
        keys["llama_4_scaling_beta"] = choose((0.1, 0.5, 2.0))
    if family == "granite":
        keys["embedding_multiplier"] = choose((1.0, 6.0, 12.0))
        keys["attention_multiplier"] = choose((None, 0.0078125, 0.3, 1.0))
        keys["residual_multiplier"] = choose((1.0, 0.22))
        keys["logits_scaling"] = choose((1.0, 3.0, 8.0))
    if family in ("olmo3", "gemma3_text"):
        keys["rope_local_base_freq"] = choose((None, 30.0, 10_000.0))
    if family in ("gemma2", "gemma3_text"):
        keys["query_pre_attn_scalar"] = choose((None, 6, 24))
        keys["final_logit_softcapping"] = choose((None, 2.0, 30.0))
    if family == "nanochat":
        keys["final_logit_softcapping"] = choose((None, 2.0, 15.0))
    if family == "gemma2":
        keys["attn_logit_softcapping"] = choose((None, 0.5, 50.0))
    if family == "smollm3":
        keys["no_rope_layers"] = choose((None, [choose((0, 1)) for _ in range(layers)]))
    if keys.get("sliding_window"):
        _draw_windows(family, keys, choose)
    if family == "gpt_oss":
        keys |= _draw_experts("mixtral", layers, choose)
        reads_keys = _RELEASE >= (5, 19)
        keys["swiglu_alpha"] = choose((1.702, 1.0) if reads_keys else (1.702,))
        keys["swiglu_limit"] = choose((7.0, 0.4) if reads_keys else (7.0,))
        return GptOssConfig(**keys)
    if family in ("mixtral", "qwen3_moe"):
        keys |= _draw_experts(family, layers, choose)
        return MoEConfig(**keys)
    if family in ("qwen3_next", "qwen3_5_moe_text"):
        keys |= _draw_experts(family, layers, choose)
        keys["shared_expert_intermediate_size"] = choose((5, 8))
    if family in _DELTA:
        keys |= _draw_linear(layers, choose)
    if family == "lfm2":
        keys["layer_types"] = [choose(("full_attention", "conv")) for _ in range(layers)]
        keys["layer_types"][choose(range(layers))] = "full_attention"
        keys["conv_L_cache"] = choose((2, 3, 4))
    return FAMILIES[family].config(**keys)


def _draw_windows(family: str, keys: dict[str, Any], choose: Choose) -> None:
    layers = keys["num_hidden_layers"]
    if family in ("qwen2", "qwen3"):
        keys["max_window_layers"] = choose(range(layers))
    if family in ("qwen2", "qwen3", "olmo3", "gemma2", "gemma3_text", "gpt_oss"):
        kinds = [choose(("full_attention", "sliding_attention")) for _ in range(layers)]
        keys["layer_types"] = choose((None, kinds))
    if keys.get("layer_types") is not None and "max_window_layers" in keys:
        # max_window_layers means that the first layers have full attention.
        first = kinds.count("full_attention")
        if kinds == sorted(kinds):
            keys["layer_types"] = None
            keys["max_window_layers"] = first if first < layers else 0
            keys["sliding_window"] = keys["sliding_window"] if first < layers else None
        else:
            keys["max_window_layers"] = 0


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
        scale_attn_weights=choose((True, True, False)),
        scale_attn_by_inverse_layer_idx=choose((False, False, True)),
    )


def _draw_rope(family: str, rotary_dim: int, choose: Choose) -> dict[str, Any] | None:
    kinds = [None, "linear", "llama3"]
    if rotary_dim % 2 == 0:
        kinds.append("yarn")
    if rotary_dim > 2:
        kinds.append("dynamic")
    kind = choose((None, "longrope") if family == "phi3" else (*kinds, "longrope"))
    original = choose((8, 16, 32, 48))
    if kind is None:
        return None
    if kind in ("linear", "dynamic"):
        return {"rope_type": kind, "factor": choose((2.0, 3.5))}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": choose((1.0, 4.0, 16.0)),
            "original_max_position_embeddings": original,
            "beta_fast": choose((32.0, 2.0)),
            "beta_slow": choose((1.0, 0.5)),
            **({"truncate": choose((True, False))} if family == "gpt_oss" else {}),
            **choose(({}, {"attention_factor": 1.25}, {"mscale": 0.7, "mscale_all_dim": 1.0})),
        }
    if kind == "longrope":
        pairs = (rotary_dim + 1) // 2
        asks_factor = family.startswith("deepseek") and _RELEASE < (5, 21)
        return {
            "rope_type": "longrope",
            "short_factor": [choose((1.0, 1.1, 2.0)) for _ in range(pairs)],
            "long_factor": [choose((1.0, 4.0, 9.5)) for _ in range(pairs)],
            "original_max_position_embeddings": original,
            **choose(({}, {"attention_factor": 1.25}, {"factor": 3.0})),
            **({"factor": 3.0} if asks_factor else {}),
        }
    return {
        "rope_type": "llama3",
        "factor": choose((8.0, 32.0)),
        "low_freq_factor": 1.0,
        "high_freq_factor": choose((2.0, 4.0)),
        "original_max_position_embeddings": choose((8, 16, 32)),
    }


def _draw_latent(family: str, layers: int, choose: Choose) -> dict[str, Any]:
    groups = choose((1, 2, 3))
    per_group = choose((2, 3, 4))
    kept = choose(range(1, groups + 1))
    is_v3 = family == "deepseek_v3"
    v3 = {"norm_topk_prob": choose((True, False)), "rope_interleave": choose((True, False))}
    return {
        "kv_lora_rank": choose((4, 10)),
        "q_lora_rank": choose((None, 5, 8)),
        "qk_nope_head_dim": choose((2, 3, 6) if is_v3 else (2, 6)),
        "qk_rope_head_dim": choose((2, 4, 6)),
        "v_head_dim": choose((3, 8)),
        "num_experts": groups * per_group,
        "num_experts_per_tok": choose(range(1, min(kept * per_group, 4) + 1)),
        "n_shared_experts": choose((1, 2)),
        "moe_intermediate_size": choose((8, 9)),
        "n_group": groups,
        "topk_group": kept if groups > 1 else 1,
        "routed_scaling_factor": choose((1.0, 2.5)),
        "first_k_dense_replace": choose(range(layers)),
        # transformers does not have this loss for these families.
        "router_aux_loss_coef": 0.0,
        **(v3 if is_v3 else {}),
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
    if family == "qwen3_5_moe_text":
        return keys | {"moe_intermediate_size": choose((8, 9))}
    sparse_step = choose(range(1, layers + 1))
    first = choose((True, False)) and sparse_step == 1 and layers > 1
    return keys | {
        "moe_intermediate_size": choose((8, 9)),
        "norm_topk_prob": choose((True, False)),
        "decoder_sparse_step": sparse_step,
        "mlp_only_layers": [0] if first else [],
    }


def _draw_linear(layers: int, choose: Choose) -> dict[str, Any]:
    key_heads = choose((1, 2, 3))
    kinds = [choose(("full_attention", "linear_attention")) for _ in range(layers)]
    # Without one, transformers' cache does not know its length.
    kinds[choose(range(layers))] = "full_attention"
    return {
        "layer_types": kinds,
        "linear_conv_kernel_dim": choose((1, 2, 4)),
        "linear_key_head_dim": choose((7, 16)),
        "linear_value_head_dim": choose((5, 8)),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * choose((1, 2, 3)),
    }


def hf_config(config: ModelConfig) -> Any:
    """Return a transformers config object, created without any file written by firstlight."""
    if isinstance(config, GPT2Config):
        return transformers.GPT2Config(
            vocab_size=config.vocab_size,
            n_embd=config.hidden_size,
            # In transformers, None stands for 4 n_embd.
            n_inner=None
            if config.intermediate_size == 4 * config.hidden_size
            else config.intermediate_size,
            n_layer=config.num_hidden_layers,
            n_head=config.num_attention_heads,
            n_positions=config.max_position_embeddings,
            layer_norm_epsilon=config.layer_norm_epsilon,
            activation_function=config.activation_function,
            scale_attn_weights=config.scale_attn_weights,
            scale_attn_by_inverse_layer_idx=config.scale_attn_by_inverse_layer_idx,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            tie_word_embeddings=config.tie_word_embeddings,
            bos_token_id=None,
            eos_token_id=None,
        )
    family = config.model_type
    common = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
        *("rms_norm_eps", "tie_word_embeddings", "initializer_range"),
    )
    names = _OTHER_NAMES.get(family, {})
    values = {names.get(n, n): getattr(config, n) for n in (*common, *_OWN_KEYS[family])}
    if family in _LAYER_NORMS:
        del values["head_dim"]
    if family == "gpt_neox":
        del values["num_key_value_heads"]
    layers = range(config.num_hidden_layers)
    if family in ("qwen2", "qwen3", "qwen3_moe", "smollm3"):
        values["use_sliding_window"] = config.sliding_window is not None
    if family in ("qwen2", "qwen3"):
        no_window = config.sliding_window is None
        values["max_window_layers"] = (
            config.num_hidden_layers if no_window else config.max_window_layers
        )
    if family == "lfm2":
        del values["head_dim"]
        values["block_auto_adjust_ff_dim"] = False
        kinds = ("full_attention", "conv")
        values["layer_types"] = [kinds[config.attention_spec(i).state_size > 0] for i in layers]
    elif family in _DELTA:
        values["layer_types"] = [
            "linear_attention" if config.attention_spec(layer).state_size else "full_attention"
            for layer in layers
        ]
    elif family in (*_PATTERNS, "smollm3") or config.layer_types:
        windows = [config.attention_spec(layer).window for layer in layers]
        values["layer_types"] = [
            "sliding_attention" if window else "full_attention" for window in windows
        ]
        if family in _PATTERNS and config.sliding_window is None:
            values["sliding_window"] = config.max_position_embeddings
    if family == "smollm3":
        values["no_rope_layers"] = [int(config.attention_spec(i).rope is not None) for i in layers]
    if family.startswith("deepseek"):
        del values["head_dim"]
        is_v3 = family == "deepseek_v3"
        grouped = "greedy" if config.n_group == 1 else "group_limited_greedy"  # type: ignore[union-attr]
        values["topk_method"] = "noaux_tc" if is_v3 else grouped
        values |= {"moe_layer_freq": 1, "scoring_func": "sigmoid" if is_v3 else "softmax"}
        values |= {"num_nextn_predict_layers": 0} if is_v3 else {}
    if family in ("mixtral", "gpt_oss"):
        values["num_local_experts"] = config.num_experts  # type: ignore[union-attr]
    return _HF_CONFIGS[family](
        **values, **_hf_rope(config), bos_token_id=None, eos_token_id=None, pad_token_id=None
    )


def _hf_rope(config: DecoderConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None:
        rope = scaling.model_dump(exclude_none=True)
    rope["rope_theta"] = config.rope_theta
    if config.partial_rotary_factor is not None:
        rope["partial_rotary_factor"] = config.partial_rotary_factor
    if config.rope_local_base_freq is not None:
        local = {"rope_type": "default", "rope_theta": config.rope_local_base_freq}
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}
    if config.model_type == "ministral3":
        # transformers always scales the queries.
        rope["llama_4_scaling_beta"] = config.llama_4_scaling_beta or 0.0
        rope.setdefault("original_max_position_embeddings", 64)
    apart = {}
    if config.model_type == "phi3" and scaling:
        name = "original_max_position_embeddings"
        apart = {name: rope[name]}
    return {"rope_parameters": rope, **apart}


@torch.no_grad()
def randomize(model: nn.Module, seed: int) -> None:
    """Set weights for which every parameter matters and logits are of order 1."""
    generator = torch.Generator().manual_seed(seed)
    # The norms of some families multiply by 1 + w: scores above 10 would only amplify rounding
    # errors.
    one_plus = ("gemma", *_DELTA)
    mean = -0.3 if str(model.config.model_type).startswith(one_plus) else 0.7  # type: ignore[union-attr]
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.3, generator=generator)
        if parameter.dim() == 1:
            parameter.add_(mean)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.3, generator=generator)


def hf_model(config: ModelConfig, seed: int) -> Any:
    # Grouped products need sizes that are multiples of 16 bytes. SDPA does not support Gemma 2's
    # score cap, although transformers used it until 5.21.
    model = transformers.AutoModelForCausalLM.from_config(
        hf_config(config),
        experts_implementation="eager",
        attn_implementation="eager" if config.model_type == "gemma2" else None,
    ).eval()
    randomize(model, seed)
    return model


def own_model(config: ModelConfig, seed: int) -> Model:
    model = empty_model(config)
    randomize(model, seed)
    return model.eval()


def write_folder(folder: Path, model: Model, tokenizer: Tokenizer) -> Path:
    """Write a model folder in the format of a checkpoint."""
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
    """Load the model, and check that every tensor of the file is used and none is missing."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, experts_implementation="eager"
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[problem], problem
    return model.eval()
