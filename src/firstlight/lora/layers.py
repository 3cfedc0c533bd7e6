"""LoRA. This module defines the `lora` section of a recipe, the adapted layers, functions that add
and merge adapters, and the names of the adapters' parameters in PEFT files.

As in PEFT, an adapter can contain whole modules (`modules_to_save`) and individual rows of the
embedding and the head (`trainable_token_indices`) in addition to low-rank matrices."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, TypeVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from firstlight.errors import ConfigError, ModelError, nearest
from firstlight.lora.quantized import NF4Linear, require_nf4
from firstlight.models import Model
from firstlight.models.gpt2 import Conv1D
from firstlight.models.moe import Experts, Router
from firstlight.models.ops import Embedding
from firstlight.section import Section

LinearLayer = nn.Linear | Conv1D
HEAD = "lm_head"

#: Classes of modules that a user could target by mistake, mapped to the names that the error
#: message uses for them.
_OTHER_KINDS: dict[type[nn.Module], str] = {
    Embedding: "an embedding",
    Experts: "a stack of experts",
    Router: "a router of experts",
}


_Target = Annotated[str, Field(min_length=1)]
TokenIds = list[Annotated[int, Field(ge=0)]]
_T = TypeVar("_T", int, float)


@functools.lru_cache(maxsize=6000)
def compiled(pattern: str) -> re.Pattern[str]:
    """Return the compiled regular expression for an entry of `rank_pattern` or `alpha_pattern`. It
    matches either the whole name of a layer or the part of the name after any dot."""
    return re.compile(rf"(.*\.)?({pattern})$")


def _by_pattern(patterns: Mapping[str, _T], layer: str, otherwise: _T) -> _T:
    """Return the value of the first pattern that matches the end of a layer's name. If no pattern
    matches, return `otherwise`. PEFT uses the same rule."""
    found = (value for pattern, value in patterns.items() if compiled(pattern).match(layer))
    return next(found, otherwise)


class LoraConfig(Section):
    """The `lora` section of a recipe. With LoRA (Hu et al. 2021, arXiv 2106.09685), the initial
    weights are frozen, and low-rank matrices that are added to them are trained.
    """

    rank: int = Field(8, ge=1)
    """rank of the product B A that is added to a layer: A has this number of rows, and B has this
    number of columns."""
    alpha: float = Field(16.0, gt=0)
    """scale of the product B A that is added to a layer: the product is multiplied by alpha /
    rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """dropout probability for the input of the low-rank matrices during training."""
    targets: Literal["all-linear"] | Annotated[list[_Target], Field(min_length=1)] = "all-linear"
    """layers to adapt, specified by the last parts of their names (`q_proj`, `mlp.c_proj`,
    `embed_tokens`, `lm_head`). "all-linear" adapts every linear layer except the head, as in
    PEFT."""
    modules_to_save: list[_Target] = Field(default=[])
    """modules to train in full and save with the adapter, specified by the last parts of their
    names (`embed_tokens`, `lm_head`, `norm`)."""
    trainable_token_indices: TokenIds | dict[str, TokenIds] = Field(default=[])
    """ids of the tokens whose embedding rows are trained. A tied head shares these rows. Separate
    lists can be given for the embedding and the head: `{embed_tokens: [5], lm_head: [5]}`."""
    ensure_weight_tying: bool = False
    """true keeps a tied head tied to the embedding if `targets` or `modules_to_save` contain the
    head or the embedding; false unties the head, as PEFT does by default."""
    use_rslora: bool = False
    """true multiplies B A by alpha / sqrt(rank) instead of by alpha / rank (rank-stabilised LoRA,
    Kalajdzievski 2023, arXiv 2312.03732)."""
    rank_pattern: dict[str, Annotated[int, Field(ge=1)]] = Field(default={})
    """ranks that replace `rank` for some layers, keyed by regular expressions that match the last
    parts of layer names."""
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = Field(default={})
    """alphas that replace `alpha` for some layers, keyed by regular expressions that match the last
    parts of layer names."""
    dora: bool = False
    """true trains the magnitude of the weights of each output separately from their direction
    (DoRA, Liu et al. 2024). Each forward pass then reads every adapted weight a second time."""
    quantize: Literal["none", "nf4"] = "none"
    """"nf4" stores the frozen linear layers, except the head, in 4 bits, and dequantises their
    weights for each multiplication (QLoRA, Dettmers et al. 2023; requires bitsandbytes). Stacked
    experts are not quantised."""

    def rank_of(self, layer: str) -> int:
        """Return the rank r of a layer's product B A."""
        return _by_pattern(self.rank_pattern, layer, self.rank)

    def scaling_of(self, layer: str) -> float:
        """Return the factor by which a layer's product B A is multiplied."""
        rank = self.rank_of(layer)
        alpha = _by_pattern(self.alpha_pattern, layer, self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


class LoraLinear(nn.Module):
    """A frozen linear layer with weight W, to which a trainable low-rank term B A is added.

        LoRA  y = W x + b + s B A x
        DoRA  y = m / |W + s B A| * (W + s B A) x + b

    See Hu et al. 2021 (arXiv 2106.09685) for LoRA, and Liu et al. 2024 (arXiv 2402.09353) for DoRA.
    |.| denotes the norms of the rows of a weight, [out], which are treated as constants in the
    backward pass (DoRA, section 4.3). A, B and m have at least fp32 precision, even if
    `LanguageModel.cast` converts the model to bf16. Products with A and B are computed in the dtype
    of the input or, under autocast, in the dtype of autocast.

    Args:
        base_layer: linear layer with the weight W [out, in] and the bias b [out]. The constructor
            freezes it.
        rank: r, the rank of B A.
        scaling: s, the factor by which B A is multiplied.
        dropout: dropout probability for the input of A during training.
        dora: True for DoRA. Its magnitudes m are initialised to |W|.

    Attributes:
        lora_A: A [r, in]. It is zero until it is set by `reset` or loaded from a file.
        lora_B: B [out, r]. It is zero until it is trained or loaded from a file.
        lora_magnitude_vector: m [out]; None for LoRA.
        keeps_precision: True, so that `LanguageModel.cast` does not convert the parameters. In
            bf16, the update of A or B in a single step could be lost to rounding.
    """

    keeps_precision = True

    def __init__(
        self,
        base_layer: LinearLayer | NF4Linear,
        rank: int,
        scaling: float,
        dropout: float,
        dora: bool,
    ) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.scaling, self.dropout = scaling, dropout
        weight = weight_of(base_layer)
        out_features, in_features = weight.shape
        self.lora_A = nn.Parameter(weight.new_zeros(rank, in_features))
        self.lora_B = nn.Parameter(weight.new_zeros(out_features, rank))
        norm = torch.linalg.vector_norm(weight, dim=1) if dora else None
        self.lora_magnitude_vector = None if norm is None else nn.Parameter(norm)

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """Draw A from Uniform(-1/sqrt(in), 1/sqrt(in)), as PEFT does. B stays zero, so the product
        B A is zero.

        Args:
            generator: generator of random numbers on the CPU. The initial values are then the same
                on all devices.
        """
        drawn = torch.empty(self.lora_A.shape)
        bound = 1 / math.sqrt(drawn.shape[1])
        self.lora_A.copy_(drawn.uniform_(-bound, bound, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to inputs of shape [..., in]. Outputs have shape [..., out]."""
        y: Tensor = self.base_layer(x)
        inner = F.dropout(x, self.dropout, self.training) if self.dropout else x
        inner = F.linear(inner, self.lora_A.to(x.dtype))
        y = y + self.scaling * F.linear(inner, self.lora_B.to(x.dtype))
        if self.lora_magnitude_vector is None:
            return y
        scale = self.lora_magnitude_vector / self._norm()
        scaled = y * scale
        if self.base_layer.bias is not None:
            # y already includes the bias, which must not be multiplied by the magnitudes.
            scaled = scaled + (1 - scale) * self.base_layer.bias
        return scaled.to(y.dtype)

    def merged_weight(self) -> Tensor:
        """Return the weight [out, in] of an equivalent plain layer, in at least fp32."""
        with torch.no_grad():
            weight = self._changed()
            if self.lora_magnitude_vector is not None:
                weight *= (self.lora_magnitude_vector / self._norm())[:, None]
        return weight

    def _norm(self) -> Tensor:
        # The norm is computed in fp32 even under autocast, because m is initialised with an fp32
        # norm and m / |W| must be 1 at the start.
        with torch.no_grad(), torch.autocast(self.lora_A.device.type, enabled=False):
            norm: Tensor = torch.linalg.vector_norm(self._changed(), dim=1)
        # The padding rows of a vocabulary are zero, so they have m = 0 and |W| = 0, and 0 / 0 would
        # be NaN.
        return norm.clamp_min(torch.finfo(norm.dtype).tiny)

    def _changed(self) -> Tensor:
        return weight_of(self.base_layer) + self.scaling * (self.lora_B @ self.lora_A)


class _Table(nn.Module):
    """Base class of wrappers around an embedding or a head, whose weight is [V, C].

    Attributes:
        base_layer: the frozen embedding or head.
    """

    keeps_precision = True
    base_layer: Embedding | nn.Linear

    @property
    def weight(self) -> Tensor:
        """The frozen weight [V, C], from which callers read the device and the dtype."""
        return self.base_layer.weight

    def embed(self, ids: Tensor) -> Tensor:
        """Look up the embedding vectors [..., C] for token ids [...]."""
        raise NotImplementedError

    def project(self, x: Tensor) -> Tensor:
        """Compute the logits [..., V] for hidden states [..., C]."""
        raise NotImplementedError

    def merged_weight(self) -> Tensor:
        """Return the weight [V, C] of an equivalent plain embedding or head, in at least fp32."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Apply the embedding or the head. Return embedding vectors or logits."""
        return self.embed(x) if isinstance(self.base_layer, Embedding) else self.project(x)


class LoraEmbedding(_Table):
    """A frozen embedding with weight W [V, C], to which a trainable low-rank term is added: W + s
    (B A)^T.

    Args:
        base_layer: embedding, which the constructor freezes.
        rank, scaling: see `LoraLinear`. As in PEFT, there is no dropout.

    Attributes:
        lora_embedding_A: A [r, V]. It is zero until it is trained or loaded from a file.
        lora_embedding_B: B [C, r]. It is zero until it is set by `reset` or loaded from a file.
    """

    def __init__(self, base_layer: Embedding, rank: int, scaling: float) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.scaling = scaling
        weight = weight_of(base_layer)
        self.lora_embedding_A = nn.Parameter(weight.new_zeros(rank, weight.shape[0]))
        self.lora_embedding_B = nn.Parameter(weight.new_zeros(weight.shape[1], rank))

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """Draw B from a normal distribution, as PEFT does. A stays zero, so the product B A is
        zero."""
        drawn = torch.empty(self.lora_embedding_B.shape)
        self.lora_embedding_B.copy_(drawn.normal_(generator=generator))

    def embed(self, ids: Tensor) -> Tensor:
        y: Tensor = self.base_layer(ids)
        inner = F.embedding(ids, self.lora_embedding_A.T)
        return y + self.scaling * F.linear(inner, self.lora_embedding_B).to(y.dtype)

    def project(self, x: Tensor) -> Tensor:
        inner = F.linear(x, self.lora_embedding_B.T.to(x.dtype))
        change = self.scaling * F.linear(inner, self.lora_embedding_A.T.to(x.dtype))
        return F.linear(x, self.weight.to(x.dtype)) + change

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        change = (self.lora_embedding_B @ self.lora_embedding_A).T
        return weight_of(self.base_layer) + self.scaling * change


class TrainableTokens(_Table):
    """A frozen embedding or head, some of whose rows are replaced by trainable rows.

    Args:
        base_layer: embedding or head, which the constructor freezes.
        token_ids: the token ids of the trainable rows.

    Attributes:
        trainable_tokens_delta: trainable rows [n, C], initialised with the values of the frozen
            rows. Despite the name, which PEFT uses, they contain values and not differences.
        token_ids: token ids of the trainable rows, int64 [n].
        rows: index of each token's row in `trainable_tokens_delta`, or -1 if the token's row is
            frozen, int64 [V].
        is_table: True, so that the optimizer uses the settings of embeddings.
    """

    is_table = True
    token_ids: Tensor
    rows: Tensor

    def __init__(self, base_layer: Embedding | nn.Linear, token_ids: list[int]) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        weight = weight_of(base_layer)
        ids = torch.tensor(token_ids, device=weight.device)
        rows = torch.full((len(weight),), -1, device=weight.device)
        self.trainable_tokens_delta = nn.Parameter(weight[ids].clone())
        self.register_buffer("token_ids", ids, persistent=False)
        rows = rows.index_copy(0, ids, torch.arange(len(ids), device=weight.device))
        self.register_buffer("rows", rows, persistent=False)

    def embed(self, ids: Tensor) -> Tensor:
        y: Tensor = self.base_layer(ids)
        rows = self.rows[ids]
        own = F.embedding(rows.clamp_min(0), self.trainable_tokens_delta).to(y.dtype)
        return torch.where((rows >= 0)[..., None], own, y)

    def project(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight.to(x.dtype))
        own = F.linear(x, self.trainable_tokens_delta.to(x.dtype))
        return y.index_copy(-1, self.token_ids, own)

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        return weight_of(self.base_layer).index_copy(0, self.token_ids, self.trainable_tokens_delta)


class TiedHead(nn.Module):
    """The tied head of a model whose embedding has an adapter. It uses the weight of the adapted
    embedding.

    Args:
        table: adapted embedding. It is not registered as a submodule, so that its parameters have
            only one name.
    """

    def __init__(self, table: _Table) -> None:
        super().__init__()
        self._table = (table,)

    @property
    def weight(self) -> Tensor:
        """The frozen weight [V, C] of the embedding, from which callers read the device and the
        dtype."""
        return self._table[0].weight

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits [..., V] for hidden states [..., C]."""
        return self._table[0].project(x)


def weight_of(layer: LinearLayer | NF4Linear | Embedding) -> Tensor:
    """Return the weight of a linear layer, [out, in], or of an embedding, [V, C], in at least
    fp32."""
    if isinstance(layer, NF4Linear):
        return layer.weight_in(torch.promote_types(layer.dtype, torch.float32))
    weight = layer.weight.T if isinstance(layer, Conv1D) else layer.weight
    return weight.detach().to(torch.promote_types(weight.dtype, torch.float32))


def add_lora(
    model: Model,
    config: LoraConfig,
    generator: torch.Generator | None,
    *,
    frozen_dtype: torch.dtype | None = None,
) -> None:
    """Freeze a plain model and add trainable adapters to its layers. Until the adapters are
    trained, they do not change the outputs of the model. Quantising the weights to 4 bits changes
    the outputs slightly.

    Args:
        model: model to modify in place.
        config: the recipe's `lora` section.
        generator: CPU generator used to initialise matrix A of each layer, or matrix B of an
            embedding. None leaves the matrices at zero, for adapters that are then loaded from a
            file.
        frozen_dtype: dtype to which the weights of frozen linear layers, except the head, are cast;
            None leaves their dtype unchanged. Under autocast with the same dtype, the cast does not
            change the results. 16-bit weights take half as much memory as fp32 weights.

    Raises:
        ConfigError: a target is not a layer that can be adapted, two keys change the same embedding
            or head, or the device does not have 4-bit kernels.
        MissingDependencyError: bitsandbytes is required for 4-bit weights but not installed.
    """
    layers = linear_layers(model)
    saved, tokens = saved_modules(model, config), token_tables(model, config)
    names = [n for n in _target_names(model, config, layers) if not _is_inside(n, saved)]
    is_tied = _keeps_tie(model, config, saved, tokens)
    if is_tied and model.embedding_name in (*names, *saved):
        # The head shares the embedding's adapter.
        names = [name for name in names if name != HEAD]
        saved = [name for name in saved if name != HEAD]
    if is_tied and model.embedding_name in tokens:
        # The head shares the embedding's trained rows. If the head also has a different adapter, an
        # error is raised below.
        tokens.pop(HEAD, None)
    _require_used_once(model, names, saved, tokens, is_tied=is_tied)
    model.requires_grad_(False)
    for name, layer in layers.items():
        if name == HEAD or _is_inside(name, saved):
            continue
        if config.quantize == "nf4":
            require_nf4(layer.weight.device)
            _replace(model, name, NF4Linear(layer))
        elif frozen_dtype is not None:
            layer.weight.data = layer.weight.data.to(frozen_dtype)
    _train_in_full(model, saved, is_tied=is_tied)
    for name in names:
        wrapped = wrap(model, name, config)
        if generator is not None:
            wrapped.reset(generator)
    for name, ids in tokens.items():
        base = model.get_submodule(name)
        assert isinstance(base, Embedding | nn.Linear)
        _replace(model, name, TrainableTokens(base, ids).train(base.training))
    if is_tied and isinstance(model.embedding, _Table):
        _replace(model, HEAD, TiedHead(model.embedding).train(model.training))


def wrap(model: Model, name: str, config: LoraConfig) -> LoraLinear | LoraEmbedding:
    """Replace a linear layer or an embedding with an equivalent module that also has low-rank
    matrices.

    Args:
        model: model to modify in place.
        name: name of the layer.
        config: the recipe's `lora` section.
    """
    base = model.get_submodule(name)
    rank, scaling = config.rank_of(name), config.scaling_of(name)
    if isinstance(base, Embedding):
        if config.dora:
            raise ConfigError(
                f"lora.dora supports only linear layers, but {name} is an embedding: leave it out "
                "of lora.targets (lora.modules_to_save trains it in full), or set lora.dora to "
                "false"
            )
        wrapped: LoraLinear | LoraEmbedding = LoraEmbedding(base, rank, scaling)
    else:
        assert isinstance(base, nn.Linear | Conv1D | NF4Linear)
        wrapped = LoraLinear(base, rank, scaling, config.dropout, config.dora)
    _replace(model, name, wrapped.train(base.training))
    return wrapped


# Modules that are trained in full, and single trained rows


def saved_modules(model: Model, config: LoraConfig) -> list[str]:
    """Return the names of the modules that match `modules_to_save`, in the order of the model.

    Raises:
        ConfigError: an entry does not match any module.
    """
    names = [name for name, _ in model.named_modules() if name]
    for target in config.modules_to_save:
        if not any(_is_target(name, target) for name in names):
            trained = (name for name in names if [*model.get_submodule(name).parameters()])
            known = sorted(n for n in {n.rpartition(".")[2] for n in trained} if not n.isdigit())
            raise ConfigError(
                f"lora.modules_to_save '{target}' matches no module of this model"
                f"{nearest(target, known)}: choose from {', '.join(known)}"
            )
    return [n for n in names if any(_is_target(n, t) for t in config.modules_to_save)]


def token_tables(model: Model, config: LoraConfig) -> dict[str, list[int]]:
    """Return the token ids in `trainable_token_indices`, keyed by the name of the embedding or
    head.

    Raises:
        ConfigError: a name refers neither to the embedding nor to the head, or an id is invalid.
    """
    given = config.trainable_token_indices
    by_name = given if isinstance(given, dict) else {model.embedding_name: given}
    tables: dict[str, list[int]] = {}
    for target, ids in by_name.items():
        name = next((n for n in (model.embedding_name, HEAD) if _is_target(n, target)), None)
        if name is None:
            raise ConfigError(
                f"lora.trainable_token_indices '{target}' is not the embedding or the head: use "
                f"{model.embedding_name.rpartition('.')[2]} or {HEAD}"
            )
        if len({*ids}) < len(ids) or max(ids, default=0) >= model.config.vocab_size:
            raise ConfigError(
                f"lora.trainable_token_indices of {target} must be distinct ids below the "
                f"vocabulary size, {model.config.vocab_size}"
            )
        if ids:
            tables[name] = ids
    return tables


def with_new_tokens(model: Model, config: LoraConfig, first: int, end: int) -> LoraConfig:
    """Return a config that also trains the rows of new tokens in the embedding and the head, unless
    the given config already trains these modules in full. The ids of the new tokens are `first` to
    `end - 1`.

    Raises:
        ConfigError: the embedding or the head already has a different adapter.
    """
    saved, tokens = saved_modules(model, config), token_tables(model, config)
    tables = [model.embedding_name]
    if not model.config.tie_word_embeddings or model.embedding_name in saved:
        tables += [] if _keeps_tie(model, config, saved, tokens) else [HEAD]
    # A tied head shares the embedding's rows.
    is_shared = model.config.tie_word_embeddings and model.embedding_name not in saved
    rows_of = [model.embedding_name, HEAD] if is_shared else tables
    targets = _target_names(model, config, linear_layers(model))
    for key, used in (
        ("targets", [name for name in rows_of if name in targets and name not in saved]),
        ("modules_to_save", [HEAD] if is_shared and HEAD in saved else []),
    ):
        if used:
            short = [n.rpartition(".")[2] for n in (rows_of if is_shared else used)]
            raise ConfigError(
                f"lora.{key} changes {used[0].rpartition('.')[2]}, but its rows for the "
                f"{end - first} new tokens must be trained too, and the two can't be combined: use "
                f"lora.modules_to_save for {' and '.join(short)}"
            )
    for name in tables:
        if name not in saved:
            tokens[name] = sorted({*tokens.get(name, []), *range(first, end)})
    return config.model_copy(update={"trainable_token_indices": tokens})


def _is_inside(name: str, modules: list[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _keeps_tie(
    model: Model, config: LoraConfig, saved: list[str], tokens: Mapping[str, list[int]]
) -> bool:
    """Return True if the head stays tied to the embedding according to PEFT's rules. Trained rows
    are shared unless the config lists different rows for the embedding and the head. All other
    changes are shared only if `ensure_weight_tying` is true."""
    if not model.config.tie_word_embeddings:
        return False
    # PEFT recognises the embedding by this name, but GPT-2's embedding is called `wte`.
    ensured = config.ensure_weight_tying and _is_target(model.embedding_name, "embed_tokens")
    embedding = tokens.get(model.embedding_name)
    if embedding is None:
        return ensured and HEAD not in tokens
    return tokens.get(HEAD, embedding) == embedding


def _require_used_once(
    model: Model,
    names: list[str],
    saved: list[str],
    tokens: Mapping[str, list[int]],
    *,
    is_tied: bool,
) -> None:
    """Raise an error if two settings change the same embedding or head."""
    for name in (model.embedding_name, HEAD):
        others = [name, HEAD] if is_tied and model.embedding_name in tokens else [name]
        keys = [
            key
            for key, found in (
                ("targets", any(n in names for n in others)),
                ("modules_to_save", any(_is_inside(n, saved) for n in others)),
                ("trainable_token_indices", name in tokens),
            )
            if found
        ]
        if len(keys) > 1:
            raise ConfigError(
                f"{' and '.join(f'lora.{key}' for key in keys)} both change {name}"
                f"{' or the head that is tied to it' if len(others) > 1 else ''}: name it in one "
                "of them"
            )


def _train_in_full(model: Model, saved: list[str], *, is_tied: bool) -> None:
    """Make all parameters of some modules trainable. The parameters are copied, because they can be
    memory-mapped."""
    for name in saved:
        module = model.get_submodule(name)
        if (
            model.config.tie_word_embeddings
            and not is_tied
            and name in (model.embedding_name, HEAD)
        ):
            assert isinstance(module, Embedding | nn.Linear)
            module.weight = nn.Parameter(module.weight.detach().clone())
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
        module.requires_grad_(True)
    if not is_tied and any(name in saved for name in (model.embedding_name, HEAD)):
        model.config = model.config.model_copy(update={"tie_word_embeddings": False})


def lora_layers(model: nn.Module) -> Iterator[tuple[str, LoraLinear | LoraEmbedding]]:
    """Yield all layers that have low-rank matrices, together with their names in the plain
    model."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear | LoraEmbedding):
            yield name, module


def lora_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of the adapters, keyed by name. Parameters of modules trained in full
    are not included. Return {} for a model without adapters."""
    return {
        f"{name}.{kind}": parameter
        for name, module in model.named_modules()
        if isinstance(module, LoraLinear | _Table)
        for kind, parameter in module.named_parameters(recurse=False)
    }


def modules_in_full(model: nn.Module) -> list[str]:
    """Return the names of the modules trained in full in addition to the adapters. If one of these
    modules contains another, only the outer module is included, because PEFT can't load nested
    modules."""
    adapters = lora_parameters(model)
    trained = (n for n, p in model.named_parameters() if p.requires_grad and n not in adapters)
    names = list(dict.fromkeys(name.rpartition(".")[0] for name in trained))
    return [n for n in names if not any(n.startswith(f"{outer}.") for outer in names)]


def merge_lora(model: Model) -> None:
    """Merge the adapters into the base weights, in place. Afterwards, all layers of the model are
    plain layers, their weights have the dtype of the base weights, and all parameters are
    trainable. 4-bit weights are dequantised.

    If the adapters untie the head from the embedding, `model.config` is changed accordingly.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLinear):
            _replace(model, name, _plain(module.base_layer, module.merged_weight()))
        elif isinstance(module, _Table):
            base, weight = module.base_layer, module.merged_weight()
            base.weight = nn.Parameter(weight.to(base.weight.dtype))
            _replace(model, name, base)
        elif isinstance(module, NF4Linear) and not name.endswith(".base_layer"):
            _replace(model, name, _plain(module, weight_of(module)))
        elif isinstance(module, TiedHead):
            rows, columns = model.embedding.weight.shape
            with torch.device("meta"):
                head = nn.Linear(columns, rows, bias=False)
            head.weight = model.embedding.weight
            _replace(model, name, head.train(module.training))
    if model.config.tie_word_embeddings and model.lm_head.weight is not model.embedding.weight:
        model.config = model.config.model_copy(update={"tie_word_embeddings": False})
    model.requires_grad_(True)


def _plain(base: LinearLayer | NF4Linear, weight: Tensor) -> LinearLayer:
    """Return a plain linear layer with the given weight [out, in], and with the class, dtype and
    bias of the base layer."""
    is_conv1d = isinstance(base, Conv1D) or (isinstance(base, NF4Linear) and base.is_conv1d)
    dtype = base.dtype if isinstance(base, NF4Linear) else base.weight.dtype
    with torch.device("meta"):
        if is_conv1d:
            layer: LinearLayer = Conv1D(
                weight.shape[1], weight.shape[0], bias=base.bias is not None
            )
        else:
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=base.bias is not None)
    layer.weight = nn.Parameter((weight.T if is_conv1d else weight).to(dtype).contiguous())
    layer.bias = base.bias
    return layer.train(base.training)


def linear_layers(model: Model) -> dict[str, LinearLayer]:
    """Return the linear layers, keyed by name, except for the routers of experts. Adapting a router
    could change the output considerably, and PEFT files do not contain adapters of routers."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and not isinstance(module, Router)
    }


def _target_names(model: Model, config: LoraConfig, layers: dict[str, LinearLayer]) -> list[str]:
    """Return the names of the layers that match the targets of a config. The embedding comes first,
    followed by the linear layers in the order of the model.

    Raises:
        ConfigError: a target does not match any layer.
    """
    if config.targets == "all-linear":
        return [name for name in layers if name != HEAD]
    names = [model.embedding_name, *layers]
    for target in config.targets:
        if not any(_is_target(name, target) for name in names):
            raise ConfigError(_no_such_target(model, target, layers))
    return [name for name in names if any(_is_target(name, t) for t in config.targets)]


def _is_target(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _no_such_target(model: Model, target: str, layers: dict[str, LinearLayer]) -> str:
    known = sorted({name.rpartition(".")[2] for name in layers})
    problem = f"matches no linear layer of this model{nearest(target, known)}"
    for name, module in model.named_modules():
        kind = next((k for t, k in _OTHER_KINDS.items() if isinstance(module, t)), None)
        # Stacked experts are parameters with the names of an expert's linear layers.
        stacked = dict(module.named_parameters(recurse=False)) if kind else {}
        if kind and any(
            _is_target(place, target) for place in (name, *(f"{name}.{n}" for n in stacked))
        ):
            problem = f"is {kind}, not a linear layer"
    return f"lora.targets '{target}' {problem}: choose from {', '.join(known)}"


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


# Parameter names in PEFT files

#: Prefix of tensor names in a PEFT adapter file.
PREFIX = "base_model.model."
#: Name of the parameter of `TrainableTokens`.
TOKENS = "trainable_tokens_delta"
#: Mapping from a parameter of an adapted layer to the suffix of its tensor's name in a PEFT adapter
#: file.
SUFFIXES = {
    "lora_A": "lora_A.weight",
    "lora_B": "lora_B.weight",
    "lora_magnitude_vector": "lora_magnitude_vector",
    "lora_embedding_A": "lora_embedding_A",
    "lora_embedding_B": "lora_embedding_B",
    TOKENS: "token_adapter.trainable_tokens_delta",
}


def fill_adapter(model: Model, tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy tensors returned by `adapter_tensors` into a model that has the same adapters.

    Args:
        model: model to modify in place.
        tensors: A [r, in], B [out, r] and magnitudes [out], keyed by their names in the PEFT file.
        where: source of the tensors, for error messages.

    Raises:
        ModelError: a tensor is missing, unexpected or has a different shape.
    """
    places = dict(_places(model))
    for name in sorted(places.keys() ^ tensors.keys()):
        problem = "lacks" if name in places else "contains, in addition to the model's adapters,"
        raise ModelError(f"{where} {problem} tensor {name}")
    with torch.no_grad():
        for name, place in places.items():
            if place.shape != tensors[name].shape:
                raise ModelError(
                    f"{where}: tensor {name} is {list(tensors[name].shape)}, expected "
                    f"{list(place.shape)}"
                )
            place.copy_(tensors[name])


def adapter_tensors(model: Model) -> dict[str, Tensor]:
    """Return the tensors to be written to `adapter_model.safetensors`, keyed by name. For each
    adapted layer, they are A [r, in], B [out, r] and, for DoRA, the magnitudes [out]. They are
    contiguous and on the CPU."""
    return {name: place.detach().cpu().contiguous() for name, place in _places(model)}


def _places(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters of the adapters and of the modules trained in full, as pairs (name in
    the PEFT file, parameter). Padding rows of the vocabulary are excluded. Parameters that the
    embedding shares with a tied head are yielded twice, because they have two names in the file."""
    count, embedding = model.config.vocab_size, model.embedding
    adapters = lora_parameters(model)
    for name, parameter in adapters.items():
        layer, _, kind = name.rpartition(".")
        if kind == "lora_embedding_A":
            place = parameter[:, :count]
        else:
            place = parameter[: count if layer == HEAD and kind != "lora_A" else None]
        yield f"{PREFIX}{layer}.{SUFFIXES[kind]}", place
    if isinstance(model.lm_head, TiedHead) and isinstance(embedding, LoraEmbedding):
        yield f"{PREFIX}{HEAD}.lora_A.weight", embedding.lora_embedding_B.T
        yield f"{PREFIX}{HEAD}.lora_B.weight", embedding.lora_embedding_A[:, :count].T
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name not in adapters:
            is_table = parameter is embedding.weight or name == f"{HEAD}.weight"
            place = parameter[: count if is_table else None]
            yield f"{PREFIX}{name}", place
            if model.config.tie_word_embeddings and parameter is embedding.weight:
                yield f"{PREFIX}{HEAD}.weight", place
