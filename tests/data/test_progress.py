"""What a user sees while it works."""

import sys
import time

import pytest

from megatron_ext.data.progress import reporter


def test_plain_lines_come_every_few_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with reporter() as progress:
        for second in range(10):
            now = float(second)
            progress("reading", second, 10)
        progress("loading", 0, 0)
    assert capsys.readouterr().out.splitlines() == [
        "reading: 30%, about 7 s left",
        "reading: 60%, about 4 s left",
        "reading: 90%, about 1 s left",
        "loading ...",
    ]


def test_quick_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with reporter() as progress:
        progress("reading", 0, 10)
        progress("reading", 9, 10)
    assert capsys.readouterr().out == ""


def test_a_terminal_gets_a_bar_for_each_stage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with reporter() as progress:
        progress("reading", 5, 10)
        progress("loading", 0, 0)
        progress("encoding", 1, 10)
    out = capsys.readouterr().out
    assert all(stage in out for stage in ("reading", "loading", "encoding"))
    assert "100%" in out
