"""Training runs for tests: Megatron's own loop on real ranks, a few steps of a tiny model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from support.ranks import run_ranks

from megatron_ext.metrics import files

TINY = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 4 "
    "--lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 1 --lr-decay-iters 8 "
    "--clip-grad 1.0 --seed 7 --mock-data --vocab-size 127 --make-vocab-size-divisible-by 32 "
    "--log-interval 1 --eval-iters 1 --eval-interval 100 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear "
    "--num-workers 0 --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
)
MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-load-balancing-type none "
    "--moe-ffn-hidden-size 32 --moe-router-dtype fp32"
)


def train(directory: Path, world_size: int, *flags: str, **run: Any) -> list[dict[str, Any]]:
    """Runs TINY with ``flags`` (a later flag wins) and returns the rows of metrics.jsonl."""
    metrics = directory / "metrics"
    argv = f"{TINY} {' '.join(flags)} --metrics-dir {metrics}".split()
    run_ranks(world_size, pretrain, argv, **run)
    return files.read(metrics / files.METRICS)


def losses(rows: list[dict[str, Any]]) -> list[float]:
    """Training losses in nats, an element an iteration."""
    return [row["lm_loss"] for row in rows if row["kind"] == "train"]


def pretrain(argv: list[str]) -> None:
    """On a rank: the entry as users call it."""
    from megatron_ext.pretrain_gpt import main

    sys.argv = ["pretrain_gpt", *argv]
    main()
