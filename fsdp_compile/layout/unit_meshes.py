"""Unit meshes: which parameters are sharded over a mesh of their own, as experts are, and which over the model's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import cast

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ConfigError
from .globs import innermost, is_named


@dataclasses.dataclass(frozen=True)
class OwnMesh:
    """The mesh of a parameter that is not the model's.

    Attributes:
        has_mean_of_model: whether the mean of gradients is over the ranks of the model, not of this mesh. The ranks
            beside this mesh hold other parameters, and have sent what these computed with.
    """

    mesh: DeviceMesh
    has_mean_of_model: bool

    @property
    def label(self) -> str:
        """The mesh in the name of a bucket, the same on every rank: by the names of its dimensions, or their sizes."""
        return "_".join(self.mesh.mesh_dim_names or map(str, self.mesh.shape))


def find_meshes(
    model: nn.Module, mesh: object, *, argument: str = "mesh"
) -> tuple[DeviceMesh | None, dict[str, OwnMesh]]:
    """What the argument `mesh` means for `model`: its mesh, and those of parameters that have another, by name.

    Args:
        mesh: a DeviceMesh, or None for all ranks; or a map to meshes from globs over module names, the root's being "".
            A parameter has the mesh of the innermost module that the map mentions, the last entry of those that match.
        argument: its name, for errors.

    Raises:
        ConfigError: an entry is no mesh, or matches no module.
    """
    if not isinstance(mesh, Mapping) or not isinstance(model, nn.Module):
        return cast("DeviceMesh | None", mesh), {}  # something else is refused later
    mesh_of_module: dict[str, DeviceMesh] = {}
    for glob, each in mesh.items():
        if not isinstance(glob, str) or not isinstance(each, DeviceMesh):
            wanted = "a map goes from globs over module names to DeviceMeshes"
            raise ConfigError(f"{argument}: {wanted}, not {glob!r}: {each!r}")
        names = [name for name, _ in model.named_modules() if is_named(name, glob)]
        if not names:
            raise ConfigError(f"{argument}: no module of the model matches {glob!r}")
        mesh_of_module |= dict.fromkeys(names, each)
    main = mesh_of_module.pop("", None)
    found = {
        name: mesh_of_module[module]
        for name, _ in model.named_parameters()
        if (module := innermost(name, mesh_of_module)) is not None
    }
    return main, {name: OwnMesh(each, True) for name, each in found.items() if each != main}
