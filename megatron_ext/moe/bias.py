"""Expert-bias update rules for auxiliary-loss-free load balance: tensors in, tensors out."""

from __future__ import annotations

from typing import Literal, get_args

import torch

Rule = Literal["sign", "centered-sign"]
"""``sign``: Wang et al. 2024 (arXiv 2408.15664), DeepSeek-V3; ``centered-sign``: Moonlight."""


def updated_expert_bias(
    tokens_per_expert: torch.Tensor, expert_bias: torch.Tensor, rate: float, rule: Rule
) -> torch.Tensor:
    """The router's bias after one step of balancing: experts with too few tokens gain.

    With the load violation ``e_i = mean_j c_j - c_i`` of expert i that received ``c_i`` tokens,

    - ``sign``:           ``b_i += rate * sign(e_i)``
    - ``centered-sign``:  ``b_i += rate * (sign(e_i) - mean_j sign(e_j))``

    means being taken over the experts of the same layer. The centred rule (Moonlight, arXiv
    2502.16982, appendix C) leaves the sum of the bias alone: under ``sign`` a layer with one
    crowded expert drifts, every bias but one growing without end.

    Args:
        tokens_per_expert: (..., experts), integer or floating point: tokens of one global batch.
        expert_bias: (..., experts), floating point. Not modified.
        rate: bias per step, ``u`` in the papers, >= 0. 1e-3 in both.
        rule: see :data:`Rule`.

    Returns:
        A new tensor like ``expert_bias``.

    Raises:
        ValueError: unknown rule, negative rate, or shapes that differ.
    """
    if rule not in get_args(Rule):
        raise ValueError(f"rule {rule!r} is unknown: use one of {', '.join(get_args(Rule))}")
    if not rate >= 0:
        raise ValueError(f"rate {rate} is negative or not a number: it must be >= 0")
    if tokens_per_expert.shape != expert_bias.shape:
        raise ValueError(
            f"tokens_per_expert {tuple(tokens_per_expert.shape)} and expert_bias "
            f"{tuple(expert_bias.shape)} must have the same shape"
        )
    # sign(mean - c) without the rounding of a mean: integers stay exact, and equal counts
    # give exactly zero.
    experts = tokens_per_expert.shape[-1]
    total = tokens_per_expert.sum(dim=-1, keepdim=True)
    direction = torch.sign(total - experts * tokens_per_expert).to(expert_bias.dtype)
    if rule == "centered-sign":
        direction = direction - direction.mean(dim=-1, keepdim=True)
    return expert_bias + rate * direction
