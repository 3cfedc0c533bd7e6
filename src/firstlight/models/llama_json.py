"""Reads and writes config.json of the Llama-like families, in the formats of transformers 4 and
5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from firstlight.errors import ModelError
from firstlight.models.family import FamilySpec
from firstlight.models.llama_families import OWN_KEYS
from firstlight.models.rope import ROPE_KINDS

#: Greatest number of layers of a model.
MOST_LAYERS = 10_000

#: Keys for which null in config.json is a value; for other keys null means the default.
_NULLABLE = ("attn_logit_softcapping", "final_logit_softcapping")

#: Settings that `_windows_from_json` and `_rope_from_json` read.
_READ_APART = ("sliding_window", "max_window_layers", "layer_types", "partial_rotary_factor")

_SAME_ACTIVATION = {"swish": "silu"}


def values_from_json(
    spec: FamilySpec, names: Sequence[str], config: Mapping[str, Any]
) -> dict[str, Any]:
    """The values of a config class' fields, from a config.json.

    Args:
        spec: facts of the family.
        names: fields of the config class.
        config: the content of config.json.

    Raises:
        ModelError: the config has a setting that would change the outputs and is not implemented.
    """
    _check_built(spec, config, has_choice=spec.activation_key in names)
    # Renamed to our names. If a config.json has both names, transformers reads the family's own.
    own = {ours: config[theirs] for ours, theirs in spec.json_names.items() if theirs in config}
    config = {**{key: value for key, value in config.items() if key not in spec.json_names}, **own}
    values = dict(spec.hf_defaults)
    common = set(names) - {"rope_theta", "rope_scaling", *OWN_KEYS, *spec.derived_keys}
    given = {ours: ours for ours in common if ours in config}
    if "num_experts" in names and "num_local_experts" in config:
        # Mixtral's config.json, and transformers 5 for all families, have another key for the
        # number of experts.
        given["num_experts"] = "num_local_experts"
    for ours, theirs in given.items():
        if config[theirs] is not None:
            values[ours] = config[theirs]
        elif ours in ("num_key_value_heads", "head_dim"):
            values.pop(ours, None)  # null: derived from the other sizes
    for name in set(spec.own_keys) - set(_READ_APART):
        if config.get(name) is not None or (name in _NULLABLE and name in config):
            values[name] = config[name]
    layers, every = values["num_hidden_layers"], config.get("no_rope_layer_interval")
    # Checked here, because lists of this length are made before the fields are checked.
    for key, value in (("num_hidden_layers", layers), ("no_rope_layer_interval", every or 1)):
        if type(value) is not int:
            raise ModelError(f"{key} is {value!r}, expected a whole number: correct the file")
    if layers > MOST_LAYERS:
        raise ModelError(f"num_hidden_layers {layers} is more than {MOST_LAYERS:,}")
    if spec.no_rope_every and every and values.get("no_rope_layers") is None:
        values["no_rope_layers"] = [int((i + 1) % every != 0) for i in range(layers)]
    if values.get("no_rope_layers") is not None:
        # transformers accepts a list with more entries than layers.
        values["no_rope_layers"] = list(values["no_rope_layers"])[:layers]
    values |= _windows_from_json(spec, config, values)
    return {**values, **_rope_from_json(spec, config, values)}


def _check_built(spec: FamilySpec, config: Mapping[str, Any], *, has_choice: bool) -> None:
    """Refuse an activation or attention that is not implemented; `has_choice` is True if the config
    class has a key for the activation."""
    activation = config.get(spec.activation_key) or spec.activation
    if not has_choice and _SAME_ACTIVATION.get(activation, activation) != spec.activation:
        raise ModelError(
            f"{spec.activation_key} '{activation}' is not supported: only '{spec.activation}' is"
        )
    if config.get("use_bidirectional_attention"):
        raise ModelError("use_bidirectional_attention is not supported: only causal attention is")


def _windows_from_json(
    spec: FamilySpec, config: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """`sliding_window`, `max_window_layers` and `layer_types` of a config.json."""
    if "sliding_window" not in spec.own_keys:
        return {}
    window = config.get("sliding_window", spec.hf_defaults.get("sliding_window"))
    kinds = config.get("layer_types")
    if spec.has_window_switch:
        # SmolLM3's class in transformers reads use_sliding_window only if layer_types is missing.
        is_on = config.get("use_sliding_window") or (spec.no_rope_every and kinds is not None)
        if not is_on:
            return {}
        window = config.get("sliding_window", spec.hf_defaults.get("sliding_window", 4096))
    period = config.get(spec.period_key) if spec.period_key else None
    layers = values["num_hidden_layers"]
    if kinds is None and isinstance(period, int) and period > 0:
        kinds = [
            "sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)
        ]
    if "max_window_layers" not in spec.own_keys or window is None:
        listed = {} if "layer_types" not in spec.own_keys or kinds is None else list(kinds)
        return {"sliding_window": window, **({"layer_types": listed} if listed else {})}
    first = config.get("max_window_layers", 28)
    if kinds is not None:
        kinds = list(kinds)
        first = kinds.count("full_attention")
        rest = len(kinds) - first
        if kinds != ["full_attention"] * first + ["sliding_attention"] * rest:
            return {"sliding_window": window, "layer_types": kinds}
        if len(kinds) != layers:
            raise ModelError(f"layer_types has {len(kinds)} entries for {layers} layers")
    if first >= layers:
        return {}
    return {"sliding_window": window, "max_window_layers": first}


def _rope_from_json(
    spec: FamilySpec, config: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """`rope_theta`, `rope_scaling` and all other keys of rotary positions."""
    # transformers 5 writes one object rope_parameters, transformers 4 the keys rope_theta and
    # rope_scaling. If config.json has both forms, transformers reads the two keys.
    settings = config.get("rope_scaling") or config.get("rope_parameters") or spec.rope.default
    found: dict[str, Any] = {}
    if spec.rope.nested:
        nested = config.get("rope_parameters") or {}
        settings = {**(nested.get("full_attention") or {}), **(config.get("rope_scaling") or {})}
        local = nested.get("sliding_attention") or {}
        if local.get("rope_type", "default") != "default":
            raise ModelError(
                f"rope type '{local['rope_type']}' of layers with a window is not supported: only "
                "default is"
            )
        usual = spec.hf_defaults["rope_local_base_freq"]
        if spec.rope.local_theta_key:
            usual = config.get(spec.rope.local_theta_key, usual)
        found["rope_local_base_freq"] = float(local.get("rope_theta", usual))
    rope = dict(settings)
    theta = rope.pop("rope_theta", config.get("rope_theta", values.get("rope_theta", 10_000.0)))
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    kind = spec.rope.other_kinds.get(kind, kind)
    if spec.rope.nested:
        # transformers looks for truncate at the level above the kinds of layers, where no
        # config.json has it, so that its value has no effect.
        rope.pop("truncate", None)
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if "partial_rotary_factor" in spec.own_keys:
        found["partial_rotary_factor"] = None if part is None else float(part)
    elif part not in (None, 1.0):
        raise ModelError(
            "partial_rotary_factor: rotary positions of a part of the head only are not supported "
            "in this family"
        )
    scaling = None if kind == "default" else _scaling_of(kind, rope, spec, config, values=values)
    return {
        **found,
        "rope_theta": 10_000.0 if theta is None else float(theta),
        "rope_scaling": scaling,
    }


def _scaling_of(
    kind: str,
    rope: Mapping[str, Any],
    spec: FamilySpec,
    config: Mapping[str, Any],
    *,
    values: Mapping[str, Any],
) -> dict[str, Any]:
    """The recipe's `rope_scaling`, for a kind that is not "default".

    Raises:
        ModelError: the kind is unknown.
    """
    if kind not in ROPE_KINDS:
        raise ModelError(
            f"rope type '{kind}' is not supported: default, {', '.join(ROPE_KINDS)} are"
        )
    fields = ROPE_KINDS[kind].model_fields
    # Keys of other kinds are ignored, as in transformers.
    scaling = {name: rope[name] for name in fields if rope.get(name) is not None}
    scaling["rope_type"] = kind
    positions = config.get("max_position_embeddings", values.get("max_position_embeddings"))
    if "original_max_position_embeddings" in fields:
        # As in transformers, the key at config.json's top level has priority over the key among
        # the rotary settings.
        apart = config.get("original_max_position_embeddings") or spec.rope.original_positions
        original = apart or scaling.get("original_max_position_embeddings") or positions
        scaling["original_max_position_embeddings"] = original
        if kind == "yarn" and "factor" not in scaling and positions and original:
            scaling["factor"] = positions / original
    return scaling


def config_json(spec: FamilySpec, model: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The Hugging Face `config.json` of a model.

    Args:
        spec: facts of the family.
        model: the config, a `llama_config.DecoderConfig` (not a type here, because `llama_config`
            imports this module).
        values: the keys that all families have, with their values.
    """
    own = {name: getattr(model, name) for name in spec.own_keys}
    if spec.has_window_switch:
        own["use_sliding_window"] = model.sliding_window is not None
    if "max_window_layers" in own and model.sliding_window is None:
        own["max_window_layers"] = model.num_hidden_layers
    layers = range(model.num_hidden_layers)
    if "layer_types" in own and (spec.has_default_types or model.layer_types is not None):
        own["layer_types"] = [
            "sliding_attention" if model.has_window(i) else "full_attention" for i in layers
        ]
        if spec.full_attention_every and model.sliding_window is None:
            # transformers always makes a mask with a window, also if no layer uses it.
            own["sliding_window"] = model.max_position_embeddings
    elif "layer_types" in own:
        del own["layer_types"]
    if "no_rope_layers" in own:
        own["no_rope_layers"] = [int(model.has_rope(i)) for i in layers]
    scaling = model.rope_scaling.model_dump(exclude_none=True) if model.rope_scaling else None
    rope: dict[str, Any] = {"rope_theta": model.rope_theta, **(scaling or {"rope_type": "default"})}
    if "partial_rotary_factor" in own:
        rope["partial_rotary_factor"] = own["partial_rotary_factor"]
    if spec.rope.original_positions and scaling:
        own["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    if spec.rope.nested:
        local = {"rope_type": "default", "rope_theta": own.pop("rope_local_base_freq")}
        if spec.rope.local_theta_key:
            own[spec.rope.local_theta_key] = local["rope_theta"]
        rope = {"full_attention": rope, "sliding_attention": local}
    content = {
        "architectures": [spec.architecture],
        **values,
        **own,
        spec.activation_key: spec.activation,
        "attention_dropout": 0.0,
        # Some config classes of transformers have a default id, which can be beyond the vocabulary.
        "pad_token_id": None,
        # Both forms: transformers 5 reads rope_parameters; transformers 4 and other programs read
        # the two keys.
        "rope_parameters": rope,
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling,
    }
    return {spec.json_names.get(key, key): value for key, value in content.items()}
