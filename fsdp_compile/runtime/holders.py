"""Holders: the ranks that hold a model between them, each other parts of it, so that what they find adds up.

Those are the ranks that it is sharded over, the ranks that tensor parallelism has split it over, and those that units
on a mesh of their own are sharded over: a norm is that of all of them together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..errors import ConfigError
from .agreement import agreement_of
from .collectives import all_reduce_alone
from .groups import group_over, mesh_of_both
from .ranks import Ranks, all_ranks, ranks_along


@dataclasses.dataclass(frozen=True)
class Holders:
    """The ranks that hold the parts of one copy of a model, this one among them.

    Attributes:
        ranks: in ascending order.
        group: the name of their process group.
        mesh: whose ranks agree on what they run.
    """

    ranks: Ranks
    group: str
    mesh: DeviceMesh
    _known: dict[Any, PartIn] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Holders:
        """Process groups are shared by copies."""
        return self

    def all_reduce(self, what: str, tensor: torch.Tensor, operator: str) -> torch.Tensor:
        """Over all of them; `what` is what they do so for."""
        return all_reduce_alone(what, tensor, operator, self.group, agreement_of(self.mesh))

    def part_in(self, parameter: torch.Tensor, *, is_own: bool) -> PartIn:
        """What this rank has to do with a parameter.

        Args:
            is_own: whether every rank has another, which no DTensor says.
        """
        if is_own:
            return PartIn(adds=True, differs=True)
        key = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        if key not in self._known:
            with_same_name, with_parts = self._with_same_name(parameter), _ranks_with_parts(parameter)
            is_whole = len(with_parts) == 1 and with_same_name == self.ranks
            self._known[key] = PartIn(adds=min(with_same_name) in with_parts, differs=not is_whole)
        return self._known[key]

    def _with_same_name(self, parameter: torch.Tensor) -> Ranks:
        """Those of them that hold parts of the parameter, or copies of these. What a unit has on a mesh of its own is
        another parameter on the ranks beside that.
        """
        if not isinstance(parameter, DTensor):
            return self.ranks
        held = set(all_ranks(parameter.device_mesh))
        if held.issuperset(all_ranks(self.mesh)):
            return self.ranks
        return tuple(rank for rank in self.ranks if rank in held)


@dataclasses.dataclass(frozen=True)
class PartIn:
    """What a rank has to do with a parameter.

    Attributes:
        adds: whether it adds what it holds: of the ranks that hold the same, one does.
        differs: whether other ranks hold something else.
    """

    adds: bool
    differs: bool


def holders_over(ranks: Ranks, mesh: DeviceMesh | None) -> Holders | None:
    """These ranks, some of which agree on what they run, if there are several; all of them call this together."""
    return None if mesh is None or len(ranks) == 1 else Holders(ranks, group_over(ranks, mesh), mesh)


def ranks_of_holders(mesh: DeviceMesh | None, inner: DeviceMesh | None, of_parts: Mapping[str, Ranks]) -> Ranks:
    """The ranks that hold the parts of a model, this one among them.

    Args:
        mesh: that the model is sharded over.
        inner: that its parameters were distributed over before.
        of_parts: by name, those of modules in it that were sharded before, and of parameters on other meshes.

    Raises:
        ConfigError: what has one of these names is sharded over ranks that are not the model's.
    """
    both = mesh_of_both(mesh, inner) if mesh is not None and inner is not None else mesh or inner
    of_row: Ranks
    of_all: Ranks
    if both is None:
        of_row = of_all = (dist.get_rank(),) if dist.is_initialized() else (0,)
    else:  # replicas, along the first of two dimensions of a mesh, hold the same parts
        of_row = _sorted(ranks_along(both, *range(0 if mesh is None else mesh.ndim - 1, both.ndim)))
        of_all = _sorted(all_ranks(both))
    candidates = [of_row, *sorted(of_parts.values(), key=len), of_all]
    for ranks in candidates:
        if all(set(ranks) >= set(each) for each in (of_row, *of_parts.values())):
            return ranks
    name, ranks = next((name, each) for name, each in of_parts.items() if not set(each) <= set(of_all))
    raise ConfigError(
        f"{name} is sharded over the ranks {list(ranks)}, and the model would be over {list(of_all)}: give "
        "them one mesh, or the model one that has all ranks of its modules"
    )


def _sorted(ranks: Ranks) -> Ranks:
    return tuple(sorted(ranks))


def _ranks_with_parts(parameter: torch.Tensor) -> Ranks:
    """The ranks that hold, between them, one whole of the parameter: this one alone, if that is not sharded."""
    if not isinstance(parameter, DTensor):
        return (dist.get_rank(),)
    sharded = [axis for axis, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    return ranks_along(parameter.device_mesh, *sharded)
