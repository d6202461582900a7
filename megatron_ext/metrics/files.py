"""metrics.jsonl and timing.jsonl: one JSON object a line, appended while a run goes on.

What a seed determines and what a clock determines are kept apart, so that two runs with the same
seed leave byte-identical ``metrics.jsonl``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
TIMING = "timing.jsonl"


def append(path: Path, row: dict[str, Any]) -> None:
    """Appends one row in one write, so that a reader never sees two rows interleaved."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """All complete rows; a last line without its end (a killed run) is left out."""
    if not path.exists():
        return []
    complete, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in complete.splitlines()]


def keep_up_to(path: Path, iteration: int) -> None:
    """Drops rows of later iterations: a run resumed from a checkpoint writes them anew."""
    if path.exists():
        _write(path, [row for row in read(path) if row["iteration"] <= iteration])


def replace(path: Path, row: dict[str, Any], key: tuple[str, ...]) -> None:
    """Appends the row; one that has the same values under ``key`` gives way."""
    rows = read(path)
    others = [old for old in rows if any(old.get(name) != row[name] for name in key)]
    if len(others) < len(rows):
        _write(path, others)
    append(path, row)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(temporary, path)
