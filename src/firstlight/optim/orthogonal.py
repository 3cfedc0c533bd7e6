"""Orthogonalised matrices, for Muon.

Shape letters: E matrices of a stack, F rows, C columns; `...` is E or nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

_EPS = 1e-7

#: `optimizer.muon_coefficients` -> (factor of the norm by which the matrix is divided at first; a,
#: b, c of each step x = a x + b (x x^T) x + c (x x^T)^2 x). "jordan" is as in torch.optim.Muon.
#: "polar_express" has in each step the optimal odd polynomial for the singular values that the step
#: before leaves, beginning with values from 0.001 to 1, and brings them nearer to one. It is
#: algorithm 1 of arXiv 2505.16932 with a cushion of 0.02, and with a safety factor of 1.02 against
#: the rounding of bf16.
COEFFICIENTS: dict[str, tuple[float, tuple[tuple[float, float, float], ...]]] = {
    "jordan": (1.0, 5 * ((3.4445, -4.7750, 2.0315),)),
    "polar_express": (
        1.02,
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
    ),
}


def orthogonalised(matrices: Tensor, coefficients: str = "jordan") -> Tensor:
    """Each matrix [..., F, C] with its singular values brought near one, [..., F, C] in bf16.

    The quintic Newton-Schulz iteration of Jordan et al. 2024, for all matrices of a stack at once.

    Args:
        matrices: [F, C] or [E, F, C].
        coefficients: a name of `COEFFICIENTS`.
    """
    divisor, steps = COEFFICIENTS[coefficients]
    is_stack = matrices.dim() == 3
    # x x^T is smallest if x has its short side first.
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.to(torch.bfloat16, copy=True)
    if is_tall:
        x = x.mT
    # The iteration needs singular values of at most one, and the Frobenius norm bounds them.
    norm = x.flatten(1).norm(dim=1)[:, None, None] if is_stack else x.norm()
    x.div_((norm * divisor if divisor != 1 else norm).clamp(min=_EPS))
    add_product = torch.baddbmm if is_stack else torch.addmm
    for a, b, c in steps:
        gram = x @ x.mT
        update = add_product(gram, gram, gram, beta=b, alpha=c)
        x = add_product(x, update, x, beta=a)
    return x.mT if is_tall else x


def neuron_squares(matrices: Tensor, transposed: bool) -> Tensor:
    """Mean squares of the neurons of orthogonalised matrices [..., F, C], in fp32: [..., F, 1],
    or [..., 1, C] of `transposed` matrices, which have their neurons in the columns."""
    # In fp32: bf16 has three digits, and a slow average would not move.
    squares = matrices.float().square()
    return squares.mean(-2 if transposed else -1, keepdim=True)


def neuron_factors(squares: Tensor, second_moment: Tensor, beta2: float) -> Tensor:
    """Factors of the neurons of orthogonalised matrices, which give neurons about equal size, and
    matrices a root mean square of one (NorMuon, arXiv 2510.05491).

    Args:
        squares: mean squares of the neurons, [..., F, 1] or [..., 1, C].
        second_moment: moving average of `squares`, updated in place.
        beta2: decay rate of the moving average.

    Returns:
        The shape and dtype of `second_moment`.
    """
    second_moment.lerp_(squares, 1 - beta2)
    inverse = 1 / (second_moment.sqrt() + _EPS)
    # The mean square of the rescaled matrix follows from those of its neurons, without a second
    # pass over the matrix.
    mean = (squares * inverse.square()).mean((-2, -1), keepdim=True)
    return inverse / (mean.sqrt() + _EPS)
