"""Byte-level BPE: trained on any text, exact on every text.

The 256 byte values are always in the vocabulary, so there is no unknown token and decoding gives
back the very text. The end-of-document token is the last id; the same characters inside a text
are ordinary text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_ext.data.errors import DataError

EOD = "<|endoftext|>"

# Short, because training asks for 256 pieces at a time, and can be stopped only then.
_PIECE_CHARACTERS = 1 << 13
_BATCH_CHARACTERS = 1 << 21
# GPT-2's pattern never joins a non-space with white space after it. Python's \S is at least as
# narrow as the pattern's, and these four are white space to both.
_CUT = re.compile(r"(?<=\S)[ \t\r\n]")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a tokenizer of at most ``vocab_size`` tokens, the end of document included.

    Little text may not hold that many pairs; then the vocabulary is smaller. The same texts give
    the same tokenizer, whatever the number of threads.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    stop = Event()
    # In a thread of its own, because Python tells only a main thread that waits in Python of
    # Ctrl-C: from inside the training it would be heard when the training is over.
    with ThreadPoolExecutor(max_workers=1) as pool:
        training = pool.submit(tokenizer.train_from_iterator, _until(stop, texts), trainer)
        try:
            training.result()
        except BaseException:
            stop.set()
            raise
    # Added after training, so that it takes the last id and no part in the merges.
    tokenizer.add_special_tokens([EOD])
    tokenizer.encode_special_tokens = True
    return tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a ``tokenizer.json``; the EOD characters in a text stay text.

    Raises:
        DataError: no such file, or not a tokenizer.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers package raises bare Exception
        raise DataError(f"cannot load the tokenizer {path}: {error}") from error
    # Not stored in the file: without it the EOD characters in a text would become the EOD token.
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[NDArray[np.int32]]:
    """Token ids of each text, the end of document appended: one int32 vector [tokens] a text.

    Texts are consumed a batch at a time, and a batch is encoded on all cores.
    """
    end = np.array([tokenizer.token_to_id(EOD)], dtype=np.int32)
    parts: list[NDArray[np.int32]] = []
    for batch in _batches(texts):
        encodings = tokenizer.encode_batch_fast(
            [piece for piece, _ in batch], add_special_tokens=False
        )
        for (_, last), encoding in zip(batch, encodings, strict=True):
            parts.append(np.array(encoding.ids, dtype=np.int32))
            if last:
                yield np.concatenate([*parts, end])
                parts = []


def pieces(text: str, characters: int = _PIECE_CHARACTERS) -> Iterator[str]:
    """Cut a text into pieces of about ``characters`` that encode to the same tokens as the whole.

    A long text would otherwise be encoded on one core, and in memory many times its size.
    """
    start = 0
    while len(text) - start > characters:
        cut = _CUT.search(text, start + characters)
        if cut is None:
            break
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def _until(stop: Event, texts: Iterable[str]) -> Iterator[str]:
    """The texts; an error, which ends the training, once ``stop`` is set."""
    for text in texts:
        if stop.is_set():
            raise RuntimeError("stopped")
        yield text


def _batches(texts: Iterable[str]) -> Iterator[list[tuple[str, bool]]]:
    """Batches of (piece, whether it ends its text)."""
    batch: list[tuple[str, bool]] = []
    characters = 0
    for text in texts:
        *body, tail = pieces(text)
        for piece, last in [*((piece, False) for piece in body), (tail, True)]:
            batch.append((piece, last))
            characters += len(piece)
            if characters >= _BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch
