"""Megatron's flags on a machine without a GPU: defaults that fit, and what is refused by name."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from typing import Any

from megatron_ext.arguments import FlagError

DEFAULTS: dict[str, Any] = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    # Fused kernels are CUDA kernels.
    "masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "no_persist_layer_norm": True,
}
"""Megatron's defaults that need a GPU -> what carries the same computation on the CPU."""

_FUSED = "the fused kernel is a CUDA kernel"
_TE = "it is TransformerEngine's, which needs a GPU"
_GRAPH = "CUDA graphs are captured on a GPU"
_NCCL = "it is NCCL's; gloo has no counterpart"

REFUSED: dict[str, tuple[Any, str, str]] = {
    # field: (the value that is carried, flag, reason)
    "distributed_backend": ("gloo", "--distributed-backend", "only gloo runs without a GPU"),
    "transformer_impl": ("local", "--transformer-impl", _TE),
    "cross_entropy_loss_fusion": (False, "--cross-entropy-loss-fusion", _FUSED),
    "moe_permute_fusion": (False, "--moe-permute-fusion", _FUSED),
    "moe_router_fusion": (False, "--moe-router-fusion", _FUSED),
    "moe_grouped_gemm": (False, "--moe-grouped-gemm", "its grouped products are TE's, on a GPU"),
    "context_parallel_size": (
        1,
        "--context-parallel-size",
        "Megatron's local attention has no context parallelism; only TransformerEngine's has",
    ),
    "fp8": (None, "--fp8-format", _TE),
    "fp4": (None, "--fp4-format", _TE),
    "te_rng_tracker": (False, "--te-rng-tracker", _TE),
    "tp_comm_overlap": (False, "--tp-comm-overlap", _TE),
    "cuda_graph_impl": ("none", "--cuda-graph-impl", _GRAPH),
    "external_cuda_graph": (False, "--external-cuda-graph", _GRAPH),
    "enable_cuda_graph": (False, "--enable-cuda-graph", _GRAPH),
    "use_megatron_fsdp": (False, "--use-megatron-fsdp", "FSDP is not carried"),
    "use_torch_fsdp2": (False, "--use-torch-fsdp2", "FSDP is not carried"),
    "use_precision_aware_optimizer": (False, "--use-precision-aware-optimizer", _TE),
    "optimizer_cpu_offload": (False, "--optimizer-cpu-offload", "everything is on the CPU"),
    "cpu_offloading_num_layers": (0, "--cpu-offloading-num-layers", "everything is on the CPU"),
    "fine_grained_activation_offloading": (
        False,
        "--fine-grained-activation-offloading",
        "everything is on the CPU",
    ),
    "nccl_ub": (False, "--use-nccl-ub", _NCCL),
    "use_sharp": (False, "--use-sharp", _NCCL),
    "high_priority_stream_groups": ([], "--high-priority-stream-groups", _NCCL),
    "nccl_communicator_config_path": (None, "--nccl-communicator-config-path", _NCCL),
    "use_flash_attn": (False, "--use-flash-attn", _FUSED),
    "moe_enable_deepep": (False, "--moe-enable-deepep", "DeepEP needs GPUs"),
    "optimizer_cuda_graph": (False, "--optimizer-cuda-graph", _GRAPH),
    "use_fused_weighted_squared_relu": (False, "--use-fused-weighted-squared-relu", _FUSED),
    "fused_residual_rmsnorm": (False, "--fused-residual-rmsnorm", _FUSED),
    "use_transformer_engine_op_fuser": (False, "--use-transformer-engine-op-fuser", _TE),
    "use_te_activation_func": (False, "--use-te-activation-func", _TE),
    "use_kitchen_attention": (False, "--use-kitchen-attention", _FUSED),
    "layernorm_zero_centered_gamma": (False, "--apply-layernorm-1p", "torch's norms lack it"),
    "flash_decode": (False, "--flash-decode", _FUSED),
    "gpu_sniff_test_interval": (None, "--gpu-sniff-test-interval", "there is no GPU to test"),
    "moe_shared_expert_overlap": (False, "--moe-shared-expert-overlap", "it overlaps CUDA streams"),
    "overlap_moe_expert_parallel_comm": (
        False,
        "--overlap-moe-expert-parallel-comm",
        "it overlaps CUDA streams",
    ),
    "multi_latent_attention": (
        False,
        "--multi-latent-attention",
        "Megatron's local attention has one width for keys and values; only TE's has two",
    ),
    "profile": (False, "--profile", "it starts the CUDA profiler"),
    "record_memory_history": (False, "--record-memory-history", "it records CUDA's allocator"),
    "log_energy": (False, "--log-energy", "it reads the GPU's meter"),
    "perform_rl_step": (False, "--perform-rl-step", "Megatron's inference needs a GPU"),
}
"""Field -> (carried value, flag, reason). A field this Megatron does not have is passed over."""

_DISPATCHERS = ("allgather", "alltoall")
_OPTIMIZERS = ("adam", "sgd")


def set_defaults(parser: ArgumentParser) -> None:
    """Defaults only: what the user writes still counts, and is refused if it needs a GPU."""
    # Megatron insists on it with tensor parallelism, for the order of kernels on a GPU.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    known = {action.dest for action in parser._actions}
    parser.set_defaults(**{name: value for name, value in DEFAULTS.items() if name in known})


def refuse(args: Namespace) -> None:
    """Raises FlagError for the first flag that cannot be carried."""
    for field, (carried, flag, reason) in REFUSED.items():
        value = getattr(args, field, carried)
        if value != carried and value:
            shown = flag if value is True else f"{flag} {value}"
            raise FlagError(f"{shown} cannot be carried without a GPU: {reason}. Leave it out")
    if args.num_experts and args.moe_token_dispatcher_type not in _DISPATCHERS:
        raise FlagError(
            f"--moe-token-dispatcher-type {args.moe_token_dispatcher_type} needs GPUs: use "
            + " or ".join(_DISPATCHERS)
        )
    if args.optimizer not in _OPTIMIZERS:
        raise FlagError(
            f"--optimizer {args.optimizer} cannot be carried without a GPU: use "
            + " or ".join(_OPTIMIZERS)
        )
