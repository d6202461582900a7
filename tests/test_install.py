"""The table of replaced names: complete, checked, reversible."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import megatron_ext
from megatron_ext.install import CHECKED_MEGATRON, TABLE, IncompatibleMegatron, Name, resolve

install = importlib.import_module("megatron_ext.install")
PACKAGE = Path(megatron_ext.__file__).parent


def state_of_targets() -> dict[str, Any]:
    """What every target is now, and whether its owner holds it itself."""
    state = {}
    for row in TABLE:
        if isinstance(row, Name):
            owner, name = install._owner(row.target)
            state[row.target] = (name in vars(owner), getattr(owner, name))
    return state


def test_importing_the_package_is_cheap() -> None:
    code = (
        "import sys, megatron_ext; "
        "assert not {'torch', 'megatron.core'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_install_is_idempotent_and_uninstall_puts_every_original_back() -> None:
    before = state_of_targets()
    megatron_ext.install()
    try:
        replaced = state_of_targets()
        megatron_ext.install()
        assert state_of_targets() == replaced
        changed = {target for target in before if before[target][1] is not replaced[target][1]}
        assert changed == {row.target for row in install.active() if isinstance(row, Name)}
    finally:
        megatron_ext.uninstall()
    assert state_of_targets() == before
    assert install.active() == ()


def test_without_the_stand_in_torch_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_ext import cpu

    monkeypatch.setattr(cpu, "wanted", lambda: False)
    megatron_ext.install()
    try:
        assert all(row.on == "always" for row in install.active())
        assert not any(row.target.startswith("torch") for row in install.active())
        import torch

        assert torch.cuda.__name__ == "torch.cuda"
    finally:
        megatron_ext.uninstall()


def test_nothing_replaces_names_outside_the_table() -> None:
    # setattr, and assignment to an attribute of torch or megatron, belong to install.py alone.
    assignment = re.compile(r"^\s*(torch|megatron)[\w.]*\.\w+ = ", re.M)
    for file in PACKAGE.rglob("*.py"):
        source = file.read_text()
        if file.name != "install.py":
            assert "setattr(" not in source.replace("getattr(", ""), file
        assert not assignment.search(source), file


def test_every_row_has_a_reason_and_a_replacement() -> None:
    assert len({row.target for row in TABLE}) == len(TABLE)
    for row in TABLE:
        assert row.why and callable(resolve(row.make)), row.target


def test_a_signature_that_differs_is_refused_and_nothing_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = state_of_targets()
    wrong = Name(
        "megatron.training.training:train_step", TABLE[-1].make, "a test", parameters="a, b"
    )
    monkeypatch.setattr(install, "TABLE", (*TABLE, wrong))
    with pytest.raises(IncompatibleMegatron, match=r"train_step\(.*\) was written for \(a, b\)"):
        megatron_ext.install()
    assert state_of_targets() == before


def test_a_name_that_is_gone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Name("megatron.training.training:no_such_function", TABLE[-1].make, "a test")
    monkeypatch.setattr(install, "TABLE", (*TABLE, gone))
    with pytest.raises(IncompatibleMegatron, match="no_such_function does not exist here"):
        megatron_ext.install()
    assert install.active() == ()


def test_a_replacement_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    before = state_of_targets()
    broken = Name("megatron.training.training:train_step", "megatron_ext.moe.bias:none", "a test")
    monkeypatch.setattr(install, "TABLE", (*TABLE, broken))
    with pytest.raises(AttributeError, match="none"):
        megatron_ext.install()
    assert install.active() == ()
    assert state_of_targets() == before


def test_an_unknown_version_warns_and_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "megatron_version", lambda: "0.99.0")
    with pytest.warns(UserWarning, match="megatron-core 0.99.0 is unknown to megatron_ext"):
        megatron_ext.install()
    megatron_ext.uninstall()


def test_a_name_that_others_replaced_again_is_left_to_them() -> None:
    import torch

    original = torch.compile
    megatron_ext.install()
    theirs = torch.compile = lambda model: model
    try:
        with pytest.warns(UserWarning, match="torch:compile was replaced again by others"):
            megatron_ext.uninstall()
        assert torch.compile is theirs
    finally:
        torch.compile = original


def test_the_table_is_printed_with_what_is_active() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "megatron_ext.install"],
        capture_output=True,
        text=True,
        check=True,
        env={"MEGATRON_EXT_DEVICE": "cpu", "COLUMNS": "250", "PATH": ""},
    )
    assert f"megatron_ext on megatron-core {CHECKED_MEGATRON}" in printed.stdout
    for row in TABLE:
        assert row.target[:60] in printed.stdout.replace("\n", ""), row.target
    assert "RuntimeWarning" not in printed.stderr
