"""Whose rows a DTensor holds: a file has those of the rank that saved it, whoever loads it.

`torch.save` writes a DTensor with its mesh, and with the mesh the coordinates of the rank that saves: they are what
`get_coordinate` says after `torch.load`, on any rank (torch 2.11 to 2.15). Meshes of different ranks are equal, and
DTensor keeps what an operator on one led to for the next: results may have either.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from ..errors import ConfigError
from .ranks import ranks_along
from .views import laid_out_as, local_tensor

_INSTEAD = (
    "a file of torch.save(state_dict) is for the rank and the number of ranks that it was saved on; "
    "torch.distributed.checkpoint saves and loads state_dicts on any, and what get_model_state_dict and "
    "get_optimizer_state_dict give with full_state_dict=True can be loaded by every rank"
)

_Part = tuple[Placement, int, int]
"""Along an axis of a mesh: how a tensor is sharded, into how many parts, and which of them this is."""


def as_laid_out(name: str, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The value laid out as `like`, if it holds the same rows; as a plain tensor, if it holds all of them.

    Args:
        name: of the value, for the error.

    Raises:
        ConfigError: it holds the rows of another rank, or of another number of them.
    """
    mesh = like.device_mesh if isinstance(like, DTensor) else None
    if not isinstance(value, DTensor) or value.device_mesh is mesh or value.shape != like.shape:
        return value
    held = _parts(value, value.device_mesh)
    if not held:
        return local_tensor(value)
    if held == _parts(like, mesh):
        return laid_out_as(like, local_tensor(value))
    if value.device_mesh != mesh or held != _parts(value, mesh):
        raise _rows_of_another(name, value, like)
    return value  # sharded otherwise: DTensor moves the rows


def refuse_states_of_others(optimizer: optim.Optimizer, args: object, kwargs: object) -> None:
    """Before a step: see that the states that were loaded hold the rows of their parameters. Once for every load.

    Raises:
        ConfigError: some hold the rows of another rank, or of another number of them; nothing was updated.
    """
    if vars(optimizer).get("_fsdp_states_are_known"):
        return
    for parameter, states in optimizer.state.items():
        for name, state in states.items():
            if isinstance(state, DTensor) and isinstance(parameter, DTensor) and _is_of_others(state, parameter):
                raise _rows_of_another(f"{name} of a parameter of shape {tuple(parameter.shape)}", state, parameter)
    if "_fsdp_states_are_known" not in vars(optimizer):
        optimizer.register_load_state_dict_post_hook(_look_again)
    vars(optimizer)["_fsdp_states_are_known"] = True  # is not pickled or copied with it


def _look_again(optimizer: optim.Optimizer) -> None:
    vars(optimizer)["_fsdp_states_are_known"] = False


def _is_of_others(state: DTensor, parameter: DTensor) -> bool:
    is_alike = state.shape == parameter.shape and state.placements == parameter.placements
    if not is_alike and state.device_mesh != parameter.device_mesh:
        return False  # laid out as the optimizer likes
    return _parts(state, state.device_mesh) != _parts(state, parameter.device_mesh)


def _rows_of_another(name: str, value: DTensor, like: torch.Tensor) -> ConfigError:
    mesh, rank = value.device_mesh, dist.get_rank() if dist.is_initialized() else 0
    coordinate = mesh.get_coordinate()
    saver = "another rank" if coordinate is None else f"rank {ranks_along(mesh)[0]}"
    here = _parts(like, like.device_mesh if isinstance(like, DTensor) else None)
    return ConfigError(
        f"{name} has the rows of {saver} ({_described(_parts(value, mesh))}), and is loaded on rank {rank} "
        f"({_described(here)}): {_INSTEAD}"
    )


def _parts(tensor: torch.Tensor, mesh: DeviceMesh | None) -> list[_Part]:
    """Which part of the tensor the rank that made `mesh` holds; nothing for one that holds all of it."""
    if mesh is None or not isinstance(tensor, DTensor):
        return []
    coordinate = mesh.get_coordinate() or [-1] * mesh.ndim  # of a rank that is not in the mesh
    axes = zip(tensor.placements, mesh.shape, coordinate, strict=False)
    return [part for part in axes if part[1] > 1 and not part[0].is_replicate()]


def _described(parts: list[_Part]) -> str:
    return " and ".join(f"part {index + 1} of {size}" for _, size, index in parts) or "the whole tensor"
