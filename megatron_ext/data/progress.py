"""How far it is: a bar on a terminal, a line every few seconds anywhere else."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_ext.data.corpus import Progress

_SECONDS_BETWEEN_LINES = 3.0


@contextmanager
def reporter() -> Iterator[Progress]:
    """A progress function that writes to standard output, in the form that suits it."""
    if not sys.stdout.isatty():
        yield _Lines()
        return
    from rich import progress as rich

    bar = rich.Progress(
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.TaskProgressColumn(),
        rich.TimeElapsedColumn(),
        rich.TimeRemainingColumn(),
    )
    tasks: dict[str, rich.TaskID] = {}

    def update(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            finish()
            tasks[stage] = bar.add_task(stage, total=total or None)
        bar.update(tasks[stage], completed=done)

    def finish() -> None:
        for task in bar.tasks:
            bar.update(task.id, total=task.total or 1, completed=task.total or 1)

    with bar:
        yield update
        finish()


class _Lines:
    """Says each new stage and then, every few seconds, how much of it is done and is left.

    The first stage is said only once it takes long: a dataset that is already there takes one
    line in all.
    """

    def __init__(self) -> None:
        self._stage = ""
        self._stage_began = self._line_written = time.monotonic()

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        is_new = stage != self._stage
        is_first = not self._stage
        if is_new:
            self._stage, self._stage_began = stage, now
        if (is_new and not is_first) or now - self._line_written >= _SECONDS_BETWEEN_LINES:
            self._line_written = now
            print(self._line(done, total, now - self._stage_began), flush=True)

    def _line(self, done: int, total: int, seconds: float) -> str:
        if not done or not total:
            return f"{self._stage} ..."
        left = seconds * (total - done) / done
        return f"{self._stage}: {done / total:.0%}, about {left:.0f} s left"


def quiet_imports() -> None:
    """Megatron's hints about optional GPU packages say nothing about text."""
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
