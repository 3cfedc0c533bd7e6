"""Direct preference optimization (Rafailov et al. 2023): learn from pairs of answers which of two
is preferred, without a model of rewards.

Shape letters as in `models/ops.py`; D is the answers of a row, two for each of its P pairs, each
in a document of its own, the chosen one first.

The starting model's log-probabilities of the answers (references) are computed once, and kept in

    FIRSTLIGHT_CACHE (or XDG_CACHE_HOME/firstlight, or ~/.cache/firstlight) / references / KEY.json

KEY is of the pairs and their rows, the model's weights, and the precision it computes in. So a
resumed run, or another run with the same starting model, reads them, and no second model is in
memory during training.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.checkpoint.checkpoint import load_trainer_state
from firstlight.checkpoint.selection import resolve_model_folder
from firstlight.data.corpus import Corpus
from firstlight.data.examples import PreferenceDataset, preference_splits
from firstlight.data.loader import rows_to_batch
from firstlight.data.remote import cache_folder, held
from firstlight.efficiency import LossFunction, autocast, matmul_precision, resolve_precision
from firstlight.efficiency.attention import choose_attention
from firstlight.errors import CheckpointError, ConfigError, InputError, ModelError
from firstlight.files.atomic import make_folder, read_json, write_json
from firstlight.hardware.device import Hardware
from firstlight.models import Model
from firstlight.models.ops import IGNORE_INDEX, at_least_fp32
from firstlight.parallel import all_reduce_sum
from firstlight.recipe import PreferenceConfig, Recipe, ResolvedRecipe
from firstlight.training.starting_model import ModelIdentity
from firstlight.weights.huggingface import base_identity, load_model


def answer_log_probs(
    logits_BTV: Tensor, labels_BT: Tensor, document_ids_BT: Tensor, documents: int
) -> Tensor:
    """The log-probability (nats) of the labels of each document, summed, fp32 or wider [B, D].

    Args:
        documents: D.
    """
    losses_BT = F.cross_entropy(
        at_least_fp32(logits_BTV).flatten(0, 1),
        labels_BT.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="none",
    ).view_as(labels_BT)
    # Not scatter_add, whose order of additions differs from run to run on a GPU.
    numbers_D1 = torch.arange(documents, device=labels_BT.device)[:, None]
    own_BDT = document_ids_BT[:, None] == numbers_D1
    return -torch.where(own_BDT, losses_BT[:, None], 0).sum(-1)


def rewards(log_probs_BD: Tensor, references_BD: Tensor, beta: float) -> Tensor:
    """beta * (log-probability - reference) [B, P, 2], of the chosen and the rejected answers; 0
    where there is no pair.

    Args:
        references_BD: NaN where there is no answer.
    """
    known = references_BD.isfinite()
    ratio_BD = log_probs_BD - references_BD.nan_to_num(0.0).to(log_probs_BD.dtype)
    rewards_BD = torch.where(known, beta * ratio_BD, 0)
    return rewards_BD.view(len(rewards_BD), -1, 2)


def pair_losses(margins: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """The loss of each pair [B], from the chosen answer's reward less the rejected one's [B]."""
    # Not log(sigmoid(x)), which is -inf for margins that fp32 can well represent.
    right = -F.logsigmoid(margins)
    if not label_smoothing:
        return right
    return (1 - label_smoothing) * right - label_smoothing * F.logsigmoid(-margins)


class PreferenceObjective:
    """The loss over preference pairs, and what their rewards were.

    Args:
        config: the recipe's section.

    Attributes:
        log_probs: `answer_log_probs`, or a function in its place: the planner's marks phases.
    """

    def __init__(self, config: PreferenceConfig) -> None:
        self.config = config
        self.log_probs: Callable[..., Tensor] = answer_log_probs
        #: Sums of the two rewards, pairs in the right order and all pairs, since they were last
        #: taken.
        self._sums: Tensor | None = None

    def __call__(self, forward: Callable[..., Tensor]) -> LossFunction:
        """The function of a batch that gives the summed loss of its pairs.

        Args:
            forward: gives logits of (input_ids, None, document_ids).
        """

        def loss_sum(
            input_ids: Tensor,
            labels: Tensor,
            document_ids: Tensor | None = None,
            references: Tensor | None = None,
        ) -> Tensor:
            assert document_ids is not None
            assert references is not None
            logits_BTV = forward(input_ids, None, document_ids)
            log_probs = self.log_probs(logits_BTV, labels, document_ids, references.shape[1])
            rewards_BP2 = rewards(log_probs, references, self.config.beta)
            there_BP = references.isfinite().view(len(references), -1, 2).all(-1)
            # Detached: metrics must not keep the graph of a micro-batch alive.
            self._add(rewards_BP2.detach(), there_BP)
            margins_BP = rewards_BP2[..., 0] - rewards_BP2[..., 1]
            losses_BP = pair_losses(margins_BP, self.config.label_smoothing)
            return torch.where(there_BP, losses_BP, 0).sum()

        return loss_sum

    def _add(self, rewards_BP2: Tensor, there_BP: Tensor) -> None:
        right_BP = (rewards_BP2[..., 0] > rewards_BP2[..., 1]) & there_BP
        counts = torch.stack((right_BP.sum(), there_BP.sum())).to(rewards_BP2)
        # Kept on the device: reading them would wait for the GPU in each micro-batch.
        sums = torch.cat((rewards_BP2.sum((0, 1)), counts))
        self._sums = sums if self._sums is None else self._sums + sums

    def take(self, prefix: str, *, shared: bool = False) -> dict[str, float]:
        """The rewards since they were last taken, as metrics; {} if there were none.

        Args:
            prefix: beginning of the metrics' names, such as "val".
            shared: True if several processes have computed on different pairs; all of them call
                this function.
        """
        sums, self._sums = self._sums, None
        if sums is None:
            return {}
        if shared:
            sums = all_reduce_sum(sums)
        chosen, rejected, right, pairs = sums.tolist()
        return {
            f"{prefix}/reward_margin": (chosen - rejected) / pairs,
            f"{prefix}/reward_accuracy": right / pairs,
            f"{prefix}/reward_chosen": chosen / pairs,
            f"{prefix}/reward_rejected": rejected / pairs,
        }

    def forget(self) -> None:
        """A step that was begun does not count."""
        self._sums = None


#: Raise it when the same key is to stand for something else.
_VERSION = 1
_MAX_BYTES = 1 << 32


def for_pairs(recipe: Recipe, dataset: Corpus, start: str | Path | None) -> Recipe:
    """The recipe with the keys that follow from the data's kind, preference pairs or other data.

    Args:
        start: the model or checkpoint that the run starts from.

    Raises:
        ConfigError: the recipe has a `preference` section for other data, or the run starts from no
            model.
    """
    if dataset.kind != "preference":
        if recipe.preference is not None:
            raise ConfigError(
                "the preference section is for pairs of answers: set data.kind preference, or "
                "leave it out"
            )
        return recipe
    if start is None:
        raise ConfigError(
            "preference pairs need a model that answers already: fine-tune one on conversations "
            "(data.kind chat), and name it with --init-from"
        )
    section = recipe.preference or PreferenceConfig()
    return recipe.with_keys("data", kind="preference").model_copy(update={"preference": section})


def give_references(
    recipe: ResolvedRecipe,
    splits: Sequence[Corpus | None],
    model: Model,
    newest: Path | None,
    started_from: ModelIdentity | None,
    hardware: Hardware,
    tell: Callable[[str], None],
) -> None:
    """Give splits of preference pairs the log-probabilities of the run's starting model.

    Args:
        recipe: see `take_references`.
        splits: the run's data; splits of other data are left alone.
        model: the model that is about to be trained.
        newest: the checkpoint that the run is resumed from; it names the starting model, which is
            loaded only if the cache has lost its log-probabilities.
        started_from: the model that a run begins with; None for a resumed run.

    Raises:
        CheckpointError: the starting model is needed, and gone or another by now.
        ModelError, StorageError: see `take_references`.
    """
    pairs = preference_splits(splits)
    if not pairs:
        return

    def starting_model() -> Model:
        return model if newest is None else _loaded_again(newest, start)

    if newest is None:
        assert started_from is not None
        start = asdict(started_from)
    else:
        start = load_trainer_state(newest).get("data", {}).get("reference") or {}
    for split in pairs:
        take_references(split, recipe, start.get("sha256", ""), starting_model, hardware, tell)
        split.reference_model = start


def _loaded_again(newest: Path, start: Mapping[str, str]) -> Model:
    """The model that a run started from."""
    name = start.get("name", "")
    advice = "which is needed again, since the cache has no reference of it"
    try:
        folder = resolve_model_folder(name)
        # By its weights and not its name: a folder may hold another model by now.
        same = base_identity(folder) == start.get("sha256")
        loaded = load_model(folder, dtype=torch.float32, mode="sequential").model
    except (ModelError, CheckpointError) as error:
        raise CheckpointError(f"{newest} started from {name}, {advice}: {error}") from error
    if not same:
        raise CheckpointError(
            f"{newest} started from {name}, {advice}: the model there has changed; restore the "
            "old one"
        )
    return loaded


def take_references(
    dataset: PreferenceDataset,
    recipe: ResolvedRecipe,
    identity: str,
    model: Callable[[], Model],
    hardware: Hardware,
    tell: Callable[[str], None],
) -> None:
    """Give a split the log-probabilities of its answers, from the cache or the model.

    Any number of processes may ask at once: one of them computes.

    Args:
        dataset: gets its `references`.
        recipe: a recipe whose row length, precision and attention are decided.
        identity: sha256 of the model's weights.
        model: loads the model, in fp32, if there is something to compute.
        hardware: the device to compute on.
        tell: called with each message for people.

    Raises:
        ModelError: a log-probability is not finite.
        StorageError: the cache can't be written.
    """
    path = _place(dataset, recipe, identity, hardware)
    found = _read(path, dataset)
    if found is None:
        make_folder(path.parent)
        # The second look: another process may have computed them while this one waited.
        with held(path.with_suffix(".lock"), "computing the same references", False):
            found = _read(path, dataset)
            if found is None:
                tell(f"{dataset.split}: computing the starting model's log-probabilities, once")
                found = reference_log_probs(dataset, recipe, model(), hardware)
                write_json(path, {"sha256": _digest(found), "log_probs": _as_list(found)})
    dataset.references = found


def _place(
    dataset: PreferenceDataset, recipe: ResolvedRecipe, identity: str, hardware: Hardware
) -> Path:
    manifest = json.dumps(dataset.manifest, sort_keys=True).encode()
    content = {
        "version": _VERSION,
        "pairs": [hashlib.sha256(manifest).hexdigest(), dataset.split],
        "rows": [recipe.data.seq_len, dataset.long],
        "model": identity,
        # Other precisions round otherwise, and rewards are small differences.
        "computed": [recipe.efficiency.precision, hardware.device.type],
    }
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder() / "references" / f"{key}.json"


def _read(path: Path, dataset: PreferenceDataset) -> npt.NDArray[np.float64] | None:
    """The content of a file of the cache; None if it is missing or damaged."""
    try:
        content = read_json(path, _MAX_BYTES)
        values = [np.nan if value is None else value for value in content["log_probs"]]
        result = np.array(values, dtype=np.float64)
        whole = _digest(result) == content["sha256"]
    except (InputError, KeyError, TypeError, ValueError):
        return None
    return result if whole and len(result) == len(dataset.lengths) else None


def _as_list(values: npt.NDArray[np.float64]) -> list[float | None]:
    return [None if np.isnan(value) else value for value in values.tolist()]


def _digest(values: npt.NDArray[np.float64]) -> str:
    return hashlib.sha256(values.astype("<f8").tobytes()).hexdigest()


@torch.no_grad()
def reference_log_probs(
    dataset: PreferenceDataset, recipe: ResolvedRecipe, model: Model, hardware: Hardware
) -> npt.NDArray[np.float64]:
    """The log-probability of each example's answer [examples]; NaN of those that are left out.

    Raises:
        ModelError: a log-probability is not finite.
    """
    seq_len, config = recipe.data.seq_len, recipe.efficiency
    result = np.full(len(dataset.lengths), np.nan)
    model.to(hardware.device).eval()
    if config.attention != "auto":
        choose_attention(model, config.attention)
    rows, at_once = len(dataset.packing(seq_len)), recipe.batch.rows
    with (
        autocast(hardware.device, resolve_precision(config, hardware)),
        matmul_precision(config),
    ):
        for first in range(0, rows, at_once):
            part = list(range(first, min(first + at_once, rows)))
            batch = rows_to_batch(dataset, part, seq_len, 0, document_masking=True)
            batch = batch.to(hardware.device)
            assert batch.document_ids is not None
            assert batch.references is not None
            logits = model(batch.input_ids, document_ids=batch.document_ids)
            width = batch.references.shape[1]
            found = answer_log_probs(logits, batch.labels, batch.document_ids, width)
            for row, values in zip(part, found.double().cpu().numpy(), strict=True):
                examples = dataset.examples_of_row(row, seq_len)
                result[examples] = values[: len(examples)]
    learned = np.isin(np.arange(len(result)) // 2, dataset.packing(seq_len).examples)
    if not np.isfinite(result[learned]).all():
        raise ModelError(
            "the starting model's log-probabilities of the pairs are not finite: its weights may "
            "be damaged; start from another model"
        )
    return result
