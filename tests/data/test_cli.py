"""The command itself: what it says, its exit status, and what it leaves on disk."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_ext.data import load_info

REPOSITORY = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "megatron_ext.data"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY)}


def run(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True
    )


def test_make_then_reuse(folder: Path, tmp_path: Path) -> None:
    arguments = ("--output", "set", "--text", folder, "--vocab-size", "400", "--held-out", "0.2")
    first = run(*arguments, cwd=tmp_path)
    assert (first.returncode, first.stderr) == (0, "")
    info = load_info(tmp_path / "set")
    assert f"--train-data-path {info.train_prefix}" in first.stdout
    assert "--vocab-size 400" in first.stdout
    assert f"{info.splits['valid'].unigram_entropy:.3f} nats" in first.stdout

    second = run(*arguments, cwd=tmp_path)
    assert (second.returncode, second.stderr) == (0, "")
    assert (
        second.stdout
        == f"{info.path} is up to date: same text, options and format, nothing to do\n"
    )

    third = run(*arguments, "--seed", "5", cwd=tmp_path)
    assert (third.returncode, third.stdout) == (2, "")
    assert third.stderr.startswith("error: ") and "--force" in third.stderr
    assert sorted(tmp_path.iterdir()) == [folder, tmp_path / "set"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("", "required: --output"),
        ("--output o --text", "expected at least one argument"),
        ("--output o --text missing", "no such file or folder: missing"),
        ("--output o --text empty.txt", "no text in empty.txt: left out 1 empty"),
        ("--output o --text empty", "no text in empty: no files"),
        ("--output o --text binary", "no text in binary: left out 1 binary"),
        ("--output o --text line.txt", "single line"),
        ("--output o --text small.txt", "too little text"),
        ("--output o --text pair", "none for valid (held-out share 0.05, seed 1234): try --"),
        ("--output small.txt --text corpus", "small.txt is not a folder"),
        ("--output small.txt/o --text corpus", "small.txt is not a folder"),
        ("--output /proc/a/o --text corpus", "cannot write in /proc/a: "),
        ("--output corpus --text corpus", "not made by this tool"),
        ("--output o --vocab-size 256", "--vocab-size 256: must be from 257 to 65535"),
        ("--output o --vocab-size 65536", "--vocab-size 65536: must be from 257 to 65535"),
        ("--output o --vocab-size many", "invalid int value: 'many'"),
        ("--output o --held-out 0", "--held-out 0: must be above 0 and at most 0.5"),
        ("--output o --held-out 0.51", "--held-out 0.51: must be above 0 and at most 0.5"),
        ("--output o --held-out nan", "--held-out nan: must be above 0 and at most 0.5"),
        ("--output o --unknown", "unrecognized arguments: --unknown"),
    ],
)
def test_bad_input_is_one_clear_line(
    folder: Path, tmp_path: Path, arguments: str, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "pair").mkdir()
    for name, data in {
        "empty.txt": b"",
        "binary": b"a\0b",
        "line.txt": b"one line",
        "small.txt": b"one\ntwo\n",
        "pair/a.txt": b"one",
        "pair/b.txt": b"two",
    }.items():
        (tmp_path / name).write_bytes(data)
    before = sorted(tmp_path.rglob("*"))

    result = run(*arguments.split(), cwd=tmp_path)

    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and message in line
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    output = tmp_path / "deep" / "set"
    process = subprocess.Popen(
        [*COMMAND, "--output", str(output)],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    # The unfinished folder is there: training the tokenizer has begun.
    while not output.parent.exists():
        assert process.poll() is None
        time.sleep(0.02)
    time.sleep(0.3)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert len(stderr.splitlines()) == 1 and "nothing was written" in stderr
    assert list(tmp_path.iterdir()) == []


def test_help_and_wrong_input_load_neither_torch_nor_megatron(tmp_path: Path) -> None:
    """They take seconds to load: help, errors and reuse come at once because nothing does."""
    code = (
        "import sys, megatron_ext.data.__main__ as tool\n"
        "status = tool.main(['--output', 'o', '--text', 'missing'])\n"
        "assert status == 2 and not {'torch', 'megatron.core'} & set(sys.modules)\n"
        "tool.main(['--help'])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert result.returncode == 0 and "--held-out" in result.stdout, result.stderr
