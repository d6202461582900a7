"""Newton-Schulz orthogonalisation, Muon's maths: tensors in, tensors out.

With ``X_0 = M / ||M||_F``, every step is the odd polynomial

    X <- a X + (b A + c A^2) X,    A = X X'

which keeps the singular vectors of M and drives its singular values towards 1: the result
approaches ``U V'`` for ``M = U S V'``. Sources: Keller Jordan's Muon
(https://kellerjordan.github.io/posts/muon), Moonlight (arXiv 2502.16982, Algorithm 1).
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal, overload

import torch
from torch import Tensor

from megatron_ext.muon.coefficients import COEFFICIENTS, Triple, segments, step_coefficients

__all__ = [
    "COEFFICIENTS",
    "newton_schulz",
    "newton_schulz_reference",
    "newton_schulz_workspace",
]

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_MODULES = {"cpu": "_C", "cuda": "_C_cuda"}


@overload
def newton_schulz(
    x: Tensor,
    *,
    coefficients: str | Triple | Sequence[Triple] = ...,
    steps: int = ...,
    restarts: int | None = ...,
    nonfinite: Literal["raise", "propagate"] = ...,
    out: Tensor | None = ...,
    workspace: Tensor | None = ...,
) -> Tensor: ...
@overload
def newton_schulz(
    x: Sequence[Tensor],
    *,
    coefficients: str | Triple | Sequence[Triple] = ...,
    steps: int = ...,
    restarts: int | None = ...,
    nonfinite: Literal["raise", "propagate"] = ...,
    out: Sequence[Tensor] | None = ...,
    workspace: Tensor | None = ...,
) -> list[Tensor]: ...
def newton_schulz(
    x: Tensor | Sequence[Tensor],
    *,
    coefficients: str | Triple | Sequence[Triple] = "simple",
    steps: int = 5,
    restarts: int | None = None,
    nonfinite: Literal["raise", "propagate"] = "raise",
    out: Tensor | Sequence[Tensor] | None = None,
    workspace: Tensor | None = None,
) -> Tensor | list[Tensor]:
    """Orthogonalises a matrix, a batch of them, or a list of either.

    Each matrix is treated on its own: its result has the same bits for any batch it is in, any
    number of threads, any strides, and whether it or its transpose is given. (On CUDA, the
    transpose of a square may be rounded differently, and so may float32 and float64 in another
    batch, as cuBLAS likes.) ``f(2**k * x)`` equals ``f(x)`` bit by bit as long as ``2**k * x`` is
    exact. A zero matrix gives zero.

    Args:
        x: (..., m, n), or a sequence of such tensors of mixed shapes with one dtype and device:
            float64, float32, bfloat16 or float16; on the CPU or a CUDA device; any strides,
            possibly empty. Not modified. The CPU computes in fp64 for float64, in fp32 otherwise;
            CUDA in x's dtype, in fp16 for bfloat16, each with fp32 sums or better.
        coefficients: a name in :data:`COEFFICIENTS`, one triple for all steps, or a triple a step.
        steps: number of iterations, >= 1.
        restarts: how often the Gram matrix is computed anew from X, 0 <= restarts < steps. None:
            one at 5 steps, two from 8 (on a square in fp32 or fp64, where it costs nothing, before
            every step). 0 is faster, by a quarter at m = 4 n, and less exact: in directions where
            the singular values are below 1e-3 of the largest, errors reach 1e-3 instead of 1e-5.
        nonfinite: what a NaN or infinite entry does. ``"raise"``: a ValueError that names the
            matrices; on CUDA the host waits for the device. ``"propagate"``: that matrix, and no
            other, becomes NaN everywhere.
        out: where to write: contiguous tensors of x's shapes, dtype and device that share no memory
            with x. After a ValueError about non-finite entries it has what "propagate" gives.
        workspace: memory to use, from :func:`newton_schulz_workspace`, or None to allocate it. On
            a CPU one that is kept saves up to a tenth of the time.

    Returns:
        A tensor like x, or a list of them: contiguous, without a gradient; ``out`` if given. On
        CUDA it is computed on the current stream, without waiting if nonfinite is "propagate".

    Raises:
        TypeError: a dtype not listed above, or tensors of different dtypes.
        ValueError: wrong dimensions, devices, steps, coefficients, restarts, out or workspace;
            NaN or infinity in x.
        ImportError: the extension is not built.
    """
    triples = step_coefficients(coefficients, steps)
    if nonfinite not in ("raise", "propagate"):
        raise ValueError(f"nonfinite is {nonfinite!r}: use 'raise' or 'propagate'")
    single = isinstance(x, Tensor)
    inputs = _checked_inputs(x)
    outputs = _checked_outputs(inputs, [out] if isinstance(out, Tensor) else out)
    if workspace is not None and (
        workspace.dtype != torch.uint8
        or workspace.ndim != 1
        or not workspace.is_contiguous()
        or any(workspace.device != tensor.device for tensor in inputs)
    ):
        raise ValueError(
            f"workspace is {workspace.dtype} of shape {tuple(workspace.shape)} on "
            f"{workspace.device}: make it with newton_schulz_workspace(x)"
        )
    with torch.no_grad():
        if inputs:
            _operator(inputs[0].device.type)(
                inputs,
                outputs,
                workspace,
                [value for triple in triples for value in triple],
                *_segments(inputs[0], steps, restarts),
                nonfinite == "raise",
            )
    if out is not None:
        return out  # type: ignore[return-value]
    return outputs[0] if single else outputs


def newton_schulz_workspace(
    x: Tensor | Sequence[Tensor], *, steps: int = 5, restarts: int | None = None
) -> Tensor:
    """Memory for :func:`newton_schulz` on tensors of these shapes and dtype, uint8 on x's device.

    On a CPU it is made for the present number of threads. One for several calls, each with its own
    shapes, is the largest of theirs.

    Raises:
        TypeError, ValueError, ImportError: as :func:`newton_schulz`.
    """
    inputs = _checked_inputs(x)
    if not inputs:
        return torch.empty(0, dtype=torch.uint8)
    extension = _extension(_MODULES[inputs[0].device.type])
    return extension.newton_schulz_workspace(inputs, *_segments(inputs[0], steps, restarts))


def newton_schulz_reference(
    x: Tensor,
    *,
    coefficients: str | Triple | Sequence[Triple] = "simple",
    steps: int = 5,
) -> Tensor:
    """The same in plain torch and in x's own dtype: what to compare with, in fp64.

    Args:
        x: (..., m, n), floating point, any device and strides, possibly empty. Not modified.
        coefficients, steps: as in :func:`newton_schulz`.

    Returns:
        (..., m, n), x's dtype and device, contiguous. Differentiable.

    Raises:
        TypeError: x is not floating point.
        ValueError: as in :func:`newton_schulz`, with nonfinite="raise".
    """
    triples = step_coefficients(coefficients, steps)
    _check_matrix(x)
    if not x.is_floating_point():
        raise TypeError(f"x is {x.dtype}: newton_schulz_reference takes a floating-point dtype")
    if not x.isfinite().all():
        raise ValueError("newton_schulz_reference: NaN or infinite entries in x")
    if x.numel() == 0:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    tall = x.size(-2) > x.size(-1)
    y = x.mT if tall else x
    # The squares in the norm would overflow from 1e19 on in fp32. A zero matrix is divided by one.
    most = y.abs().amax((-2, -1), keepdim=True)
    y = y / most.where(most != 0, 1)
    norm = y.square().sum((-2, -1), keepdim=True).sqrt()
    y = y / norm.where(norm != 0, 1)
    for a, b, c in triples:
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return (y.mT if tall else y).contiguous()


# --- the operator ---------------------------------------------------------------------------------


def _operator(device: str) -> Any:
    """torch.ops.megatron_ext.newton_schulz, with its implementation for this kind of device."""
    if not torch.compiler.is_compiling():  # which cannot trace an import
        _extension("_C")  # defines it
        _extension(_MODULES[device])
    return torch.ops.megatron_ext.newton_schulz


def _extension(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"megatron_ext.{name}")
    except ImportError as error:
        raise ImportError(
            f"megatron_ext.{name} cannot be imported ({error}). Build it for the installed torch: "
            "run pip install . where megatron_ext's setup.py is, with MEGATRON_EXT_CUDA=1 for the "
            "CUDA module"
        ) from error


def _segments(
    x: Tensor, steps: int, restarts: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The segments for rectangles, and those for squares, with x's dtype and device."""
    rectangular = segments(steps, restarts)
    # On a square, restarts cost nothing, and leave fewer symmetric and more general products, which
    # are a little faster. In fp16 they would round X more often.
    half = x.device.type == "cuda" and x.element_size() == 2
    anew = restarts is None and not half
    return rectangular, segments(steps, steps - 1) if anew else rectangular


