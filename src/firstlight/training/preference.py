"""Direct preference optimization (DPO; Rafailov et al. 2023, arXiv 2305.18290). The model is
trained on pairs of a chosen and a rejected answer, without a reward model.

Shape letters are those of `models/ops.py`, plus P for the pairs in a row and D = 2 P for the
answers in a row. Each answer is a separate document; the chosen answer of a pair comes first.

DPO compares the model with the model from which training starts. The log-probabilities of the
answers under that starting model are called references. They are computed once and stored in the
file

    FIRSTLIGHT_CACHE (or XDG_CACHE_HOME/firstlight, or ~/.cache/firstlight) / references / KEY.json

KEY is a hash of the pairs, their arrangement in rows, the model's weights, and the precision and
device type of the computation. A resumed run, or another run with the same starting model, reads
the file. Training therefore never keeps a second model in memory.
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
from firstlight.data.loader import rows_to_batch
from firstlight.data.packing import PreferenceDataset, preference_splits
from firstlight.data.shards import manifest_digest
from firstlight.errors import CheckpointError, InputError, ModelError
from firstlight.files.atomic import make_folder, read_json, write_json
from firstlight.files.cache import cache_folder, held
from firstlight.hardware.device import Hardware
from firstlight.lora.loading import base_identity, load_model
from firstlight.methods import LossFunction, autocast, matmul_precision, resolve_precision
from firstlight.methods.attention import choose_attention
from firstlight.models import Model
from firstlight.models.ops import IGNORE_INDEX, at_least_fp32
from firstlight.parallel import all_reduce_sum
from firstlight.recipe import PreferenceConfig, ResolvedRecipe
from firstlight.training.starting_model import ModelIdentity


def answer_log_probs(
    logits_BTV: Tensor, labels_BT: Tensor, document_ids_BT: Tensor, documents: int
) -> Tensor:
    """Return the log-probability in nats of each document's labels, summed over the document.

    Args:
        logits_BTV: logits.
        labels_BT: token ids, or `IGNORE_INDEX` where no loss is computed.
        document_ids_BT: zero-based index of each token's document in its row.
        documents: D, the number of documents per row.

    Returns:
        A tensor of shape [B, D], in fp32 or a wider dtype.
    """
    losses_BT = F.cross_entropy(
        at_least_fp32(logits_BTV).flatten(0, 1),
        labels_BT.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="none",
    ).view_as(labels_BT)
    # Do not use scatter_add, because its order of additions varies between runs on a GPU.
    numbers_D1 = torch.arange(documents, device=labels_BT.device)[:, None]
    own_BDT = document_ids_BT[:, None] == numbers_D1
    return -torch.where(own_BDT, losses_BT[:, None], 0).sum(-1)


def rewards(log_probs_BD: Tensor, references_BD: Tensor, beta: float) -> Tensor:
    """Return the implicit reward of each answer, beta * (log-probability - reference).

    Args:
        log_probs_BD: log-probabilities of the answers, in nats.
        references_BD: log-probabilities of the starting model; NaN where a row has no answer.
        beta: scale of the rewards; see `PreferenceConfig`.

    Returns:
        A tensor of shape [B, P, 2] with the rewards of the chosen and the rejected answers. It is 0
        where a row has no answer.
    """
    known = references_BD.isfinite()
    ratio_BD = log_probs_BD - references_BD.nan_to_num(0.0).to(log_probs_BD.dtype)
    rewards_BD = torch.where(known, beta * ratio_BD, 0)
    return rewards_BD.view(len(rewards_BD), -1, 2)


def pair_losses(margins: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the DPO loss of each pair, in the shape of `margins`. Without label smoothing, the
    loss is -log(sigmoid(margin)).

    Args:
        margins: reward of the chosen answer minus the reward of the rejected one; any shape.
        label_smoothing: label-smoothing coefficient; see `PreferenceConfig`.
    """
    # Use logsigmoid, because log(sigmoid(x)) is -inf for large negative margins.
    right = -F.logsigmoid(margins)
    if not label_smoothing:
        return right
    return (1 - label_smoothing) * right - label_smoothing * F.logsigmoid(-margins)


class PreferenceObjective:
    """DPO loss, with statistics of the pairs' rewards.

    Args:
        config: the recipe's `preference` section.

    Attributes:
        log_probs: function that computes the log-probabilities, by default `answer_log_probs`. The
            planner replaces it with a function that also marks phases.
    """

    def __init__(self, config: PreferenceConfig) -> None:
        self.config = config
        self.log_probs: Callable[..., Tensor] = answer_log_probs
        #: Sums since the last call to `take`, as a tensor of shape [5]. Its elements are the
        #: rewards of the chosen answers, the rewards of the rejected answers, the
        #: log-probabilities of the chosen answers, the number of pairs in which the chosen answer
        #: has the larger reward, and the number of pairs.
        self._sums: Tensor | None = None

    def __call__(self, forward: Callable[..., Tensor]) -> LossFunction:
        """Return a loss function that computes the sum of the losses of all pairs in a batch, as a
        scalar.

        Args:
            forward: function that maps (input_ids, None, document_ids) to logits.
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
            # Detach the rewards, so that their sums do not keep the autograd graph of a micro-batch
            # in memory.
            chosen_BP = torch.where(there_BP, log_probs.detach().view_as(rewards_BP2)[..., 0], 0)
            self._add(rewards_BP2.detach(), chosen_BP.sum(), there_BP)
            margins_BP = rewards_BP2[..., 0] - rewards_BP2[..., 1]
            losses_BP = pair_losses(margins_BP, self.config.label_smoothing)
            return torch.where(there_BP, losses_BP, 0).sum()

        return loss_sum

    def _add(self, rewards_BP2: Tensor, chosen: Tensor, there_BP: Tensor) -> None:
        right_BP = (rewards_BP2[..., 0] > rewards_BP2[..., 1]) & there_BP
        counts = torch.stack((chosen, right_BP.sum(), there_BP.sum())).to(rewards_BP2)
        # Keep the sums on the device, because copying them to the host would make it wait for the
        # GPU in each micro-batch.
        sums = torch.cat((rewards_BP2.sum((0, 1)), counts))
        self._sums = sums if self._sums is None else self._sums + sums

    def take(self, prefix: str, *, shared: bool = False) -> dict[str, float]:
        """Return the mean rewards of the pairs since the last call, as metrics. If there are no
        pairs, return an empty dict.

        Args:
            prefix: prefix of the metrics' names, such as "val".
            shared: True to sum over the pairs of all processes, which makes the call a collective
                operation.
        """
        sums, self._sums = self._sums, None
        if sums is None:
            return {}
        if shared:
            sums = all_reduce_sum(sums)
        chosen, rejected, log_prob, right, pairs = sums.tolist()
        return {
            f"{prefix}/reward_margin": (chosen - rejected) / pairs,
            f"{prefix}/reward_accuracy": right / pairs,
            f"{prefix}/reward_chosen": chosen / pairs,
            f"{prefix}/reward_rejected": rejected / pairs,
            f"{prefix}/log_prob_chosen": log_prob / pairs,
        }

    def forget(self) -> None:
        """Discard the sums that were collected in an abandoned step."""
        self._sums = None


#: Version of the format of the cache files. It is part of KEY, and must be increased if the content
#: for a given key changes. `_MAX_BYTES` is the maximum size of a file that is read.
_VERSION = 1
_MAX_BYTES = 1 << 32


def give_references(
    recipe: ResolvedRecipe,
    splits: Sequence[Corpus],
    model: Model,
    newest: Path | None,
    started_from: ModelIdentity | None,
    hardware: Hardware,
    tell: Callable[[str], None],
) -> None:
    """Set the references of all splits with preference pairs. References are the log-probabilities
    of the answers under the model from which the run starts.

    Args:
        recipe: a recipe whose row length, precision and attention are resolved.
        splits: the run's splits. Splits without preference pairs are left unchanged.
        model: the model to be trained, with its initial weights in a new run.
        newest: the checkpoint from which the run is resumed; None for a new run. The checkpoint
            contains the name of the starting model. That model is loaded only if its references are
            not in the cache.
        started_from: identity of the starting model of a new run; None for a resumed run.

    Raises:
        CheckpointError: the starting model must be loaded, but is missing or has changed.
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
        take_references(
            split, recipe, start.get("sha256", ""), starting_model, hardware=hardware, tell=tell
        )
        split.reference_model = start


def _loaded_again(newest: Path, start: Mapping[str, str]) -> Model:
    """Load the model from which a run started, in fp32.

    Raises:
        CheckpointError: the model is missing, or its weights have changed.
    """
    name = start.get("name", "")
    advice = "which is needed again because its log-probabilities are not in the cache"
    try:
        folder = resolve_model_folder(name)
        # Compare the weights, because the folder may have been overwritten with a different model.
        same = base_identity(folder) == start.get("sha256")
        loaded = load_model(folder, dtype=torch.float32, mode="sequential").model
    except (ModelError, CheckpointError) as error:
        raise CheckpointError(f"{newest} started from {name}, {advice}: {error}") from error
    if not same:
        raise CheckpointError(
            f"{newest} started from {name}, {advice}, but has changed: restore the old model"
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
    """Set the references of a split, reading them from the cache or computing them with the model.

    Several processes may call this function concurrently. One of them computes the references, and
    the others wait for its file.

    Args:
        dataset: the split whose `references` are set.
        recipe: a recipe whose row length, precision and attention are resolved.
        identity: sha256 of the model's weights.
        model: function that loads the model in fp32; called if the cache does not contain the
            references.
        hardware: the device to compute on.
        tell: called with each message to the user.

    Raises:
        ModelError: a log-probability is not finite.
        StorageError: the cache can't be written.
    """
    path = _place(dataset, recipe, identity, hardware)
    found = _read(path, dataset)
    if found is None:
        make_folder(path.parent)
        # Read the cache again while holding the lock, because another process may have computed the
        # references in the meantime.
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
    content = {
        "version": _VERSION,
        "pairs": [manifest_digest(dataset.manifest), dataset.split],
        "rows": [recipe.data.seq_len, dataset.long],
        "model": identity,
        # Include the precision and the device in the key, because they affect how results are
        # rounded. The rounding matters because rewards are small differences between
        # log-probabilities.
        "computed": [recipe.efficiency.precision, hardware.device.type],
    }
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder() / "references" / f"{key}.json"


def _read(path: Path, dataset: PreferenceDataset) -> npt.NDArray[np.float64] | None:
    """Read the references from a cache file, as an fp64 array of shape [examples]. Return None if
    the file is missing or damaged.
    """
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
    """Compute the log-probability in nats of each example's answer, as an fp64 array of shape
    [examples]. The value is NaN for examples that are not in any row.

    Args:
        dataset: the split.
        recipe: a recipe whose row length, precision and attention are resolved.
        model: the model, which is moved to the device and set to evaluation mode.
        hardware: the device to compute on.

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
            "the starting model's log-probabilities of the pairs are not finite, perhaps because "
            "its weights are damaged: start from another model"
        )
    return result
