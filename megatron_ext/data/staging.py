"""All or nothing: a dataset is written beside its place and moved there when it is complete."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_ext.data.errors import DataError
from megatron_ext.data.info import DATA_FILES, INFO_FILE, read_info_file

# "cache" is where Megatron puts its sample indices for the data beside it.
_OURS = {*DATA_FILES, INFO_FILE, "cache"}


def check_place(output: Path, force: bool) -> None:
    """Refuse a place that can never hold the dataset, before any work is done.

    Raises:
        DataError: it is a file, lies below one, or holds something this tool did not write.
    """
    for place in (output, *output.parents):
        if place.exists():
            if not place.is_dir():
                raise DataError(f"cannot write in {output}: {place} is not a folder")
            break
    if not output.exists():
        return
    # The finished folder takes the name of the one that is there, which these two do not survive.
    if output == Path.cwd() or output.is_mount():
        kind = "the current folder" if output == Path.cwd() else "a mount point"
        raise DataError(f"--output {output} is {kind}: name a new folder inside it")
    if not any(output.iterdir()):
        return
    if read_info_file(output) is None:
        raise DataError(
            f"{output} is not empty and was not made by this tool: choose another --output"
        )
    if force:
        strangers = sorted(entry.name for entry in output.iterdir() if entry.name not in _OURS)
        if strangers:
            raise DataError(
                f"{output} also holds {', '.join(strangers)}, which --force would delete: move"
                " it away first"
            )


@contextmanager
def staging(output: Path) -> Iterator[Path]:
    """A new folder beside ``output``, gone afterwards unless it was published.

    Raises:
        DataError: no folder can be made there.
    """
    folder = output.parent / f".{output.name}.partial-{secrets.token_hex(4)}"
    missing = [parent for parent in output.parents if not parent.exists()]
    try:
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise DataError(f"cannot write in {output.parent}: {error.strerror}") from error
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        # Parents made here go too while they are empty, which they are after a failure.
        with suppress(OSError):
            for parent in missing:
                parent.rmdir()


def publish(folder: Path, output: Path, force: bool) -> None:
    """Move the complete ``folder`` to ``output``, which replaces an older dataset if ``force``.

    Raises:
        OSError: the move failed, as it does without ``force`` if something is there by now; an
            older dataset is in its place as before.
    """
    if not force or not output.exists():
        os.rename(folder, output)
        return
    older = folder.with_name(f"{folder.name}-older")
    try:
        os.rename(output, older)
        os.rename(folder, output)
    finally:
        if older.exists() and not output.exists():
            os.rename(older, output)
        shutil.rmtree(older, ignore_errors=True)
