"""Stands in the place of the module ``torch.cuda`` on a machine without a GPU.

What Megatron calls has a meaning here: a process has one device, work is done when the call
returns (streams and events have nothing to wait for), and device random numbers come from the
CPU's generator. Any other name is torch's own, which says itself that there is no CUDA.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch

_real = torch.cuda

BFloat16Tensor = torch.BFloat16Tensor
FloatTensor = torch.FloatTensor
HalfTensor = torch.HalfTensor


def __getattr__(name: str) -> Any:
    return getattr(_real, name)


# ---- devices ------------------------------------------------------------------------------


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    pass


def device_count() -> int:
    """Ranks on this machine, so that each has "its" device: torchrun tells how many."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def current_device() -> int:
    return 0


def set_device(device: Any) -> None:
    pass


def device(device: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def get_device_name(device: Any = None) -> str:
    return "CPU (megatron_ext stand-in)"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """An architecture without FP8 and without TMA, so that Megatron picks no kernel for either."""
    return (8, 0)


def get_device_properties(device: Any = None) -> SimpleNamespace:
    major, minor = get_device_capability()
    return SimpleNamespace(
        name=get_device_name(),
        major=major,
        minor=minor,
        total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        multi_processor_count=os.cpu_count() or 1,
    )


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


# ---- streams and events: the CPU's work is done when the call returns ------------------------


def synchronize(device: Any = None) -> None:
    pass


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._time = 0.0

    def record(self, stream: Any = None) -> None:
        self._time = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event's record to the other's."""
        return (end_event._time - self._time) * 1e3


class Stream:
    cuda_stream = 0
    priority = 0
    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


_the_stream = Stream()


def current_stream(device: Any = None) -> Stream:
    return _the_stream


def default_stream(device: Any = None) -> Stream:
    return _the_stream


def set_stream(stream: Any) -> None:
    pass


def stream(stream: Any) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext(stream)


def is_current_stream_capturing() -> bool:
    return False


# ---- random numbers -------------------------------------------------------------------------

default_generators = (torch.default_generator,)


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


manual_seed_all = manual_seed


def initial_seed() -> int:
    return torch.default_generator.initial_seed()


def get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return torch.default_generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    torch.default_generator.set_state(new_state)


random = SimpleNamespace(
    get_rng_state=get_rng_state,
    set_rng_state=set_rng_state,
    manual_seed=manual_seed,
    manual_seed_all=manual_seed_all,
    initial_seed=initial_seed,
)


# ---- memory: there is no allocator of a device to report on ---------------------------------


def empty_cache() -> None:
    pass


def memory_stats(device: Any = None) -> dict[str, int]:
    return defaultdict(int)


def _no_bytes(device: Any = None) -> int:
    return 0


memory_allocated = max_memory_allocated = memory_reserved = max_memory_reserved = _no_bytes
device_memory_used = _no_bytes


def reset_peak_memory_stats(device: Any = None) -> None:
    pass


# ---- profiling marks --------------------------------------------------------------------------

nvtx = SimpleNamespace(
    range_push=lambda message: None,
    range_pop=lambda: None,
    mark=lambda message: None,
    range=lambda *args, **kwargs: contextlib.nullcontext(),
)
