"""Published coefficients of the Newton-Schulz polynomials, and how steps are cut into segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Triple = tuple[float, float, float]
"""The coefficients (a, b, c) of one step, x <- a x + b x^3 + c x^5 for every singular value x."""

COEFFICIENTS: dict[str, tuple[Triple, ...]] = {
    # Keller Jordan's and Moonlight's. Its slope at zero is steep for speed: singular values end
    # between about 0.7 and 1.2 instead of at 1.
    "simple": ((3.4445, -4.7750, 2.0315),),
    # Jiacheng You's, a triple a step. https://leloykun.github.io/ponder/muon-opt-coeffs
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Polar Express, with its safety factor of 1.01 (arXiv 2505.16932, Algorithm 1).
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    # Chebyshev-type polynomials, Remez on a shrinking interval (arXiv 2506.10935).
    "cans": (
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
    # For matrices preconditioned to almost orthogonal rows (https://github.com/thib-s/
    # flash-newton-schulz); here, as in Megatron, after division by the Frobenius norm.
    "aol": (
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ),
}
"""Sets by name, with the values of Emerging-Optimizers, hence of Megatron's own Muon."""

_ENDS_WITH_LAST = ("polar_express", "cans")


def step_coefficients(
    coefficients: str | Triple | Sequence[Triple], steps: int
) -> tuple[Triple, ...]:
    """One triple a step.

    A named set that is shorter than ``steps`` starts over, or goes on with its last triple where
    the polynomials converge (polar_express, cans): what Megatron's Muon does.

    Raises:
        ValueError: an unknown name, steps < 1, or triples that do not fit the number of steps.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}: it must be at least 1")
    if isinstance(coefficients, str):
        if coefficients not in COEFFICIENTS:
            raise ValueError(
                f"coefficients {coefficients!r} is unknown: use one of {', '.join(COEFFICIENTS)}, "
                "or give triples (a, b, c)"
            )
        named = COEFFICIENTS[coefficients]
        if coefficients in _ENDS_WITH_LAST:
            return (named + named[-1:] * steps)[:steps]
        return (named * steps)[:steps]
    table: list[Any] = list(coefficients)
    if table and not isinstance(table[0], Sequence):
        table = [table] * steps
    if len(table) != steps or any(len(triple) != 3 for triple in table):
        raise ValueError(
            f"coefficients {coefficients} do not fit steps={steps}: give one triple (a, b, c), or "
            "one a step"
        )
    return tuple((float(a), float(b), float(c)) for a, b, c in table)


def default_restarts(steps: int) -> int:
    """One at 5 steps, two from 8; one at 4 too, none where nothing can grow."""
    return 0 if steps < 4 else 1 if steps < 8 else 2


def segments(steps: int, restarts: int | None) -> tuple[int, ...]:
    """The number of steps of each segment, nearly equal, the longer ones first.

    Rounding errors grow by a^2 a step within a segment and are gone after a restart: measured in
    fp32 with 5 steps, 3 + 2 is 2 to 5 times more exact than 2 + 3, whose later segment starts from
    singular values that the first has already raised.

    Raises:
        ValueError: restarts is negative or leaves a segment without a step.
    """
    if restarts is None:
        restarts = default_restarts(steps)
    if not 0 <= restarts < steps:
        raise ValueError(
            f"restarts is {restarts}: with steps={steps} it must be from 0 to {steps - 1}"
        )
    shorter, longer = divmod(steps, restarts + 1)
    return (shorter + 1,) * longer + (shorter,) * (restarts + 1 - longer)
