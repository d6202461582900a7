"""Replacements of torch names on a machine without a GPU; megatron_ext/install.py says why."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist


def cuda(original: ModuleType) -> ModuleType:
    from megatron_ext.cpu import torch_cuda

    return torch_cuda


def never(original: Callable) -> Callable[..., bool]:
    return lambda *args, **kwargs: False


def nothing(original: Callable) -> Callable[..., Any]:
    return lambda *args, **kwargs: None


def do_not_compile(original: Callable) -> Callable:
    """``torch.compile`` that returns the function itself, in both of its spellings."""

    def compile(model: Callable | None = None, **options: Any) -> Callable:
        return model if model is not None else lambda function: function

    return compile


def all_gather(original: Callable) -> Callable:
    """Takes pieces of different sizes, as NCCL does: each rank broadcasts its own."""

    def all_gather(
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        if len({piece.shape for piece in tensor_list}) <= 1:
            return original(tensor_list, tensor, group=group, async_op=async_op)
        for source, piece in enumerate(tensor_list):
            if source == dist.get_rank(group):
                piece.copy_(tensor)
            if piece.numel():
                dist.broadcast(piece, group=group, group_src=source)
        return _Done() if async_op else None

    return all_gather


class _Done:
    """The handle of a collective that was finished before it was returned."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True
