"""A live line of progress, read from the timing file that a run appends to."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from megatron_ext.metrics import files

PLAIN_INTERVAL_SECONDS = 15.0
"""Between two lines where the output is no terminal."""


class TrainingProgress:
    """Shows iteration, loss, tokens/s and the time left; ``update`` as often as you like."""

    def __init__(self, timing: Path) -> None:
        self._timing = timing
        self._seen = len(files.read(timing))
        self._size = -1
        self._live = sys.stdout.isatty()
        self._printed = time.monotonic()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            disable=not self._live,
        )
        self._task = self._bar.add_task("starting: torch and Megatron are imported", total=None)

    def __enter__(self) -> TrainingProgress:
        self._bar.start()
        if not self._live:
            print("starting: torch and Megatron are imported", flush=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def update(self) -> None:
        # Called several times a second, for days: the file is read only when it has changed.
        size = self._timing.stat().st_size if self._timing.exists() else 0
        if size == self._size:
            return
        self._size = size
        rows = files.read(self._timing)
        if len(rows) < self._seen:  # rows after the checkpoint were dropped: the run resumed
            self._seen = len(rows)
        if len(rows) == self._seen:
            return
        self._seen = len(rows)
        last = rows[-1]
        # The median: a checkpoint's seconds fall into one interval and say nothing of the next.
        pace = median(row["seconds_per_iteration"] for row in rows)
        text = describe(last, seconds_per_iteration=pace)
        self._bar.update(
            self._task,
            description=text,
            completed=last["iteration"],
            total=last["train_iters"],
        )
        if not self._live and time.monotonic() - self._printed > PLAIN_INTERVAL_SECONDS:
            self._printed = time.monotonic()
            print(f"iteration {last['iteration']}/{last['train_iters']}  {text}", flush=True)


def describe(row: dict[str, Any], seconds_per_iteration: float) -> str:
    """``loss 3.912  2,310 tokens/s  1:40 left`` from a row of timing.jsonl."""
    left = (row["train_iters"] - row["iteration"]) * seconds_per_iteration
    loss = "-" if row["lm_loss"] is None else f"{row['lm_loss']:.3f}"
    minutes, seconds = divmod(round(left), 60)
    return f"loss {loss}  {row['tokens_per_second']:,.0f} tokens/s  {minutes}:{seconds:02} left"
