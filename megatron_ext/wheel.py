"""What the megatron-core wheel leaves out and a Megatron checkout has."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable


def use_compiled_helpers(original: Callable[[], None]) -> Callable[[], None]:
    """``compile_helpers`` that builds the dataset helpers only where none are built."""

    def compile_helpers() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            original()

    return compile_helpers
