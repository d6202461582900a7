"""The figures of a finished quickstart, as in the README.

bash launch/quickstart.sh && python benchmarks/quickstart.py [--json FILE]
"""

from __future__ import annotations

from pathlib import Path

from common import arguments, publish

from megatron_ext.data import load_info
from megatron_ext.report import Run, rows_of_table


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/quickstart"))
    options = parser.parse_args()
    table = rows_of_table(Run.read(options.run_dir), load_info(options.run_dir / "data"))
    rows = [{"figure": figure, "value": value} for figure, value in table]
    publish(rows, options.json, str(options.run_dir))


if __name__ == "__main__":
    main()
