"""The metrics files, as a run that is killed and resumed leaves them, and the report on them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megatron_ext.data import DatasetInfo, SplitInfo
from megatron_ext.launch.progress import describe
from megatron_ext.metrics import files
from megatron_ext.report import PICTURE, Run, draw, report, rows_of_table


def row(iteration: int, **more: object) -> dict[str, object]:
    return {"kind": "train", "iteration": iteration, **more}


def test_rows_come_back_and_an_unfinished_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / files.METRICS
    assert files.read(path) == []
    files.append(path, row(1, lm_loss=0.1 + 0.2))
    files.append(path, row(2, lm_loss=None))
    with path.open("a") as file:
        file.write('{"kind": "tr')
    assert files.read(path) == [row(1, lm_loss=0.1 + 0.2), row(2, lm_loss=None)]


def test_a_resumed_run_drops_the_rows_it_writes_again(tmp_path: Path) -> None:
    path = tmp_path / files.METRICS
    files.keep_up_to(path, 0)
    assert not path.exists()
    for iteration in range(1, 6):
        files.append(path, row(iteration))
    files.keep_up_to(path, 3)
    assert [kept["iteration"] for kept in files.read(path)] == [1, 2, 3]
    assert list(tmp_path.iterdir()) == [path]


def test_a_row_replaces_the_one_with_the_same_key(tmp_path: Path) -> None:
    path = tmp_path / files.METRICS
    for loss in (3.0, 2.0):
        files.replace(path, row(5, lm_loss=loss), key=("kind", "iteration"))
        files.replace(path, row(6, lm_loss=loss), key=("kind", "iteration"))
    assert [(kept["iteration"], kept["lm_loss"]) for kept in files.read(path)] == [(5, 2), (6, 2)]


def test_progress_says_what_is_left() -> None:
    timing = {
        "iteration": 10,
        "train_iters": 40,
        "lm_loss": 3.14159,
        "tokens_per_second": 1234.5,
    }
    assert describe(timing, 2.5) == "loss 3.142  1,234 tokens/s  1:15 left"
    assert describe({**timing, "lm_loss": None}, 2.5).startswith("loss -  ")


def dataset(path: Path) -> DatasetInfo:
    split = SplitInfo(documents=2, tokens=1000, bytes=2000, unigram_entropy=5.0)
    return DatasetInfo(
        path=path,
        fingerprint="",
        sources=(),
        options={},
        files={},
        vocab_size=512,
        eod_id=511,
        dtype="uint16",
        splits={"train": split, "valid": split},
        sizes={},
    )


def a_run(iterations: int = 3) -> Run:
    train = [
        row(
            i,
            lm_loss=4.0 / i,
            tokens_per_expert={"1": [1, 3], "2": [0, 0, 8]},
            max_violation={"1": 0.5, "2": 2.0},
        )
        for i in range(1, iterations + 1)
    ]
    valid = [{"kind": "eval", "split": "valid", "iteration": iterations, "lm_loss": 2.0}]
    timing = [{"tokens_per_second": speed} for speed in (100.0, 300.0, 200.0)]
    return Run(train, valid, timing)


def test_the_table_holds_figures_worked_out_by_hand(tmp_path: Path) -> None:
    table = dict(rows_of_table(a_run(), dataset(tmp_path)))
    assert table["validation loss"] == "2.000 nats/token"
    assert table["validation loss below it"] == "60.0%"  # 1 - 2/5
    # 2 nats a token, 2 bytes a token.
    assert table["validation bits per byte"] == f"{1 / math.log(2):.3f}"
    assert table["tokens/s (median)"] == "200"
    assert table["busiest expert over the mean (MaxVio + 1)"] == (
        "3.00 in the worst of 2 layers, 2.25 on average"
    )


def test_a_run_on_other_data_has_no_figures_that_need_the_bytes() -> None:
    table = dict(rows_of_table(a_run(), None))
    assert "validation loss" in table and "validation bits per byte" not in table


@pytest.mark.parametrize("iterations", [1, 3])
def test_the_picture_is_drawn_also_of_one_interval(tmp_path: Path, iterations: int) -> None:
    path = tmp_path / PICTURE
    draw(a_run(iterations), dataset(tmp_path), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_to_report_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no metrics: train there first"):
        report(tmp_path)
