"""Newton-Schulz orthogonalisation, Muon's maths: a tensor in, a tensor out.

With ``X_0 = M / ||M||_F``, every step is the odd polynomial

    X <- a X + (b A + c A^2) X,    A = X X'

which keeps the singular vectors of M and drives its singular values towards 1: the result
approaches ``U V'`` for ``M = U S V'``. Sources: Keller Jordan's Muon
(https://kellerjordan.github.io/posts/muon), Moonlight (arXiv 2502.16982, Algorithm 1).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

Triple = tuple[float, float, float]
"""The coefficients (a, b, c) of one step."""

COEFFICIENTS: dict[str, Triple] = {"simple": (3.4445, -4.7750, 2.0315)}
"""Published coefficients by name. ``simple``: Keller Jordan's and Moonlight's. Its slope at zero is
steep for speed, and singular values end between about 0.7 and 1.2 instead of at 1."""


def newton_schulz(
    x: torch.Tensor,
    *,
    coefficients: str | Triple | Sequence[Triple] = "simple",
    steps: int = 5,
    check_finite: bool = True,
) -> torch.Tensor:
    """Orthogonalises a matrix in fp32, with the compiled extension.

    ``newton_schulz(2**k * x)`` equals ``newton_schulz(x)`` bit by bit as long as ``2**k * x`` is
    exact. A zero matrix gives zero.

    Args:
        x: (m, n), float32, on the CPU or a CUDA device; any strides, possibly empty. Not modified.
        coefficients: a name in :data:`COEFFICIENTS`, one triple for all steps, or a triple a step.
        steps: number of iterations, >= 1.
        check_finite: on CUDA, whether to look for NaN and infinity, for which the host waits for
            the device; unchecked, they make the whole result NaN. The CPU always checks.

    Returns:
        (m, n), float32, contiguous, on x's device, without a gradient. On CUDA it is computed on
        the current stream, and in TF32 if ``torch.backends.cuda.matmul`` allows that.

    Raises:
        TypeError: x is not float32.
        ValueError: wrong number of dimensions, device, steps or coefficients; NaN or infinity in x.
        ImportError: the extension is not built.
    """
    triples = _triples(coefficients, steps)
    _check_matrix(x)
    if x.dtype != torch.float32:
        raise TypeError(
            f"x is {x.dtype}: newton_schulz takes torch.float32, convert with x.float()"
        )
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"x is on {x.device}: newton_schulz runs on cpu and cuda")
    on_cuda = x.device.type == "cuda"
    if on_cuda and check_finite and not x.isfinite().all():
        raise ValueError("newton_schulz: the matrix has NaN or infinite entries")
    return _extension("_C_cuda" if on_cuda else "_C").newton_schulz(x, triples)


def newton_schulz_reference(
    x: torch.Tensor,
    *,
    coefficients: str | Triple | Sequence[Triple] = "simple",
    steps: int = 5,
) -> torch.Tensor:
    """The same in plain torch and in x's own dtype: what to compare with, in fp64.

    Args:
        x: (m, n), floating point, any device and strides, possibly empty. Not modified.
        coefficients, steps: as in :func:`newton_schulz`.

    Returns:
        (m, n), x's dtype and device, contiguous. Differentiable.

    Raises:
        TypeError: x is not floating point.
        ValueError: as in :func:`newton_schulz`.
    """
    triples = _triples(coefficients, steps)
    _check_matrix(x)
    if not x.is_floating_point():
        raise TypeError(f"x is {x.dtype}: newton_schulz_reference takes a floating-point dtype")
    if not x.isfinite().all():
        raise ValueError("newton_schulz_reference: the matrix has NaN or infinite entries")
    if not x.any():
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    tall = x.size(0) > x.size(1)
    y = x.T if tall else x
    y = y / y.abs().amax()  # The squares in the norm would overflow from 1e19 on in fp32.
    y = y / y.norm()
    for a, b, c in triples:
        gram = y @ y.T
        y = a * y + (b * gram + c * gram @ gram) @ y
    return (y.T if tall else y).contiguous()


def _triples(coefficients: str | Triple | Sequence[Triple], steps: int) -> list[Triple]:
    """One triple a step. Raises ValueError."""
    if steps < 1:
        raise ValueError(f"steps is {steps}: it must be at least 1")
    if isinstance(coefficients, str):
        if coefficients not in COEFFICIENTS:
            raise ValueError(
                f"coefficients {coefficients!r} is unknown: use one of {', '.join(COEFFICIENTS)}, "
                "or give triples (a, b, c)"
            )
        return [COEFFICIENTS[coefficients]] * steps
    table: list[Any] = list(coefficients)
    if table and not isinstance(table[0], Sequence):
        table = [table] * steps
    if len(table) != steps or any(len(triple) != 3 for triple in table):
        raise ValueError(
            f"coefficients {coefficients} do not fit steps={steps}: give one triple (a, b, c), or "
            "one a step"
        )
    return [(a, b, c) for a, b, c in table]


def _check_matrix(x: torch.Tensor) -> None:
    if x.ndim != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}: it must be a matrix (m, n)")


def _extension(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"megatron_ext.{name}")
    except ImportError as error:
        raise ImportError(
            f"megatron_ext.{name} cannot be imported ({error}). Build it for the installed torch: "
            "run pip install . where megatron_ext's setup.py is, with MEGATRON_EXT_CUDA=1 for the "
            "CUDA module"
        ) from error
