"""One training job on this machine: ranks, live progress, and an error that names the rank."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from megatron_ext.launch.progress import TrainingProgress
from megatron_ext.launch.ranks import Failure, Ranks, free_port, port_is_free
from megatron_ext.metrics import files

POLL_SECONDS = 0.2
SAME_MOMENT_SECONDS = 1.0
"""After the first failure: time for the others' to show, so that the cause can be told apart."""

ERROR = "megatron_ext: error: "
"""How a rank begins the line that says what was wrong with its input (arguments.fail)."""


class LaunchError(RuntimeError):
    """The job could not start, or ended badly. ``status`` is the exit status to pass on."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def run(flags: Sequence[str], world_size: int, directory: Path, port: int | None = None) -> None:
    """Trains with ``megatron_ext.pretrain_gpt <flags>`` on ``world_size`` ranks of this machine.

    ``directory`` receives ``metrics.jsonl``, ``timing.jsonl`` and ``logs/rank<r>.log``.

    Raises LaunchError, after every rank has ended.
    """
    if world_size < 1:
        raise LaunchError(f"--ranks {world_size} must be at least 1", status=2)
    if port is not None and not 1 <= port <= 65535:
        raise LaunchError(f"--master-port {port} is no TCP port: use 1 to 65535", status=2)
    if port is not None and not port_is_free(port):
        raise LaunchError(
            f"--master-port {port} is in use on this machine: choose another, or leave the flag "
            "out to get a free one",
            status=2,
        )
    try:
        (directory / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"{directory} cannot be made: {error.strerror}", status=2) from error
    command = [
        *(sys.executable, "-m", "megatron_ext.pretrain_gpt"),
        *flags,
        *("--metrics-dir", str(directory)),
    ]
    with (
        terminated_like_interrupted(),
        TrainingProgress(directory / files.TIMING) as progress,
        Ranks(command, world_size, port or free_port(), directory / "logs") as ranks,
    ):
        while ranks.running() and not ranks.failures():
            time.sleep(POLL_SECONDS)
            progress.update()
        if ranks.failures():
            time.sleep(SAME_MOMENT_SECONDS)
        failures = ranks.failures()
    if failures:
        resumes = "--save" in flags and "--load" in flags
        raise _what_happened(failures[0], directory / "logs" / "rank0.log", resumes)


def _what_happened(failure: Failure, first_log: Path, resumes: bool) -> LaunchError:
    refused = _last_line(first_log, ERROR) or _last_line(failure.log, ERROR)
    if failure.status == 2 and refused:
        return LaunchError(refused.removeprefix(ERROR), status=2)
    said = "" if failure.status < 0 else _last_line(failure.log)
    return LaunchError(
        f"{failure}{': ' + said if said else ''}. All ranks were stopped; its log: {failure.log}"
        + (". The same command resumes from the last checkpoint" if resumes else "")
    )


def _last_line(log: Path, start: str = "") -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line and line.startswith(start)), "")


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM unwinds the stack as Ctrl-C does, so that the ranks are ended."""

    def interrupt(number: int, frame: Any) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
