"""Trains on this machine, a process a rank, with a live line of progress.

    python -m megatron_ext.launch --ranks 4 --run-dir runs/mine <megatron and extension flags>

The flags are those of ``megatron_ext.pretrain_gpt``. On several machines use torchrun or Slurm.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_ext.launch.local import LaunchError, run


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_ext.launch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # what is not one of these flags is Megatron's
    )
    parser.add_argument("--ranks", type=int, required=True, help="processes to start")
    parser.add_argument(
        "--run-dir", type=Path, required=True, help="folder for logs, metrics.jsonl, timing.jsonl"
    )
    parser.add_argument(
        "--master-port", type=int, help="TCP port of the rendezvous; default: a free one"
    )
    own, flags = parser.parse_known_args()
    try:
        run(flags, own.ranks, own.run_dir, own.master_port)
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        print("interrupted: all ranks were stopped", file=sys.stderr)
        return 130
    print(f"done: {own.run_dir}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
