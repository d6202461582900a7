"""The tokenizer gives back every text exactly, however it is cut and whatever it holds."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from megatron_ext.data import tokenizer as tokenizer_module
from megatron_ext.data.errors import DataError
from megatron_ext.data.tokenizer import EOD, encode, load_tokenizer, pieces, train_tokenizer

# Every character that UTF-8 can carry, and texts full of what decides where words begin and end.
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
SPACED_TEXT = st.text(
    st.sampled_from("ab1.'s \t\r\n\x0b\x1c\x85\u00a0\u200b\u3000é漢🙂"), max_size=60
)


@pytest.fixture(scope="module")
def tokenizer(texts: dict[str, str]) -> Tokenizer:
    return train_tokenizer(texts.values(), 400)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    (tokens,) = encode(tokenizer, [text])
    return [int(token) for token in tokens]


@settings(max_examples=300, deadline=None)
@given(text=st.one_of(ANY_TEXT, SPACED_TEXT))
def test_every_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    tokens = ids(tokenizer, text)
    assert tokens[-1] == 399
    assert tokenizer.decode(tokens[:-1], skip_special_tokens=False) == text


@settings(max_examples=300, deadline=None)
@given(text=st.one_of(ANY_TEXT, SPACED_TEXT), size=st.integers(1, 12))
def test_pieces_encode_like_the_whole(tokenizer: Tokenizer, text: str, size: int) -> None:
    parts = list(pieces(text, size))
    assert "".join(parts) == text
    together = [token for part in parts for token in tokenizer.encode(part).ids]
    assert together == tokenizer.encode(text).ids


def test_every_space_python_knows_is_cut_safely(tokenizer: Tokenizer) -> None:
    for code in range(sys.maxunicode + 1):
        if chr(code).isspace():
            text = f"ab{chr(code)}\nba{chr(code)} a\n.{chr(code)}"
            together = [t for part in pieces(text, 1) for t in tokenizer.encode(part).ids]
            assert together == tokenizer.encode(text).ids, hex(code)


def test_long_texts_across_batches(
    tokenizer: Tokenizer, texts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_module, "_BATCH_CHARACTERS", 20_000)
    long = "".join(texts.values())
    assert len(long) > 40_000
    batch = ["short", long, "", "end"]
    vectors = list(encode(tokenizer, batch))
    assert [tokenizer.decode(v[:-1].tolist()) for v in vectors] == batch
    assert vectors[1][:-1].tolist() == tokenizer.encode(long).ids
    assert all(vector.dtype == np.int32 for vector in vectors)


def test_the_end_of_document_written_out_is_ordinary_text(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for one in (tokenizer, load_tokenizer(tmp_path / "tokenizer.json")):
        tokens = ids(one, f"a{EOD}b")
        assert tokens.count(399) == 1
        assert one.decode(tokens[:-1], skip_special_tokens=False) == f"a{EOD}b"


def test_the_end_of_document_is_the_last_id(texts: dict[str, str]) -> None:
    for size in (257, 300):
        trained = train_tokenizer(texts.values(), size)
        assert trained.get_vocab_size() == size
        assert trained.token_to_id(EOD) == size - 1


def test_little_text_gives_a_smaller_vocabulary() -> None:
    trained = train_tokenizer(["abab"], 5000)
    assert trained.get_vocab_size() < 300
    assert trained.token_to_id(EOD) == trained.get_vocab_size() - 1


def test_training_is_repeatable(texts: dict[str, str]) -> None:
    trained = {train_tokenizer(texts.values(), 600).to_str() for _ in range(5)}
    assert len(trained) == 1


def test_an_error_in_the_text_stops_training() -> None:
    def broken() -> Iterator[str]:
        yield "some text"
        raise DataError("gone")

    with pytest.raises(DataError, match="gone"):
        train_tokenizer(broken(), 300)


def test_not_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="cannot load the tokenizer"):
        load_tokenizer(tmp_path / "tokenizer.json")
