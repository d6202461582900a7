"""An unmodified Megatron trains on gloo ranks in every layout, and each computes the same.

Layouts draw different initial weights, so each loads the same checkpoint, saved by one rank, and
its losses are compared with those of one rank that went on alone. The comparison covers the
checkpoint too: weights, optimizer states and data position have to survive the change of layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from support.training import MOE, losses, train

pytestmark = pytest.mark.slow

SAVED_AT, LAST = 2, 5

FP32 = 2e-5
"""Relative; sums over ranks, heads and micro-batches are taken in another order, five steps long.
A wrong gradient shows in the third digit: SGD instead of Adam, say, or a missing reduction."""

BF16 = 2e-3
"""bf16 keeps 8 bits, and activations are rounded at other places."""

DENSE = ""
DO = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
OVERLAP = f"{DO} --overlap-grad-reduce --overlap-param-gather"
PP2 = "--pipeline-model-parallel-size 2"
VPP = f"{PP2} --num-layers-per-virtual-pipeline-stage 1"
TP2 = "--tensor-model-parallel-size 2"
SP = f"{TP2} --sequence-parallel"
EP2 = "--expert-model-parallel-size 2"
ALLTOALL = "--moe-token-dispatcher-type alltoall"
ALLGATHER = "--moe-token-dispatcher-type allgather"

WEIGHTS_ONLY = "--no-load-optim --no-load-rng"
"""Megatron 0.19.2 numbers the optimizers of a checkpoint, and experts get one of their own only
where they are spread over ranks: at another expert-parallel size it does not load."""

Alone = Callable[..., tuple[list[float], str]]


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """(model, load flags) -> losses of one rank from the checkpoint on, flags that load it."""

    @functools.cache
    def checkpoints(model: str) -> Path:
        directory = tmp_path_factory.mktemp("checkpoints")
        save = f"--save {directory} --save-interval {SAVED_AT} --train-iters {LAST}"
        train(directory, 1, model, save)
        return directory

    @functools.cache
    def train_alone(model: str, load: str = "") -> tuple[list[float], str]:
        flags = f"--train-iters {LAST} --load {checkpoints(model)} --ckpt-step {SAVED_AT} {load}"
        return losses(train(tmp_path_factory.mktemp("alone"), 1, model, flags)), flags

    return train_alone


def check(
    reference: tuple[list[float], str],
    directory: Path,
    world_size: int,
    model: str,
    layout: str,
    tolerance: float,
) -> None:
    expected, load = reference
    rows = train(directory, world_size, model, load, layout)
    assert losses(rows) == pytest.approx(expected, rel=tolerance, abs=0)
    assert len(expected) == LAST - SAVED_AT


@pytest.mark.parametrize(
    ("world_size", "model", "layout"),
    [
        pytest.param(2, DENSE, "", id="dp2"),
        pytest.param(2, DENSE, "--overlap-grad-reduce", id="dp2-overlap-grad-reduce"),
        pytest.param(4, DENSE, f"{SP} {PP2}", id="tp2-sp-pp2-plain"),
        pytest.param(4, DO, "", id="dp4-distopt"),
        pytest.param(3, f"{DO} --global-batch-size 6", "", id="dp3-distopt-uneven"),
        pytest.param(2, DO, OVERLAP, id="dp2-distopt-overlap"),
        pytest.param(2, DO, PP2, id="pp2"),
        pytest.param(4, DO, "--pipeline-model-parallel-size 4", id="pp4"),
        pytest.param(2, DO, VPP, id="pp2-interleaved"),
        pytest.param(4, DO, f"{VPP} {OVERLAP}", id="pp2-interleaved-dp2-overlap"),
        pytest.param(2, DO, TP2, id="tp2"),
        pytest.param(2, DO, SP, id="tp2-sequence-parallel"),
        pytest.param(4, DO, f"{SP} {PP2}", id="tp2-sp-pp2"),
        pytest.param(4, DO, f"{SP} {OVERLAP}", id="tp2-sp-dp2-overlap"),
        pytest.param(1, DO, "--recompute-granularity full --recompute-method uniform "
                     "--recompute-num-layers 1", id="full-recomputation"),
        pytest.param(2, f"{DO} --calculate-per-token-loss", "", id="per-token-loss"),
        pytest.param(2, f"{DO} --normalization LayerNorm", SP, id="layernorm-sp"),
        pytest.param(2, f"{DO} --group-query-attention --num-query-groups 2", SP, id="gqa-tp2"),
    ],
)  # fmt: skip
def test_dense_fp32(alone: Alone, tmp_path: Path, world_size: int, model: str, layout: str) -> None:
    check(alone(model), tmp_path, world_size, model, layout, FP32)


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        pytest.param(4, f"{PP2} {ALLTOALL} {OVERLAP}", id="pp2-dp2-overlap"),
        pytest.param(2, f"{EP2} {ALLTOALL}", id="ep2-alltoall"),
        pytest.param(2, f"{EP2} {ALLGATHER}", id="ep2-allgather"),
        pytest.param(4, f"--expert-model-parallel-size 4 {ALLTOALL}", id="ep4"),
        pytest.param(4, f"{EP2} {PP2} {ALLTOALL} {OVERLAP}", id="pp2-dp2-ep2-overlap"),
        pytest.param(4, f"{EP2} {SP} {ALLTOALL}", id="tp2-sp-ep2-alltoall"),
        pytest.param(4, f"{EP2} {SP} {ALLGATHER}", id="tp2-sp-ep2-allgather"),
        pytest.param(2, f"{SP} --expert-tensor-parallel-size 1 {ALLTOALL}", id="tp2-sp-etp1"),
    ],
)
def test_mixture_of_experts_fp32(
    alone: Alone, tmp_path: Path, world_size: int, layout: str
) -> None:
    model = f"{DO} {MOE}"
    load = WEIGHTS_ONLY if "expert-" in layout else ""
    check(alone(model, load), tmp_path, world_size, model, layout, FP32)


@pytest.mark.parametrize(
    ("world_size", "model", "layout"),
    [
        pytest.param(2, f"{DO} --bf16", "", id="dp2-distopt"),
        pytest.param(2, f"{DO} --bf16", OVERLAP, id="dp2-distopt-overlap"),
        pytest.param(2, "--bf16", "", id="dp2"),
        pytest.param(2, f"{DO} --bf16", PP2, id="pp2"),
        pytest.param(2, f"{DO} --bf16", SP, id="tp2-sp"),
        pytest.param(2, f"{DO} --bf16 {MOE}", f"{EP2} {ALLTOALL}", id="ep2"),
    ],
)
def test_bf16(alone: Alone, tmp_path: Path, world_size: int, model: str, layout: str) -> None:
    load = WEIGHTS_ONLY if "expert-model" in layout else ""
    check(alone(model, load), tmp_path, world_size, model, layout, BF16)


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        pytest.param(1, DENSE, id="alone"),
        pytest.param(3, f"{OVERLAP} --global-batch-size 6", id="dp3-overlap"),
        pytest.param(4, f"{SP} {PP2} {DO}", id="tp2-sp-pp2"),
        pytest.param(4, f"{MOE} {EP2} {PP2} {ALLTOALL} {DO}", id="pp2-dp2-ep2"),
        pytest.param(4, f"{MOE} {EP2} {PP2} {ALLTOALL} {OVERLAP} --bf16", id="pp2-dp2-ep2-bf16"),
        pytest.param(2, f"{DO} --hidden-dropout 0.1 --attention-dropout 0.1 {SP}", id="dropout"),
        pytest.param(2, f"{DO} --async-save", id="async-save"),
        pytest.param(2, f"{DO} --fp16 --initial-loss-scale 1024", id="fp16"),
    ],
)
def test_a_resumed_run_is_bit_equal_to_one_that_was_not_interrupted(
    tmp_path: Path, world_size: int, flags: str
) -> None:
    save = f"{flags} --save {tmp_path}/checkpoints --save-interval 2 --train-iters 4"
    whole = train(tmp_path / "whole", world_size, save)
    resumed = train(tmp_path / "resumed", world_size, f"{save} --load {tmp_path}/checkpoints",
                    "--ckpt-step 2")  # fmt: skip
    assert [row["iteration"] for row in resumed if row["kind"] == "train"] == [3, 4]
    # Loss, grad norm, learning rate, tokens per expert and held-out loss, to the last bit.
    assert resumed == [row for row in whole if row["iteration"] > 2]


@pytest.mark.parametrize(
    ("saved_on", "layout", "model"),
    [
        pytest.param(4, f"{SP} {PP2}", DO, id="tp2-sp-pp2"),
        pytest.param(3, "--global-batch-size 6", f"{DO} --global-batch-size 6", id="dp3"),
        pytest.param(4, f"{PP2} {ALLTOALL}", f"{DO} {MOE}", id="moe-pp2-dp2"),
    ],
)
def test_a_checkpoint_of_many_ranks_is_resumed_by_one(
    tmp_path: Path, saved_on: int, layout: str, model: str
) -> None:
    flags = f"{model} --save {tmp_path}/checkpoints --save-interval 2 --train-iters 4"
    many = train(tmp_path / "many", saved_on, flags, layout)
    one = train(tmp_path / "one", 1, f"{model} --load {tmp_path}/checkpoints --ckpt-step 2")
    assert losses(one) == pytest.approx(losses(many)[2:], rel=FP32, abs=0)


def test_the_same_seed_gives_the_same_metrics(tmp_path: Path) -> None:
    flags = f"{MOE} {EP2} {PP2} {ALLTOALL} {DO}"
    train(tmp_path / "once", 4, flags)
    train(tmp_path / "twice", 4, flags)
    once, twice = (tmp_path / run / "metrics" / "metrics.jsonl" for run in ("once", "twice"))
    assert once.read_bytes() == twice.read_bytes()
    assert len(once.read_bytes()) > 1000
