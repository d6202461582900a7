"""How evenly experts are loaded: figures of one layer's token counts."""

from __future__ import annotations

from collections.abc import Sequence


def max_violation(tokens_per_expert: Sequence[int]) -> float:
    """MaxVio = (max_i c_i - mean_j c_j) / mean_j c_j; 0 is perfect balance.

    Wang et al. 2024 (arXiv 2408.15664), equation 4. 0 for a layer that saw no token.
    """
    mean = sum(tokens_per_expert) / len(tokens_per_expert)
    return max(tokens_per_expert) / mean - 1 if mean else 0.0
