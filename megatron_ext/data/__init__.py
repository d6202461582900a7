"""Text files to Megatron's indexed dataset, with a tokenizer trained on the spot.

    python -m megatron_ext.data --output data/stdlib

>>> from megatron_ext.data import Options, load_info, prepare
>>> info = prepare(Options(output="data/stdlib"))   # or load_info("data/stdlib") later
>>> info.train_prefix, info.vocab_size, info.splits["valid"].unigram_entropy

The names are loaded on first use: importing this package imports nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_ext.data.build import Options, prepare
    from megatron_ext.data.errors import DataError
    from megatron_ext.data.info import DatasetInfo, SplitInfo, load_info
    from megatron_ext.data.tokenizer import load_tokenizer

_HOME = {
    "DataError": "errors",
    "DatasetInfo": "info",
    "Options": "build",
    "SplitInfo": "info",
    "load_info": "info",
    "load_tokenizer": "tokenizer",
    "prepare": "build",
}

__all__ = [
    "DataError",
    "DatasetInfo",
    "Options",
    "SplitInfo",
    "load_info",
    "load_tokenizer",
    "prepare",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
