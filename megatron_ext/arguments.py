"""The extension's flags, and everything that is refused before training starts.

One frozen dataclass per component; a field is a flag (``moe_router_bias_update_rule`` is
``--moe-router-bias-update-rule``), its docstring the help. Annotations are evaluated here (no
``__future__`` import): Megatron makes the flags of them.
"""

import argparse
import difflib
import functools
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NoReturn

from megatron_ext.moe import adapter as moe
from megatron_ext.moe.bias import Rule

USAGE_ERROR = 2
"""Exit status for bad input, argparse's own."""


class FlagError(ValueError):
    """A flag that cannot be honoured. The message names the flag, its value and what to do."""


@dataclass(frozen=True)
class ExpertBalanceConfig:
    """Auxiliary-loss-free balance of a mixture of experts."""

    title: ClassVar[str] = "megatron_ext: expert balance"

    moe_router_bias_update_rule: Rule = "sign"
    """How the router's expert bias follows the load: sign is Megatron's own rule (DeepSeek-V3),
    centered-sign (Moonlight) keeps the mean of the bias where it is. Needs
    --moe-router-enable-expert-bias."""

    def check(self, args: Namespace) -> None:
        if self.moe_router_bias_update_rule == "sign":
            return
        if not args.moe_router_enable_expert_bias:
            raise FlagError(
                f"--moe-router-bias-update-rule {self.moe_router_bias_update_rule} changes a bias "
                "that is not there: add --moe-router-enable-expert-bias"
            )


@dataclass(frozen=True)
class MetricsConfig:
    """Metrics as JSON lines, for programs; Megatron's log stays as it is."""

    title: ClassVar[str] = "megatron_ext: metrics"

    metrics_dir: str | None = None
    """Folder for metrics.jsonl (loss, grad norm, learning rate and expert load per log interval,
    held-out loss per evaluation; the same bits for the same seed) and timing.jsonl."""

    def check(self, args: Namespace) -> None:
        if self.metrics_dir == "":
            raise FlagError("--metrics-dir is empty: name a folder, or leave the flag out")

    def make_folder(self) -> None:
        if self.metrics_dir is None:
            return
        try:
            os.makedirs(self.metrics_dir, exist_ok=True)
        except OSError as error:
            raise FlagError(
                f"--metrics-dir {self.metrics_dir} cannot be made: {error.strerror}"
            ) from error
        if not os.access(self.metrics_dir, os.W_OK | os.X_OK):
            raise FlagError(f"--metrics-dir {self.metrics_dir} cannot be written: permissions")


COMPONENTS: tuple[Any, ...] = (ExpertBalanceConfig, MetricsConfig)


def config_from_args(component: Any, args: Namespace) -> Any:
    """The component's dataclass filled from Megatron's parsed arguments."""
    names = [field.name for field in fields(component) if hasattr(args, field.name)]
    return component(**{name: getattr(args, name) for name in names})


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds the extension's groups to Megatron's parser, and errors of one line."""
    from megatron.training.argument_utils import ArgumentGroupFactory

    for component in COMPONENTS:
        ArgumentGroupFactory(component).build_group(parser, title=component.title)
    _make_help_printable(parser)
    parser.error = functools.partial(_one_line_error, parser)  # type: ignore[method-assign]
    return parser


def check(args: Namespace) -> None:
    """Raises FlagError for what cannot work. ``args`` as parsed, Megatron's checks yet to come."""
    stages = args.pipeline_model_parallel_size
    # With a layout of the user's own, stages may hold the embedding or the loss alone.
    layers = None if args.pipeline_model_parallel_layout else args.num_layers
    if layers is not None:
        layers += args.account_for_embedding_in_pipeline_split
        layers += args.account_for_loss_in_pipeline_split
        if stages > layers:
            raise FlagError(
                f"--pipeline-model-parallel-size {stages} leaves stages without a layer: there "
                f"are {layers} (--num-layers); use at most {layers} stages"
            )
    decay = args.lr_decay_iters or args.train_iters
    if args.lr_warmup_iters and decay and args.lr_warmup_iters >= decay:
        raise FlagError(
            f"--lr-warmup-iters {args.lr_warmup_iters} leaves no iteration to decay in: use less "
            f"than {decay} (--lr-decay-iters, or --train-iters without it)"
        )
    for component in COMPONENTS:
        config_from_args(component, args).check(args)


def parse_args(original: Callable) -> Callable:
    """Megatron's parser with our flags; with the stand-in, its defaults and refusals too."""

    @functools.wraps(original)
    def parse_args(
        extra_args_provider: Callable | None = None, ignore_unknown_args: bool = False
    ) -> Namespace:
        from megatron_ext import cpu

        def all_arguments(parser: ArgumentParser) -> ArgumentParser:
            if extra_args_provider is not None:
                parser = extra_args_provider(parser)
            add_arguments(parser)
            if cpu.wanted():
                from megatron_ext.cpu import flags

                flags.set_defaults(parser)
                if is_first_rank_here():
                    print(f"megatron_ext: {cpu.NOTICE}", flush=True)
            return parser

        return original(all_arguments, ignore_unknown_args)

    return parse_args


def validate_args(original: Callable) -> Callable:
    """Our checks around Megatron's; a refusal of ours ends the run with one line."""

    @functools.wraps(original)
    def validate_args(args: Namespace, *defaults: Any, **more: Any) -> Any:
        from megatron_ext import cpu

        try:
            check(args)
            if cpu.wanted():
                from megatron_ext.cpu import flags

                flags.refuse(args)
        except FlagError as error:
            fail(str(error), everywhere=False)
        validated = original(args, *defaults, **more)
        metrics = config_from_args(MetricsConfig, args)
        try:
            metrics.make_folder()
        except FlagError as error:
            fail(str(error))
        balance = config_from_args(ExpertBalanceConfig, args)
        moe.Settings.rule = balance.moe_router_bias_update_rule
        moe.Settings.keep_load = metrics.metrics_dir is not None
        return validated

    return validate_args


def fail(message: str, everywhere: bool = True) -> NoReturn:
    """Ends this rank with exit status 2 and one line.

    ``everywhere=False`` is for what every rank finds alike: rank 0 says it for all.
    """
    rank = os.environ.get("RANK", "0")
    if rank == "0":
        print(f"megatron_ext: error: {message}", file=sys.stderr, flush=True)
    elif everywhere:
        print(f"megatron_ext: error: rank {rank}: {message}", file=sys.stderr, flush=True)
    raise SystemExit(USAGE_ERROR)


def is_first_rank_here() -> bool:
    """Whether this process speaks for its machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _one_line_error(parser: ArgumentParser, message: str) -> NoReturn:
    """argparse would print the usage of a thousand flags first."""
    prefix = "unrecognized arguments: "
    if message.startswith(prefix):
        first = message.removeprefix(prefix).split()[0].partition("=")[0]
        near = difflib.get_close_matches(first, _flags(parser), n=1)
        message += f" (did you mean {near[0]}?)" if near else " (--help lists them all)"
    fail(message, everywhere=False)


def _make_help_printable(parser: ArgumentParser) -> None:
    """argparse reads ``%`` in a help text as a format; Megatron 0.19.2 has one that is none, so
    that its own ``--help`` ends in a traceback."""
    for action in parser._actions:
        try:
            _ = (action.help or "") % {**vars(action), "prog": parser.prog}
        except (KeyError, TypeError, ValueError):
            action.help = str(action.help).replace("%", "%%")


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    return [flag for action in parser._actions for flag in action.option_strings]
