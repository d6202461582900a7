"""Megatron's expert-bias update with our rules; the load it saw is kept for the metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_ext.moe.bias import Rule, updated_expert_bias

Layer = tuple[bool, int]
"""(whether the layer predicts further tokens, its number): both kinds are numbered from 1."""


class Settings:
    """What the flags asked for. As it is here, Megatron's own function is called."""

    rule: Rule = "sign"
    keep_load: bool = False


latest_load: dict[Layer, torch.Tensor] = {}
"""(experts,) int64 tokens of the latest global batch, of the layers of this pipeline stage."""


def update_router_expert_bias(original: Callable) -> Callable:
    """The replacement of Megatron's function; same arguments.

    Unlike the original it takes layers with different numbers of experts, and still reduces
    all of them at once.
    """

    def _update_router_expert_bias(
        model: list[torch.nn.Module], config: Any, tp_dp_cp_group: Any = None
    ) -> None:
        if Settings.rule == "sign" and not Settings.keep_load:
            return original(model, config, tp_dp_cp_group)
        from megatron.core import parallel_state

        routers = list(_routers(model))
        if not routers:
            return None
        group = tp_dp_cp_group or parallel_state.get_tensor_and_data_parallel_group(
            with_context_parallel=True
        )
        # Counts are whole numbers in fp32 buffers: summed as integers they stay exact.
        load = torch.cat([router.local_tokens_per_expert for router in routers]).long()
        torch.distributed.all_reduce(load, group=group)
        layers = load.split([router.expert_bias.numel() for router in routers])
        for router, tokens in zip(routers, layers, strict=True):
            router.expert_bias.copy_(
                updated_expert_bias(
                    tokens, router.expert_bias, config.moe_router_bias_update_rate, Settings.rule
                )
            )
            latest_load[getattr(router, "is_mtp_layer", False), router.layer_number] = tokens
        return None

    return _update_router_expert_bias


def _routers(model: list[torch.nn.Module]) -> Iterator[Any]:
    """Routers whose bias is trained, in the order of their layers (a distillation teacher's and
    a frozen one are not)."""
    for chunk in model:
        for module in chunk.modules():
            if (
                hasattr(module, "expert_bias")
                and module.training
                and not getattr(module, "frozen_expert_bias", False)
            ):
                yield module
