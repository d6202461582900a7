"""Command line: python -m megatron_ext.data --output DIR [--text PATH ...]."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from types import FrameType
from typing import NoReturn

from megatron_ext.data.corpus import left_out
from megatron_ext.data.errors import DataError
from megatron_ext.data.info import DatasetInfo
from megatron_ext.data.progress import quiet_imports


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # One line, like every other error of this tool; --help shows the usage.
        self.exit(2, f"error: {message}\n")


def main(arguments: list[str] | None = None) -> int:
    """Run the tool and return its exit status: 0 done, 2 wrong input, 128 + N on signal N."""
    parsed = _parser().parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP: leave it so
            signal.signal(number, _stop)
    quiet_imports()
    began = time.monotonic()
    try:
        from megatron_ext.data.build import Options, prepare
        from megatron_ext.data.progress import reporter

        with reporter() as progress:
            info = prepare(Options(**vars(parsed)), progress)
    except DataError as error:
        return _failed(2, f"error: {error}")
    except ModuleNotFoundError as error:
        return _failed(2, f"error: the package {error.name} is needed: pip install {error.name}")
    except OSError as error:
        return _failed(2, f"error: cannot write {parsed.output}: {error.strerror or error}")
    except KeyboardInterrupt:
        return _failed(130, "interrupted: nothing was written")

    if info.reused:
        print(f"{info.path} is up to date: same text, options and format, nothing to do")
        return 0
    print(_summary(info, time.monotonic() - began))
    return 0


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m megatron_ext.data",
        description="Turn text files into Megatron's indexed dataset, with a byte-level BPE"
        " tokenizer trained on them. Needs no GPU and downloads nothing.",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="folder of the dataset")
    parser.add_argument(
        "--text",
        nargs="+",
        default=(),
        metavar="PATH",
        help="files and folders (default: the source of this Python's standard library);"
        " hidden and binary files in folders are left out",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        default=1024,
        help="tokens, the end of document included, 257 to 65535 (default: 1024)",
    )
    parser.add_argument(
        "--held-out",
        type=float,
        default=0.05,
        help="share of the documents to hold out, above 0 and at most 0.5 (default: 0.05)",
    )
    parser.add_argument(
        "--seed", type=int, default=1234, help="decides which documents (default: 1234)"
    )
    parser.add_argument(
        "--force", action="store_true", help="replace a dataset of this tool that is there"
    )
    return parser


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    # A plain kill would leave the unfinished folder behind.
    print(f"stopped by {signal.Signals(number).name}: nothing was written", file=sys.stderr)
    sys.exit(128 + number)


def _failed(status: int, line: str) -> int:
    print(line, file=sys.stderr)
    return status


def _summary(info: DatasetInfo, seconds: float) -> str:
    lines = [
        f"{info.path} written in {seconds:.0f} s from {', '.join(info.sources)}",
        "split  documents      tokens       bytes  bytes/token  unigram entropy",
    ]
    for name, split in info.splits.items():
        bits = split.bits_per_byte(split.unigram_entropy)
        lines.append(
            f"{name}  {split.documents:9,}  {split.tokens:10,}  {split.bytes:10,}"
            f"  {split.bytes_per_token:11.3f}  {split.unigram_entropy:.3f} nats a token"
            f" = {bits:.3f} bits a byte"
        )
    if left_out(info.files):
        lines.append(f"files left out: {left_out(info.files)}")
    if info.files["replaced"]:
        lines.append(f"files with bytes that are not UTF-8, replaced: {info.files['replaced']}")
    if info.vocab_size < info.options["vocab_size"]:
        lines.append(
            f"the text holds no more than {info.vocab_size} tokens"
            f" ({info.options['vocab_size']} asked for)"
        )
    lines.append(
        f"Megatron: --train-data-path {info.train_prefix} --valid-data-path {info.valid_prefix}"
        f" --tokenizer-type NullTokenizer --vocab-size {info.vocab_size}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
