"""Megatron's distributed optimizer over torch's own Adam: saved and resumed correctly.

Megatron expects TransformerEngine's or apex's fused Adam, which keeps its step count in the
parameter group. torch's keeps a ``step`` tensor in the state of every parameter, and Megatron
treats it as it treats moments. Needed on a GPU as well where neither package is installed; with
one of them these functions change nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def _is_torch_adam(optimizer: Any) -> bool:
    return isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))


def state_dict(original: Callable) -> Callable:
    """Gives an Adam that never stepped the state it has before its first step: zeros."""

    @functools.wraps(original)
    def state_dict(self: Any) -> dict[str, Any]:
        if _is_torch_adam(self.optimizer):
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    state = self.optimizer.state[parameter]
                    if "step" not in state:
                        state["step"] = torch.tensor(0.0)
                        state["exp_avg"] = torch.zeros_like(parameter)
                        state["exp_avg_sq"] = torch.zeros_like(parameter)
        return original(self)

    return state_dict


def load_state_dict(original: Callable) -> Callable:
    """Gives every parameter a step tensor of its own; torch counts up in place."""

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        original(self, state_dict)
        if _is_torch_adam(self.optimizer):
            for state in self.optimizer.state.values():
                state["step"] = state["step"].clone()

    return load_state_dict


def get_states(original: Callable) -> Callable:
    """The tensors that are sharded like the parameter: master weight and moments, not step."""

    @functools.wraps(original)
    def _get_main_param_and_optimizer_states(self: Any, model_param: Any) -> dict[str, Any]:
        tensors = original(self, model_param)
        if _is_torch_adam(self.optimizer):
            tensors.pop("step", None)
        return tensors

    return _get_main_param_and_optimizer_states


def set_states(original: Callable) -> Callable:
    """Writes them back; the step was already restored from the parameter group."""

    @functools.wraps(original)
    @torch.no_grad()
    def _set_main_param_and_optimizer_states(
        self: Any, model_param: Any, tensors: dict[str, Any]
    ) -> None:
        if not _is_torch_adam(self.optimizer):
            return original(self, model_param, tensors)
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        step = state.pop("step")
        try:
            original(self, model_param, tensors)
        finally:
            state["step"] = step
        return None

    return _set_main_param_and_optimizer_states
