"""The order of blocks in the Hopper kernels, checked on the host: every element is stored once."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_every_element_is_stored_once(tmp_path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = ROOT / "tests/muon/cuda_host/sm90_tiles.cpp"
    program = tmp_path / "sm90_tiles"
    flags = ["-O2", "-std=c++17", "-Wall", "-Werror", f"-I{ROOT / 'csrc/newton_schulz/cuda'}"]
    subprocess.run([*compiler.split(), *flags, source, "-o", program], check=True)
    result = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout
