"""Whole states: full tensors, as checkpoints of frameworks hold them, of a sharded model and its optimizer."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn as nn
from torch import optim
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from .agreement import agreement_of
from .comparison import Line


def whole_state(model: nn.Module) -> OrderedDict[str, Any]:
    """The state dict with full tensors on the CPU of the first rank; on the others it is empty. Every rank calls it.

    Tied parameters are one tensor under all their names, as in the state dict of the unsharded model.

    Raises:
        RankError: another rank goes on without.
    """
    _agree(model, f"the full state of the {type(model).__name__}")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = OrderedDict(get_model_state_dict(model, options=options))
    first_name: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = first_name.setdefault(parameter, name)
        if name in state and first in state:
            state[name] = state[first]
    return state


def _agree(model: nn.Module, what: str) -> None:
    """See that every rank asks for it: one that went on would take its messages for others."""
    mesh = next((parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)), None)
    if (agreement := agreement_of(mesh)) is not None:
        agreement.agree((Line(what),))


def whole_optimizer_state(state: dict[str, Any], *, is_kept: bool) -> dict[str, Any]:
    """What `optimizer.state_dict()` gave, with full tensors on the CPU. Every rank calls it.

    Args:
        is_kept: whether this rank wants them; the others take part, one tensor after another.
    """

    def whole(value: DTensor) -> torch.Tensor:
        full = value.full_tensor()
        return full.cpu() if is_kept else full.new_empty(0)

    return tree_map_only(DTensor, whole, state)  # type: ignore[no-any-return]


def shard_optimizer_states(optimizer: optim.Optimizer) -> None:
    """After `load_state_dict` of full tensors: keep those rows of them that are the parameters' on this rank."""
    for parameter, states in optimizer.state.items():
        if not isinstance(parameter, DTensor):
            continue
        for name, value in states.items():
            if torch.is_tensor(value) and not isinstance(value, DTensor) and value.shape == parameter.shape:
                placed = value.to(parameter.device_mesh.device_type)
                states[name] = distribute_tensor(
                    placed, parameter.device_mesh, parameter.placements, src_data_rank=None
                )
