"""The ranks of a mesh, also while a compilation or a FakeTensorMode makes every tensor a fake one.

torch keeps them as a tensor, which a FakeTensorMode refuses to read.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh

Ranks: TypeAlias = "tuple[int, ...]"


def all_ranks(mesh: DeviceMesh) -> Ranks:
    """In the order of the mesh, its last dimension innermost."""
    with unset_fake_temporarily():  # private as of torch 2.11 to 2.15
        return tuple(mesh.mesh.flatten().tolist())


def ranks_along(mesh: DeviceMesh, *axes: int) -> Ranks:
    """The ranks that this one meets along these axes, and itself, in the order of the mesh."""
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    index = tuple(slice(None) if axis in axes else coordinate[axis] for axis in range(mesh.ndim))
    with unset_fake_temporarily():
        return tuple(mesh.mesh[index].flatten().tolist())


def nested_ranks(mesh: DeviceMesh) -> list[Any]:
    """A list for each dimension, as in `DeviceMesh("cpu", [[0, 1], [2, 3]])`."""
    with unset_fake_temporarily():
        return mesh.mesh.tolist()
