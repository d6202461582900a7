"""Builds the extension modules; pyproject.toml holds the rest of the packaging.

- ``megatron_ext._C``       always
- ``megatron_ext._C_cuda``  if torch is a CUDA build and a toolkit of its major version is found

Environment:

- ``MEGATRON_EXT_CUDA``     ``0``: no CUDA module. ``1``: fail if it cannot be built. Unset: build
  it if that is possible.
- ``CUDA_HOME``             the toolkit, otherwise sought next to nvcc and in /usr/local/cuda.
- ``CUTLASS_HOME``          CUTLASS, otherwise the package nvidia-cutlass: kernels for H100, H200.
- ``TORCH_CUDA_ARCH_LIST``  such as ``8.0;9.0+PTX``; otherwise the GPUs of this machine, or
  DEFAULT_ARCHS if it has none.
- ``MAX_JOBS``              number of files compiled at once.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent

DEFAULT_ARCHS = ("8.0", "9.0a", "10.0")
"""A100; H100, H200; B200. Code for x.0 runs on every x.y, PTX of the last one on what follows; the
instructions of 9.0a run on 9.0 only."""

CXX_FLAGS = ["-O3", "-g0", "-Wall"]  # -g0: Python's own flags may ask for -g, 10 MB

# at::parallel_for is a header: without this, torch's threads would not be used. The library is the
# one that torch has loaded already.
OPENMP = ["-fopenmp"] if sys.platform == "linux" else []


class CudaUnavailable(Exception):
    """Why the CUDA module cannot be built."""


@dataclass(frozen=True)
class Toolkit:
    home: Path
    version: str
    archs: tuple[str, ...]
    """Plain compute capabilities that nvcc knows, such as ``9.0``."""


# --- torch ----------------------------------------------------------------------------------------


def torch_requirement() -> Requirement:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = map(Requirement, project["dependencies"])
    return next(requirement for requirement in requirements if requirement.name == "torch")


def installed_path() -> list[str]:
    """sys.path of the installing interpreter, without the environment that pip builds in."""
    ask = [sys.executable, "-EP", "-c", "import sys; print(*sys.path, sep='\\n')"]
    return subprocess.check_output(ask, text=True).splitlines()


def find_torch() -> Any | None:
    """The torch that the extension will meet at run time; None if it is absent or unsuitable.

    pip builds in an environment that hides the installed packages, so that torch would have to be
    a build requirement, downloaded a second time. Instead, the interpreter is asked what its path
    is without that environment.
    """
    if not importlib.util.find_spec("torch"):
        # At the end: the build environment's own packages keep precedence.
        sys.path += installed_path()
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return None
    supported = torch_requirement().specifier.contains(torch.__version__, prereleases=True)
    return torch if supported else None


# --- CUDA -----------------------------------------------------------------------------------------


def find_toolkit() -> Toolkit:
    """The toolkit at ``CUDA_HOME``, next to nvcc, or in /usr/local/cuda. Raises CudaUnavailable."""
    explicit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc")
    candidates = [Path(explicit)] if explicit else [Path("/usr/local/cuda")]
    if nvcc and not explicit:
        candidates.insert(0, Path(nvcc).resolve().parent.parent)
    # The nvcc on PATH may be a wrapper, with no headers next to it.
    for home in candidates:
        if (home / "bin/nvcc").is_file() and (home / "include/cuda_runtime.h").is_file():
            break
    else:
        raise CudaUnavailable(
            "no CUDA toolkit (bin/nvcc and include/cuda_runtime.h) in "
            f"{' or '.join(map(str, candidates))}: set CUDA_HOME"
        )

    def ask(option: str) -> str:
        try:
            return subprocess.check_output([home / "bin/nvcc", option], text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise CudaUnavailable(f"nvcc does not run: {error}") from error

    release = re.search(r"release (\d+\.\d+)", ask("--version"))
    if release is None:
        raise CudaUnavailable(f"{home}/bin/nvcc does not tell its version")
    archs = re.findall(r"compute_(\d+)(\d)\b", ask("--list-gpu-arch"))
    return Toolkit(home, release[1], tuple(f"{major}.{minor}" for major, minor in archs))


def choose_cuda(torch: Any) -> tuple[Toolkit | None, str]:
    """The toolkit to build the CUDA module with, or None; and why.

    Exits if ``MEGATRON_EXT_CUDA`` is invalid, or asks for what is not possible.
    """
    wish = os.environ.get("MEGATRON_EXT_CUDA", "")
    if wish not in ("", "0", "1"):
        raise SystemExit(
            f"MEGATRON_EXT_CUDA={wish!r} is unknown: use 0 (never), 1 (always), or leave it unset "
            "(if possible)"
        )
    if wish == "0":
        return None, "MEGATRON_EXT_CUDA=0"
    try:
        if torch.version.cuda is None:
            raise CudaUnavailable(f"torch {torch.__version__} is not a CUDA build")
        toolkit = find_toolkit()
        if toolkit.version.split(".")[0] != torch.version.cuda.split(".")[0]:
            raise CudaUnavailable(
                f"the toolkit in {toolkit.home} is CUDA {toolkit.version}, torch "
                f"{torch.__version__} needs CUDA {torch.version.cuda}: set CUDA_HOME"
            )
    except CudaUnavailable as reason:
        if wish == "1":
            raise SystemExit(
                f"MEGATRON_EXT_CUDA=1, but the CUDA module cannot be built: {reason}"
            ) from reason
        return None, str(reason)
    return toolkit, f"CUDA {toolkit.version}"


def choose_archs(torch: Any, toolkit: Toolkit) -> list[str]:
    """The architectures to compile for, in the form of ``TORCH_CUDA_ARCH_LIST``."""
    wish = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(" ", ";")
    if wish not in ("", "native"):
        return wish.split(";")
    devices = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    archs = [f"{major}.{minor}" for major, minor in sorted(set(devices))]
    archs = ["9.0a" if arch == "9.0" else arch for arch in archs] or [
        arch for arch in DEFAULT_ARCHS if arch.rstrip("a") in toolkit.archs
    ]
    portable = [index for index, arch in enumerate(archs) if not arch.endswith("a")]
    if portable:
        archs[portable[-1]] += "+PTX"
    return archs


def find_cutlass() -> Path | None:
    """The CUTLASS headers, of ``CUTLASS_HOME`` or of the package nvidia-cutlass."""
    homes = [Path(os.environ["CUTLASS_HOME"])] if os.environ.get("CUTLASS_HOME") else []
    homes += [Path(path, "cutlass_library/source") for path in installed_path()]
    found = [home / "include" for home in homes if (home / "include/cutlass/cutlass.h").is_file()]
    return found[0] if found else None


# --- the build ------------------------------------------------------------------------------------


def extension(
    factory: Any, name: str, sources: list[str], cxx: list[str], nvcc: Sequence[str] = ()
) -> Extension:
    return factory(
        f"megatron_ext.{name}",
        sources=sources,
        depends=sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/**/*.[hi]*")),
        extra_compile_args={"cxx": CXX_FLAGS + cxx, "nvcc": ["-O3", *nvcc]},
    )


def cuda_extension(factory: Any, archs: list[str]) -> Extension:
    """The kernels for 9.0a need CUTLASS; without it the generic ones serve there too."""
    sources = ["csrc/bindings_cuda.cpp", *files("csrc/newton_schulz/cuda/*.c*")]
    flags = []
    cutlass = find_cutlass() if "9.0a" in " ".join(archs) else None
    if cutlass:
        # nvcc takes it as system headers, whose warnings are not ours.
        flags = ["-isystem", str(cutlass), "-DMEGATRON_EXT_SM90"]
    else:
        sources.remove("csrc/newton_schulz/cuda/sm90.cu")
    return extension(factory, "_C_cuda", sources, [], flags)


def files(pattern: str) -> list[str]:
    found = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))
    return [path for path in found if not path.endswith(".cuh")]


def build_arguments(torch: Any) -> dict[str, Any]:
    """Arguments of ``setup`` for a build against this torch."""
    toolkit, reason = choose_cuda(torch)
    archs = choose_archs(torch, toolkit) if toolkit else []
    info = {
        "torch": torch.__version__,
        "cuda": toolkit.version if toolkit else None,
        "cuda_reason": reason,
        "arch_list": archs,
        "cutlass": bool(toolkit and find_cutlass()),
    }
    if toolkit:
        # torch takes both from the environment, CUDA_HOME when cpp_extension is imported.
        os.environ["CUDA_HOME"] = str(toolkit.home)
        os.environ["TORCH_CUDA_ARCH_LIST"] = ";".join(archs)
    from torch.utils import cpp_extension

    # A C string literal is written like a JSON string.
    build_info = f"-DMEGATRON_EXT_BUILD_INFO={json.dumps(json.dumps(info))}"
    extensions = [
        extension(
            cpp_extension.CppExtension,
            "_C",
            ["csrc/bindings.cpp", *files("csrc/newton_schulz/cpu/*.cpp")],
            [build_info, *OPENMP],
        )
    ]
    if toolkit:
        extensions.append(cuda_extension(cpp_extension.CUDAExtension, archs))

    class BuildExtension(cpp_extension.BuildExtension):
        def run(self) -> None:
            super().run()
            if not toolkit:  # An earlier build's module would be packed, or imported.
                Path(self.get_ext_fullpath("megatron_ext._C_cuda")).unlink(missing_ok=True)
            print(
                f"megatron_ext is built for torch {torch.__version__}\n"
                "  C++   (megatron_ext._C):      yes\n"
                f"  CUDA  (megatron_ext._C_cuda): {'yes' if toolkit else 'no'}, {reason}\n"
                f"  TORCH_CUDA_ARCH_LIST:         {';'.join(archs) or 'none'}",
                flush=True,
            )

    return {"ext_modules": extensions, "cmdclass": {"build_ext": BuildExtension}}


def torchless_arguments() -> dict[str, Any]:
    """Arguments of ``setup`` without a suitable torch: pip is asked for one, then tries again."""
    requirement = str(torch_requirement())

    class NoTorch(build_ext):
        def run(self) -> None:
            raise SystemExit(f"megatron_ext is compiled against torch: install '{requirement}'")

    return {
        "setup_requires": [requirement],
        "ext_modules": [Extension("megatron_ext._C", [])],
        "cmdclass": {"build_ext": NoTorch},
    }


if __name__ == "__main__":
    torch = find_torch()
    setup(**(build_arguments(torch) if torch else torchless_arguments()))
