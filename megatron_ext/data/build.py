"""Text files in, a dataset folder out. ``prepare`` reads top to bottom in the order it works."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from megatron_ext.data.corpus import Corpus, Document, Progress, read_corpus
from megatron_ext.data.errors import DataError
from megatron_ext.data.info import (
    DATA_FILES,
    FORMAT_VERSION,
    DatasetInfo,
    SplitInfo,
    load_info,
    read_info_file,
)
from megatron_ext.data.split import SPLITS, split_documents
from megatron_ext.data.staging import check_place, publish, staging
from megatron_ext.data.tokenizer import encode, pieces, train_tokenizer

__all__ = ["DatasetInfo", "Options", "load_info", "prepare"]

# A vocabulary of a few thousand tokens is settled long before this; it bounds the time.
_TOKENIZER_TRAINING_BYTES = 64 << 20
# Less than about one training sequence measures nothing.
_MINIMUM_TOKENS = {"train": 1024, "valid": 64}


@dataclass(frozen=True)
class Options:
    """What to make of which text, and where."""

    output: str | Path
    """Folder of the dataset; it must not exist, be empty, or hold a dataset of this tool."""
    text: Sequence[str | Path] = ()
    """Files and folders; none: the source of the Python standard library."""
    vocab_size: int = 1024
    """Tokens, the end of document included: 257 (bytes alone) to 65535."""
    held_out: float = 0.05
    """Share of the documents to hold out, in (0, 0.5]; of the text, if there is one document."""
    seed: int = 1234
    """Decides which documents are held out."""
    force: bool = False
    """Replace a dataset of this tool that is already there."""

    def check(self) -> None:
        """Raise :class:`DataError` for a value outside its range."""
        if not 257 <= self.vocab_size <= 65535:
            raise DataError(f"--vocab-size {self.vocab_size}: must be from 257 to 65535")
        if not 0 < self.held_out <= 0.5:
            raise DataError(f"--held-out {self.held_out:g}: must be above 0 and at most 0.5")


def _silent(stage: str, done: int, total: int) -> None:
    pass


def prepare(options: Options, progress: Progress = _silent) -> DatasetInfo:
    """Make the dataset, or find it made: the same text and options are not processed twice.

    Args:
        options: what to make.
        progress: called as ``progress(stage, done, total)`` all along; an exception it raises
            stops the work and leaves nothing behind.

    Returns:
        The dataset's description; ``reused`` tells whether it was already there.

    Raises:
        DataError: wrong options, no usable text, or an output that cannot be used.
        OSError: writing failed, for instance on a full disk; nothing is left behind.
    """
    options.check()
    # Resolved, so that a link to a folder is followed and not replaced.
    output = Path(options.output).resolve()
    check_place(output, options.force)

    corpus = read_corpus([Path(path) for path in options.text], output, progress)
    splits = split_documents(corpus.documents, options.held_out, options.seed)
    for name, documents in splits.items():
        # A token is at least a byte.
        _require_tokens(name, sum(document.size for document in documents) + len(documents))

    fingerprint = _fingerprint(splits, options)
    if not options.force and read_info_file(output) is not None:
        return _reuse(output, fingerprint)

    with staging(output) as folder:
        tokenizer = _train(splits["train"], options, progress)
        # Not tokenizer.save: a full disk would be a bare Exception there.
        (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        progress("loading Megatron", 0, 0)
        dtype = _token_type(tokenizer.get_vocab_size())
        split_infos = {
            name: _write_split(folder / name, splits[name], tokenizer, dtype, progress)
            for name in SPLITS
        }
        info = _describe(folder, corpus, options, fingerprint, tokenizer, dtype, split_infos)
        info.write()
        try:
            publish(folder, output, options.force)
        except OSError:
            # Another process may have finished the same dataset first.
            if options.force or read_info_file(output) is None:
                raise
            return _reuse(output, fingerprint)
    return replace(info, path=output)


def _reuse(output: Path, fingerprint: str) -> DatasetInfo:
    info = load_info(output)
    if info.fingerprint != fingerprint:
        raise DataError(
            f"{output} holds a dataset of other text or options: choose another --output, or"
            " replace it with --force"
        )
    return replace(info, reused=True)


def _fingerprint(splits: dict[str, tuple[Document, ...]], options: Options) -> str:
    settings = {"format_version": FORMAT_VERSION, **_settings(options)}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name in SPLITS:
        for document in splits[name]:
            label = os.fsencode(document.label)
            digest.update(b"\0".join([name.encode(), label, document.digest.encode()]) + b"\n")
    return digest.hexdigest()


def _settings(options: Options) -> dict[str, int | float]:
    """The options that decide the contents."""
    return {
        "vocab_size": options.vocab_size,
        "held_out": float(options.held_out),
        "seed": options.seed,
    }


def _train(documents: Sequence[Document], options: Options, progress: Progress) -> Tokenizer:
    """Train on the training split alone: the held-out text must not shape the vocabulary."""
    total = sum(document.size for document in documents)
    if total > _TOKENIZER_TRAINING_BYTES:
        # The digest as order: a fixed sample from all over the corpus.
        documents = sorted(documents, key=lambda document: document.digest)
        total = _TOKENIZER_TRAINING_BYTES

    def texts() -> Iterator[str]:
        done = 0
        for document in documents:
            for piece in pieces(document.read()):
                if done >= total:
                    return
                progress("training the tokenizer", done, total)
                yield piece
                done += len(piece.encode())

    return train_tokenizer(texts(), options.vocab_size)


def _token_type(vocab_size: int) -> type[np.number]:
    # Imported here: Megatron takes seconds to load, and wrong input should be told at once.
    from megatron.core.datasets.indexed_dataset import DType

    dtype: type[np.number] = DType.optimal_dtype(vocab_size)
    return dtype


def _write_split(
    prefix: Path,
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    dtype: type[np.number],
    progress: Progress,
) -> SplitInfo:
    """Encode and write one split, a batch in memory at a time."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    size = sum(document.size for document in documents)
    counts = np.zeros(tokenizer.get_vocab_size(), dtype=np.int64)
    done = 0
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    # Closed on failure too: some network file systems cannot delete a folder with an open file.
    with closing(builder.data_file):
        vectors = encode(tokenizer, (document.read() for document in documents))
        for document, tokens in zip(documents, vectors, strict=True):
            builder.add_document(tokens, [len(tokens)])
            counts += np.bincount(tokens, minlength=len(counts))
            done += document.size
            progress(f"encoding {prefix.name}", done, size)
        builder.finalize(f"{prefix}.idx")
    tokens_written = int(counts.sum())
    _require_tokens(prefix.name, tokens_written)
    return SplitInfo(len(documents), tokens_written, size, _entropy(counts))


def _entropy(counts: np.ndarray) -> float:
    """Entropy in nats of the distribution with these counts."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def _require_tokens(split: str, tokens: int) -> None:
    if tokens < _MINIMUM_TOKENS[split]:
        remedy = "" if split == "train" else " or a larger --held-out"
        raise DataError(
            f"too little text: the {split} split comes to no more than {tokens} tokens and needs"
            f" {_MINIMUM_TOKENS[split]}: give more text{remedy}"
        )


def _describe(
    folder: Path,
    corpus: Corpus,
    options: Options,
    fingerprint: str,
    tokenizer: Tokenizer,
    dtype: type[np.number],
    splits: dict[str, SplitInfo],
) -> DatasetInfo:
    return DatasetInfo(
        path=folder,
        fingerprint=fingerprint,
        sources=corpus.sources,
        options=_settings(options),
        files=corpus.files,
        vocab_size=tokenizer.get_vocab_size(),
        eod_id=tokenizer.get_vocab_size() - 1,
        dtype=dtype.__name__,
        splits=splits,
        sizes={name: (folder / name).stat().st_size for name in DATA_FILES},
    )
