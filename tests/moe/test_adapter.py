"""The bias update on real ranks: equal to Megatron's own for its rule, and where that gives up."""

from __future__ import annotations

import importlib
from argparse import Namespace
from typing import Any

import pytest
import torch
from support.ranks import run_ranks

from megatron_ext.moe.bias import updated_expert_bias

RATE = 1e-3


class Router(torch.nn.Module):
    """What the update reads and writes of Megatron's router."""

    def __init__(self, layer_number: int, counts: list[int]) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.register_buffer("local_tokens_per_expert", torch.tensor(counts, dtype=torch.float32))
        self.register_buffer("expert_bias", torch.linspace(-0.1, 0.1, len(counts)))


def counts_on(rank: int, layer: int, experts: int) -> list[int]:
    return [(rank + 2) * (expert + layer) % 7 for expert in range(experts)]


def layers(rank: int, *experts: int) -> list[Router]:
    return [Router(i, counts_on(rank, i, number)) for i, number in enumerate(experts, start=1)]


def update(rule: str, *experts: int) -> tuple[list[list[float]], list[list[float]], dict]:
    """On a rank: (our biases, Megatron's where it can, the load kept for the metrics)."""
    # By name: the package holds a function of the module's name in its place.
    finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias

    from megatron_ext.moe.adapter import Settings, latest_load

    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.group.WORLD
    Settings.rule, Settings.keep_load = rule, True
    theirs = []
    if len(set(experts)) == 1:
        stacked = layers(rank, *experts)
        theirs = get_updated_expert_bias(
            torch.stack([router.local_tokens_per_expert for router in stacked]),
            torch.stack([router.expert_bias for router in stacked]),
            RATE,
            tp_dp_cp_group=world,
        ).tolist()

    routers = layers(rank, *experts)
    frozen, evaluated = layers(rank, 4, 4)
    frozen.frozen_expert_bias = True
    evaluated.eval()
    untouched = frozen.expert_bias.clone()
    chunks = [torch.nn.ModuleList(routers[:1]), torch.nn.ModuleList([*routers[1:], frozen])]
    chunks.append(torch.nn.ModuleList([evaluated]))
    chunks[-1].training = True
    config = Namespace(moe_router_bias_update_rate=RATE)
    finalize._update_router_expert_bias(chunks, config, tp_dp_cp_group=world)
    assert torch.equal(frozen.expert_bias, untouched)
    assert torch.equal(evaluated.expert_bias, untouched)
    ours = [router.expert_bias.tolist() for router in routers]
    return ours, theirs, {layer: load.tolist() for (_, layer), load in latest_load.items()}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sign_is_megatrons_rule_bit_for_bit(world_size: int) -> None:
    for ours, theirs, _ in run_ranks(world_size, update, "sign", 4, 4):
        assert ours == theirs


@pytest.mark.parametrize("world_size", [2, 3])
def test_layers_with_different_numbers_of_experts_follow_the_sum_over_ranks(
    world_size: int,
) -> None:
    experts = (4, 8)
    results: list[Any] = run_ranks(world_size, update, "centered-sign", *experts)
    for ours, _, load in results:
        for layer, number in enumerate(experts, start=1):
            counts = torch.tensor([counts_on(rank, layer, number) for rank in range(world_size)])
            total = counts.sum(0)
            bias = torch.linspace(-0.1, 0.1, number)
            expected = updated_expert_bias(total, bias, RATE, "centered-sign")
            assert ours[layer - 1] == expected.tolist()
            assert load[layer] == total.tolist()


def update_without_flags() -> bool:
    """On a rank of a loop that has Megatron's core alone: no arguments were ever parsed."""
    finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    torch.distributed.init_process_group("gloo")
    router = layers(0, 4)[0]
    before = router.expert_bias.clone()
    finalize._update_router_expert_bias(
        [torch.nn.ModuleList([router])],
        Namespace(moe_router_bias_update_rate=RATE),
        torch.distributed.group.WORLD,
    )
    return not torch.equal(router.expert_bias, before)


def test_without_flags_megatrons_own_function_runs() -> None:
    assert run_ranks(1, update_without_flags) == [True]
