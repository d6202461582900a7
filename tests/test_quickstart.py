"""The quickstart on a small text: bad input, a run, its reuse, and what is refused afterwards."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.metrics import files
from megatron_ext.report import PICTURE

pytestmark = pytest.mark.slow


def quickstart(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megatron_ext.quickstart", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = random.Random(1).choices(
        ["the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "ran", "off"], k=20_000
    )
    lines = (" ".join(words[start : start + 10]) for start in range(0, len(words), 10))
    path = tmp_path_factory.mktemp("text") / "cat.txt"
    path.write_text("\n".join(lines))
    return path


def test_a_run_its_reuse_and_a_run_with_other_flags(tmp_path: Path, text: Path) -> None:
    run_dir = tmp_path / "run"
    flags = ("--run-dir", run_dir, "--text", text, "--iterations", 10, "--save-interval", 5)
    first = quickstart(*flags, "--eval-iters", 2)
    assert first.returncode == 0, first.stderr
    for line in ("validation bits per byte", "unigram entropy", "tokens/s", "busiest expert"):
        assert line in first.stdout
    assert (run_dir / PICTURE).exists()
    assert (run_dir / "checkpoints" / "iter_0000010" / ".metadata").exists()
    metrics = (run_dir / files.METRICS).read_bytes()

    again = quickstart(*flags, "--eval-iters", 2)
    assert again.returncode == 0, again.stderr
    assert "(reused)" in again.stdout and "training: complete already" in again.stdout
    assert (run_dir / files.METRICS).read_bytes() == metrics

    other = quickstart(*flags, "--eval-iters", 3)
    assert other.returncode == 2
    assert other.stderr == (
        f"error: {run_dir} holds a run with other flags or other text: give this one a --run-dir "
        "of its own, or add --restart to delete the old one\n"
    )
    assert json.loads((run_dir / "run.json").read_text())["flags"][-1] == "2"


def test_restart_deletes_nothing_that_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    job = quickstart("--run-dir", tmp_path, "--restart")
    assert job.returncode == 2
    assert job.stderr == f"error: --restart: {tmp_path} holds no quickstart run: left alone\n"
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--text", "{tmp}/none.txt"), "none.txt"),
        (("--text", "{tmp}/empty.txt"), "empty.txt"),
        (("--run-dir", "{tmp}/empty.txt/run"), "is not a folder"),
        (("--iterations", "0"), "--iterations 0"),
        (("--iterations", "many"), "argument --iterations: invalid int value: 'many'"),
    ],
)
def test_bad_input_is_one_clear_line(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "empty.txt").touch()
    job = quickstart(
        *("--run-dir", tmp_path / "run"),
        *(argument.format(tmp=tmp_path) for argument in arguments),
    )
    assert job.returncode == 2
    assert job.stderr.startswith("error: ") and job.stderr.count("\n") == 1
    assert message in job.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]
