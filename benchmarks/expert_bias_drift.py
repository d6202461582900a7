"""Where the router's bias goes under Megatron's rule and under ours: a layer with one crowded
expert, its counts the same at every step (Megatron's own function is called).

    python benchmarks/expert_bias_drift.py [--steps 3] [--json FILE]
"""

from __future__ import annotations

import warnings

import torch
from common import arguments, publish

RATE = 1e-3
COUNTS = (1, 1, 1, 97)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()

    warnings.simplefilter("ignore")  # Megatron's hints about optional GPU packages
    from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias

    from megatron_ext.moe.bias import updated_expert_bias


    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0,
                                         world_size=1)  # fmt: skip
    world = torch.distributed.group.WORLD
    rules = {
        "Megatron": lambda counts, bias: get_updated_expert_bias(
            counts.float(), bias, RATE, tp_dp_cp_group=world
        ),
        "sign": lambda counts, bias: updated_expert_bias(counts, bias, RATE, "sign"),
        "centered-sign": lambda counts, bias: updated_expert_bias(
            counts, bias, RATE, "centered-sign"
        ),
    }
    rows = []
    for name, rule in rules.items():
        bias = torch.zeros(len(COUNTS), dtype=torch.float64)
        for _ in range(options.steps):
            bias = rule(torch.tensor(COUNTS), bias)
        values = {f"b{i}": value for i, value in enumerate(bias.tolist())}
        rows.append({"rule": name, **values, "mean": bias.mean().item()})
    publish(rows, options.json, f"bias after {options.steps} steps of {RATE}, counts {COUNTS}")


if __name__ == "__main__":
    main()
