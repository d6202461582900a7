"""What setup.py decides, without compiling, and what the installed build says of itself."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

SETUP = Path(__file__).resolve().parents[1] / "setup.py"


def load_setup():
    spec = importlib.util.spec_from_file_location("megatron_ext_setup", SETUP)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


setup = load_setup()


def torch_build(cuda="13.0", capabilities=()):
    return SimpleNamespace(
        __version__="2.14.1+test",
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(
            device_count=lambda: len(capabilities), get_device_capability=capabilities.__getitem__
        ),
    )


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in ("MEGATRON_EXT_CUDA", "TORCH_CUDA_ARCH_LIST", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def toolkit(tmp_path):
    """A folder that looks like a CUDA 13.0 toolkit."""
    home = tmp_path / "toolkit"
    (home / "include").mkdir(parents=True)
    (home / "include/cuda_runtime.h").touch()
    (home / "bin").mkdir()
    nvcc = home / "bin/nvcc"
    nvcc.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        "--version) echo 'Cuda compilation tools, release 13.0, V13.0.88';;\n"
        "--list-gpu-arch) printf 'compute_75\\ncompute_80\\ncompute_90\\ncompute_100\\n';;\n"
        "esac\n"
    )
    nvcc.chmod(0o755)
    return home


# --- whether CUDA is built ------------------------------------------------------------------------


def test_automatic_takes_the_toolkit(toolkit, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    found, reason = setup.choose_cuda(torch_build())
    assert found == setup.Toolkit(toolkit, "13.0", ("7.5", "8.0", "9.0", "10.0"))
    assert reason == "CUDA 13.0"


def test_never(toolkit, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    monkeypatch.setenv("MEGATRON_EXT_CUDA", "0")
    assert setup.choose_cuda(torch_build()) == (None, "MEGATRON_EXT_CUDA=0")


@pytest.mark.parametrize("value", ["2", "yes", "true"])
def test_unknown_value_is_refused(value, monkeypatch):
    monkeypatch.setenv("MEGATRON_EXT_CUDA", value)
    with pytest.raises(SystemExit, match=f"MEGATRON_EXT_CUDA='{value}' is unknown: use 0"):
        setup.choose_cuda(torch_build())


@pytest.mark.parametrize(
    ("home", "cuda", "why"),
    [
        ("empty", "13.0", r"no CUDA toolkit .* in .*empty: set CUDA_HOME"),
        ("toolkit", "12.8", r"is CUDA 13\.0, torch 2\.14\.1\+test needs CUDA 12\.8"),
        ("toolkit", None, r"torch 2\.14\.1\+test is not a CUDA build"),
    ],
)
def test_impossible(home, cuda, why, toolkit, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / home))
    (tmp_path / "empty").mkdir()

    found, reason = setup.choose_cuda(torch_build(cuda))
    assert found is None
    assert re.search(why, reason)

    monkeypatch.setenv("MEGATRON_EXT_CUDA", "1")
    with pytest.raises(SystemExit, match=f"MEGATRON_EXT_CUDA=1, but .* cannot be built: .*{why}"):
        setup.choose_cuda(torch_build(cuda))


def test_broken_nvcc(toolkit, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    (toolkit / "bin/nvcc").write_text("#!/bin/sh\nexit 1\n")
    found, reason = setup.choose_cuda(torch_build())
    assert found is None
    assert reason.startswith("nvcc does not run")


def test_minor_versions_may_differ(toolkit, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    assert setup.choose_cuda(torch_build("13.2"))[0].version == "13.0"


def test_nvcc_on_path_may_be_a_link(toolkit, tmp_path, monkeypatch):
    links = tmp_path / "links/bin"
    links.mkdir(parents=True)
    (links / "nvcc").symlink_to(toolkit / "bin/nvcc")
    monkeypatch.setenv("PATH", str(links), prepend=os.pathsep)
    assert setup.find_toolkit().home == toolkit


def test_nvcc_on_path_may_be_a_wrapper_without_headers(toolkit, tmp_path, monkeypatch):
    (toolkit / "include/cuda_runtime.h").unlink()
    monkeypatch.setenv("PATH", str(toolkit / "bin"), prepend=os.pathsep)
    try:
        home = setup.find_toolkit().home
    except setup.CudaUnavailable as reason:
        assert f"{toolkit} or " in str(reason)
    else:
        assert home != toolkit


# --- for which GPUs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (("8.0", "9.0", "10.0", "12.0"), "8.0;9.0a;10.0+PTX"),
        (("7.5", "8.0", "9.0"), "8.0+PTX;9.0a"),
    ],
)
def test_default_architectures_are_those_nvcc_knows(known, expected):
    toolkit = setup.Toolkit(Path("cuda"), "13.0", known)
    assert ";".join(setup.choose_archs(torch_build(), toolkit)) == expected


def test_architectures_of_the_gpus_present():
    machine = torch_build(capabilities=[(10, 0), (9, 0), (9, 0)])
    toolkit = setup.Toolkit(Path("cuda"), "13.0", ("9.0",))
    assert setup.choose_archs(machine, toolkit) == ["9.0a", "10.0+PTX"]


@pytest.mark.parametrize("value", ["9.0a;10.0+PTX", "9.0a 10.0+PTX"])
def test_torch_cuda_arch_list_is_respected(value, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", value)
    toolkit = setup.Toolkit(Path("cuda"), "13.0", ("9.0",))
    assert setup.choose_archs(torch_build(), toolkit) == ["9.0a", "10.0+PTX"]


# --- torch ----------------------------------------------------------------------------------------


def test_finds_the_torch_that_pip_hides():
    hidden = (
        "import importlib.util, runpy, sys, sysconfig\n"
        f"setup = runpy.run_path({str(SETUP)!r}, run_name='setup')\n"
        "sys.path[:] = [sysconfig.get_path('stdlib'), sysconfig.get_path('platstdlib')\n"
        "               + '/lib-dynload']\n"
        "assert importlib.util.find_spec('torch') is None\n"
        "print(setup['find_torch']().__version__)\n"
    )
    found = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True)
    assert found.stdout.strip() == torch.__version__, found.stderr


def test_unsupported_torch_is_not_built_against(monkeypatch):
    assert setup.find_torch() is torch
    monkeypatch.setattr(torch, "__version__", "2.10.0+cu128")
    assert setup.find_torch() is None


def test_without_torch_pip_is_asked_for_it():
    arguments = setup.torchless_arguments()
    assert arguments["setup_requires"] == [str(setup.torch_requirement())]
    assert arguments["setup_requires"][0].startswith("torch")


# --- the installed build --------------------------------------------------------------------------


def test_build_info():
    from megatron_ext import _C

    info = _C.build_info()
    assert info["torch"] == torch.__version__
    assert info["cuda_reason"]
    assert (info["cuda"] is None) == (info["arch_list"] == [])


def test_cuda_module_is_there_exactly_if_it_was_built():
    from megatron_ext import _C

    built = _C.build_info()["cuda"] is not None
    assert (importlib.util.find_spec("megatron_ext._C_cuda") is not None) == built


@pytest.mark.skipif(
    importlib.util.find_spec("megatron_ext._C_cuda") is None, reason="the CUDA module is not built"
)
def test_cuda_module_loads_without_a_gpu():
    from megatron_ext import _C_cuda

    # Of the shape alone; the kernels need a device.
    assert _C_cuda.newton_schulz_workspace([torch.ones(2, 3)], [3, 2], [3, 2]).numel() > 0


def test_kernels_for_h100_need_cutlass_and_their_architecture(tmp_path, monkeypatch):
    header = tmp_path / "include/cutlass/cutlass.h"
    header.parent.mkdir(parents=True)
    header.touch()
    monkeypatch.setenv("CUTLASS_HOME", str(tmp_path))

    def sources(archs):
        return setup.cuda_extension(setup.Extension, archs).sources

    monkeypatch.setattr(
        setup, "extension", lambda _, name, sources, *flags: SimpleNamespace(sources=sources)
    )
    assert any(path.endswith("sm90.cu") for path in sources(["8.0", "9.0a"]))
    assert not any(path.endswith("sm90.cu") for path in sources(["8.0"]))
    monkeypatch.setattr(setup, "find_cutlass", lambda: None)
    assert not any(path.endswith("sm90.cu") for path in sources(["8.0", "9.0a"]))
