"""The switches of a recipe, and the maximum difference of each from the plain fp32 run."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from covering import Choice, covering_set, legal_pairs
from plain_recipe import plain_recipe

from firstlight.errors import ConfigError
from firstlight.hardware.device import Hardware
from firstlight.methods.precision import BOUNDS
from firstlight.recipe import ResolvedRecipe
from firstlight.recipe.conflicts import require_combination

#: "plain": the value of the plain run. "mathematics": computes something else, so the plain run
#: uses this value too. "exact": bitwise identical results. "rounding": the same fp32 sums in a
#: different order. "approximate": lower-precision numbers.
Kind = Literal["plain", "mathematics", "exact", "rounding", "approximate"]

#: Device to which a switch's kind and bounds apply; "any" includes both.
On = Literal["any", "cpu", "cuda"]

CPU = Hardware(torch.device("cpu"), "the CPU of a test", 2**33, bf16=True)


@dataclass(frozen=True)
class Switch:
    """One value of one method.

    Attributes:
        factor: the method; a run has one value for each.
        value: its name in test names and tables.
        kind: see `Kind`.
        settings: pairs of `section.key` and value.
        loss: maximum difference of any step's loss, in nats.
        weights: maximum difference of the trained weights, relative to their change during training
            (both L2 norms).
        amplifies: factor by which this value enlarges the differences caused by others.
        needs: a package beyond those that the tests install.
        slow: True if the test takes half a minute.
        on: device to which kind and bounds apply.
    """

    factor: str
    value: str
    kind: Kind
    settings: tuple[tuple[str, Any], ...] = ()
    loss: float = 0.0
    weights: float = 0.0
    amplifies: float = 1.0
    needs: str | None = None
    slow: bool = False
    on: On = "any"

    @property
    def missing(self) -> bool:
        """Return True if the required package is not installed."""
        return self.needs is not None and importlib.util.find_spec(self.needs) is None


def _efficiency(
    factor: str, value: str, kind: Kind, loss: float = 0.0, weights: float = 0.0, **keys: Any
) -> Switch:
    settings = tuple((f"efficiency.{key}", keys[key]) for key in keys)
    return Switch(factor, value, kind, settings, loss, weights)


def _optimizer(value: str, kind: Kind, rate: float, **more: Any) -> Switch:
    settings = (("optimizer.name", value.split("-")[0]), ("optimizer.learning_rate", rate))
    return Switch("optimizer", value, kind, settings, **more)


#: Bounds of the loss and the weights.
_ROUNDING = BOUNDS["fp32"]
#: For fp8 computed in fp32 on a CPU: 0.005 nats, 6 %.
_FP8 = (0.02, 0.2)

SWITCHES = [
    Switch("model", "llama", "mathematics"),
    Switch("model", "gpt2", "mathematics"),
    _efficiency("precision", "fp32", "plain"),
    replace(_efficiency("precision", "tf32", "exact", precision="tf32"), on="cpu"),
    _efficiency("precision", "bf16", "approximate", *BOUNDS["bf16"], precision="bf16"),
    _efficiency(
        "precision",
        "bf16_residual",
        "approximate",
        *BOUNDS["bf16"],
        precision="bf16",
        bf16_residual=True,
    ),
    _efficiency(
        "precision", "bf16_params", "approximate", *BOUNDS["bf16"], precision="bf16_params"
    ),
    _efficiency("precision", "fp16", "approximate", *BOUNDS["fp16"], precision="fp16"),
    _efficiency("attention", "sdpa", "plain"),
    _efficiency("attention", "plain", "rounding", *_ROUNDING, attention="plain"),
    _efficiency("attention", "blockwise", "rounding", *_ROUNDING, attention="blockwise"),
    _efficiency("attention", "math", "rounding", *_ROUNDING, attention="math"),
    replace(_efficiency("attention", "flash", "rounding", *_ROUNDING, attention="flash"), on="cpu"),
    _efficiency("checkpointing", "none", "plain"),
    _efficiency("checkpointing", "full", "exact", activation_checkpointing="full"),
    _efficiency("checkpointing", "selective", "exact", activation_checkpointing="selective"),
    _efficiency("checkpointing", "budget", "exact", activation_checkpointing="budget"),
    _efficiency("offload", "no", "plain"),
    _efficiency("offload", "yes", "exact", activation_offload=True),
    _efficiency("loss", "whole", "plain"),
    _efficiency("loss", "chunks", "rounding", *_ROUNDING, loss_chunk_tokens=24),
    _efficiency("update", "after", "plain"),
    _efficiency("update", "in-backward", "exact", optimizer_in_backward=True),
    _efficiency("vocabulary", "as-is", "plain"),
    _efficiency("vocabulary", "padded", "rounding", *_ROUNDING, vocab_multiple=64),
    _efficiency("cache", "kept", "plain"),
    _efficiency("cache", "emptied", "exact", empty_cache_steps=2),
    _efficiency("compile", "no", "plain"),
    replace(
        _efficiency("compile", "aot_eager", "exact", compile=True, compile_backend="aot_eager"),
        on="cpu",
    ),
    _efficiency(
        "compile",
        "regional",
        "exact",
        compile=True,
        compile_backend="aot_eager",
        compile_regional=True,
    ),
    _optimizer("adamw", "plain", 2e-3),
    _optimizer("adamw8bit", "approximate", 2e-3, loss=0.005, weights=0.2, needs="bitsandbytes"),
    _optimizer("adafactor", "mathematics", 1e-2),
    # Muon makes all singular values of an update equal, including those that are only rounding
    # errors.
    _optimizer("muon", "mathematics", 5e-3, amplifies=30.0),
    _optimizer("sgd", "mathematics", 1e-1),
    Switch("implementation", "auto", "plain"),
    *(
        Switch(
            "implementation", name, "rounding", (("optimizer.implementation", name),), *_ROUNDING
        )
        for name in ("for-loop", "foreach", "fused")
    ),
    Switch("clipping", "on", "plain"),
    Switch("clipping", "off", "mathematics", (("optimizer.max_grad_norm", 0.0),)),
    Switch("batch", "whole", "plain"),
    Switch(
        "batch",
        "accumulated",
        "rounding",
        (("batch.micro_batch_size", 2), ("batch.gradient_accumulation_steps", 2)),
        *_ROUNDING,
    ),
    Switch(
        "batch",
        "global-tokens",
        "rounding",
        (
            ("batch.micro_batch_size", 2),
            ("batch.global_batch_tokens", 128),
        ),
        *_ROUNDING,
    ),
    Switch("documents", "mixed", "plain"),
    Switch("documents", "masked", "mathematics", (("data.document_masking", True),)),
    Switch("readers", "one", "plain"),
    Switch("readers", "three", "exact", (("data.workers", 3), ("data.prefetch", 5))),
    Switch("adapters", "none", "plain"),
    Switch("adapters", "lora", "mathematics", (("lora.rank", 4),)),
    Switch("adapters", "dora", "mathematics", (("lora.rank", 4), ("lora.dora", True))),
    Switch(
        "adapters",
        "nf4",
        "mathematics",
        (("lora.rank", 4), ("lora.quantize", "nf4")),
        needs="bitsandbytes",
    ),
]

#: Tested alone, not in pairs, because inductor compiles for too long.
ALONE = [
    replace(
        _efficiency("compile", "cudagraphs", "exact", compile=True, compile_backend="cudagraphs"),
        on="cpu",
    ),
    _efficiency("compile", "eager", "exact", compile=True, compile_backend="eager"),
    _efficiency("compile", "inductor", "rounding", *_ROUNDING, compile=True, compile_regional=True),
    Switch(
        "optimizer",
        "adamw8bit-torchao",
        "approximate",
        (
            ("optimizer.name", "adamw8bit"),
            ("optimizer.eight_bit_library", "torchao"),
            ("optimizer.learning_rate", 2e-3),
        ),
        0.005,
        0.2,
        needs="torchao",
        slow=True,
    ),
]

#: Further settings of torch.compile's inductor, and the bounds of loss and weights.
INDUCTOR: list[dict[str, Any]] = [
    {},
    {"compile_regional": True},
    {"compile_mode": "reduce-overhead"},
    {"compile_mode": "max-autotune"},
    {"compile_mode": "max-autotune-no-cudagraphs"},
    {"activation_checkpointing": "budget"},
    {"activation_checkpointing": "full"},
    {"loss_chunk_tokens": 24, "vocab_multiple": 64},
]
INDUCTOR_BOUNDS = (2e-5, 2e-3)

#: Not available on a CPU, or closer to the plain run there than on a GPU.
ON_CUDA = [
    replace(switch, on="cuda")
    for switch in (
        _efficiency("precision", "tf32", "approximate", 0.001, 0.03, precision="tf32"),
        replace(
            _efficiency("precision", "fp8", "approximate", *_FP8, precision="fp8"), needs="torchao"
        ),
        _efficiency("attention", "efficient", "rounding", *_ROUNDING, attention="efficient"),
        _efficiency("attention", "flex", "rounding", *_ROUNDING, attention="flex"),
        *(
            _efficiency(
                "attention",
                f"{name}-bf16",
                "approximate",
                *BOUNDS["bf16"],
                attention=name,
                precision="bf16",
            )
            for name in ("flash", "cudnn")
        ),
        # During tracing, torch may select other kernels than in eager mode.
        *(
            _efficiency("compile", name, "rounding", *_ROUNDING, compile=True, compile_backend=name)
            for name in ("aot_eager", "cudagraphs")
        ),
        *(
            _efficiency(
                "compile", mode, "rounding", *INDUCTOR_BOUNDS, compile=True, compile_mode=mode
            )
            for mode in ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
        ),
        Switch(
            "readers",
            "pinned",
            "exact",
            (("data.pin_memory", True), ("data.workers", 3), ("data.prefetch", 5)),
        ),
        _optimizer(
            "paged_adamw8bit", "approximate", 2e-3, loss=0.005, weights=0.2, needs="bitsandbytes"
        ),
    )
]

_BY_CHOICE: dict[Choice, Switch] = {(s.factor, s.value): s for s in [*ON_CUDA, *SWITCHES, *ALONE]}

#: One value per factor; an omitted factor has its plain value.
Combination = frozenset[Choice]


def factors(installed_only: bool = True) -> dict[str, list[str]]:
    """Return every factor with its values, the plain one first."""
    found: dict[str, list[str]] = {}
    for switch in SWITCHES:
        if not (installed_only and switch.missing):
            found.setdefault(switch.factor, []).append(switch.value)
    return found


def switches(combination: Combination) -> list[Switch]:
    """Return the switches that a combination sets, without the plain ones."""
    chosen = [_BY_CHOICE[choice] for choice in sorted(combination)]
    return [switch for switch in chosen if switch.kind != "plain"]


def of_kinds(combination: Combination, *kinds: Kind) -> Combination:
    """Return the choices of a combination that are of some kinds."""
    return frozenset((s.factor, s.value) for s in switches(combination) if s.kind in kinds)


def recipe_of(
    combination: Combination, data: str = "data", further: Mapping[str, Any] | None = None
) -> ResolvedRecipe:
    """Return a recipe of 20 steps for a model small enough to be trained in a fraction of a second.

    Args:
        combination: the switches to set.
        data: the folder of prepared text.
        further: settings by `section.key`, in addition to the combination's.

    Raises:
        ConfigError: the keys conflict.
    """
    model = {"model_type": dict(combination).get("model", "llama"), **_SHAPE}
    if model["model_type"] == "llama":
        model["num_key_value_heads"] = 2
    values: dict[str, Any] = {
        "run": {"device": "cpu"},
        "model": model,
        "data": {"dir": data, "seq_len": 32},
        "batch": {"micro_batch_size": 4},
        "schedule": {"max_steps": 20, "warmup_steps": 4},
        "optimizer": {"learning_rate": 2e-3},
        "efficiency": {"precision": "fp32", "attention": "sdpa", "compile": False},
    }
    settings = [setting for switch in switches(combination) for setting in switch.settings]
    for name, value in [*settings, *(further or {}).items()]:
        section, key = name.split(".")
        values.setdefault(section, {})[key] = value
    return plain_recipe(values)


_SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}


def refusal(combination: Combination, hardware: Hardware = CPU) -> str | None:
    """Return the error message for a combination, or None if it is valid."""
    try:
        require_combination(recipe_of(combination), hardware)
    except ConfigError as error:
        return str(error)
    return None


@functools.cache
def _is_refused(one: Choice, other: Choice) -> bool:
    # Some values require another one. A pair is refused if it is refused with that one, too.
    def refused(*more: Choice) -> bool:
        return refusal(frozenset((one, other, *more))) is not None

    return refused() and refused(*needed(one, other))


def needed(*choices: Choice) -> list[Choice]:
    """Return the values that some choices require and that the others do not set."""
    taken = {factor for factor, _ in choices}
    companions = {
        ("checkpointing", "budget"): ("compile", "regional"),
        ("update", "in-backward"): ("clipping", "off"),
    }
    wanted = [companions[choice] for choice in choices if choice in companions]
    return [choice for choice in wanted if choice[0] not in taken]


def refused_pairs() -> set[frozenset[Choice]]:
    """Return every pair of values that no combination may contain."""
    everything = legal_pairs(factors(installed_only=False), lambda *_: False)
    return {pair for pair in everything if _is_refused(*sorted(pair))}


def pairwise_combinations() -> tuple[list[Combination], list[Combination]]:
    """Return combinations that cover every legal pair: those that take one or two seconds each, and
    those with the values that take torch's compiler longest.
    """
    names = factors()
    refused = refused_pairs()
    legal = legal_pairs(names, lambda one, other: frozenset((one, other)) in refused)
    quick = {pair for pair in legal if not pair & _LONG}
    return (
        [frozenset(row.items()) for row in covering_set(names, quick)],
        [frozenset(row.items()) for row in covering_set(names, legal, legal - quick)],
    )


_LONG: set[Choice] = {("compile", "aot_eager"), ("checkpointing", "budget")}
