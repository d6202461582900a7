"""Newton-Schulz on the CPU: ours against the routine of torch.optim.Muon, forced to fp32.

    python benchmarks/newton_schulz_cpu.py [--repeats 7] [--json FILE]

Interleaved in one process, medians; above 1 the ratio says how often ours fits into theirs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from unittest.mock import patch

import torch
from common import arguments, publish
from torch.optim import _muon

from megatron_ext.muon.newton_schulz import COEFFICIENTS, newton_schulz

SHAPES = ((512, 512), (1024, 1024), (512, 2048), (128, 512))


def torch_fp32(x: torch.Tensor) -> torch.Tensor:
    """torch's routine converts to bf16, which a CPU computes many times slower than fp32; it
    also works in place, so it is given a copy, which costs it less than a thousandth."""
    with patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
        return _muon._zeropower_via_newtonschulz(x, COEFFICIENTS["simple"], 5, 1e-7)


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    rows = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for shape in SHAPES:
            x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
            ours, theirs = [], []
            for repeat in range(options.repeats + 1):
                pair = seconds(lambda x=x: newton_schulz(x)), seconds(lambda x=x: torch_fp32(x))
                if repeat:  # the first warms caches and thread pools up
                    ours.append(pair[0])
                    theirs.append(pair[1])
            rows.append(
                {
                    "m x n": f"{shape[0]} x {shape[1]}",
                    "threads": threads,
                    "ours ms": 1e3 * median(ours),
                    "torch fp32 ms": 1e3 * median(theirs),
                    "ratio": median(theirs) / median(ours),
                }
            )
    publish(rows, options.json, "Newton-Schulz, fp32, 5 steps, CPU")


if __name__ == "__main__":
    main()
