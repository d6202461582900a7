"""Megatron's training log and evaluation, also written as JSON lines (``--metrics-dir``).

The last rank writes, for it has the loss; expert loads come to it from every pipeline stage.
"""

from __future__ import annotations

import functools
import inspect
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_ext.metrics import files
from megatron_ext.moe import adapter as moe
from megatron_ext.moe.load import max_violation


class _Recorder:
    """What is remembered between two log intervals of this process."""

    def __init__(self, directory: Path, args: Any) -> None:
        self.metrics = directory / files.METRICS
        self.timing = directory / files.TIMING
        self.losses: list[torch.Tensor] = []
        self.iterations = 0
        self.evaluating: dict[str, Any] = {}
        self.since = 0.0
        self.since_iteration: int | None = None
        self.since_samples = 0
        self.sets = 0
        self.full = False
        if _writes():
            for path in (self.metrics, self.timing):
                files.keep_up_to(path, args.iteration)

    def restart_clock(self, iteration: int, consumed_samples: int) -> None:
        """Time is counted from here: from the end of the first iteration, which also pays for
        what is done once, and then from the end of each interval."""
        self.since = time.perf_counter()
        self.since_iteration = iteration
        self.since_samples = consumed_samples

    def write(self, path: Path, row: dict[str, Any], key: tuple[str, ...] = ()) -> None:
        """A full disk costs the metrics, not the training run."""
        if self.full:
            return
        try:
            files.replace(path, row, key) if key else files.append(path, row)
        except OSError as error:
            self.full = True
            warnings.warn(f"{path}: {error.strerror}: no more metrics are written", stacklevel=2)


_recorder: _Recorder | None = None


def _recorder_of(args: Any) -> _Recorder | None:
    """The process's recorder, made when the first iteration or evaluation ends."""
    global _recorder
    if _recorder is None and getattr(args, "metrics_dir", None) is not None:
        _recorder = _Recorder(Path(args.metrics_dir), args)
    return _recorder


def _writes() -> bool:
    return torch.distributed.get_rank() == torch.distributed.get_world_size() - 1


def training_log(original: Callable) -> Callable:
    """Megatron's log line first, then ours."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        report_memory_flag = original(*args, **kwargs)
        recorder = _recorder_of(get_args())
        if recorder:
            call = signature.bind(*args, **kwargs)
            _record_iteration(recorder, get_args(), call.arguments)
        return report_memory_flag

    return training_log


def _record_iteration(recorder: _Recorder, args: Any, call: dict[str, Any]) -> None:
    iteration = call["iteration"]
    recorder.iterations += 1
    if not call["skipped_iter"] and "lm loss" in call["loss_dict"]:
        recorder.losses.append(call["loss_dict"]["lm loss"].detach().reshape(()))
    if iteration % args.log_interval and iteration != args.train_iters:
        if recorder.since_iteration is None:
            recorder.restart_clock(iteration, args.consumed_train_samples)
        return
    experts = _gathered_expert_load()
    if _writes():
        losses = recorder.losses
        row = {
            "kind": "train",
            "iteration": iteration,
            "consumed_samples": args.consumed_train_samples,
            "lm_loss": torch.stack(losses).mean().item() if losses else None,
            "skipped": recorder.iterations - len(losses),
            "grad_norm": _number(call["grad_norm"]),
            "learning_rate": _number(call["learning_rate"]),
        }
        if experts:
            row["tokens_per_expert"] = experts
            row["max_violation"] = {name: max_violation(load) for name, load in experts.items()}
        recorder.write(recorder.metrics, row)
        timed = iteration - (recorder.since_iteration or iteration)
        if timed:
            seconds = time.perf_counter() - recorder.since
            samples = args.consumed_train_samples - recorder.since_samples
            timing = {
                "iteration": iteration,
                "train_iters": args.train_iters,
                "lm_loss": row["lm_loss"],
                "seconds_per_iteration": seconds / timed,
                "tokens_per_second": samples * args.seq_length / seconds,
            }
            recorder.write(recorder.timing, timing)
    recorder.losses, recorder.iterations = [], 0
    recorder.restart_clock(iteration, args.consumed_train_samples)


def evaluate_and_print_results(original: Callable) -> Callable:
    """Notes what Megatron evaluates and when: ``evaluate`` itself is not told."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def evaluate_and_print_results(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        recorder = _recorder_of(get_args())
        if recorder:
            call = signature.bind(*args, **kwargs).arguments
            split = "test" if call["prefix"].endswith("test set") else "valid"
            recorder.evaluating = {"split": split, "iteration": call["iteration"]}
            recorder.sets = 0
        return original(*args, **kwargs)

    return evaluate_and_print_results


def evaluate(original: Callable) -> Callable:
    """Megatron's evaluation; its loss becomes a row, its time is not the training's."""

    @functools.wraps(original)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        started = time.perf_counter()
        result = original(*args, **kwargs)
        losses = result[0]
        recorder = _recorder_of(get_args())
        if recorder:
            if losses and "lm loss" in losses and _writes():
                # Several validation sets are evaluated one after the other.
                row = {"kind": "eval", **recorder.evaluating, "set": recorder.sets}
                row["lm_loss"] = losses["lm loss"].item()
                recorder.write(recorder.metrics, row, key=("kind", "split", "iteration", "set"))
                recorder.sets += 1
            recorder.since += time.perf_counter() - started
        return result

    return evaluate


def _gathered_expert_load() -> dict[str, list[int]]:
    """Layer -> tokens per expert of the latest batch, of every pipeline stage; on all ranks."""
    from megatron.core import parallel_state

    group = parallel_state.get_pipeline_model_parallel_group()
    own = {layer: tokens.tolist() for layer, tokens in moe.latest_load.items()}
    stages: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(stages, own, group=group)
    model = {layer: tokens for stage in stages for layer, tokens in stage.items()}
    return {
        f"mtp {number}" if is_mtp else str(number): model[is_mtp, number]
        for is_mtp, number in sorted(model)
    }


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
