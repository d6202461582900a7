"""Real gloo ranks for tests, without paying for the imports of torch and Megatron each time.

Ranks are forked from one server process that has imported everything once
(``multiprocessing``'s forkserver), so each starts fresh and within milliseconds.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_ext.launch.ranks import free_port

# The server does not inherit this process's sys.path, and passes over what it cannot import.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
)
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["support.preload"])


class RankFailed(AssertionError):
    """A rank raised or died; the message holds the end of its output."""


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 240
) -> list[Any]:
    """``function(*args)`` on every rank of a torchrun-like environment; what each returned.

    Raises RankFailed when a rank raises, exits with another status than 0, or is not done
    after ``timeout`` seconds; the others are killed.
    """
    with tempfile.TemporaryDirectory() as directory:
        pipes, processes = [], []
        port = free_port()
        for rank in range(world_size):
            parent, child = _server.Pipe(duplex=False)
            log = Path(directory, f"rank{rank}.log")
            process = _server.Process(
                target=_rank, args=(rank, world_size, port, str(log), child, function, args)
            )
            process.start()
            child.close()
            pipes.append(parent)
            processes.append(process)
        try:
            _wait(processes, time.monotonic() + timeout, directory)
            return [pipe.recv() for pipe in pipes]
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join()


def _wait(processes: list[Any], deadline: float, directory: str) -> None:
    while True:
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        # Looked at after them: a rank that ended in between is not overlooked.
        failed = [rank for rank, process in enumerate(processes) if process.exitcode]
        if not late and not failed:
            return
        if failed or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    rank = (failed or late)[0]
    output = Path(directory, f"rank{rank}.log").read_text(errors="replace")
    what = f"exited with {processes[rank].exitcode}" if failed else "is not done in time"
    raise RankFailed(f"rank {rank} {what}:\n{output[-6000:]}")


def _rank(
    rank: int, world_size: int, port: int, log: str, pipe: Any, function: Callable, args: Any
) -> None:
    os.setsid()  # so that children of this rank, such as checkpoint writers, end with it
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    try:
        pipe.send(function(*args))
        status = 0
    except BaseException as error:
        traceback.print_exc()
        status = error.code if isinstance(error, SystemExit) and error.code else 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the interpreter's clean-up: gloo's threads would outlive the process group.
    os._exit(status if isinstance(status, int) else 1)
