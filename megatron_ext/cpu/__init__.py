"""The device stand-in: an unmodified Megatron trains on gloo, on a machine without a GPU.

``cuda`` becomes another word for ``cpu``:

- :mod:`~megatron_ext.cpu.placement`     tensors placed on ``cuda`` land on the CPU
- :mod:`~megatron_ext.cpu.torch_cuda`    what stands in the place of the module ``torch.cuda``
- :mod:`~megatron_ext.cpu.torch_names`, :mod:`~megatron_ext.cpu.megatron_names`
                                         the other names, a function each
- :mod:`~megatron_ext.cpu.flags`         Megatron's flags: defaults that fit, and what is refused

It is used only where torch finds no GPU, or on request: ``MEGATRON_EXT_DEVICE=cpu``.
"""

from __future__ import annotations

import functools
import glob
import os

NOTICE = (
    "no GPU is used: the device stand-in runs Megatron on gloo with its local transformer "
    "implementation (MEGATRON_EXT_DEVICE=cuda asks for a GPU)"
)


class DeviceChoiceError(RuntimeError):
    """MEGATRON_EXT_DEVICE and the machine do not fit."""


@functools.cache
def wanted() -> bool:
    """Whether the stand-in carries Megatron in this process; decided once.

    ``MEGATRON_EXT_DEVICE``: ``cpu`` is always obeyed; ``cuda`` needs a GPU that torch can use;
    unset means ``cuda`` where there is one. A machine whose GPU torch cannot use is refused
    rather than silently trained on at a thousandth of its speed.

    Raises DeviceChoiceError.
    """
    import torch

    choice = os.environ.get("MEGATRON_EXT_DEVICE", "")
    if choice not in ("", "cpu", "cuda"):
        raise DeviceChoiceError(
            f"MEGATRON_EXT_DEVICE={choice!r} is unknown: use cpu or cuda, or leave it unset"
        )
    if choice == "cpu":
        return True
    if torch.cuda.is_available():
        return False
    if choice == "cuda":
        raise DeviceChoiceError(
            f"MEGATRON_EXT_DEVICE=cuda, but torch {torch.__version__} finds no GPU: look at "
            "nvidia-smi and CUDA_VISIBLE_DEVICES, or use MEGATRON_EXT_DEVICE=cpu"
        )
    if glob.glob("/dev/nvidia[0-9]*") or os.path.exists("/dev/dxg"):  # dxg: under WSL
        raise DeviceChoiceError(
            f"this machine has an NVIDIA GPU that torch {torch.__version__} cannot use (driver, "
            "CPU build of torch, or CUDA_VISIBLE_DEVICES): repair that, or ask for the CPU with "
            "MEGATRON_EXT_DEVICE=cpu"
        )
    return True
