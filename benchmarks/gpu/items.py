"""Items of `quick` for optimisation work, ordered by value per second of measurement; `published`
has others.

An item is a generator of rows: dicts of a row's name, "row", and its figures, or "error". A row
that fails does not affect the others. Each item measures the package's current implementation and
plain torch alternatives, so that it shows the difference before and after a change.

Shape letters as in `models/ops.py`; N is B x T, n the number of tokens of a chunk.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.calls import Call, free_memory, kernels, milliseconds, peak_memory, recorded
from benchmarks.models import PlannerCase, dry_grid, gpu_grid, model_values, random_model
from benchmarks.planner_memory import random_batch
from benchmarks.planner_steps import STEPS_MODULE
from benchmarks.planner_steps import measure as measure_steps
from firstlight.bench.models import config_of
from firstlight.generation.batch import BatchDecoder
from firstlight.generation.config import SamplingConfig
from firstlight.generation.continuation import Chosen, Continuation
from firstlight.generation.engine import first_tokens, next_tokens
from firstlight.generation.few_rows import Int8Linear, rounded, use_few_rows
from firstlight.hardware.device import Hardware, download, synchronize
from firstlight.hardware.fresh_process import ask, training_environment
from firstlight.methods.memory import chunked_head_loss
from firstlight.models import Model
from firstlight.models.accounting import train_flops_per_token
from firstlight.models.ops import for_each_query_head
from firstlight.recipe import parse_resolved_recipe
from firstlight.training.program import TrainingProgram
from firstlight.training.starting_model import attach

#: Name, figures or error of one measurement.
Row = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """The device, and the sizes of a dry run.

    Attributes:
        hardware: device that is measured.
        dry: True for tiny shapes and one call of each, whose figures are meaningless.
        out: folder of the results, for files of an item; None keeps none.
    """

    hardware: Hardware
    dry: bool = False
    out: Path | None = None

    @property
    def device(self) -> torch.device:
        """Device that is measured."""
        return self.hardware.device

    def pick(self, real: Any, tiny: Any) -> Any:
        """Return `real`, or `tiny` in a dry run."""
        return tiny if self.dry else real

    def ms(self, call: Call, *, rounds: int = 5, calls: int = 5) -> float:
        """See `calls.milliseconds`."""
        if self.dry:
            rounds = calls = 1
        return round(milliseconds(call, self.device, rounds=rounds, calls=calls), 4)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a function with torch.compile for one shape; in a dry run, no code is
        generated."""
        backend = "eager" if self.dry else "inductor"
        compiled: Callable[..., Any] = torch.compile(function, dynamic=False, backend=backend)
        return compiled

    def tensor(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return a random tensor on the device."""
        return torch.randn(*shape, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class Item:
    """One item.

    Attributes:
        name: letter of the item in the plan, and its part.
        title: heading of its table.
        seconds: expected duration, including compilation if the item compiles.
        rows: function that measures.
        of_machine: True if the figures do not depend on the package and need not be measured again
            for other source code.
    """

    name: str
    title: str
    seconds: float
    rows: Callable[[Bench], Iterator[Row]]
    of_machine: bool = False


def attempt(name: str, measure: Callable[[], Mapping[str, Any]]) -> Row:
    """Measure a row, with "error" in place of figures if `measure` fails."""
    try:
        return {"row": name, **measure()}
    except Exception as error:  # noqa: BLE001  (one row's failure is none of the others')
        return {"row": name, "error": in_words(error)}


def in_words(error: BaseException) -> str:
    """Return an error as one short line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


# A: facts


#: Name -> B, H, K, T, S, D of attention.
_SHAPES = {
    "training, GPT-2 124M": (32, 12, 12, 1024, 1024, 64),
    "training, Llama 1B": (4, 32, 8, 2048, 2048, 64),
    "training, Llama 3B": (2, 24, 8, 4096, 4096, 128),
    "training, small run": (8, 9, 9, 512, 512, 64),
    "prompt, GPT-2 124M": (1, 12, 12, 128, 128, 64),
    "prompt, Llama 1B": (1, 32, 8, 128, 128, 64),
    "token, GPT-2 124M": (1, 12, 12, 1, 129, 64),
    "token, Llama 1B": (1, 32, 8, 1, 129, 64),
}
_TRAINING_SHAPES = ("training, GPT-2 124M", "training, Llama 1B", "training, Llama 3B")


def _operands(bench: Bench, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Create queries [B, H, T, D], and keys and values [B, K, S, D], for a shape; all require
    gradients."""
    B, H, K, T, S, D = _SHAPES[name]
    if bench.dry:
        B, S = min(B, 2), min(S, 17 if T == 1 else 16)
        T = min(T, 16)
    shapes = ((B, H, T, D), (B, K, S, D), (B, K, S, D))
    q, k, v = (bench.tensor(*shape).requires_grad_() for shape in shapes)
    return q, k, v


def facts(bench: Bench) -> Iterator[Row]:
    """Yield versions, the time to launch a kernel, and the attention kernels that torch chooses."""
    yield attempt("machine", functools.partial(_machine, bench))
    for name in _SHAPES:
        yield attempt(name, functools.partial(_chosen_kernel, bench, name))


def _machine(bench: Bench) -> Row:
    one = bench.tensor(16)
    calls = bench.pick(2000, 10)
    architectures = torch.cuda.get_arch_list() if bench.device.type == "cuda" else ()
    return {
        "cudnn": torch.backends.cudnn.version() or "",  # type: ignore[no-untyped-call]
        "architectures": " ".join(architectures),
        "launch_us": round(1000 * bench.ms(lambda: one.add_(1), calls=calls), 3),
    }


def _chosen_kernel(bench: Bench, name: str) -> Row:
    q, k, v = _operands(bench, name)
    causal, grouped = q.shape[2] > 1, q.shape[1] != k.shape[1]
    chosen = torch._fused_sdp_choice(q, k, v, None, 0.0, causal, enable_gqa=grouped)
    ran = kernels(lambda: _attend(q, k, v), bench.device)
    return {"chosen": SDPBackend(chosen).name, "attention": ran["attention"]}


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=q.shape[2] > 1 and mask is None,
        enable_gqa=q.shape[1] != k.shape[1],
    )


# B: attention kernels

_BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def attention(bench: Bench) -> Iterator[Row]:
    """Measure attention kernels forward and backward, and alternatives for grouped queries."""
    for shape in _TRAINING_SHAPES:
        for name, backend in _BACKENDS.items():
            yield attempt(
                f"{shape}: {name}", functools.partial(_kernel_times, bench, shape, [backend])
            )
    #: Backends on a GPU without flash attention.
    old = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    ways = {"enable_gqa": _attend, "expanded keys": _expanded, "groups as rows": _as_rows}
    for kind, backends in (("all kernels", list(_BACKENDS.values())), ("no flash, no cuDNN", old)):
        for way, function in ways.items():
            yield attempt(
                f"8 texts, a token, {kind}: {way}",
                functools.partial(_token_times, bench, function, backends, (8, 32, 8, 1024)),
            )
        for way in ("enable_gqa", "expanded keys"):
            yield attempt(
                f"training, Llama 1B, {kind}: {way}",
                functools.partial(_kernel_times, bench, "training, Llama 1B", backends, ways[way]),
            )

    #: GPT-2 124M.
    for way, function in (("one kernel", _attend), ("two products", _two_products)):
        yield attempt(
            f"1 text, a token, {way}",
            functools.partial(
                _token_times, bench, function, list(_BACKENDS.values()), (1, 12, 12, 192)
            ),
        )


def _two_products(q_BHTD: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute attention as two products with a softmax in between."""
    assert mask is not None
    scores = q_BHTD @ k.transpose(-2, -1) * q_BHTD.shape[-1] ** -0.5
    out: Tensor = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
    return out


def _expanded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute grouped-query attention by repeating keys and values for each query head."""
    heads = q.shape[1]
    return _attend(q, for_each_query_head(k, heads), for_each_query_head(v, heads), mask)


def _as_rows(q_BHTD: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute grouped-query attention for one token, with the query heads of a group as rows: [B,
    K, H / K, D]."""
    B, H, _, D = q_BHTD.shape
    rows_BKGD = q_BHTD.view(B, k.shape[1], -1, D)
    found = F.scaled_dot_product_attention(rows_BKGD, k, v, attn_mask=mask)
    return found.reshape(B, H, 1, D)


def _kernel_times(
    bench: Bench,
    shape: str,
    backends: Sequence[SDPBackend],
    attend: Callable[..., Tensor] = _attend,
) -> Row:
    q, k, v = _operands(bench, shape)
    B, H, T, D = q.shape
    # Products with queries and with values over half of the T x T scores.
    flops = 2 * B * H * T * T * D

    def both() -> None:
        found = attend(q, k, v)
        torch.autograd.grad(found, (q, k, v), found)

    with sdpa_kernel(list(backends)):
        ran = kernels(both, bench.device)
        with torch.no_grad():
            forward = bench.ms(lambda: attend(q, k, v))
        whole = bench.ms(both)
    return {
        "forward_ms": forward,
        "backward_ms": round(whole - forward, 4),
        "forward_tflops": round(flops / forward / 1e9, 1),
        "whole_tflops": round(3.5 * flops / whole / 1e9, 1),
        "attention": ran["attention"],
    }


@torch.no_grad()
def _token_times(
    bench: Bench,
    attend: Callable[..., Tensor],
    backends: Sequence[SDPBackend],
    shape: tuple[int, int, int, int],
) -> Row:
    """Measure attention of one token for a shape: B, H, K, S."""
    B, H, K, S = shape
    S = bench.pick(S, 32)
    q, k = bench.tensor(B, H, 1, 64), bench.tensor(B, K, S, 64)
    v = torch.randn_like(k)
    mask = torch.ones(B, 1, 1, S, dtype=torch.bool, device=bench.device)
    with sdpa_kernel(list(backends)):
        ran = kernels(lambda: attend(q, k, v, mask), bench.device)
        replay = recorded(lambda: attend(q, k, v, mask), bench.device)
        return {"ms": bench.ms(replay, calls=20), "attention": ran["attention"]}


# C and D: decoding


@contextlib.contextmanager
def _cudnn(enabled: bool) -> Iterator[None]:
    """Context manager that enables or disables cuDNN's attention."""
    before: bool = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(enabled)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def random_bf16_model(bench: Bench, name: str) -> Model:
    """Return a model in bf16 for generation, with random weights, set up as by `engine.load`:
    otherwise its steps would not be recorded."""
    tiny = "tiny-gpt2" if name.startswith("gpt2") else "tiny-llama"
    config = config_of(model_values(bench.pick(name, tiny)))
    model = random_model(config, bench.device).to(torch.bfloat16).eval()
    use_few_rows(model)
    return model


def _prompt(bench: Bench, tokens: int) -> list[int]:
    return [number % 1000 for number in range(bench.pick(tokens, 1 + tokens // 16))]


@torch.inference_mode()
def new_lengths(bench: Bench) -> Iterator[Row]:
    """Measure tokens and prompts with lengths that occur for the first time, with and without
    cuDNN."""
    model, new = random_bf16_model(bench, "gpt2-124m"), bench.pick(64, 3)
    decoder = BatchDecoder(model, 1, bench.pick(512, 64))
    warm_up = _prompt(bench, 300)
    with _cudnn(False):
        _decode(bench, decoder, warm_up, 2)
    for name, enabled in (("without cuDNN", False), ("with cuDNN", True)):
        for turn in ("first", "again"):
            with _cudnn(enabled):
                yield attempt(
                    f"{new} tokens, {name}, {turn}",
                    functools.partial(_decode, bench, decoder, _prompt(bench, 128), new),
                )
    for name, enabled in (("without cuDNN", False), ("with cuDNN", True)):
        for turn in ("first", "again"):
            with _cudnn(enabled):
                yield attempt(
                    f"16 prompts, {name}, {turn}", functools.partial(_prompts, bench, decoder)
                )


def _decode(bench: Bench, decoder: BatchDecoder, prompt: Sequence[int], new: int) -> Row:
    """Decode greedily and time each token."""
    token, seconds = int(decoder.add(prompt).argmax()), []
    for _ in range(new):
        start = time.perf_counter()
        token = int(decoder.step([token]).argmax())
        seconds.append(time.perf_counter() - start)
    found = kernels(lambda: decoder.step([token]), bench.device)
    decoder.remove(0)
    return {
        "tokens_per_s": round(new / sum(seconds), 1),
        "ms": round(1000 * sum(seconds) / new, 3),
        "slowest_ms": round(1000 * max(seconds), 3),
        **found,
    }


def _prompts(bench: Bench, decoder: BatchDecoder) -> Row:
    """Read prompts of 16 lengths that are not those of `_decode`."""
    start = time.perf_counter()
    for number in range(16):
        int(decoder.add(_prompt(bench, 200 + 5 * number)).argmax())
        decoder.remove(0)
    return {"ms": round(1000 * (time.perf_counter() - start) / 16, 3)}


def decoding(bench: Bench, name: str) -> Iterator[Row]:
    """Measure decoding steps as they are and as CUDA graphs of the same operators, and prompts
    individually and in one pass, without cuDNN's attention."""
    model = random_bf16_model(bench, name)
    for texts in bench.pick((1, 8, 64), (1, 2)):
        with _cudnn(False):
            yield from _steps(bench, model, texts)
        free_memory(bench.device)


class _Decoding:
    """Texts in a decoder, and steps of decoding that can be recorded.

    Args:
        bench: the device.
        model: a model in bf16.
        texts: number of texts.
    """

    def __init__(self, bench: Bench, model: Model, texts: int) -> None:
        self.bench, self.model = bench, model
        self.tokens, new = bench.pick((128, 64), (4, 60))
        self.decoder = BatchDecoder(model, texts, self.tokens + new)
        self.prompts = [[number + 1] * self.tokens for number in range(texts)]
        self.texts: list[Continuation] = []
        # All steps read the entire cache.
        self.reach = self.tokens + new
        self.ids_B1 = torch.ones(texts, 1, dtype=torch.int64, device=bench.device)
        self.lengths_B = torch.full((texts,), self.tokens, device=bench.device)
        self.empty_B = torch.zeros_like(self.lengths_B)
        self.chosen_B = torch.zeros_like(self.lengths_B)

    def logits(self) -> Tensor:
        """Return the logits [B, V] after the tokens `ids_B1`; reads nothing on the host."""
        cache = self.decoder.cache.ragged(self.lengths_B, self.reach)
        found: Tensor = self.model(self.ids_B1, cache=cache)[:, -1]
        return found

    def choose(self) -> None:
        """Choose the next tokens, and read them on the host."""
        self.chosen_B.copy_(self.logits().argmax(-1))

    def advance(self, choose: Callable[[Tensor], Tensor]) -> None:
        """Choose the next tokens by a function of the logits [B, V], and append them."""
        self.ids_B1.copy_(choose(self.logits())[:, None])
        # Never exceeds the cache, however often the step is replayed.
        self.lengths_B.add_(1).clamp_(max=self.reach - 1)

    def feed(self, replay: Call) -> None:
        """Replay a recorded `choose` with tokens and lengths sent by the host."""
        replay()
        tokens = torch.tensor(self.chosen_B.tolist(), device=self.bench.device)
        self.ids_B1.copy_(tokens[:, None])
        lengths = [self.tokens] * len(self.prompts)
        self.lengths_B.copy_(torch.tensor(lengths, device=self.bench.device))

    def begin(self, config: SamplingConfig) -> None:
        """Compute the prompts of texts, and choose their first tokens."""
        context = self.decoder.max_tokens
        self.texts = [Continuation(prompt, config, context=context) for prompt in self.prompts]
        self._push(first_tokens(self.texts, self.decoder))

    def as_it_is(self) -> None:
        """Run a step as in `generate` and `serve`."""
        self._push(next_tokens(self.texts, self.decoder))

    def _push(self, chosen: Sequence[Chosen | Exception]) -> None:
        for text, one in zip(self.texts, chosen, strict=True):
            text.push(one)

    def one_by_one(self) -> None:
        """Compute the prompts as the package does."""
        for prompt in self.prompts:
            self.decoder.add(prompt)
        for _ in self.prompts:
            self.decoder.remove(0)

    def one_pass(self, *, masked: bool) -> None:
        """Compute all prompts in one pass, with equal lengths or masked by their lengths."""
        ids_BT = torch.tensor(self.prompts, device=self.bench.device)
        cache = self.decoder.cache
        cache.length = 0
        if masked:
            self.model(ids_BT, cache=cache.ragged(self.empty_B, self.tokens), logits_to_keep=1)
        else:
            self.model(ids_BT, cache=cache, logits_to_keep=1)


# Not in inference mode, because a CUDA graph recorded in it would leave torch's random state
# unusable for the graphs of training.
@torch.no_grad()
def _steps(bench: Bench, model: Model, texts: int) -> Iterator[Row]:
    decoding = _Decoding(bench, model, texts)
    row = functools.partial(_step_row, bench, tokens=texts)
    for name, config in (("greedy", {"temperature": 0.0}), ("sampled", {"top_k": 50, "seed": 1})):
        decoding.begin(SamplingConfig(**config))
        yield attempt(f"{texts} texts: as it is, {name}", lambda: row(decoding.as_it_is))
        for _ in decoding.prompts:
            decoding.decoder.remove(0)
    greedy = functools.partial(decoding.advance, functools.partial(torch.argmax, dim=-1))
    sampled = functools.partial(decoding.advance, _sample)
    yield attempt(
        f"{texts} texts: recorded, tokens sent by the host",
        lambda: row(functools.partial(decoding.feed, recorded(decoding.choose, bench.device))),
    )
    for name, step in (("greedy", greedy), ("sampled", sampled)):
        yield attempt(
            f"{texts} texts: recorded, {name} on the device",
            functools.partial(_recorded_row, bench, step, texts),
        )
    for name, call in (
        ("one by one", decoding.one_by_one),
        ("one pass", functools.partial(decoding.one_pass, masked=False)),
        ("one pass with a mask", functools.partial(decoding.one_pass, masked=True)),
    ):
        yield attempt(f"{texts} prompts: {name}", functools.partial(_prompts_row, bench, call))


def _recorded_row(bench: Bench, step: Call, tokens: int) -> Row:
    return _step_row(bench, recorded(step, bench.device), tokens=tokens)


def _prompts_row(bench: Bench, call: Call) -> Row:
    return {"ms": bench.ms(call, rounds=3, calls=2)}


def _step_row(bench: Bench, step: Call, *, tokens: int) -> Row:
    """Measure the time, memory and kernels of a decoding step."""
    with peak_memory(bench.device) as peaks:
        # Fewer steps than fit into the cache.
        ms = bench.ms(step, rounds=3, calls=12)
    found = kernels(step, bench.device)
    return {
        "ms": ms,
        "tokens_per_s": round(1000 * tokens / ms, 1),
        "host_gap_ms": round(ms - found["kernels_ms"], 4),
        **peaks,
        **found,
    }


def _sample(logits_BV: Tensor) -> Tensor:
    """Draw a token for each row without waiting for the host: the one with the largest p / e, where
    e is exponentially distributed."""
    p_BV = (logits_BV.float() / 0.8).softmax(-1)
    return (p_BV / torch.empty_like(p_BV).exponential_(1)).argmax(-1)


# E, F, G, H, M: training

_BF16 = {"efficiency.precision": "bf16", "optimizer.implementation": "fused"}
_COMPILED = {**_BF16, "efficiency.compile": True}
_PADDED = {**_COMPILED, "efficiency.vocab_multiple": 64}


class _Training:
    """A model in training on one batch of random tokens.

    Args:
        bench: the device.
        model: name of the model, see `models.model_values`.
        rows: sequences of a step.
        tokens: tokens of a sequence.
        changes: values of the recipe by key.
    """

    def __init__(
        self, bench: Bench, model: str, rows: int, tokens: int, changes: Mapping[str, Any]
    ) -> None:
        if bench.dry:
            rows, tokens = 1, 16
            if model.startswith("gpt2"):
                model, changes = "tiny-gpt2", {**changes, "efficiency.compile_backend": "eager"}
            else:  # Compiling one model already takes long.
                model = "tiny-llama"
                changes = {k: v for k, v in changes.items() if "compile" not in k}
        self.bench = bench
        recipe = parse_resolved_recipe(
            PlannerCase(model, rows, tokens, changes).recipe(bench.device.type)
        )
        made = random_model(recipe.model, bench.device, recipe.efficiency.vocab_multiple)
        attach(made, recipe, bench.hardware)
        self.program = TrainingProgram(recipe, made, bench.hardware)
        frozen = recipe.lora is not None
        #: FLOPs per token.
        self.flops = train_flops_per_token(made, recipe.data.seq_len, frozen=frozen)
        self.batch = random_batch(recipe).to(bench.device)
        self._unread: Call | None = None

    def row(self, step: Call | None = None, *, calls: int = 3) -> Row:
        """Return the figures of a step, see `training_row`."""
        tokens = self.batch.input_ids.numel()
        return training_row(self.bench, step or self.step, tokens, self.flops * tokens, calls=calls)

    def step(self) -> None:
        """Run a step as in `firstlight train`."""
        self.program.step([self.batch], lr_scale=1.0)

    def step_without_reading(self, *, clips: bool = True) -> Tensor:
        """Run a step whose loss, [], is not read by the host, with or without gradient clipping."""
        optimizer = self.program.optimizer
        with self.program.stepping(1.0):
            optimizer.zero_grad()
            loss = self.program.loss_sum(*self.batch.inputs) / self.batch.num_terms
            loss.backward()  # type: ignore[no-untyped-call]
            if clips:
                optimizer.clip_gradients()
            optimizer.step()
        return loss.detach()

    def step_read_late(self, *, clips: bool = True) -> None:
        """Run a step that reads the loss of the previous step after queueing its own work."""
        loss = self.step_without_reading(clips=clips)
        before, self._unread = self._unread, download(loss[None])
        if before is not None:
            before()


def training_row(bench: Bench, step: Call, tokens: int, flops: float, *, calls: int = 3) -> Row:
    """Measure the first step in seconds, and time, memory and kernels of later steps.

    Args:
        bench: the device.
        step: a step of training.
        tokens: tokens of a step.
        flops: floating-point operations of a step, used for "tflops".
        calls: steps of each of three timed rounds.
    """
    synchronize(bench.device)
    start = time.perf_counter()
    step()
    synchronize(bench.device)
    first = time.perf_counter() - start
    with peak_memory(bench.device) as peaks:
        step()
        ms = bench.ms(step, rounds=3, calls=calls)
    found = kernels(step, bench.device)
    return {
        "ms": ms,
        "tokens_per_s": round(1000 * tokens / ms),
        "tflops": round(flops / ms / 1e9, 1),
        "host_gap_ms": round(ms - found["kernels_ms"], 3),
        "first_s": round(first, 2),
        **peaks,
        **found,
    }


def training_124m(bench: Bench) -> Iterator[Row]:
    """Measure compiled steps of GPT-2 124M, unchanged and with less waiting and clipping."""
    training = _Training(bench, "gpt2-124m", 32, 1024, _PADDED)
    yield attempt("as it is", training.row)
    yield attempt("loss read one step later", lambda: training.row(training.step_read_late))
    unclipped = functools.partial(training.step_read_late, clips=False)
    yield attempt("read late, not clipped", lambda: training.row(unclipped))


def bf16_stream(bench: Bench) -> Iterator[Row]:
    """Measure the same with bf16 between the layers."""
    changes = {**_PADDED, "efficiency.bf16_residual": True}
    training = _Training(bench, "gpt2-124m", 32, 1024, changes)
    yield attempt("bf16 between layers", training.row)
    late = training.step_read_late
    yield attempt("bf16 between layers, read late", lambda: training.row(late))


#: Optimizer of `firstlight train stdlib --budget 3m`.
_MUON = {
    "efficiency.precision": "bf16",
    "optimizer.name": "muon",
    "optimizer.muon_coefficients": "polar_express",
    "optimizer.muon_beta2": 0.95,
    "optimizer.cautious_weight_decay": True,
    "optimizer.max_grad_norm": 0.0,
}


def small_run(bench: Bench, changes: Mapping[str, Any]) -> Iterator[Row]:
    """Measure steps of the model of `firstlight train stdlib --budget 3m`."""
    training = _Training(bench, "stdlib-44m", 8, 512, {**_MUON, **changes})
    yield attempt("as it is", lambda: training.row(calls=10))
    yield attempt(
        "loss read one step later", lambda: training.row(training.step_read_late, calls=10)
    )


def training_1b(bench: Bench, precision: str) -> Iterator[Row]:
    """Measure compiled steps of a Llama with 1.2B parameters."""
    chosen = {"efficiency.precision": bench.pick(precision, "bf16")}
    training = _Training(bench, "llama-1b", 4, 2048, {**_COMPILED, **chosen})
    yield attempt("as it is", training.row)
    if precision == "bf16":
        yield attempt("read late", lambda: training.row(training.step_read_late))


QLORA: dict[str, Any] = {
    "efficiency.precision": "bf16_params",
    "efficiency.loss_chunk_tokens": 256,
    "efficiency.activation_checkpointing": "full",
    "efficiency.compile": True,
    "lora": {"rank": 8, "quantize": "nf4"},
}


def qlora_8b(bench: Bench) -> Iterator[Row]:
    """Measure compiled QLoRA steps of a Llama with 8B parameters and one sequence."""
    changes = bench.pick(QLORA, {**QLORA, "lora": {"rank": 8}})
    training = _Training(bench, "llama-8b", 1, 2048, changes)
    yield attempt("as it is", training.row)


# I: the loss in chunks


def loss_in_chunks(bench: Bench) -> Iterator[Row]:
    """Measure head and loss, forward and backward: all logits at once, and in chunks of tokens."""
    for model, sizes in {"124M": (32768, 768, 50304), "3B": (8192, 3072, 128256)}.items():
        head = _Head(bench, *bench.pick(sizes, (32, 16, 64)))
        yield attempt(f"{model}: all logits, compiled", head.whole)
        for chunk in bench.pick((2048, 8192), (16,)):
            title = f"{model}: chunks of {chunk}"
            yield attempt(f"{title} as they are", functools.partial(head.as_it_is, chunk))
            for way, function in (
                ("compiled", _chunk),
                ("compiled, addmm into fp32", _chunk_addmm),
            ):
                yield attempt(f"{title} {way}", functools.partial(head.chunks, function, chunk))
        del head
        free_memory(bench.device)


class _Head:
    """A head's weights, its inputs and the labels, random.

    Args:
        bench: the device.
        N, C, V: number of tokens, width of the inputs, size of the vocabulary.
    """

    def __init__(self, bench: Bench, N: int, C: int, V: int) -> None:
        self.bench = bench
        self.linear = nn.Linear(C, V, bias=False, device=bench.device)
        self.x_NC = bench.tensor(N, C).requires_grad_()
        self.labels_N = torch.randint(V, (N,), device=bench.device)

    def whole(self) -> Row:
        """Measure all logits at once, compiled."""
        loss = self.bench.compiled(_whole_loss)
        return self._row(lambda: self._gradients(loss(self.x_NC, self.linear, self.labels_N)))

    def as_it_is(self, chunk: int) -> Row:
        """Measure chunks as computed by `efficiency.loss_chunk_tokens`."""
        loss = chunked_head_loss(chunk)

        def call() -> None:
            with torch.autocast(self.x_NC.device.type, torch.bfloat16, cache_enabled=False):
                found = loss(
                    self.x_NC[None], self.linear, self.linear.out_features, self.labels_N[None]
                )
            self._gradients(found)

        return self._row(call)

    def chunks(self, function: Callable[..., object], chunk: int) -> Row:
        """Measure chunks computed by a compiled function; see `_chunk`."""
        compiled = self.bench.compiled(function)

        def call() -> None:
            with torch.no_grad():
                weight_VC = self.linear.weight.to(self.x_NC.dtype)
                grad_VC = torch.zeros_like(self.linear.weight)
                parts = zip(
                    torch.split(self.x_NC, chunk), torch.split(self.labels_N, chunk), strict=True
                )
                for x_nC, labels_n in parts:
                    compiled(x_nC, weight_VC, labels_n, grad_VC)

        return self._row(call)

    def _gradients(self, loss: Tensor) -> None:
        torch.autograd.grad(loss, (self.x_NC, self.linear.weight))

    def _row(self, call: Call) -> Row:
        call()  # Compile.
        with peak_memory(self.bench.device) as peaks:
            ms = self.bench.ms(call, rounds=3, calls=2)
        return {"ms": ms, **peaks, **kernels(call, self.bench.device)}


def _whole_loss(x_NC: Tensor, head: nn.Linear, labels_N: Tensor) -> Tensor:
    logits_NV = x_NC @ head.weight.to(x_NC.dtype).T
    return F.cross_entropy(logits_NV.float(), labels_N, reduction="sum")


def _chunk_gradient(
    x_nC: Tensor, weight_VC: Tensor, labels_n: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed loss [], and its gradients for the logits [n, V] and for `x_nC` [n, C]."""
    logits_nV = (x_nC @ weight_VC.T).float()
    loss = F.cross_entropy(logits_nV, labels_n, reduction="sum")
    columns_V = torch.arange(weight_VC.shape[0], device=x_nC.device)
    grad_nV = (logits_nV.softmax(-1) - (columns_V == labels_n[:, None]).float()).to(x_nC.dtype)
    return loss, grad_nV, grad_nV @ weight_VC


def _chunk(
    x_nC: Tensor, weight_VC: Tensor, labels_n: Tensor, grad_VC: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss [] and the gradient of `x_nC` [n, C], and add the weight's gradient to
    `grad_VC`."""
    loss, grad_nV, grad_x_nC = _chunk_gradient(x_nC, weight_VC, labels_n)
    grad_VC += grad_nV.T @ x_nC
    return loss, grad_x_nC


def _chunk_addmm(
    x_nC: Tensor, weight_VC: Tensor, labels_n: Tensor, grad_VC: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the same as `_chunk`, but add the product in fp32 without first rounding it to
    bf16."""
    loss, grad_nV, grad_x_nC = _chunk_gradient(x_nC, weight_VC, labels_n)
    if x_nC.is_cuda:
        grad_VC.copy_(torch.addmm(grad_VC, grad_nV.T, x_nC, out_dtype=torch.float32))
    else:
        grad_VC.addmm_(grad_nV.T.float(), x_nC.float())
    return loss, grad_x_nC


# J: memory that the allocator reserves

_ADAFACTOR_3B = {
    "efficiency.precision": "bf16",
    "efficiency.loss_chunk_tokens": 1024,
    "efficiency.activation_checkpointing": "full",
    "efficiency.activation_offload": True,
    "efficiency.optimizer_in_backward": True,
    "optimizer.max_grad_norm": 0.0,
    "optimizer.name": "adafactor",
    "optimizer.learning_rate": 0.01,
}


def expandable_segments(bench: Bench) -> Iterator[Row]:
    """Measure allocated and reserved memory of three configurations that reserve much more than
    they use, in processes with and without `expandable_segments`."""
    cases = [
        PlannerCase("llama-110m", 8, 2048, {"efficiency.precision": "bf16_params"}),
        PlannerCase(
            "llama-400m",
            1,
            8192,
            {"efficiency.precision": "bf16", "efficiency.activation_checkpointing": "full"},
        ),
        PlannerCase("llama-3b", 2, 4096, _ADAFACTOR_3B, title="llama-3b, Adafactor, offloaded"),
    ]
    request = steps_request(bench, bench.pick(cases, dry_grid()[2:3]))
    for setting in ("True", "False"):
        value = f"expandable_segments:{setting}"
        # The second name is for torch before 2.9.
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        environment = training_environment() | dict.fromkeys(names, value)
        found = ask(STEPS_MODULE, request, environment, seconds=60.0)
        if "error" in found:
            yield {"row": value, "error": found["error"]["message"]}
        for case in found.get("cases", ()):
            row = case_row(case, f"{value}: ")
            if "driver_bytes" in case:
                # Memory of the process outside of torch's allocator: the CUDA context and kernels.
                row["context_mib"] = round((case["driver_bytes"] - case["reserved_bytes"]) / 2**20)
            yield row


def steps_request(bench: Bench, cases: Sequence[PlannerCase]) -> dict[str, Any]:
    """Return a request for `planner_steps`."""
    device = bench.device.type
    requests = [case.request(device) for case in cases]
    return {"cases": requests, "device": device, "steps": bench.pick(12, 1), "seconds": 1.2}


def case_row(case: Mapping[str, Any], prefix: str = "") -> Row:
    """Return the row of a configuration that `planner_steps` has measured."""
    row: Row = {"row": prefix + case["name"]}
    if case["reason"]:
        return {**row, "error": case["reason"]}
    if case.get("step_seconds"):
        ms = 1000 * sorted(case["step_seconds"])[len(case["step_seconds"]) // 2]
        row |= {"ms": round(ms, 3), "tokens_per_s": round(1000 * case["tokens_a_step"] / ms)}
    for key, name in (("peak_bytes", "allocated_mib"), ("reserved_bytes", "reserved_mib")):
        if key in case:
            row[name] = round(case[key] / 2**20, 1)
    return row


# K: int8


@torch.no_grad()
def int8(bench: Bench) -> Iterator[Row]:
    """Yield products of 1, 8 and 64 rows with 8 weights [8192, 2048], which exceed the GPU's
    cache."""
    layers, out, inner = bench.pick((8, 8192, 2048), (2, 64, 32))
    weights = [bench.tensor(out, inner) for _ in range(layers)]
    quantized = [rounded(weight) for weight in weights]
    present = [Int8Linear(weight, None) for weight in weights]
    cast = bench.compiled(_cast_product)
    ways: dict[str, Callable[[Tensor], object]] = {
        "bf16": lambda x: [F.linear(x, weight) for weight in weights],
        "int8, cast": lambda x: [one(x) for one in present],
        "_weight_int8pack_mm": lambda x: [torch._weight_int8pack_mm(x, w, s) for w, s in quantized],
        "int8, cast compiled": lambda x: [cast(x, w, s) for w, s in quantized],
    }
    with contextlib.suppress(ImportError):
        from torchao.quantization import (  # type: ignore[import-untyped, unused-ignore]
            Int8WeightOnlyConfig,
            quantize_,
        )

        theirs = nn.ModuleList(
            nn.Linear(inner, out, bias=False, device=bench.device, dtype=torch.bfloat16)
            for _ in weights
        )
        quantize_(theirs, Int8WeightOnlyConfig())
        compiled = [bench.compiled(one) for one in theirs]
        ways["torchao, compiled"] = lambda x: [one(x) for one in compiled]
    for rows in (1, 8, 64):
        x = bench.tensor(rows, inner)
        for name, product in ways.items():
            call = functools.partial(product, x)
            yield attempt(f"{rows} rows: {name}", functools.partial(_products, bench, call, layers))


def _cast_product(x: Tensor, weight_int8: Tensor, scale: Tensor) -> Tensor:
    return F.linear(x, weight_int8.to(x.dtype)) * scale


def _products(bench: Bench, call: Call, layers: int) -> Row:
    replay = recorded(call, bench.device)
    return {"us_per_weight": round(1000 * bench.ms(replay) / layers, 2)}


# L: the planner's configurations


def planner(bench: Bench, start: int, *, rest: bool = False) -> Iterator[Row]:
    """Measure seven configurations of the planner's grid, mixtures of experts first.

    Args:
        bench: the device.
        start: number of the first configuration.
        rest: True for configurations that compile or need a package, False for the others.
    """
    grid = bench.pick(gpu_grid(), dry_grid())
    cases = [case for case in grid if bool(case.slow or case.needs) is rest]
    cases.sort(key=lambda case: case.model != "mixtral-small")
    for case in cases[start : start + bench.pick(7, 1)]:
        (found,) = measure_steps(steps_request(bench, [case]))["cases"]
        yield case_row(found)


def make_item(
    name: str, title: str, seconds: float, rows: Any, *arguments: Any, **named: Any
) -> Item:
    """Return an item whose function gets further arguments."""
    return Item(name, title, seconds, lambda bench: rows(bench, *arguments, **named))


_COMPILE = {"efficiency.compile": True}
_REGIONAL = {**_COMPILE, "efficiency.compile_regional": True}
_GRAPHS = {**_COMPILE, "efficiency.compile_mode": "reduce-overhead"}

ITEMS: tuple[Item, ...] = (
    make_item("A", "Facts", 5, facts),
    make_item("B", "Attention kernels", 12, attention),
    make_item("C", "New lengths, with and without cuDNN attention", 15, new_lengths),
    make_item("D-124m", "Decoding, GPT-2 124M", 15, decoding, "gpt2-124m"),
    make_item("D-1b", "Decoding, Llama 1B", 15, decoding, "llama-1b"),
    make_item("E", "Training GPT-2 124M, 32 x 1,024, compiled", 45, training_124m),
    make_item("F", "The same in bf16 between layers", 35, bf16_stream),
    make_item("G-eager", "Training 44.5M with Muon, 8 x 512, not compiled", 8, small_run, {}),
    make_item("G-compiled", "The same, compiled", 22, small_run, _COMPILE),
    make_item("G-regional", "The same, layers and loss compiled", 13, small_run, _REGIONAL),
    make_item("G-graphs", "The same, compiled to CUDA graphs", 26, small_run, _GRAPHS),
    make_item("H-bf16", "Training Llama 1B, 4 x 2,048, compiled", 55, training_1b, "bf16"),
    make_item("H-fp8", "The same in fp8", 55, training_1b, "fp8"),
    make_item("I", "The loss in chunks", 25, loss_in_chunks),
    make_item("J", "expandable_segments", 30, expandable_segments),
    make_item("K", "int8 weights", 12, int8),
    make_item("L-1", "The planner's configurations 1 to 7", 24, planner, 0),
    make_item("L-2", "The planner's configurations 8 to 14", 24, planner, 7),
    make_item("L-3", "The planner's configurations 15 to 21", 24, planner, 14),
    make_item("M", "QLoRA of Llama 8B, 1 x 2,048, compiled", 70, qlora_8b),
)
