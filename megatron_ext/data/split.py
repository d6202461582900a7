"""Which documents are trained on and which are held out."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence

from megatron_ext.data.corpus import Document, sha256
from megatron_ext.data.errors import DataError

SPLITS = ("train", "valid")


def split_documents(
    documents: Sequence[Document], held_out: float, seed: int
) -> dict[str, tuple[Document, ...]]:
    """Documents by split name, each in the order given.

    A document's side depends on its label and the seed alone: more files, other files or another
    order leave it where it is. One single document is cut by lines instead.

    Args:
        documents: distinct texts.
        held_out: share of the documents (of the characters, for a single one) to hold out.
        seed: another seed holds out other documents.

    Raises:
        DataError: a side would be empty.
    """
    if len(documents) == 1:
        train, valid = _cut_by_lines(documents[0], held_out)
        return {"train": (train,), "valid": (valid,)}
    places = [place(document.label, seed) for document in documents]
    splits = {
        "train": tuple(d for d, at in zip(documents, places, strict=True) if at >= held_out),
        "valid": tuple(d for d, at in zip(documents, places, strict=True) if at < held_out),
    }
    for name, other in (("train", "valid"), ("valid", "train")):
        if not splits[name]:
            advice = _advice(documents, held_out, seed)
            raise DataError(
                f"all {len(documents)} documents fall in the {other} split, which leaves none for"
                f" {name} (held-out share {held_out:g}, seed {seed}): {advice}"
            )
    return splits


def place(label: str, seed: int) -> float:
    """A document's fixed place in [0, 1), the same on every machine."""
    digest = hashlib.sha256(b"%d\0" % seed + os.fsencode(label)).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _advice(documents: Sequence[Document], held_out: float, seed: int) -> str:
    """A setting that is known to put something on both sides."""
    lowest = min(place(document.label, seed) for document in documents)
    # The share that holds out the lowest document, in whole per cents.
    share = (math.floor(lowest * 100) + 1) / 100
    if held_out < share <= 0.5:
        return f"try --held-out {share:g}"
    for other in range(seed + 1, seed + 10_000):
        below = [place(document.label, other) < held_out for document in documents]
        if any(below) and not all(below):
            return f"try --seed {other}"
    return "give more text, or a larger --held-out"


def _cut_by_lines(document: Document, held_out: float) -> tuple[Document, Document]:
    """The document up to a line end near ``1 - held_out`` of it, and the rest."""
    text = document.read()
    cut = text.find("\n", int(len(text) * (1 - held_out))) + 1
    if cut in (0, len(text)):
        cut = text.rfind("\n", 0, len(text) - 1) + 1
    if cut == 0:
        raise DataError(
            f"{document.path} is the only text and has a single line, so nothing can be held out:"
            " give more text"
        )
    return _part(document, text, 0, cut), _part(document, text, cut, len(text))


def _part(document: Document, text: str, start: int, stop: int) -> Document:
    part = text[start:stop]
    return Document(
        label=f"{document.label}[{start}:{stop}]",
        path=document.path,
        size=len(part.encode()),
        digest=sha256(part),
        start=start,
        stop=stop,
    )
