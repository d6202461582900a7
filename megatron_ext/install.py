"""Every point where this extension touches Megatron or torch: one table, checked and reversible.

No other file of the package replaces a name of theirs. A row names its target, the function that
makes the replacement from the original, the reason, and the parameters the original must have.

``python -m megatron_ext.install`` prints the table and what is active on this machine.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

CHECKED_MEGATRON = "0.19.2"
"""The megatron-core release that the signatures in the table were read from."""


class IncompatibleMegatron(RuntimeError):
    """An installed function does not have the parameters that its replacement was written for."""


def resolve(path: str) -> Any:
    """The object at ``"package.module:attribute.attribute"``.

    Raises ImportError or AttributeError when there is none.
    """
    module, _, attributes = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in attributes.split("."):
        found = getattr(found, name)
    return found


def _owner(path: str) -> tuple[Any, str]:
    parent, _, name = path.rpartition("." if "." in path.partition(":")[2] else ":")
    return (resolve(parent) if ":" in parent else importlib.import_module(parent)), name


@dataclass(frozen=True)
class Name:
    """One replaced name."""

    target: str
    """Where the original is found: ``"package.module:attribute"``."""

    make: str
    """Our function ``original -> replacement``, as ``"package.module:function"``."""

    why: str
    """What fails, or is silently wrong, without the replacement."""

    on: Literal["always", "cpu"] = "always"
    """Where it applies: everywhere, or only where the device stand-in carries Megatron."""

    parameters: str | None = None
    """Names of the original's parameters in CHECKED_MEGATRON; None for a name without any."""

    def check(self) -> str | None:
        """What is wrong with the installed original, or None."""
        try:
            original = resolve(self.target)
        except (ImportError, AttributeError) as error:
            return f"{self.target} does not exist here ({error})"
        if self.parameters is None:
            return None
        found = ", ".join(inspect.signature(original).parameters)
        if found != self.parameters:
            return f"{self.target}({found}) was written for ({self.parameters})"
        return None

    def put(self) -> Callable[[], None]:
        """Replaces the name. Returns the function that puts the original back."""
        owner, name = _owner(self.target)
        inherited = name not in vars(owner)
        # A class's __dict__ keeps a staticmethod what it is; getattr would unwrap it.
        original = getattr(owner, name) if inherited else vars(owner)[name]
        replacement = resolve(self.make)(original)
        setattr(owner, name, replacement)

        def put_back() -> None:
            if vars(owner).get(name) is not replacement:
                warnings.warn(f"{self.target} was replaced again by others: left", stacklevel=3)
            elif inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, original)

        return put_back


@dataclass(frozen=True)
class Context:
    """One context that stays entered while the extension is installed."""

    target: str
    """What it acts on, in words."""

    make: str
    """Our context manager, as ``"package.module:callable"``."""

    why: str
    on: Literal["always", "cpu"] = "always"

    def check(self) -> None:
        return None

    def put(self) -> Callable[[], None]:
        context: AbstractContextManager[Any] = resolve(self.make)()
        context.__enter__()

        def leave() -> None:
            context.__exit__(None, None, None)

        return leave


_CPU_TORCH = "megatron_ext.cpu.torch_names"
_PLACEMENT = "megatron_ext.cpu.placement"
_PLACES = "Megatron places tensors on 'cuda', on its index, or on torch.device('cuda')"
_CPU_MEGATRON = "megatron_ext.cpu.megatron_names"
_ADAM = "megatron_ext.torch_adam"
_DISTRIBUTED_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"

