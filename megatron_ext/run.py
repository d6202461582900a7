"""Any Megatron script, unmodified, with the extension installed.

    torchrun --nproc-per-node 8 -m megatron_ext.run /path/to/Megatron-LM/pretrain_gpt.py <flags>

takes the script's own flags and the extension's.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from megatron_ext.arguments import fail


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        raise SystemExit(0 if len(sys.argv) > 1 else 2)
    script = Path(sys.argv[1])
    if not script.is_file():
        fail(f"{script} is no file: give the path of a Megatron script, e.g. pretrain_gpt.py")
    sys.argv = sys.argv[1:]
    # Appended, not put first: a checkout beside the script also has a folder ``megatron``, a
    # namespace package that must not hide the installed core.
    sys.path.append(str(script.resolve().parent))

    from megatron_ext.entry import prepare

    prepare()
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
