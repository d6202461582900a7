"""Newton-Schulz on a GPU: checked, then timed.

    python benchmarks/newton_schulz_gpu.py [--repeats 20] [--json FILE]

Checks first: against fp64, in a CUDA graph, without synchronisation. Then the table: ours in fp16
with the default restart and without, against torch.optim.Muon's routine in bf16 on each matrix and,
where it can be imported, against gram_newton_schulz. Interleaved, medians of CUDA events; a ratio
above 1 says how often ours, with the default restart, fits into theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from common import arguments, publish
from torch.optim import _muon

from megatron_ext.muon.newton_schulz import (
    COEFFICIENTS,
    newton_schulz,
    newton_schulz_reference,
)

SIMPLE = COEFFICIENTS["simple"][0]

SHAPES = (
    (1, 1024, 1024),
    (1, 2048, 2048),
    (1, 4096, 4096),
    (1, 1024, 4096),
    (1, 2048, 8192),
    (1, 4096, 14336),
    (64, 256, 1024),
    (128, 512, 512),
    (32, 1024, 1024),
)

TOLERANCES = {torch.float16: 2e-2, torch.bfloat16: 2e-2, torch.float32: 1e-4, torch.float64: 1e-9}
"""Of the largest error of an entry. On Gaussian matrices fp16 arithmetic is off by up to 4e-3."""


def random(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator).to(dtype)


# --- checks ---------------------------------------------------------------------------------------


def check_values() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    shapes = ((1, 1), (1, 300), (7, 5), (64, 64), (130, 257), (257, 130), (512, 2048), (2048, 512))
    for dtype, tolerance in TOLERANCES.items():
        matrices = [random(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
        matrices.append(random(300, 200, dtype=dtype)[::2, ::3])
        for x, y in zip(matrices, newton_schulz(matrices), strict=True):
            assert y.dtype == dtype
            assert y.is_contiguous()
            error = (y.double() - newton_schulz_reference(x.double())).abs().max().item()
            assert error <= tolerance, f"{dtype} {tuple(x.shape)}: error {error:.2g}"
            if dtype == torch.float16:  # Half-precision bits do not depend on what runs beside.
                assert torch.equal(newton_schulz(x), y), f"{tuple(x.shape)}: other bits alone"
    print("values            ok, against fp64")


def check_bad_items() -> None:
    x = random(4, 100, 300, dtype=torch.bfloat16)
    good = newton_schulz(x)
    x[1, 2, 3] = torch.nan
    x[2] = 0
    y = newton_schulz(x, nonfinite="propagate")
    assert y[1].isnan().all()
    assert not y[2].any()
    assert torch.equal(y[0], good[0])
    assert torch.equal(y[3], good[3])
    assert torch.equal(newton_schulz(x[0] * 8), good[0])
    print("NaN, zero, scale  ok")


def check_graph() -> None:
    x = random(8, 256, 700)
    out = torch.empty_like(x)
    expected = newton_schulz(x, nonfinite="propagate")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        newton_schulz(x, nonfinite="propagate", out=out)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)
    print("CUDA graph        ok, the same bits")


def check_no_synchronisation() -> None:
    x = [random(256, 700), random(700, 256)]
    newton_schulz(x, nonfinite="propagate")
    torch.cuda.set_sync_debug_mode("error")
    try:
        newton_schulz(x, nonfinite="propagate")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    print("synchronisation   none")


# --- times ----------------------------------------------------------------------------------------


def torch_loop(x: torch.Tensor) -> list[torch.Tensor]:
    """torch's routine takes one matrix, and bf16 ones in place: it is given copies."""
    return [_muon._zeropower_via_newtonschulz(matrix.clone(), SIMPLE, 5, 1e-7) for matrix in x]


def gram_newton_schulz() -> Callable[[torch.Tensor], torch.Tensor] | None:
    try:
        from gram_newton_schulz import GramNewtonSchulz

        return GramNewtonSchulz(
            ns_coefficients=[list(SIMPLE)] * 5,
            gram_newton_schulz_reset_iterations=[2],
        )
    except Exception as error:  # Its kernels ask for packages and GPUs of their own.
        print(f"gram_newton_schulz is left out: {error!r}")
        return None


def milliseconds(run: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def measure(shape: tuple[int, int, int], rival: Any, repeats: int) -> dict[str, Any]:
    x = random(*shape)
    x_bf16 = x.bfloat16()
    out = torch.empty_like(x)

    def ours(restarts: int | None) -> None:
        newton_schulz(x, restarts=restarts, nonfinite="propagate", out=out)

    runs: dict[str, Callable[[], object]] = {
        "ours ms": lambda: ours(None),
        "no restart ms": lambda: ours(0),
        "ours, loop ms": lambda: [newton_schulz(m, nonfinite="propagate") for m in x],
        "torch bf16 ms": lambda: torch_loop(x_bf16),
    }
    if rival is not None:
        runs["gram ms"] = lambda: rival(x)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 3):
        for name, run in runs.items():
            elapsed = milliseconds(run)
            if repeat >= 3:  # the first ones warm clocks, caches and allocators up
                times[name].append(elapsed)
    row: dict[str, Any] = {"matrices": shape[0], "m x n": f"{shape[1]} x {shape[2]}"}
    row |= {name: median(values) for name, values in times.items()}
    row["torch / ours"] = row["torch bf16 ms"] / row["ours ms"]
    if rival is not None:
        row["gram / ours"] = row["gram ms"] / row["ours ms"]
    return row


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("newton_schulz_gpu: torch finds no GPU, nothing is measured", file=sys.stderr)
        return 1
    check_values()
    check_bad_items()
    check_graph()
    check_no_synchronisation()
    rival = gram_newton_schulz()
    rows = [measure(shape, rival, options.repeats) for shape in SHAPES]
    title = f"Newton-Schulz, half precision, 5 steps, {torch.cuda.get_device_name()}"
    publish(rows, options.json, title)
    return 0


if __name__ == "__main__":
    sys.exit(main())
