"""A small corpus: sixty files of made-up words, the same on every run."""

import random
from pathlib import Path

import pytest

SYLLABLES = (
    "ba",
    "de",
    "fi",
    "go",
    "lu",
    "ma",
    "ne",
    "ri",
    "so",
    "tu",
    "va",
    "ze",
    "ção",
    "ß",
    "漢字",
    "🙂",
)


def made_up_text(seed: int, words: int) -> str:
    rng = random.Random(seed)
    lines = []
    while words > 0:
        line = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 3))) for _ in range(8)]
        lines.append(" " * rng.randint(0, 4) + " ".join(line))
        words -= len(line)
    return "\n".join(lines) + rng.choice(["", "\n", "\n\n", "\r\n", "  "])


@pytest.fixture(scope="session")
def texts() -> dict[str, str]:
    """Label to text."""
    names = [f"{'abc'[number % 3]}/{number:02}.txt" for number in range(60)]
    return {name: made_up_text(number, 40 + 5 * number) for number, name in enumerate(names)}


@pytest.fixture
def folder(tmp_path: Path, texts: dict[str, str]) -> Path:
    """The corpus on disk, in a folder of its own below ``tmp_path``."""
    root = tmp_path / "corpus"
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode())
    return root
