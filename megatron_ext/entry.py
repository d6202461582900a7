"""What both entries do before Megatron is imported."""

from __future__ import annotations

from megatron_ext.arguments import fail
from megatron_ext.launch.ranks import die_with_launcher


def prepare() -> None:
    """Installs the extension; what stands in the way ends the run with one line."""
    import megatron_ext
    from megatron_ext.cpu import DeviceChoiceError
    from megatron_ext.install import IncompatibleMegatron

    die_with_launcher()
    try:
        megatron_ext.install()
    except (DeviceChoiceError, IncompatibleMegatron) as error:
        fail(str(error))
