"""The held-out side depends on label and seed alone, and is never empty."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.data.corpus import Document, sha256
from megatron_ext.data.errors import DataError
from megatron_ext.data.split import place, split_documents

LABELS = [f"folder/{number}.txt" for number in range(400)]


def documents(labels: list[str]) -> list[Document]:
    return [Document(label, Path(label), size=10, digest=label) for label in labels]


def held_out(labels: list[str], share: float = 0.1, seed: int = 1) -> set[str]:
    return {document.label for document in split_documents(documents(labels), share, seed)["valid"]}


def single(path: Path, text: str) -> Document:
    path.write_bytes(text.encode())
    return Document("one.txt", path, size=len(text.encode()), digest=sha256(text))


def test_the_places_never_change() -> None:
    # Written down: another hash would move documents of existing datasets to the other side.
    assert place("json/decoder.py", 1234) == pytest.approx(0.38941615953127096)
    assert place("café.txt", -1) == pytest.approx(0.885839241297786)


def test_other_files_do_not_move_a_document() -> None:
    everything = held_out(LABELS)
    assert held_out(LABELS[::-1]) == everything
    for some in (LABELS[:200], LABELS[100:], LABELS[::3]):
        assert held_out(some) == everything & set(some)


def test_a_larger_share_only_adds() -> None:
    assert held_out(LABELS, 0.05) < held_out(LABELS, 0.1) < held_out(LABELS, 0.5)


def test_the_seed_matters_and_the_share_is_about_right() -> None:
    sides = [held_out(LABELS, 0.25, seed) for seed in range(20)]
    assert len(set(map(frozenset, sides))) == 20
    assert 0.22 < sum(map(len, sides)) / len(LABELS) / 20 < 0.28


def test_each_document_is_on_one_side_in_order() -> None:
    splits = split_documents(documents(LABELS), 0.3, 5)
    for side in splits.values():
        labels = [document.label for document in side]
        assert labels == [label for label in LABELS if label in set(labels)]
    assert sum(map(len, splits.values())) == len(LABELS)


@given(st.integers(2, 8), st.sampled_from([0.001, 0.05, 0.5]), st.integers(0, 1000))
def test_an_empty_side_is_refused_with_advice_that_works(
    count: int, share: float, seed: int
) -> None:
    try:
        split_documents(documents(LABELS[:count]), share, seed)
    except DataError as error:
        advice = re.search(r"try --(held-out|seed) (\S+)$", str(error))
        assert advice or share < 0.01
        if advice and advice[1] == "seed":
            seed = int(advice[2])
        elif advice:
            share = float(advice[2])
        if advice:
            splits = split_documents(documents(LABELS[:count]), share, seed)
            assert splits["train"] and splits["valid"]


@given(
    lines=st.lists(st.text("ab é\r", max_size=8), min_size=2, max_size=30),
    share=st.sampled_from([0.05, 0.3, 0.5]),
)
def test_one_document_is_cut_at_a_line_end(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], share: float
) -> None:
    text = "\n".join(lines) + "x"
    document = single(tmp_path_factory.mktemp("cut") / "one.txt", text)
    splits = split_documents([document], share, 1)
    (train,), (valid,) = splits["train"], splits["valid"]
    assert train.read() + valid.read() == text
    assert train.read().endswith("\n") and valid.read()
    assert train.size + valid.size == document.size
    assert train.label != valid.label


def test_the_cut_is_near_the_share(tmp_path: Path) -> None:
    document = single(tmp_path / "one.txt", "0123456789abcde\n" * 1000)
    assert split_documents([document], 0.2, 1)["valid"][0].size == pytest.approx(3200, abs=16)


def test_a_single_line_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="single line"):
        split_documents([single(tmp_path / "one.txt", "only one line\n")], 0.1, 1)