TABLE: tuple[Name | Context, ...] = (
    # torch, where there is no GPU: these come first, before any Megatron module is imported.
    Name(
        "torch:cuda",
        f"{_CPU_TORCH}:cuda",
        "Megatron asks torch.cuda for devices, streams, events, memory and random states",
        on="cpu",
    ),
    Name(
        "torch.accelerator:is_available",
        f"{_CPU_TORCH}:never",
        "torch would look for a CUDA stream behind the stand-in: optimizers, pinned memory",
        on="cpu",
    ),
    Name(
        "torch.accelerator:current_accelerator",
        f"{_CPU_TORCH}:nothing",
        "the same, in the optimizers' health check for graph capture",
        on="cpu",
    ),
    Name(
        "torch:compile",
        f"{_CPU_TORCH}:do_not_compile",
        "Megatron's jit_fuser: inductor looks for CUDA, and compiles for minutes before step 1",
        on="cpu",
    ),
    Name(
        "torch.distributed:all_gather",
        f"{_CPU_TORCH}:all_gather",
        "gloo refuses pieces of different sizes: experts under sequence parallelism",
        on="cpu",
        parameters="tensor_list, tensor, group, async_op",
    ),
    *(
        Name(f"torch:{name}", f"{_PLACEMENT}:takes_device", _PLACES, on="cpu")
        for name in (
            *("arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye"),
            *("full", "full_like", "linspace", "logspace", "ones", "ones_like", "rand"),
            *("rand_like", "randint", "randint_like", "randn", "randn_like", "randperm"),
            *("tensor", "tril_indices", "triu_indices", "zeros", "zeros_like"),
            *("Tensor.new_empty", "Tensor.new_full", "Tensor.new_ones", "Tensor.new_tensor"),
            "Tensor.new_zeros",
        )
    ),
    Name("torch:Tensor.to", f"{_PLACEMENT}:to", _PLACES, on="cpu"),
    Name("torch:Tensor.cuda", f"{_PLACEMENT}:stay", _PLACES, on="cpu"),
    Name("torch:Tensor.pin_memory", f"{_PLACEMENT}:stay", "only a GPU can pin memory", on="cpu"),
    Name("torch:Tensor.is_pinned", f"{_CPU_TORCH}:never", "the same", on="cpu"),
    Name("torch:Tensor.record_stream", f"{_CPU_TORCH}:nothing", "there is no stream", on="cpu"),
    Name(
        "torch:Tensor.type",
        f"{_PLACEMENT}:type_name",
        "Megatron's optimizers compare type names with 'torch.cuda.*'",
        on="cpu",
    ),
    # Megatron, where there is no GPU.
    Name(
        "megatron.core.tensor_parallel.random:_get_cuda_rng_state",
        f"{_CPU_MEGATRON}:get_rng_state",
        "the generator that random operations draw from is the CPU's",
        on="cpu",
        parameters="device, clone, graph_safe",
    ),
    Name(
        "megatron.core.tensor_parallel.random:_set_cuda_rng_state",
        f"{_CPU_MEGATRON}:set_rng_state",
        "the same; torch would queue the call until CUDA initialises, which never happens",
        on="cpu",
        parameters="new_state, device, graph_safe",
    ),
    Context(
        "log of megatron.core.tensor_parallel.random",
        "megatron_ext.cpu.megatron_names:ShareOneGenerator",
        "device and host share one generator here: the warning that they do is noise",
        on="cpu",
    ),
    Name(
        "megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
        f"{_CPU_MEGATRON}:move_split_sizes",
        "split sizes become lists only if the tensor is on a GPU, and gloo refuses tensors",
        on="cpu",
        parameters="tensor, as_numpy, record_stream",
    ),
    Name(
        "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        f"{_CPU_MEGATRON}:norm_with_sequence_parallel",
        "torch's norms lack only the mark by which their gradients are summed over TP ranks",
        on="cpu",
        parameters="cls, config, hidden_size, eps, persist_layer_norm, zero_centered_gamma, "
        "normalization",
    ),
    # Megatron, everywhere: what the wheel needs.
    Name(
        "megatron.core.datasets.utils:compile_helpers",
        "megatron_ext.wheel:use_compiled_helpers",
        "the wheel ships the compiled helpers without their Makefile: make fails and exits",
        parameters="",
    ),
    Name(
        f"{_DISTRIBUTED_OPTIMIZER}.state_dict",
        f"{_ADAM}:state_dict",
        "with torch's Adam (no TE, no apex) it fails on an optimizer that never stepped: resume",
        parameters="self",
    ),
    Name(
        f"{_DISTRIBUTED_OPTIMIZER}.load_state_dict",
        f"{_ADAM}:load_state_dict",
        "one shared step tensor goes to every parameter: Adam's bias correction runs N-fold",
        parameters="self, state_dict",
    ),
    Name(
        f"{_DISTRIBUTED_OPTIMIZER}._get_main_param_and_optimizer_states",
        f"{_ADAM}:get_states",
        "torch Adam's step leaks into the sharded checkpoint as if it were a moment",
        parameters="self, model_param",
    ),
    Name(
        f"{_DISTRIBUTED_OPTIMIZER}._set_main_param_and_optimizer_states",
        f"{_ADAM}:set_states",
        "the same on the way back, and it writes to a leaf that requires grad",
        parameters="self, model_param, tensors",
    ),
    # The extension's own features.
    Name(
        "megatron.training.arguments:parse_args",
        "megatron_ext.arguments:parse_args",
        "adds the extension's flags to any script; gives the parser errors of one line and mends "
        "its --help",
        parameters="extra_args_provider, ignore_unknown_args",
    ),
    Name(
        "megatron.training.arguments:validate_args",
        "megatron_ext.arguments:validate_args",
        "checks the extension's flags against Megatron's once those are complete",
        parameters="args, defaults",
    ),
    Name(
        "megatron.core.distributed.finalize_model_grads:_update_router_expert_bias",
        "megatron_ext.moe.adapter:update_router_expert_bias",
        "the centred rule, and the expert load that the metrics report",
        parameters="model, config, tp_dp_cp_group",
    ),
    Name(
        "megatron.training.training:training_log",
        "megatron_ext.metrics.adapter:training_log",
        "writes the metrics of each log interval as JSON lines",
        parameters="loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, "
        "report_memory_flag, skipped_iter, grad_norm, params_norm, num_zeros_in_grad, "
        "max_attention_logit, pg_collection, is_first_iteration, seqlen_squared_sum_in_batch, "
        "total_real_tokens_in_batch",
    ),
    Name(
        "megatron.training.training:evaluate_and_print_results",
        "megatron_ext.metrics.adapter:evaluate_and_print_results",
        "evaluate is not told the iteration and the split whose loss it returns",
        parameters="prefix, forward_step_func, data_iterator, model, iteration, "
        "process_non_loss_data_func, config, verbose, write_to_tensorboard, non_loss_data_func, "
        "pg_collection, p2p_communicator",
    ),
    Name(
        "megatron.training.training:evaluate",
        "megatron_ext.metrics.adapter:evaluate",
        "writes the held-out loss beside them",
        parameters="forward_step_func, data_iterator, model, process_non_loss_data_func, config, "
        "verbose, non_loss_data_func, eval_iters, pg_collection, p2p_communicator",
    ),
)

