"""The CUDA kernels, compiled by the C++ compiler and run by an emulator of the instructions they
use (cuda_host/): indices, edges, barriers, schedules and mirrored tiles, without a GPU."""

import importlib.util
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HOST = Path(__file__).resolve().parent / "cuda_host"
KERNELS = HOST.parents[2] / "csrc/newton_schulz/cuda"
SOURCES = (
    HOST / "kernels.cpp",
    HOST / "emulator.cpp",
    KERNELS / "prepare.cu",
    KERNELS / "gram.cpp",
)


def cuda_headers() -> Path | None:
    """The toolkit's, or those that torch's CUDA wheels come with."""
    candidates = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"]
    if spec := importlib.util.find_spec("nvidia"):
        candidates += [Path(p) / "cu13/include" for p in spec.submodule_search_locations or ()]
    names = ("cuda_runtime_api.h", "cuda_fp16.h", "cuda_bf16.h", "crt/host_defines.h")
    return next((p for p in candidates if all((p / name).is_file() for name in names)), None)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> Path:
    compiler, headers = os.environ.get("CXX") or shutil.which("g++"), cuda_headers()
    if not compiler or not headers:
        pytest.skip("no C++ compiler, or no headers of CUDA: the kernels cannot be emulated")
    build = tmp_path_factory.mktemp("cuda_host")
    flags = ["-std=c++20", "-O2", "-Wall", "-Werror", "-Wno-unknown-pragmas"]
    flags += ["-DMEGATRON_EXT_EMULATED_CUDA", f"-I{HOST}", f"-I{KERNELS}", "-isystem", str(headers)]

    def compile_source(source: Path) -> str:
        target = str(build / f"{source.stem}.o")
        command = [compiler, *flags, "-x", "c++", "-c", str(source), "-o", target]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return target

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compile_source, SOURCES))
    program = build / "kernels"
    subprocess.run([compiler, *objects, "-o", str(program)], check=True)
    return program


@pytest.mark.parametrize(
    "test",
    ["triangle", "schedule", "symmetric_products", "general_products", "prepare", "newton_schulz"],
)
def test_on_host(kernels, test):
    done = subprocess.run([kernels, test], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
