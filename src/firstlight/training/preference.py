"""Direct preference optimization (Rafailov et al. 2023): learn from pairs of answers which of two
is preferred, without a model of rewards.

Shape letters as in `models/ops.py`; D is the answers of a row, two for each of its P pairs, each
in a document of its own, the chosen one first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.efficiency import LossFunction
from firstlight.models.ops import IGNORE_INDEX, at_least_fp32
from firstlight.parallel import all_reduce_sum
from firstlight.recipe import PreferenceConfig


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
    """The loss of each pair, from the chosen answer's reward less that of the rejected one."""
    right = -F.logsigmoid(margins)
    if not label_smoothing:
        return right
    return (1 - label_smoothing) * right - label_smoothing * F.logsigmoid(-margins)


class PreferenceObjective:
    """The loss over preference pairs, and what their rewards were.

    Args:
        config: the recipe's section.
    """

    def __init__(self, config: PreferenceConfig) -> None:
        self.config = config
        #: Of pairs since they were last taken: sums of the two rewards, pairs in the right
        #: order, pairs.
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
            log_probs = answer_log_probs(logits_BTV, labels, document_ids, references.shape[1])
            rewards_BP2 = rewards(log_probs, references, self.config.beta)
            there_BP = references.isfinite().view(len(references), -1, 2).all(-1)
            self._add(rewards_BP2.detach(), there_BP)
            margins_BP = rewards_BP2[..., 0] - rewards_BP2[..., 1]
            losses_BP = pair_losses(margins_BP, self.config.label_smoothing)
            return torch.where(there_BP, losses_BP, 0).sum()

        return loss_sum

    def _add(self, rewards_BP2: Tensor, there_BP: Tensor) -> None:
        right_BP = (rewards_BP2[..., 0] > rewards_BP2[..., 1]) & there_BP
        counts = torch.stack((right_BP.sum(), there_BP.sum())).to(rewards_BP2)
        sums = torch.cat((rewards_BP2.sum((0, 1)), counts))
        self._sums = sums if self._sums is None else self._sums + sums

    def take(self, prefix: str, *, shared: bool = False) -> dict[str, float]:
        """The rewards since they were last taken, as metrics; {} if there were none.

        Args:
            prefix: of their names.
            shared: several processes have computed on pairs of their own; all call this.
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
