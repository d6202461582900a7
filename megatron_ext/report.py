"""What a run came to: a table, and a picture of its loss and expert load.

    python -m megatron_ext.report runs/quickstart

reads ``metrics.jsonl``, ``timing.jsonl`` and, for bits per byte, ``data/dataset.json``.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megatron_ext.data import DataError, DatasetInfo, load_info
from megatron_ext.metrics import files

PICTURE = "loss_and_expert_load.png"


@dataclass(frozen=True)
class Run:
    """A run's rows, by kind."""

    train: list[dict[str, Any]]
    valid: list[dict[str, Any]]
    timing: list[dict[str, Any]]

    @classmethod
    def read(cls, directory: Path) -> Run:
        rows = files.read(directory / files.METRICS)
        return cls(
            train=[row for row in rows if row["kind"] == "train"],
            valid=[row for row in rows if row["kind"] == "eval" and row["split"] == "valid"],
            timing=files.read(directory / files.TIMING),
        )


def rows_of_table(run: Run, data: DatasetInfo | None) -> list[tuple[str, str]]:
    """(what, value) in the order in which they are shown."""
    table = [
        ("iterations", f"{run.train[-1]['iteration']:,}"),
        ("training loss", _nats(run.train[-1]["lm_loss"])),
    ]
    if run.valid:
        loss = run.valid[-1]["lm_loss"]
        table.append(("validation loss", _nats(loss)))
        if data:
            split = data.splits["valid"]
            below = 1 - loss / split.unigram_entropy
            table += [
                ("unigram entropy of the same text", _nats(split.unigram_entropy)),
                ("validation loss below it", f"{below:.1%}"),
                ("validation bits per byte", f"{split.bits_per_byte(loss):.3f}"),
            ]
    if run.timing:
        speed = median(row["tokens_per_second"] for row in run.timing)
        table.append(("tokens/s (median)", f"{speed:,.0f}"))
    balance = run.train[-1].get("max_violation")
    if balance:
        table.append(
            (
                "busiest expert over the mean (MaxVio + 1)",
                f"{1 + max(balance.values()):.2f} in the worst of {len(balance)} layers, "
                f"{1 + sum(balance.values()) / len(balance):.2f} on average",
            )
        )
    return table


def _nats(value: float | None) -> str:
    return "- (every step was skipped)" if value is None else f"{value:.3f} nats/token"


def print_table(rows: list[tuple[str, str]], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_header=False)
    for row in rows:
        table.add_row(*row)
    # Off a terminal rich assumes 80 columns, which would cut a value in two.
    console = Console()
    console = console if console.is_terminal else Console(width=110)
    console.print(table)


def draw(run: Run, data: DatasetInfo | None, path: Path) -> None:
    """Loss over iterations above, load of every expert of every layer over iterations below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    balanced = [row for row in run.train if "tokens_per_expert" in row]
    panels = 2 if balanced else 1
    figure, axes = plt.subplots(panels, 1, figsize=(9, 4 * panels), squeeze=False)
    loss = axes[0, 0]
    seen = [row for row in run.train if row["lm_loss"] is not None]
    loss.plot(
        *zip(*((row["iteration"], row["lm_loss"]) for row in seen), strict=True), label="train"
    )
    if run.valid:
        points = [(row["iteration"], row["lm_loss"]) for row in run.valid]
        loss.plot(*zip(*points, strict=True), "o-", label="held out")
    if data:
        entropy = data.splits["valid"].unigram_entropy
        loss.axhline(entropy, color="gray", ls="--", lw=1, label="unigram entropy, held out")
    loss.set(xlabel="iteration", ylabel="loss (nats/token)")
    loss.legend(frameon=False)
    loss.spines[["top", "right"]].set_visible(False)

    if balanced:
        layers = list(balanced[-1]["tokens_per_expert"])
        # One column an interval, one row an expert; 1 is a fair share.
        columns = [
            np.concatenate(
                [
                    np.array(row["tokens_per_expert"][layer])
                    / max(1.0, float(np.mean(row["tokens_per_expert"][layer])))
                    for layer in layers
                ]
            )
            for row in balanced
        ]
        experts = [len(balanced[-1]["tokens_per_expert"][layer]) for layer in layers]
        load = axes[1, 0]
        first, last = balanced[0]["iteration"], balanced[-1]["iteration"]
        image = load.imshow(
            np.stack(columns, axis=1),
            aspect="auto",
            cmap="RdBu_r",
            vmin=0,
            vmax=2,
            extent=(first, max(last, first + 1), sum(experts), 0),
            interpolation="nearest",
        )
        edges = np.cumsum([0, *experts])
        for edge in edges[1:-1]:
            load.axhline(edge, color="black", lw=1)
        load.set_yticks((edges[:-1] + edges[1:]) / 2, [f"layer {layer}" for layer in layers])
        load.set(xlabel="iteration", title="load of each expert (1 = fair share)")
        figure.colorbar(image, ax=load, pad=0.02)
    figure.tight_layout()
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, dpi=120, format="png")
    temporary.replace(path)
    plt.close(figure)


def report(directory: Path) -> None:
    """Prints the table and writes the picture of the run in ``directory``.

    Raises ValueError if there is nothing to report.
    """
    run = Run.read(directory)
    if not run.train:
        raise ValueError(f"{directory} holds no metrics: train there first")
    try:
        data: DatasetInfo | None = load_info(directory / "data")
    except DataError:
        data = None  # a run on data of the user's own: no figures that need the bytes
    print_table(rows_of_table(run, data), title=str(directory))
    draw(run, data, directory / PICTURE)
    print(f"metrics: {directory / files.METRICS}\npicture: {directory / PICTURE}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m megatron_ext.report", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    try:
        report(parser.parse_args().run_dir)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
