"""What every benchmark shares: rows as a table and, with ``--json FILE``, for programs."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    return parser


def publish(rows: list[dict[str, Any]], path: Path | None, title: str) -> None:
    """Prints the rows as a table; writes {"rows", "machine", "versions"} to ``path``."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
    # A pipe has no width; rich would take 80 and wrap.
    Console(width=None if sys.stdout.isatty() else 240).print(table)
    if path:
        machine = {"processor": _processor(), "cores": os.cpu_count(), "system": platform.system()}
        packages = ("torch", "megatron-core", "megatron-ext")
        versions = {name: version(name) for name in packages}
        content = {"rows": rows, "machine": machine, "versions": versions}
        path.write_text(json.dumps(content, indent=1) + "\n")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
