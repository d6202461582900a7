"""The local launcher: failures are named, nothing is left behind, the same command resumes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.training import MOE, TINY

from megatron_ext.launch.ranks import Ranks, free_port
from megatron_ext.metrics import files

pytestmark = pytest.mark.slow

JOB = (
    f"{TINY} {MOE} --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 "
    "--use-distributed-optimizer --moe-token-dispatcher-type alltoall"
)


def launch(run_dir: Path, flags: str, ranks: int = 4) -> list[str]:
    return [
        *(sys.executable, "-m", "megatron_ext.launch"),
        *("--ranks", str(ranks), "--run-dir", str(run_dir)),
        *flags.split(),
    ]


def processes_of(marker: str) -> list[int]:
    """Processes whose command line holds ``marker``, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if marker in command:
                found.append(int(entry.name))
    return found


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(what: str, condition, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what} after {seconds} s"
        time.sleep(0.1)


def test_a_killed_rank_ends_the_job_by_name_and_the_same_command_resumes(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    checkpoints = run_dir / "checkpoints"
    flags = f"{JOB} --train-iters 400 --lr-decay-iters 400 --save-interval 5 --log-interval 5 "
    flags += f"--save {checkpoints} --load {checkpoints}"
    tracker = checkpoints / "latest_checkpointed_iteration.txt"
    with started(launch(run_dir, flags)) as job:
        wait_for("checkpoint", tracker.exists)
        victim = next(
            pid
            for pid in processes_of(str(run_dir))
            if b"RANK=2\0" in Path(f"/proc/{pid}/environ").read_bytes()
        )
        os.kill(victim, signal.SIGKILL)
        killed_at = time.monotonic()
        _, error = job.communicate(timeout=60)
    assert time.monotonic() - killed_at < 60
    assert job.returncode == 1
    assert error.count("\n") == 1
    assert error.startswith(f"error: rank 2 (pid {victim}) was killed by SIGKILL")
    assert processes_of(str(run_dir)) == []

    # The interrupted save, if there was one, does not count; the tracker names a complete one.
    last = int(tracker.read_text())
    resumed = launch(run_dir, f"{flags} --exit-interval {last + 5}")
    subprocess.run(resumed, check=True, timeout=180)
    log = (run_dir / "logs" / "rank0.log").read_text()
    assert f"at iteration {last}" in log
    rows = [row for row in files.read(run_dir / files.METRICS) if row["kind"] == "train"]
    assert [row["iteration"] for row in rows] == list(range(5, last + 6, 5))


def test_ranks_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    with started(launch(tmp_path / "run", f"{JOB} --train-iters 4000")) as job:
        log = tmp_path / "run" / "logs" / "rank3.log"
        # Any output comes after the rank asked to die with its launcher.
        wait_for("output of rank 3", lambda: log.exists() and log.stat().st_size > 0)
        job.kill()
        job.wait()
        wait_for("end of the ranks", lambda: not processes_of(str(tmp_path)), seconds=20)


def test_ctrl_c_stops_all_ranks(tmp_path: Path) -> None:
    with started(launch(tmp_path / "run", f"{JOB} --train-iters 4000", ranks=2)) as job:
        wait_for("ranks", lambda: len(processes_of(str(tmp_path))) == 3)
        job.send_signal(signal.SIGINT)
        _, error = job.communicate(timeout=30)
    assert job.returncode == 130
    assert error == "interrupted: all ranks were stopped\n"
    assert processes_of(str(tmp_path)) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        pytest.param(
            f"{JOB} --moe-router-bias-update-rul sign",
            "unrecognized arguments: --moe-router-bias-update-rul sign "
            "(did you mean --moe-router-bias-update-rule?)",
            id="unknown-flag",
        ),
        pytest.param(
            f"{JOB} --pipeline-model-parallel-size 8",
            "--pipeline-model-parallel-size 8 leaves stages without a layer: there are 4 "
            "(--num-layers); use at most 4 stages",
            id="more-ranks-than-layers",
        ),
        pytest.param(
            f"{JOB} --master-port {{busy}}",
            "--master-port {busy} is in use on this machine: choose another, or leave the flag "
            "out to get a free one",
            id="port-in-use",
        ),
        pytest.param(
            f"{JOB} --master-port 70000",
            "--master-port 70000 is no TCP port: use 1 to 65535",
            id="no-port",
        ),
        pytest.param(
            f"{JOB} --context-parallel-size 2",
            "--context-parallel-size 2 cannot be carried without a GPU: Megatron's local "
            "attention has no context parallelism; only TransformerEngine's has. Leave it out",
            id="not-carried",
        ),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path: Path, flags: str, message: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = taken.getsockname()[1]
        flags, message = flags.replace("{busy}", str(busy)), message.replace("{busy}", str(busy))
        job = subprocess.run(
            launch(tmp_path / "run", flags), capture_output=True, text=True, timeout=120
        )
    assert job.stderr == f"error: {message}\n"
    assert job.returncode == 2
    assert not (tmp_path / "run" / files.METRICS).exists()


def test_a_run_dir_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    # root may write anywhere, so a folder below a file stands for one without permission.
    (tmp_path / "file").touch()
    job = subprocess.run(
        launch(tmp_path / "file" / "run", JOB), capture_output=True, text=True, timeout=60
    )
    assert job.stderr == f"error: {tmp_path}/file/run cannot be made: Not a directory\n"
    assert job.returncode == 2


def test_the_rank_that_a_signal_killed_is_named_before_those_that_failed_of_it(
    tmp_path: Path,
) -> None:
    script = (
        "import os, signal, sys, time\n"
        "rank = os.environ['RANK']\n"
        "if rank == '2': os.kill(os.getpid(), signal.SIGKILL)\n"
        "if rank == '0': sys.exit(1)\n"
        "time.sleep(60)\n"
    )
    with Ranks([sys.executable, "-c", script], 3, free_port(), tmp_path) as ranks:
        wait_for("failures", lambda: len(ranks.failures()) == 2, seconds=20)
        killed, failed = ranks.failures()
    assert (killed.rank, killed.status) == (2, -signal.SIGKILL)
    assert (failed.rank, failed.status) == (0, 1)
    assert not ranks.running()
