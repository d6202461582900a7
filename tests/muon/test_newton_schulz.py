"""Newton-Schulz: the compiled operator against fp64, the SVD, and torch's own routine."""

import importlib.util
import itertools
import math
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import _muon

from megatron_ext.muon.newton_schulz import (
    COEFFICIENTS,
    newton_schulz,
    newton_schulz_reference,
    newton_schulz_workspace,
)

NO_CUDA = not torch.cuda.is_available() or importlib.util.find_spec("megatron_ext._C_cuda") is None

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

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
at zero, 3.4445 a step, so by 485 in five steps: 3e-5 for each of a few such errors. Entries are
checked more tightly below, see test_largest_error."""


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
        x.as_subclass(Float32Only), COEFFICIENTS["simple"][0], ns_steps=5, eps=1e-7
    )
    assert theirs.dtype == torch.float32
    # Both are inexact, in the same way.
    torch.testing.assert_close(newton_schulz(x), theirs, atol=2 * TOLERANCE, rtol=0)


@pytest.mark.parametrize("shape", [(9, 9), (6, 30), (30, 6)])
def test_applies_the_polynomial_to_the_singular_values(shape):
    x = matrix(*shape)
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / s.norm()
    [(a, b, c)] = COEFFICIENTS["simple"]
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
    [simple] = COEFFICIENTS["simple"]
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


NONFINITE = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", NONFINITE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_is_refused(value, dtype, device):
    x = matrix(4, 6)
    x[2, 3] = value
    with pytest.raises(ValueError, match=r"newton_schulz: NaN or infinite entries in x$"):
        newton_schulz(x.to(device, dtype))
    with pytest.raises(ValueError, match=r"_reference: NaN or infinite entries in x$"):
        newton_schulz_reference(x.to(device, dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", NONFINITE)
def test_non_finite_affects_its_own_matrix_only(value, device):
    clean = matrix(2, 3, 9, 5).to(device)
    x = clean.clone()
    x[1, 2, 8, 4] = value
    x[0, 1, 0, 0] = value
    y = newton_schulz(x, nonfinite="propagate")
    assert y[1, 2].isnan().all()
    assert y[0, 1].isnan().all()
    healthy = y.isfinite().all((-1, -2))
    assert healthy.sum() == 4
    assert torch.equal(y[healthy], newton_schulz(clean)[healthy])

    out = torch.empty_like(x)
    with pytest.raises(ValueError, match=r"entries in x, matrix \(0, 1\); x, matrix \(1, 2\)$"):
        newton_schulz(x, out=out)
    assert torch.equal(out.nan_to_num(7), y.nan_to_num(7))


def test_non_finite_matrices_of_a_list_are_named():
    x = [matrix(3, 4), matrix(2, 6, 6), matrix(3, 4), matrix(20, 4, 3)]
    x[0][0, 0] = x[1][1, 5, 5] = float("nan")
    with pytest.raises(ValueError, match=r"in x\[0\]; x\[1\], matrix \(1\)$"):
        newton_schulz(x)
    x[3].fill_(float("inf"))
    with pytest.raises(ValueError, match=r"x\[3\], matrix \(5\); and 14 more$"):
        newton_schulz(x)


@pytest.mark.parametrize("function", [newton_schulz, newton_schulz_reference])
@pytest.mark.parametrize(
    ("x", "options", "error", "message"),
    [
        (torch.ones(3), {}, ValueError, r"shape \(3,\)"),
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


@pytest.mark.parametrize(
    ("x", "options", "error", "message"),
    [
        (torch.ones(2, 3, device="meta"), {}, ValueError, "on meta"),
        (torch.ones(2, 3), {"restarts": 5}, ValueError, "restarts is 5.*0 to 4"),
        (torch.ones(2, 3), {"restarts": -1}, ValueError, "restarts is -1"),
        (torch.ones(2, 3), {"nonfinite": "ignore"}, ValueError, "'raise' or 'propagate'"),
        (torch.ones(2, 3), {"out": torch.ones(3, 2)}, ValueError, "out is .* must be contiguous"),
        (torch.ones(2, 3), {"out": torch.ones(3, 2).T}, ValueError, "strides"),
        (torch.ones(2, 3), {"out": torch.ones(2, 3).double()}, ValueError, "float64"),
        (torch.ones(2, 3), {"workspace": torch.ones(9)}, ValueError, "newton_schulz_workspace"),
        (
            torch.ones(2, 3),
            {"workspace": torch.ones(9, dtype=torch.uint8)},
            ValueError,
            "workspace has 9 bytes, but [0-9]+ are needed",
        ),
        ([torch.ones(2, 3)], {"out": []}, ValueError, "0 tensors for 1"),
        ([torch.ones(2, 3), torch.ones(3)], {}, ValueError, r"shape \(3,\)"),
        ([torch.ones(2, 3), torch.ones(2, 3).double()], {}, TypeError, "float32 and .*float64"),
    ],
)
def test_wrong_arguments_of_the_operator(x, options, error, message):
    with pytest.raises(error, match=message):
        newton_schulz(x, **options)


def test_missing_extension_says_how_to_build(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron_ext._C", None)
    with pytest.raises(ImportError, match=r"megatron_ext\._C cannot be imported.*pip install"):
        newton_schulz(torch.ones(2, 3))


# --- precision ------------------------------------------------------------------------------------


def spectrum(m, n, smallest, seed=0):
    """Singular values from 1 to ``smallest``, equally spaced in the logarithm."""
    rank = min(m, n)
    u = torch.linalg.qr(matrix(m, rank, seed=seed).double())[0]
    v = torch.linalg.qr(matrix(n, rank, seed=seed + 1).double())[0]
    return (u * torch.logspace(0, math.log10(smallest), rank, dtype=torch.float64)) @ v.T


def gaussian(m, n, seed=0):
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


PRECISION_SHAPES = [(64, 64), (128, 512), (200, 48), (33, 129), (256, 256)]


@pytest.mark.parametrize("shape", PRECISION_SHAPES)
@pytest.mark.parametrize(
    ("name", "allowed"),
    [("gaussian", 5e-6), ("spectrum", 1e-5), ("rank 1", 1e-5)],
)
def test_largest_error(name, allowed, shape):
    x = {
        "gaussian": lambda: gaussian(*shape),
        "spectrum": lambda: spectrum(*shape, 1e-7),
        "rank 1": lambda: gaussian(shape[0], 1) @ gaussian(1, shape[1], seed=1),
    }[name]().float()
    error = newton_schulz(x).double() - newton_schulz_reference(x.double())
    assert error.abs().max() <= allowed


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("steps", [1, 2, 5, 8, 10])
def test_every_set_with_any_number_of_steps(coefficients, steps):
    x = gaussian(40, 72).float()
    options = {"coefficients": coefficients, "steps": steps}
    error = newton_schulz(x, **options).double() - newton_schulz_reference(x.double(), **options)
    # aol's first slope is made for another normalisation and overshoots: larger entries, errors.
    assert error.abs().max() <= 1e-4


@pytest.mark.parametrize("restarts", range(5))
def test_restarts_change_the_error_only(restarts):
    x = spectrum(48, 96, 1e-5).float()
    error = newton_schulz(x, restarts=restarts).double() - newton_schulz_reference(x.double())
    # Without a restart, errors of 6e-8 grow by 3.4445^8 where singular values are small.
    assert error.abs().max() <= (2e-3 if restarts == 0 else 2e-5)


@pytest.mark.parametrize("shape", [(40, 40), (24, 100), (100, 24)])
def test_fp64_is_computed_in_fp64(shape):
    x = spectrum(*shape, 1e-7)
    error = newton_schulz(x) - newton_schulz_reference(x)
    assert error.abs().max() <= 1e-13
    assert torch.equal(newton_schulz(x * 2.0**900), newton_schulz(x))
    assert torch.equal(newton_schulz(x * 2.0**-900), newton_schulz(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(9, 9), (24, 100), (100, 24)])
def test_half_precision_is_computed_in_fp32(dtype, shape):
    x = gaussian(*shape).to(dtype)
    y = newton_schulz(x)
    assert y.dtype == dtype
    assert torch.equal(y, newton_schulz(x.float()).to(dtype))


# --- the same bits --------------------------------------------------------------------------------


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(64, 64), (100, 300), (300, 300), (200, 1100), (1100, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_threads_and_runs_change_no_bit(shape, dtype, threads):
    x = gaussian(*shape).to(dtype)
    results = []
    for count in (1, 2, 3, 4, 1):
        threads(count)
        results.append(newton_schulz(x))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("count", [2, 3, 64])
@pytest.mark.parametrize("shape", [(16, 40), (250, 250)])
def test_the_batch_changes_no_bit(count, shape, threads):
    threads(2)
    x = torch.stack([gaussian(*shape, seed=seed) for seed in range(min(count, 8))]).float()
    x = x.repeat(-(-count // 8), 1, 1)[:count]
    y = newton_schulz(x)
    for index in range(min(count, 8)):
        assert torch.equal(y[index], newton_schulz(x[index]))


def test_a_square_and_its_transpose_have_the_same_bits():
    x = matrix(37, 37)
    x[0, 1] = x[1, 0]  # the first pair does not tell them apart
    assert torch.equal(newton_schulz(x.T), newton_schulz(x).T)
    assert torch.equal(newton_schulz(-x), -newton_schulz(x))


# --- batches, lists, out, workspace ---------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(3, 4, 6), (2, 3, 6, 4), (1, 1, 1, 1), (0, 4, 6), (2, 0, 6)])
def test_leading_dimensions_are_a_batch(shape, device):
    x = matrix(*shape).to(device)
    y = newton_schulz(x)
    assert y.shape == shape
    assert y.is_contiguous()
    for index in itertools.product(*map(range, shape[:-2])):
        assert torch.equal(y[index], newton_schulz(x[index]))


@pytest.mark.parametrize("device", DEVICES)
def test_batch_of_any_strides(device):
    x = matrix(5, 7, 4, 3).to(device).permute(2, 3, 1, 0)[::2, :, 1:, ::2]
    before = x.clone()
    y = newton_schulz(x)
    assert torch.equal(y, newton_schulz(x.contiguous()))
    assert torch.equal(x, before)


@pytest.mark.parametrize("device", DEVICES)
def test_list_of_mixed_shapes(device):
    shapes = [(4, 6), (300, 200), (2, 6, 4), (4, 6), (0, 3), (1, 9), (8, 8), (200, 900)]
    x = [matrix(*shape, seed=seed).to(device) for seed, shape in enumerate(shapes)]
    y = newton_schulz(tuple(x))
    assert isinstance(y, list)
    assert all(torch.equal(mine, newton_schulz(its)) for mine, its in zip(y, x, strict=True))
    assert newton_schulz([]) == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_out_and_workspace(dtype, device):
    x = [matrix(30, 20).to(device, dtype), matrix(3, 40, 40).to(device, dtype)]
    expected = newton_schulz(x)
    workspace = newton_schulz_workspace(x)
    workspace.fill_(255)  # NaN everywhere
    out = [torch.full_like(tensor, float("nan")) for tensor in x]
    for _ in range(2):
        assert newton_schulz(x, out=out, workspace=workspace) is out
        assert all(torch.equal(mine, its) for mine, its in zip(out, expected, strict=True))
    single = torch.empty_like(x[0])
    assert newton_schulz(x[0], out=single, workspace=workspace) is single
    assert torch.equal(single, expected[0])


# --- torch.compile --------------------------------------------------------------------------------


def test_fake_tensors():
    with FakeTensorMode():
        x = torch.empty(3, 5, 4, dtype=torch.bfloat16).mT
        y = newton_schulz(x)
    assert (y.shape, y.dtype) == ((3, 4, 5), torch.bfloat16)
    assert y.is_contiguous()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_without_a_graph_break(backend):
    def step(momentum, weight):
        return weight - 0.1 * newton_schulz(momentum * 2)

    x, weight = matrix(6, 9), matrix(6, 9, seed=1)
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    assert torch.equal(compiled(x, weight), step(x, weight))


def test_operator_is_registered_as_torch_wants_it():
    newton_schulz(matrix(2, 3))
    x, out = [matrix(4, 6), matrix(2, 3, 3)], [torch.empty(4, 6), torch.empty(2, 3, 3)]
    coefficients = [*COEFFICIENTS["simple"][0]] * 5
    torch.library.opcheck(
        torch.ops.megatron_ext.newton_schulz.default,
        (x, out, None, coefficients, [3, 2], [1] * 5, True),
        test_utils=("test_schema", "test_faketensor"),
    )


# --- instruction sets -----------------------------------------------------------------------------

CHECK = """
import torch
from megatron_ext.muon.newton_schulz import newton_schulz, newton_schulz_reference
torch.manual_seed(0)
for dtype, allowed in ((torch.float32, 2e-6), (torch.float64, 1e-14)):
    for shape in ((1, 1), (5, 7), (33, 65), (100, 31), (96, 96), (64, 500)):
        x = torch.randn(shape, dtype=dtype)
        error = newton_schulz(x).double() - newton_schulz_reference(x.double())
        assert error.abs().max() <= allowed, (dtype, shape, error.abs().max())
        assert torch.equal(newton_schulz(x.T), newton_schulz(x).T)
print(torch.backends.cpu.get_cpu_capability())
"""


@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_every_instruction_set(capability):
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run(
        [sys.executable, "-c", CHECK], capture_output=True, text=True, env=environment
    )
    if done.returncode < 0 and capability != "default":
        pytest.skip(f"this processor has no {capability}")
    assert done.returncode == 0, done.stderr
    if done.stdout.strip().lower() != capability:
        pytest.skip(f"torch has no {capability} here: {done.stdout.strip()}")


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
    longest = max(after - before for before, after in itertools.pairwise(ticks))
    assert longest < 0.5 * (ticks[-1] - ticks[0])
