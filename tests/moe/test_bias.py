"""The expert-bias rules against values worked out by hand and against Megatron's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.moe.bias import updated_expert_bias
from megatron_ext.moe.load import max_violation

RATE = 1e-3


def test_centered_sign_leaves_the_sum_of_the_bias_unchanged() -> None:
    counts = torch.tensor([1, 1, 1, 97])
    bias = torch.zeros(4, dtype=torch.float64)
    for _ in range(3):
        bias = updated_expert_bias(counts, bias, RATE, "centered-sign")
    # Signs (+1, +1, +1, -1), mean 1/2: three steps of u * (1/2, 1/2, 1/2, -3/2).
    expected = torch.tensor([1.5e-3, 1.5e-3, 1.5e-3, -4.5e-3], dtype=torch.float64)
    torch.testing.assert_close(bias, expected, rtol=1e-15, atol=0)
    assert bias.sum().item() == pytest.approx(0, abs=1e-18)


def test_sign_drifts_as_megatrons_does() -> None:
    counts = torch.tensor([1, 1, 1, 97])
    bias = torch.zeros(4, dtype=torch.float64)
    for _ in range(3):
        bias = updated_expert_bias(counts, bias, RATE, "sign")
    expected = torch.tensor([3e-3, 3e-3, 3e-3, -3e-3], dtype=torch.float64)
    torch.testing.assert_close(bias, expected, rtol=1e-15, atol=0)


@pytest.mark.parametrize("rule", ["sign", "centered-sign"])
@pytest.mark.parametrize("count", [0, 1, 7, 2**24 + 1])
def test_equal_counts_leave_the_bias_unchanged(rule: str, count: int) -> None:
    bias = torch.tensor([0.25, -0.5, 0.125])
    counts = torch.full((3,), count)
    assert torch.equal(updated_expert_bias(counts, bias, RATE, rule), bias)


def test_counts_above_2_24_are_told_apart() -> None:
    # As fp32, the form of Megatron's counters, both are 2**24 and no bias would move.
    counts = torch.tensor([2**24, 2**24 + 1])
    bias = updated_expert_bias(counts, torch.zeros(2), 1.0, "sign")
    assert bias.tolist() == [1.0, -1.0]


@given(
    counts=st.lists(
        st.lists(st.integers(0, 10_000), min_size=5, max_size=5), min_size=1, max_size=4
    ),
    rate=st.floats(0, 1),
)
def test_layers_are_independent_and_the_centred_sum_is_kept(
    counts: list[list[int]], rate: float
) -> None:
    tokens = torch.tensor(counts)
    bias = torch.linspace(-1, 1, tokens.numel(), dtype=torch.float64).view(tokens.shape)
    together = updated_expert_bias(tokens, bias, rate, "centered-sign")
    for layer in range(len(counts)):
        alone = updated_expert_bias(tokens[layer], bias[layer], rate, "centered-sign")
        assert torch.equal(together[layer], alone)
    torch.testing.assert_close(together.sum(-1), bias.sum(-1), rtol=0, atol=1e-12)


@given(st.lists(st.integers(0, 2**20), min_size=4, max_size=4))
def test_sign_equals_megatrons_own_rule(counts: list[int]) -> None:
    # Megatron's expression (moe_utils.get_updated_expert_bias) after its all-reduce.
    tokens = torch.tensor(counts, dtype=torch.float32)
    bias = torch.tensor([0.1, -0.2, 0.3, 0.0])
    mean = tokens.sum(dim=-1, keepdim=True) / tokens.shape[-1]
    theirs = bias + torch.sign(mean - tokens) * RATE
    assert torch.equal(updated_expert_bias(tokens.long(), bias, RATE, "sign"), theirs)


def test_the_argument_is_not_modified() -> None:
    bias = torch.zeros(2)
    updated_expert_bias(torch.tensor([1, 3]), bias, RATE, "centered-sign")
    assert torch.equal(bias, torch.zeros(2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rule": "median"}, "rule 'median' is unknown: use one of sign, centered-sign"),
        ({"rate": -1.0}, "rate -1.0 is negative"),
        ({"rate": float("nan")}, "rate nan is negative or not a number"),
        ({"expert_bias": torch.zeros(3)}, r"\(2,\) and expert_bias \(3,\)"),
    ],
)
def test_bad_input_is_named(change: dict, message: str) -> None:
    arguments = {
        "tokens_per_expert": torch.tensor([1, 2]),
        "expert_bias": torch.zeros(2),
        "rate": RATE,
        "rule": "sign",
    }
    with pytest.raises(ValueError, match=message):
        updated_expert_bias(**{**arguments, **change})


def test_max_violation_by_hand() -> None:
    assert max_violation([1, 1, 1, 97]) == pytest.approx(2.88)
    assert max_violation([5, 5, 5]) == 0
    assert max_violation([0, 0]) == 0
