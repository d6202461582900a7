"""Newton-Schulz on the CPU against the routines of torch and Emerging-Optimizers.

    python benchmarks/newton_schulz.py [--grid] [--json FILE]

Everything interleaved in one process, medians, 1 and 2 threads; a ratio says how often ours fits
into theirs. Ours works with a kept workspace. The peers:

- torch.optim.Muon's routine forced to fp32, and, for matrices where that takes no minutes, as
  shipped, in bf16. It takes one matrix; a batch is a loop.
- the batched routine of emerging_optimizers, if it can be imported (it is not on PyPI:
  github.com/NVIDIA-NeMo/Emerging-Optimizers), otherwise the same operations written out here.

The last column is ours' share of the fastest matrix product torch reaches on this machine, counting
only the operations of the Gram form. --grid: instead, every shape from 16 x 16 to 2048 x 2048,
square to 1:16, batches of 1 to 128, against the faster of both peers.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from statistics import median
from unittest.mock import patch

import torch
from common import arguments, publish
from torch.optim import _muon

from megatron_ext.muon.newton_schulz import COEFFICIENTS, newton_schulz, newton_schulz_workspace

SIMPLE = COEFFICIENTS["simple"][0]
SHAPES = (
    (768, 3072),
    (1024, 4096),
    (1024, 1024),
    (2048, 2048),
    (128, 512),
    (64, 128, 512),
    (16, 256, 1024),
)


def torch_routine(x: torch.Tensor) -> None:
    for matrix in x.reshape(-1, *x.shape[-2:]):
        _muon._zeropower_via_newtonschulz(matrix, SIMPLE, 5, 1e-7)


def torch_fp32(x: torch.Tensor) -> None:
    # The routine converts to bf16, and works in place, so it is given a copy: under 0.1 %.
    with patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
        torch_routine(x)


def written_out(x: torch.Tensor) -> torch.Tensor:
    a, b, c = SIMPLE
    x = torch.nn.functional.normalize(x, p=2, dim=(-2, -1), eps=1e-15)
    product = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(5):
        gram = x @ x.mT
        polynomial = product(gram, gram, gram, beta=b, alpha=c)
        x = product(x, polynomial, x, beta=a)
    return x


def batched_peer() -> tuple[str, Callable[[torch.Tensor], object]]:
    if importlib.util.find_spec("emerging_optimizers") is None:
        return "the batched operations written out (no emerging_optimizers here)", written_out
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz as theirs

    return "emerging_optimizers", lambda x: theirs(x, 5, "simple")


def interleaved(runs: list[Callable[[], object]], rounds: int) -> list[float]:
    """Median seconds of each."""
    times: list[list[float]] = [[] for _ in runs]
    for index in range(rounds + 1):
        for run, its in zip(runs, times, strict=True):
            began = time.perf_counter()
            run()
            if index:  # the first warms caches and thread pools up
                its.append(time.perf_counter() - began)
    return [median(its) for its in times]


def peak(threads: int) -> float:
    """Flop/s of the best of torch's fp32 products."""
    torch.set_num_threads(threads)
    a, b = torch.randn(2, 1024, 1024)
    out = torch.empty_like(a)
    return 2 * 1024**3 / min(interleaved([lambda: torch.mm(a, b, out=out)], 9))


def gram_flops(shape: tuple[int, ...]) -> float:
    """With one restart; symmetric products once. A square restarts before every step."""
    *batch, short, long = (*shape[:-2], *sorted(shape[-2:]))
    units = 20 if short == long else 6 * long / short + 14
    return units * short**3 * torch.Size(batch).numel()


def compare(shape: tuple[int, ...], threads: int, fastest: float, theirs: Callable) -> dict:
    torch.set_num_threads(threads)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    out, workspace = torch.empty_like(x), newton_schulz_workspace(x)
    rounds = 7 if x.numel() * min(shape[-2:]) < 3e8 else 5
    safe, fast, fp32, batched = interleaved(
        [
            lambda: newton_schulz(x, out=out, workspace=workspace),
            lambda: newton_schulz(x, restarts=0, out=out, workspace=workspace),
            lambda: torch_fp32(x),
            lambda: theirs(x),
        ],
        rounds,
    )
    row = {
        "shape": " x ".join(map(str, shape)),
        "threads": threads,
        "ours ms": 1e3 * safe,
        "0 restarts ms": 1e3 * fast,
        "torch fp32 ms": 1e3 * fp32,
        "batched peer ms": 1e3 * batched,
        "torch / ours": fp32 / safe,
        "torch / 0 restarts": fp32 / fast,
        "peer / ours": batched / safe,
        "peer / 0 restarts": batched / fast,
        "of sgemm": gram_flops(shape) / safe / fastest,
    }
    # bf16 takes some 50 times as long as fp32: one run tells enough.
    slow = x.numel() * min(shape[-2:]) < 1e8
    row["torch bf16 / ours"] = interleaved([lambda: torch_routine(x)], 1)[0] / safe if slow else "-"
    return row


def grid(threads: int, theirs: Callable) -> list[dict]:
    torch.set_num_threads(threads)
    rows = []
    for short in (16, 32, 64, 128, 256, 512, 1024, 2048):
        for ratio in (1, 2, 4, 8, 16):
            for batch in (1, 8, 128):
                if batch * ratio * short**3 > 2.2e9 or short * ratio > 32768:
                    continue
                x = torch.randn(batch, short, short * ratio)
                x = x[0] if batch == 1 else x
                ours, *peers = interleaved(
                    [
                        lambda x=x: newton_schulz(x),
                        lambda x=x: torch_fp32(x),
                        lambda x=x: theirs(x),
                    ],
                    5,
                )
                rows.append(
                    {
                        "shape": " x ".join(map(str, x.shape)),
                        "threads": threads,
                        "ours ms": 1e3 * ours,
                        "torch / ours": peers[0] / ours,
                        "peer / ours": peers[1] / ours,
                    }
                )
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--grid", action="store_true")
    options = parser.parse_args()
    name, theirs = batched_peer()
    if options.grid:
        rows = [row for threads in (1, 2) for row in grid(threads, theirs)]
        least = min(min(row["torch / ours"], row["peer / ours"]) for row in rows)
        title = f"fp32, 5 steps; peer: {name}; smallest ratio {least:.2f}"
    else:
        rows = []
        for threads in (1, 2):
            fastest = peak(threads)
            print(f"{threads} threads: {fastest / 1e9:.0f} Gflop/s in torch's fp32 product")
            rows += [compare(shape, threads, fastest, theirs) for shape in SHAPES]
        title = f"fp32, 5 steps; batched peer: {name}"
    publish(rows, options.json, f"Newton-Schulz on the CPU, {title}")


if __name__ == "__main__":
    main()
