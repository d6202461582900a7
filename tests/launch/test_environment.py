"""launch/environment.sh finds a Python that really runs, whatever PATH promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch" / "environment.sh"


def fake(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def find_python(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """With only the fakes below ``tmp_path/bin`` and the shell's own tools on PATH."""
    for tool in ("bash", "dirname", "cat"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        if not (tmp_path / "bin" / tool).exists():
            (tmp_path / "bin" / tool).symlink_to(f"/usr/bin/{tool}")
    home = {"HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "bin")}
    return subprocess.run(
        ["/usr/bin/bash", "-c", f'source "{SCRIPT}"; find_python'],
        env={**home, **environment},
        capture_output=True,
        text=True,
    )


def works(path: Path) -> Path:
    return fake(path, f'exec "{sys.executable}" "$@"')


def test_a_shim_that_fails_and_an_old_python_are_passed_over(tmp_path: Path) -> None:
    fake(tmp_path / "bin" / "python3.12", "echo 'pyenv: command not found' >&2; exit 127")
    fake(tmp_path / "bin" / "python3", "exit 1")  # what the version check returns on 3.11
    pyenv = works(tmp_path / "home/.pyenv/versions/3.12.1/bin/python3")
    assert find_python(tmp_path).stdout.strip() == str(pyenv)


def test_the_first_on_path_that_works_is_taken(tmp_path: Path) -> None:
    works(tmp_path / "bin" / "python3")
    works(tmp_path / "home/.pyenv/versions/3.12.1/bin/python3")
    assert find_python(tmp_path).stdout.strip() == "python3"


def test_uv_is_asked_where_there_is_nothing_else(tmp_path: Path) -> None:
    managed = works(tmp_path / "uv-managed" / "python3.12")
    fake(tmp_path / "bin" / "uv", f'[ "$2" = find ] && echo "{managed}"; true')
    assert find_python(tmp_path).stdout.strip() == str(managed)


def test_none_is_said_with_how_to_get_one(tmp_path: Path) -> None:
    found = find_python(tmp_path)
    assert found.returncode == 1
    assert found.stderr.startswith("error: no Python 3.12 or 3.13 with venv was found")
    assert "pyenv install 3.12" in found.stderr and found.stderr.count("\n") == 1


@pytest.mark.parametrize("named", ["/no/such/python", "/bin/false"])
def test_a_named_python_that_does_not_work_is_refused(tmp_path: Path, named: str) -> None:
    found = find_python(tmp_path, PYTHON=named)
    assert found.returncode == 1
    assert found.stderr == f"error: PYTHON={named} is no Python 3.12 or 3.13 with venv and pip\n"


def test_the_fingerprint_changes_with_what_the_installation_depends_on(tmp_path: Path) -> None:
    def fingerprint(**environment: str) -> str:
        return subprocess.run(
            ["bash", "-c", f'source "{SCRIPT}"; fingerprint test'],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert fingerprint() == fingerprint()
    assert fingerprint() != fingerprint(MEGATRON_EXT_CUDA="0")
