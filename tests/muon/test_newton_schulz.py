"""Newton-Schulz: the compiled operator against fp64, the SVD, and torch's own routine."""

import importlib.util
import sys
import threading
import time
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import _muon

from megatron_ext.muon.newton_schulz import (
    COEFFICIENTS,
    newton_schulz,
    newton_schulz_reference,
)

NO_CUDA = not torch.cuda.is_available() or importlib.util.find_spec("megatron_ext._C_cuda") is None

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(
            NO_CUDA, reason="no GPU, or no CUDA module: its kernels compile but cannot run here"
        ),
    ),
]

TOLERANCE = 1e-4
"""Allowed spectral norm of the error of an fp32 result, whose own spectral norm is about 1.

A rounding error of 6e-8 in a direction in which the matrix is zero grows by the polynomial's slope
at zero, 3.4445 a step, so by 485 in five steps: 3e-5 for each of a few such errors. Measured: up to
2e-5, for matrices of rank 1."""


def matrix(*shape, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.rand(shape, generator=generator) - 1) * scale


def matrix_of_rank(rank, m, n):
    return matrix(m, rank) @ matrix(rank, n, seed=1)


def assert_close(actual, expected):
    assert actual.dtype == torch.float32
    assert actual.is_contiguous()
    assert actual.shape == expected.shape
    if expected.numel():
        assert torch.linalg.matrix_norm(actual.cpu().double() - expected, 2) <= TOLERANCE


class Float32Only(torch.Tensor):
    """torch's routine converts its argument to bfloat16; of this one it gets an fp32 copy."""

    def bfloat16(self):
        return self.as_subclass(torch.Tensor).clone()


# --- values ---------------------------------------------------------------------------------------

SHAPES = [(1, 1), (1, 9), (9, 1), (5, 7), (7, 5), (64, 64), (48, 200), (200, 48)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_fp64_reference(shape, device):
    x = matrix(*shape)
    assert_close(newton_schulz(x.to(device)), newton_schulz_reference(x.double()))


@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_torch(shape):
    x = matrix(*shape)
    theirs = _muon._zeropower_via_newtonschulz(
        x.as_subclass(Float32Only), COEFFICIENTS["simple"], ns_steps=5, eps=1e-7
    )
    assert theirs.dtype == torch.float32
    # Both are inexact, in the same way.
    torch.testing.assert_close(newton_schulz(x), theirs, atol=2 * TOLERANCE, rtol=0)


@pytest.mark.parametrize("shape", [(9, 9), (6, 30), (30, 6)])
def test_applies_the_polynomial_to_the_singular_values(shape):
    x = matrix(*shape)
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / s.norm()
    a, b, c = COEFFICIENTS["simple"]
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    expected = u @ s.diag() @ vh
    assert_close(newton_schulz(x), expected)
    assert_close(newton_schulz_reference(x.double()).float(), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rank", [1, 3])
def test_rank_deficient(rank, device):
    x = matrix_of_rank(rank, 20, 30)
    assert_close(newton_schulz(x.to(device)), newton_schulz_reference(x.double()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("coefficients", "steps"),
    [
        ((1.5, -0.5, 0.0), 1),
        ((1.875, -1.25, 0.375), 12),
        ([(3.0, -3.2, 1.2), (1.875, -1.25, 0.375), (1.5, -0.5, 0.0)], 3),
        ([[2.0, 0.0, 0.0]], 1),
    ],
)
def test_coefficients(coefficients, steps, device):
    x = matrix(8, 13)
    assert_close(
        newton_schulz(x.to(device), coefficients=coefficients, steps=steps),
        newton_schulz_reference(x.double(), coefficients=coefficients, steps=steps),
    )


def test_one_triple_equals_that_triple_at_every_step():
    x = matrix(8, 13)
    simple = COEFFICIENTS["simple"]
    expected = newton_schulz(x)
    assert torch.equal(newton_schulz(x, coefficients=simple), expected)
    assert torch.equal(newton_schulz(x, coefficients=[simple] * 5), expected)


# --- scale ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exponent", [-100, -3, 1, 3, 64, 127])
def test_powers_of_two_change_no_bit(exponent, device):
    x = matrix(12, 20).to(device)
    assert torch.equal(newton_schulz(x * 2.0**exponent), newton_schulz(x))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-30, 1e-9, 1e19, 1e30, 3.4e38])
def test_any_magnitude(scale, device):
    x = matrix(12, 20, scale=scale)
    assert x.isfinite().all()
    assert x.any()
    assert_close(newton_schulz(x.to(device)), newton_schulz_reference(x.double()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(4, 6), (0, 5), (5, 0), (0, 0)])
def test_zero_and_empty(shape, device):
    y = newton_schulz(torch.zeros(shape, device=device))
    assert y.is_contiguous()
    assert torch.equal(y, torch.zeros(shape, device=device))


# --- layout ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(0, 24),
    columns=st.integers(0, 24),
    row_step=st.integers(1, 3),
    column_step=st.integers(1, 3),
    transposed=st.booleans(),
)
def test_any_strides(device, rows, columns, row_step, column_step, transposed):
    storage = matrix(rows * row_step, columns * column_step).to(device)
    before = storage.clone()
    x = storage[::row_step, ::column_step]
    x = x.T if transposed else x
    y = newton_schulz(x)
    assert_close(y, newton_schulz_reference(x.cpu().double()))
    assert torch.equal(y, newton_schulz(x.contiguous()))
    assert torch.equal(storage, before)


