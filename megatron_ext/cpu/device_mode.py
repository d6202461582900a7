"""Tensors that Megatron places on ``cuda`` land on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

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


def _to(function: Callable, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if args and not isinstance(args[0], (torch.dtype, torch.Tensor)):
        args = (on_cpu(args[0]), *args[1:])
    return function(tensor, *args, **kwargs)


def _type(function: Callable, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """``tensor.type()`` says ``torch.cuda.*``: Megatron's optimizers compare the name."""
    if args and isinstance(args[0], str):
        args = (args[0].replace("torch.cuda.", "torch."), *args[1:])
    name_or_tensor = function(tensor, *args, **kwargs)
    if isinstance(name_or_tensor, str):
        return name_or_tensor.replace("torch.", "torch.cuda.", 1)
    return name_or_tensor


def _unchanged(_: Callable, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor


_METHODS: dict[Callable, Callable] = {
    torch.Tensor.to: _to,
    torch.Tensor.type: _type,
    torch.Tensor.cuda: _unchanged,
    torch.Tensor.pin_memory: _unchanged,
    torch.Tensor.is_pinned: lambda *_, **__: False,
    torch.Tensor.record_stream: lambda *_, **__: None,
}


class CudaMeansCpu(TorchFunctionMode):
    """While entered, torch functions read a CUDA device as the CPU and never pin memory.

    One mode serves factories (``torch.empty(..., device="cuda")``), tensor methods and, through
    them, ``nn.Module.to``. It costs about a microsecond per torch call.
    """

    def __torch_function__(
        self, function: Callable, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": on_cpu(kwargs["device"])}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        method = _METHODS.get(function)
        return method(function, *args, **kwargs) if method else function(*args, **kwargs)
