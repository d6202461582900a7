"""Any Megatron script, unmodified, with the extension installed.

    torchrun --nproc-per-node 8 -m megatron_ext.run /path/to/Megatron-LM/pretrain_gpt.py <flags>

takes the script's own flags and the extension's.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from megatron_ext.arguments import fail, is_first_rank_here


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        raise SystemExit(0 if len(sys.argv) > 1 else 2)
    script = Path(sys.argv[1])
    if not script.is_file():
        fail(f"{script} is no file: give the path of a Megatron script, e.g. pretrain_gpt.py")
    sys.argv = sys.argv[1:]
    # At the end, for a checkout's folder ``megatron`` must not hide the installed core.
    folder = script.resolve().parent
    sys.path.append(str(folder))

    from megatron_ext.entry import prepare

    prepare()
    _say_which_core(folder)
    runpy.run_path(str(script), run_name="__main__")


def _say_which_core(folder: Path) -> None:
    import megatron.core

    core = Path(megatron.core.__file__).parent
    if is_first_rank_here():
        print(f"megatron_ext: Megatron core {megatron.core.__version__} of {core}", flush=True)
        if (folder / "megatron" / "core").is_dir() and core != folder / "megatron" / "core":
            print(
                f"megatron_ext: not the one in {folder}: to use that, pip install -e {folder}",
                flush=True,
            )


if __name__ == "__main__":
    main()