@pytest.mark.parametrize("device", DEVICES)
def test_broadcast_rows(device):
    x = matrix(1, 6).to(device).expand(4, 6)
    assert_close(newton_schulz(x), newton_schulz_reference(x.cpu().double()))


@pytest.mark.parametrize("device", DEVICES)
def test_transpose_has_the_same_bits(device):
    x = matrix(10, 33).to(device)
    assert torch.equal(newton_schulz(x.T), newton_schulz(x).T)


@pytest.mark.parametrize("device", DEVICES)
def test_result_is_new_and_has_no_gradient(device):
    x = matrix(6, 6).to(device).requires_grad_()
    y = newton_schulz(x)
    assert not y.requires_grad
    assert y.data_ptr() != x.data_ptr()
    assert torch.equal(y, newton_schulz(x.detach()))


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_is_refused(value, device):
    x = matrix(4, 6)
    x[2, 3] = value
    with pytest.raises(ValueError, match="newton_schulz: the matrix has NaN or infinite"):
        newton_schulz(x.to(device))
    with pytest.raises(ValueError, match="newton_schulz_reference: the matrix has NaN or inf"):
        newton_schulz_reference(x.to(device))


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_unchecked_non_finite_gives_nan(value, device):
    x = matrix(4, 6)
    x[2, 3] = value
    assert newton_schulz(x.to(device), check_finite=False).isnan().all()


@pytest.mark.parametrize("function", [newton_schulz, newton_schulz_reference])
@pytest.mark.parametrize(
    ("x", "options", "error", "message"),
    [
        (torch.ones(3), {}, ValueError, r"shape \(3,\)"),
        (torch.ones(2, 3, 4), {}, ValueError, r"shape \(2, 3, 4\)"),
        (torch.ones(2, 3, dtype=torch.int64), {}, TypeError, "torch.int64"),
        (torch.ones(2, 3), {"steps": 0}, ValueError, "steps is 0"),
        (torch.ones(2, 3), {"coefficients": "simpel"}, ValueError, "'simpel'.*simple"),
        (torch.ones(2, 3), {"coefficients": (1.0, 2.0)}, ValueError, "one triple"),
        (torch.ones(2, 3), {"coefficients": []}, ValueError, "one triple"),
        (torch.ones(2, 3), {"coefficients": [(1.0, 2.0, 3.0)] * 4}, ValueError, "steps=5"),
        (torch.ones(2, 3), {"coefficients": [(1.0, 2.0)] * 5}, ValueError, "one triple"),
    ],
)
def test_wrong_arguments(function, x, options, error, message):
    with pytest.raises(error, match=message):
        function(x, **options)


def test_only_fp32_on_cpu_or_cuda():
    with pytest.raises(TypeError, match=r"torch\.float64.*torch\.float32"):
        newton_schulz(torch.ones(2, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="on meta"):
        newton_schulz(torch.ones(2, 3, device="meta"))


def test_missing_extension_says_how_to_build(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron_ext._C", None)
    with pytest.raises(ImportError, match=r"megatron_ext\._C cannot be imported.*pip install"):
        newton_schulz(torch.ones(2, 3))


# --- the reference, the interpreter ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_reference_keeps_the_dtype(dtype):
    x = matrix(6, 10)
    y = newton_schulz_reference(x.to(dtype))
    assert y.dtype == dtype
    torch.testing.assert_close(
        y.double(), newton_schulz_reference(x.double()), rtol=0, atol=100 * torch.finfo(dtype).eps
    )


def test_reference_is_differentiable():
    x = matrix(3, 4).double().requires_grad_()
    assert torch.autograd.gradcheck(newton_schulz_reference, x)


def test_other_threads_run_meanwhile():
    worker = threading.Thread(target=newton_schulz, args=(matrix(512, 512),), kwargs={"steps": 60})
    worker.start()
    ticks = []
    while worker.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0.001)
    # With the interpreter locked, one pause would last as long as nearly the whole computation.
    longest = max(after - before for before, after in pairwise(ticks))
    assert longest < 0.5 * (ticks[-1] - ticks[0])