_put_back: list[tuple[Name | Context, Callable[[], None]]] = []


def applies(row: Name | Context) -> bool:
    """Whether the row is wanted on this machine."""
    if row.on == "always":
        return True
    from megatron_ext.cpu import wanted

    return wanted()


def active() -> tuple[Name | Context, ...]:
    """The rows in force, in the order in which they were put in place."""
    return tuple(row for row, _ in _put_back)


def install() -> None:
    """Puts every row that applies in place; with one that does not fit, none."""
    if _put_back:
        return
    if "megatron.training.arguments" in sys.modules:
        warnings.warn(
            "Megatron was imported before megatron_ext.install(): what other modules took from it "
            "by name (from ... import ...) stays Megatron's",
            stacklevel=2,
        )
    try:
        problems = _put_all()
        _warn_about_unknown_version()
    except BaseException:
        uninstall()
        raise
    if problems:
        uninstall()
        raise IncompatibleMegatron(
            f"megatron_ext was written for megatron-core {CHECKED_MEGATRON}, and megatron-core "
            f"{megatron_version()} or the installed torch differs where it matters:\n  "
            + "\n  ".join(problems)
            + f"\nInstall megatron-core=={CHECKED_MEGATRON}, or a megatron_ext for yours."
        )


def _put_all() -> list[str]:
    """Puts every row that fits; what is wrong with the others.

    One by one, for importing Megatron to check a later row already needs the earlier ones.
    """
    problems = []
    for row in filter(applies, TABLE):
        problem = row.check()
        if problem:
            problems.append(problem)
        else:
            _put_back.append((row, row.put()))
    return problems


def uninstall() -> None:
    """Puts the originals back, last first."""
    while _put_back:
        _, put_back = _put_back.pop()
        put_back()


def megatron_version() -> str:
    """Release of the Megatron core that Python finds, e.g. ``"0.19.2"``."""
    version = importlib.import_module("megatron.core.package_info").__version__
    return str(version.partition("+")[0])  # the wheel appends the commit it was built from


def _warn_about_unknown_version() -> None:
    version = megatron_version()
    if version != CHECKED_MEGATRON:
        names = sum(1 for row in TABLE if isinstance(row, Name))
        warnings.warn(
            f"megatron-core {version} is unknown to megatron_ext, which was written for "
            f"{CHECKED_MEGATRON}: existence and parameters of {names} names are checked now, "
            "their behaviour is not",
            stacklevel=3,
        )


def _print_table() -> None:
    from rich.console import Console
    from rich.table import Table

    install()
    in_force = active()
    table = Table(title=f"megatron_ext on megatron-core {megatron_version()}", show_lines=True)
    for heading in ("active", "on", "target", "replacement", "why"):
        table.add_column(heading, overflow="fold")
    for row in TABLE:
        table.add_row("yes" if row in in_force else "no", row.on, row.target, row.make, row.why)
    Console().print(table)


if __name__ == "__main__":
    # Run as a module this file exists twice; the table's state lives in the imported one.
    importlib.import_module("megatron_ext.install")._print_table()
