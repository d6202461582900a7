"""A dataset is exact, repeatable, and either complete or not there."""

import json
import os
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

from megatron_ext.data import DataError, DatasetInfo, Options, load_info, load_tokenizer, prepare
from megatron_ext.data import build as build_module


@pytest.fixture
def options(folder: Path, tmp_path: Path) -> Options:
    return Options(output=tmp_path / "out" / "set", text=[folder], vocab_size=400, held_out=0.2)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def decoded(info: DatasetInfo, split: str) -> list[str]:
    tokenizer = load_tokenizer(info.tokenizer_path)
    texts = []
    for tokens in IndexedDataset(str(info.path / split)):
        assert tokens[-1] == info.eod_id and (tokens[:-1] < info.eod_id).all()
        texts.append(tokenizer.decode(tokens[:-1].tolist(), skip_special_tokens=False))
    return texts


def test_megatron_reads_the_very_text_back(options: Options, texts: dict[str, str]) -> None:
    info = prepare(options)
    train, valid = decoded(info, "train"), decoded(info, "valid")
    assert sorted(train + valid) == sorted(texts.values())
    assert len(train) == info.splits["train"].documents
    assert len(valid) == info.splits["valid"].documents
    assert info.vocab_size == 400 and info.eod_id == 399 and not info.reused
    dataset = IndexedDataset(info.train_prefix)
    assert dataset.index.dtype.__name__ == info.dtype == "uint16"
    assert len(dataset.document_indices) == len(dataset) + 1


def test_a_large_vocabulary_takes_four_bytes(options: Options) -> None:
    # The text cannot fill such a vocabulary, so the type is asked for directly.
    assert build_module._token_type(65499) is np.uint16
    assert build_module._token_type(65535) is np.int32


def test_one_file_is_cut_and_comes_back(options: Options, texts: dict[str, str]) -> None:
    file = Path(options.text[0]) / "a/00.txt"
    whole = "\n".join(texts.values())
    file.write_bytes(whole.encode())
    info = prepare(replace(options, text=[file]))
    (train,), (valid,) = decoded(info, "train"), decoded(info, "valid")
    assert train + valid == whole
    assert info.splits["valid"].bytes / len(whole.encode()) == pytest.approx(0.2, abs=0.02)


def test_the_numbers_against_independent_ones(options: Options) -> None:
    info = prepare(options)
    for name, prefix in (("train", info.train_prefix), ("valid", info.valid_prefix)):
        split = info.splits[name]
        tokens = np.fromfile(f"{prefix}.bin", dtype=np.uint16)
        _, counts = np.unique(tokens, return_counts=True)
        size = sum(len(text.encode()) for text in decoded(info, name))
        assert split.unigram_entropy == pytest.approx(scipy.stats.entropy(counts), rel=1e-12)
        assert (split.tokens, split.bytes) == (len(tokens), size)
        assert split.bytes_per_token == size / len(tokens)
        bits = scipy.stats.entropy(counts, base=2) * len(tokens) / size
        assert split.bits_per_byte(split.unigram_entropy) == pytest.approx(bits, rel=1e-12)
    stored = json.loads((info.path / "dataset.json").read_text())
    assert stored["splits"]["valid"]["unigram_entropy_nats"] == info.splits["valid"].unigram_entropy
    assert str(info.path.parent) not in json.dumps(stored)


def test_copies_do_not_leak_held_out_text(options: Options, texts: dict[str, str]) -> None:
    (source,) = map(Path, options.text)
    for name, text in texts.items():
        copy = source / "copies" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(text.encode())
    info = prepare(options)
    train, valid = decoded(info, "train"), decoded(info, "valid")
    assert sorted(train + valid) == sorted(texts.values())
    assert info.files["duplicate"] == len(texts)


def test_held_out_text_does_not_shape_the_tokenizer(options: Options) -> None:
    (source,) = map(Path, options.text)
    before = prepare(options)
    held_out = set(decoded(before, "valid"))
    for file in source.rglob("*.txt"):
        if file.read_bytes().decode() in held_out:
            file.write_text("quite different words here " * 20 + file.name)
    after = prepare(replace(options, output=before.path.with_name("other")))
    assert after.tokenizer_path.read_bytes() == before.tokenizer_path.read_bytes()
    assert contents(after.path)["train.bin"] == contents(before.path)["train.bin"]
    assert contents(after.path)["valid.bin"] != contents(before.path)["valid.bin"]


