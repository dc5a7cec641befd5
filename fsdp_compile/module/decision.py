"""The decision: how a model is to be sharded, before anything of it is changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from ..layout.precision import Precision
from ..layout.units import Unit
from ..options import Options
from ..planning.options import Reshard, ScheduleConfig
from ..runtime.comparison import Line
from ..runtime.groups import device_of


@dataclasses.dataclass(frozen=True)
class Decision:
    """How a model is to be sharded: everything that was decided, and could be refused, before anything is changed.

    Attributes:
        parameters: those to shard, by name.
        schedule: that of the options, and the hardware at hand if that is to be planned for.
        mesh: of the ranks, once it is known; None for a single one.
    """

    options: Options
    parameters: Mapping[str, nn.Parameter]
    units: list[Unit]
    precision: Precision
    schedule: ScheduleConfig
    mesh: DeviceMesh | None = None

    def with_shards(self, num_shards: int) -> dict[str, Reshard]:
        """Whether each unit reshards after the forward, sharded over so many ranks; as `ScheduleConfig` has it."""
        return self.schedule.reshard_of_unit([unit.name for unit in self.units], num_shards)

    @property
    def compute_device(self) -> torch.device:
        """Where the forward runs."""
        return compute_device(device_of(self.parameters), self.mesh)


def compute_device(device: torch.device, mesh: DeviceMesh | None) -> torch.device:
    """Where the forward runs of a model whose parameters are on `device`; on the meta device none does."""
    kind = device.type if mesh is None or mesh.device_type == "cpu" else mesh.device_type
    if kind == "meta":
        kind = "cuda" if mesh is None and torch.cuda.is_available() else "cpu"
    if kind == device.type:
        return device
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def statement_of_decision(decision: Decision) -> list[Line]:
    """How a model is sharded: the options that decide about collectives, and every parameter of every unit."""
    asked = decision.options
    options = (asked.strategy, decision.schedule, asked.reduction, asked.offload, asked.sync_module_states)
    lines = [Line(f"options: {option}") for option in options] + [Line(f"check_gradients: {asked.check_gradients}")]
    for unit in decision.units:
        for name, parameter in unit.parameters:
            policy = decision.precision.policy_of_parameter.get(name)
            parts = [
                str(tuple(parameter.shape)),
                str(parameter.dtype),
                "trained" if parameter.requires_grad else "frozen",
            ]
            parts += [] if policy is None else [str(policy)]
            lines.append(Line(f"parameter {name} of the unit {unit.name}: {', '.join(parts)}"))
    return lines
