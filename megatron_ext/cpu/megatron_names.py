"""Replacements of Megatron names on a machine without a GPU; megatron_ext/install.py says why."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch


def get_rng_state(original: Callable) -> Callable:
    def _get_cuda_rng_state(
        device: Any = "cuda", clone: bool = False, graph_safe: bool = False
    ) -> torch.Tensor:
        return torch.default_generator.get_state()

    return _get_cuda_rng_state


def set_rng_state(original: Callable) -> Callable:
    def _set_cuda_rng_state(
        new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False
    ) -> None:
        torch.default_generator.set_state(new_state)

    return _set_cuda_rng_state


class ShareOneGenerator(logging.Filter):
    """Silences the random tracker's check that device draws leave the host's generator alone."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed within GPU RNG context" not in record.getMessage()

    def __enter__(self) -> None:
        logging.getLogger("megatron.core.tensor_parallel.random").addFilter(self)

    def __exit__(self, *exception: Any) -> None:
        logging.getLogger("megatron.core.tensor_parallel.random").removeFilter(self)


def move_split_sizes(original: Callable) -> Callable:
    def maybe_move_tensor_to_cpu(
        tensor: Any, as_numpy: bool = False, record_stream: bool = False
    ) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return maybe_move_tensor_to_cpu


def norm_with_sequence_parallel(original: Callable) -> Callable:
    """torch's LayerNorm and RMSNorm under sequence parallelism.

    Each TP rank normalises its own part of the sequence, so a norm's gradient is a partial sum;
    Megatron adds those of every parameter marked ``sequence_parallel`` (finalize_model_grads).
    """
    make = original.__func__ if isinstance(original, staticmethod) else original

    @functools.wraps(make)
    def __new__(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        sequence_parallel = config.sequence_parallel
        config.sequence_parallel = False
        try:
            norm = make(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = sequence_parallel
        for parameter in norm.parameters():
            parameter.sequence_parallel = sequence_parallel
        return norm

    return staticmethod(__new__)