def test_a_corpus_above_the_training_sample(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prepare(options)
    monkeypatch.setattr(build_module, "_TOKENIZER_TRAINING_BYTES", 5000)
    some = [prepare(replace(options, output=whole.path.with_name(name))) for name in "ab"]
    assert contents(some[0].path) == contents(some[1].path)
    assert some[0].tokenizer_path.read_bytes() != whole.tokenizer_path.read_bytes()
    assert sorted(decoded(some[0], "train")) == sorted(decoded(whole, "train"))


def test_two_builds_are_byte_identical(options: Options, folder: Path, tmp_path: Path) -> None:
    first = prepare(options)
    (tmp_path / "elsewhere").mkdir()
    moved = folder.rename(tmp_path / "elsewhere" / folder.name)
    second = prepare(replace(options, output=tmp_path / "second", text=[moved]))
    assert contents(first.path) == contents(second.path)
    assert set(contents(first.path)) == {
        *("train.bin", "train.idx", "valid.bin", "valid.idx", "tokenizer.json", "dataset.json")
    }


def test_the_same_again_is_reused(options: Options) -> None:
    first = prepare(options)
    stages: list[str] = []
    second = prepare(options, lambda stage, done, total: stages.append(stage))
    assert second == replace(first, reused=True)
    assert set(stages) == {"reading text"}
    assert load_info(options.output) == first


@pytest.mark.parametrize("change", ["vocabulary", "share", "seed", "text", "name"])
def test_anything_else_needs_force(options: Options, change: str) -> None:
    info = prepare(options)
    before = contents(info.path)
    (source,) = map(Path, options.text)
    if change == "text":
        (source / "a/00.txt").write_text("changed " * 50)
    elif change == "name":
        (source / "a/00.txt").rename(source / "a/renamed.txt")
    other = {
        "vocabulary": replace(options, vocab_size=300),
        "share": replace(options, held_out=0.3),
        "seed": replace(options, seed=7),
    }.get(change, options)
    with pytest.raises(DataError, match="replace it with --force"):
        prepare(other)
    assert contents(info.path) == before
    assert not prepare(replace(other, force=True)).reused
    assert contents(info.path) != before
    assert os.listdir(info.path.parent) == [info.path.name]


def test_a_damaged_dataset_is_noticed_and_can_be_replaced(options: Options) -> None:
    info = prepare(options)
    whole = contents(info.path)
    (info.path / "train.bin").write_bytes(whole["train.bin"][:-2])
    for attempt in (lambda: prepare(options), lambda: load_info(info.path)):
        with pytest.raises(DataError, match=r"train\.bin has \d+ bytes.*--force"):
            attempt()
    (info.path / "dataset.json").write_text('{"format": "megatron_ext.data", "format_version": 1}')
    with pytest.raises(DataError, match=r"damaged .*--force"):
        load_info(info.path)
    (info.path / "dataset.json").write_text('{"format": "megatron_ext.data", "format_version": 0}')
    with pytest.raises(DataError, match=r"format version 0.*--force"):
        load_info(info.path)
    prepare(replace(options, force=True))
    assert contents(info.path) == whole


def test_force_clears_megatrons_cache_but_nothing_else(options: Options) -> None:
    info = prepare(options)
    (info.path / "cache").mkdir()
    (info.path / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"also holds notes\.txt"):
        prepare(replace(options, force=True))
    (info.path / "notes.txt").unlink()
    prepare(replace(options, force=True))
    assert not (info.path / "cache").exists()


def test_a_folder_of_somebody_else_is_left_alone(options: Options) -> None:
    output = Path(options.output)
    output.mkdir(parents=True)
    for name in ("notes.txt", "dataset.json"):  # any tool may have a dataset.json
        (output / name).write_text("{}")
        for force in (False, True):
            with pytest.raises(DataError, match="not made by this tool"):
                prepare(replace(options, force=force))
        assert list(contents(output)) == [name]
        (output / name).unlink()
    assert prepare(options).path == output  # an empty folder is fine


def test_places_that_cannot_be_renamed_over(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = Path(options.output)
    output.mkdir(parents=True)
    monkeypatch.chdir(output)
    with pytest.raises(DataError, match="is the current folder"):
        prepare(replace(options, output="."))
    with pytest.raises(DataError, match="is a mount point"):
        prepare(replace(options, output="/proc"))


def test_the_output_may_lie_inside_the_text(options: Options, folder: Path) -> None:
    inside = replace(options, output=folder / "set")
    assert not prepare(inside).reused
    assert prepare(inside).reused


def test_a_link_to_the_output_is_followed(options: Options, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    prepare(replace(options, output=tmp_path / "link"))
    assert (tmp_path / "link").is_symlink()
    assert load_info(tmp_path / "target").vocab_size == 400


@pytest.mark.parametrize(
    "stage", ["reading", "training", "loading", "encoding train", "encoding v"]
)
@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_stopped_at_any_stage_nothing_is_left(
    options: Options, tmp_path: Path, stage: str, kind: type[BaseException]
) -> None:
    def stop(now: str, done: int, total: int) -> None:
        if now.startswith(stage):
            raise kind("stop")

    before = sorted(tmp_path.iterdir())
    with pytest.raises(kind, match="stop"):
        prepare(options, stop)
    assert sorted(tmp_path.iterdir()) == before


def test_a_failed_rebuild_leaves_the_older_dataset(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = prepare(options)
    before = contents(info.path)
    again = replace(options, seed=7, force=True)

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "encoding valid":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(again, stop)
    assert contents(info.path) == before

    rename = os.rename

    def fail_into_place(source: Path, target: Path) -> None:
        if target == info.path and not str(source).endswith("-older"):
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail_into_place)
    with pytest.raises(OSError, match="Input/output"):
        prepare(again)
    assert contents(info.path) == before
    assert os.listdir(info.path.parent) == [info.path.name]


@pytest.mark.parametrize("limit", [2_000, 9_000, 20_000])
def test_no_room_to_write_leaves_nothing(options: Options, tmp_path: Path, limit: int) -> None:
    # A real failing write: this process may not make files longer than ``limit`` bytes.
    before = sorted(tmp_path.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            prepare(options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("seed", [1234, 7])
def test_another_process_may_be_first(options: Options, seed: int) -> None:
    """The slower of two processes uses what the faster one made, unless that is another dataset."""
    done: list[DatasetInfo] = []

    def overtaken(stage: str, *_: int) -> None:
        if stage == "encoding valid" and not done:
            done.append(prepare(replace(options, seed=seed)))

    if seed == options.seed:
        assert prepare(options, overtaken) == replace(done[0], reused=True)
    else:
        with pytest.raises(DataError, match="--force"):
            prepare(options, overtaken)
    assert load_info(done[0].path) == done[0]
    assert os.listdir(done[0].path.parent) == [done[0].path.name]


def test_too_little_text(options: Options, tmp_path: Path) -> None:
    small = tmp_path / "small.txt"
    small.write_text("one\ntwo\n")
    with pytest.raises(DataError, match="too little text"):
        prepare(replace(options, text=[small]))
    # Bytes enough, but the vocabulary makes few tokens of them: known only after encoding.
    small.write_text(("a" * 1000 + "\n") * 10)
    with pytest.raises(DataError, match="too little text"):
        prepare(replace(options, text=[small]))
    assert not Path(options.output).parent.exists()


def test_no_dataset_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no dataset in .*python -m megatron_ext\.data"):
        load_info(tmp_path)


def test_megatron_samples_from_it(options: Options, tmp_path: Path) -> None:
    """Through the path training takes: every sample is a window of the dataset's tokens."""
    info = prepare(options)
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=32,
        blend_per_split=[([info.train_prefix], None), ([info.valid_prefix], None), None],
        path_to_cache=str(tmp_path / "cache"),
        tokenizer=NullTokenizer(info.vocab_size),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        mid_level_dataset_surplus=0.005,
    )
    assert config.tokenizer.eod == info.eod_id
    build: Callable[[], list[GPTDataset]] = BlendedMegatronDatasetBuilder(
        GPTDataset, [20, 5, 0], lambda: True, config
    ).build
    train, valid, _ = build()
    assert len(train) >= 20 and len(valid) >= 5
    document = np.fromfile(f"{info.train_prefix}.bin", dtype=np.uint16).astype(np.int64)
    known = set(zip(document[:-1].tolist(), document[1:].tolist(), strict=True))
    pairs = [
        pair
        for index in range(20)
        for sample in [train[index]]
        for pair in zip(sample["tokens"].tolist(), sample["labels"].tolist(), strict=True)
        if pair[0] != info.eod_id  # documents are shuffled: what follows an end is another one
    ]
    assert pairs and set(pairs) <= known
