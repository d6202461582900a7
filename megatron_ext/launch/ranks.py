"""The ranks of a job on this machine: started together, watched, and never left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PARENT = "MEGATRON_EXT_LAUNCHER_PID"
"""Environment variable by which a rank knows whom not to outlive (die_with_launcher)."""

GRACE_SECONDS = 5.0
"""Between the request to stop and the kill."""


@dataclass(frozen=True)
class Failure:
    """A rank that ended badly, before it was asked to."""

    rank: int
    pid: int
    status: int
    """As subprocess gives it: the exit status, or minus the signal's number."""

    log: Path

    def __str__(self) -> str:
        if self.status < 0:
            how = f"was killed by {signal.Signals(-self.status).name}"
        else:
            how = f"failed with exit status {self.status}"
        return f"rank {self.rank} (pid {self.pid}) {how}"


class Ranks:
    """``command`` once per rank, in the environment that torchrun would give it.

    Use as a context manager: leaving it ends every rank and its children.
    """

    def __init__(self, command: Sequence[str], world_size: int, port: int, logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._logs = [logs / f"rank{rank}.log" for rank in range(world_size)]
        self._command = command
        self._port = port
        self._processes: list[subprocess.Popen[bytes]] = []

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        world_size = len(self._logs)
        environment = {
            # More threads than cores share the work badly; the user's own choice counts.
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world_size)),
            "GLOO_SOCKET_IFNAME": _loopback(),
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port),
            PARENT: str(os.getpid()),
        }
        with self._logs[rank].open("wb") as log:
            return subprocess.Popen(
                self._command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A session of its own, so that a rank and its children can be ended together
                # and a Ctrl-C reaches the launcher alone.
                start_new_session=True,
            )

    def __enter__(self) -> Ranks:
        try:
            for rank in range(len(self._logs)):
                self._processes.append(self._start(rank))
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def running(self) -> bool:
        return any(process.poll() is None for process in self._processes)

    def failures(self) -> list[Failure]:
        """Ranks that ended badly so far; one that a signal killed, so the likely cause, first.

        A rank whose peer died fails too, a moment later, for its connection is gone.
        """
        failed = [
            Failure(rank, process.pid, status, self._logs[rank])
            for rank, process in enumerate(self._processes)
            if (status := process.poll())
        ]
        return sorted(failed, key=lambda failure: failure.status > 0)

    def stop(self) -> None:
        """Ends every rank and its children: SIGTERM, and SIGKILL after GRACE_SECONDS.

        Not to be interrupted: an impatient second Ctrl-C would leave processes behind.
        """
        before = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._stop()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self) -> None:
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while self.running() and time.monotonic() < deadline:
            time.sleep(0.05)
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):  # the whole group is gone
                os.killpg(process.pid, number)


def free_port() -> int:
    """A TCP port that was free on this machine a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def port_is_free(port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _loopback() -> str:
    """All ranks are here, and a host name that resolves to another interface would mislead gloo."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), names[0])


def die_with_launcher() -> None:
    """On a rank: asks Linux to kill this process when the launcher's dies, even by SIGKILL."""
    launcher = os.environ.get(PARENT)
    if launcher is None or not Path("/proc/self").exists():
        return
    import ctypes

    set_parent_death_signal = 1  # PR_SET_PDEATHSIG, prctl(2)
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if str(os.getppid()) != launcher:  # it died before the request
        raise SystemExit(1)
