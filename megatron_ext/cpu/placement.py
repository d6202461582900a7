"""Tensors that Megatron places on ``cuda`` land on the CPU; megatron_ext/install.py says why.

Functions that take a device are wrapped one by one. A TorchFunctionMode would do it at one place,
and cost 2-12 microseconds at EVERY torch call, attribute reads included.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")


def on_cpu(device: Any) -> Any:
    """``device`` with every spelling of a CUDA device turned into the CPU; others unchanged.

    Megatron spells one as ``"cuda"``, ``"cuda:1"``, ``torch.device("cuda", 1)``, or as the bare
    index that ``torch.cuda.current_device()`` returns.
    """
    if isinstance(device, str):
        return CPU if device.startswith("cuda") else device
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    if isinstance(device, int) and not isinstance(device, bool):
        return CPU
    return device


def takes_device(original: Callable) -> Callable:
    """A factory function or method: keyword ``device`` on the CPU, memory never pinned."""

    @functools.wraps(original)
    def on_the_cpu(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return original(*args, **kwargs)

    return on_the_cpu


def to(original: Callable) -> Callable:
    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and not isinstance(args[0], (torch.dtype, torch.Tensor)):
            args = (on_cpu(args[0]), *args[1:])
        elif "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return original(self, *args, **kwargs)

    return to


def type_name(original: Callable) -> Callable:
    """``tensor.type()`` says ``torch.cuda.*``: Megatron's optimizers compare the name."""

    @functools.wraps(original)
    def type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], str):
            args = (args[0].replace("torch.cuda.", "torch."), *args[1:])
        name_or_tensor = original(self, *args, **kwargs)
        if isinstance(name_or_tensor, str):
            return name_or_tensor.replace("torch.", "torch.cuda.", 1)
        return name_or_tensor

    return type


def stay(original: Callable) -> Callable:
    """A method that moves or pins a tensor: it stays where it is."""

    @functools.wraps(original)
    def stay(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self

    return stay
