"""The fast tests first: a mistake shows before the minutes of training start."""

import os

import pytest

# Also for the processes that tests start: they are about ranks on the CPU, GPU or not.
os.environ["MEGATRON_EXT_DEVICE"] = "cpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