# --- arguments ------------------------------------------------------------------------------------


def _check_matrix(x: Tensor) -> None:
    if x.ndim < 2:
        raise ValueError(
            f"x has shape {tuple(x.shape)}: it must be a matrix or a batch (..., m, n)"
        )


def _checked_inputs(x: Tensor | Sequence[Tensor]) -> list[Tensor]:
    inputs = [x] if isinstance(x, Tensor) else list(x)
    for tensor in inputs:
        _check_matrix(tensor)
        if tensor.dtype not in DTYPES:
            names = ", ".join(map(str, DTYPES))
            raise TypeError(f"x is {tensor.dtype}: newton_schulz takes {names}")
        if tensor.device.type not in _MODULES:
            raise ValueError(f"x is on {tensor.device}: newton_schulz runs on cpu and cuda")
        if tensor.dtype != inputs[0].dtype:
            raise TypeError(
                f"x has {inputs[0].dtype} and {tensor.dtype}: call newton_schulz once for each"
            )
        if tensor.device != inputs[0].device:
            raise ValueError(
                f"x is on {inputs[0].device} and {tensor.device}: call newton_schulz once for each"
            )
    return [tensor.detach() for tensor in inputs]


def _checked_outputs(inputs: list[Tensor], out: Sequence[Tensor] | None) -> list[Tensor]:
    if out is None:
        return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
    outputs = list(out)
    if len(outputs) != len(inputs):
        raise ValueError(f"out has {len(outputs)} tensors for {len(inputs)} in x")
    for x, y in zip(inputs, outputs, strict=True):
        if (y.shape, y.dtype, y.device) != (x.shape, x.dtype, x.device) or not y.is_contiguous():
            raise ValueError(
                f"out is {y.dtype} of shape {tuple(y.shape)} and strides {y.stride()} on "
                f"{y.device}: it must be contiguous, {x.dtype} of shape {tuple(x.shape)} on "
                f"{x.device}"
            )
    return [y.detach() for y in outputs]


with contextlib.suppress(ImportError):  # newton_schulz tells it, and what to do
    for _name in _MODULES.values():
        _extension(_name)
        if _name == "_C":
            # It writes to its arguments and returns nothing: without data there is nothing to do.
            torch.library.register_fake("megatron_ext::newton_schulz", lambda *arguments: None)
