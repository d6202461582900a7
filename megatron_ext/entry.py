"""What both entries do before Megatron is imported."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_ext.arguments import fail
from megatron_ext.launch.ranks import die_with_launcher


def prepare() -> None:
    """Installs the extension; what stands in the way ends the run with one line."""
    import megatron_ext
    from megatron_ext.cpu import DeviceChoiceError
    from megatron_ext.install import IncompatibleMegatron

    die_with_launcher()
    # One rule wherever a run is started: the installed core comes first. ``python -m`` puts the
    # current folder in front, and a Megatron checkout there would hide it.
    if Path(sys.path[0] or ".").resolve() == Path.cwd():
        sys.path.append(sys.path.pop(0))
    try:
        megatron_ext.install()
    except (DeviceChoiceError, IncompatibleMegatron) as error:
        fail(str(error))
