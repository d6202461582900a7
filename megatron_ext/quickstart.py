"""From nothing to a trained mixture of experts, on a machine without a GPU, in five minutes.

Prepares text, trains a small GPT with experts on 4 gloo ranks (2 pipeline stages x 2 data-parallel
ranks, experts spread over 2), and reports. A second run reuses what is there; after a crash it
resumes from the last checkpoint. Any flag of Megatron's or the extension's can be added.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

from megatron_ext.data import DataError, DatasetInfo, Options, prepare
from megatron_ext.data.progress import quiet_imports, reporter
from megatron_ext.launch.local import LaunchError, run, terminated_like_interrupted
from megatron_ext.metrics import files
from megatron_ext.report import report

RANKS = 4
VOCABULARY = 512

MODEL = """
    --num-layers 4 --hidden-size 96 --num-attention-heads 4 --seq-length 128
    --max-position-embeddings 128 --position-embedding-type rope --normalization RMSNorm
    --swiglu --disable-bias-linear --init-method-std 0.04 --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
"""
EXPERTS = """
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 128
    --moe-router-score-function sigmoid --moe-router-dtype fp32
    --moe-router-load-balancing-type none --moe-router-enable-expert-bias
    --moe-router-bias-update-rule centered-sign --moe-router-bias-update-rate 5e-3
    --moe-token-dispatcher-type alltoall
"""
LAYOUT = """
    --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --use-distributed-optimizer
"""
TRAINING = """
    --micro-batch-size 8 --global-batch-size 16 --optimizer adam --adam-beta2 0.95
    --lr 4e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-fraction 0.02 --weight-decay 0.1
    --clip-grad 1.0 --seed 1234 --num-workers 0 --log-interval 10
    --eval-interval 100 --eval-iters 16 --save-interval 100
"""


def training_flags(directory: Path, data: DatasetInfo, iterations: int) -> list[str]:
    """The flags of ``megatron_ext.pretrain_gpt`` for the run in ``directory``."""
    checkpoints = str(directory / "checkpoints")
    return [
        *f"{MODEL} {EXPERTS} {LAYOUT} {TRAINING} --train-iters {iterations}".split(),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", str(data.vocab_size)),
        *("--train-data-path", data.train_prefix, "--valid-data-path", data.valid_prefix),
        *("--data-cache-path", str(directory / "cache")),
        *("--save", checkpoints, "--load", checkpoints, "--ckpt-format", "torch_dist"),
        "--dist-ckpt-optim-fully-reshardable",  # so that it loads in any other layout
    ]


def quickstart(
    directory: Path, text: list[Path], iterations: int, port: int | None, more: list[str]
) -> None:
    """Data, training and report, each step only if it is not there yet.

    Raises DataError or LaunchError, with everything complete that the steps before made.
    """
    with reporter() as progress:
        data = prepare(
            Options(output=directory / "data", text=text, vocab_size=VOCABULARY), progress
        )
    print(f"data: {data.path} ({'reused' if data.reused else 'new'}), {', '.join(data.sources)}")
    flags = [*training_flags(directory, data, iterations), *more]
    _refuse_other_run(directory, data, flags)
    if _is_complete(directory, iterations):
        print("training: complete already")
    else:
        run(flags, RANKS, directory, port)
    report(directory)


def _refuse_other_run(directory: Path, data: DatasetInfo, flags: list[str]) -> None:
    """A checkpoint is resumed with the flags and the data it was made with, or not at all."""
    record = directory / "run.json"
    this = {"flags": flags, "data": data.fingerprint}
    started = (directory / "checkpoints" / "latest_checkpointed_iteration.txt").exists()
    if started and record.exists() and json.loads(record.read_text()) != this:
        raise LaunchError(
            f"{directory} holds a run with other flags or other text: give this one a --run-dir "
            "of its own, or add --restart to delete the old one",
            status=2,
        )
    record.write_text(json.dumps(this, indent=1) + "\n")


def _is_complete(directory: Path, iterations: int) -> bool:
    tracker = directory / "checkpoints" / "latest_checkpointed_iteration.txt"
    evaluated = any(
        row["kind"] == "eval" and row["iteration"] == iterations
        for row in files.read(directory / files.METRICS)
    )
    return evaluated and tracker.exists() and tracker.read_text().strip() == str(iterations)


def _delete(directory: Path) -> None:
    """Deletes a run of ours; nothing else."""
    if not directory.exists():
        return
    if not (directory / "run.json").exists() and any(directory.iterdir()):
        raise LaunchError(f"--restart: {directory} holds no quickstart run: left alone", status=2)
    shutil.rmtree(directory)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bash launch/quickstart.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # what is not one of these flags is Megatron's
    )
    parser.add_argument(
        "--text",
        nargs="+",
        type=Path,
        default=[],
        metavar="PATH",
        help="text files or folders to train on (default: the Python standard library's source)",
    )
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs/quickstart"), help="default: runs/quickstart"
    )
    parser.add_argument("--iterations", type=int, default=500, help="default: 500")
    parser.add_argument("--restart", action="store_true", help="delete the run in --run-dir first")
    parser.add_argument("--master-port", type=int, help="default: a free one")
    parser.error = lambda message: parser.exit(2, f"error: {message}\n")  # type: ignore
    own, more = parser.parse_known_args()
    if own.iterations < 1:
        return _failed(f"--iterations {own.iterations} must be at least 1", 2)
    quiet_imports()
    # Four ranks on whatever machine this is: a GPU, if there is one, is not asked for.
    os.environ.setdefault("MEGATRON_EXT_DEVICE", "cpu")
    try:
        with terminated_like_interrupted():
            if own.restart:
                _delete(own.run_dir)
            quickstart(own.run_dir, own.text, own.iterations, own.master_port, more)
    except DataError as error:
        return _failed(str(error), 2)
    except LaunchError as error:
        return _failed(str(error), error.status)
    except ValueError as error:  # nothing to report
        return _failed(str(error), 1)
    except OSError as error:
        return _failed(f"{error.filename or own.run_dir}: {error.strerror}", 1)
    except KeyboardInterrupt:
        return _failed("interrupted: all ranks were stopped; the same command resumes", 130)
    return 0


def _failed(message: str, status: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
