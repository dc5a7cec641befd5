"""Layouts: where the parameters of a decided model lie, once it is known along which axes its ranks share them."""

from __future__ import annotations

import torch

from ..layout.buckets import Axes, Layout, OwnAxes, Placement, lay_out
from ..runtime.groups import axes_of
from .decision import Decision


def layouts_of(decision: Decision, axes: Axes, device: torch.device) -> list[Layout]:
    """Those of all buckets of the model.

    Args:
        axes: of the model's mesh; those of parameters on another mesh follow from that.
        device: that computes.
    """
    options = decision.options
    own_axes = {
        own: OwnAxes(
            own.label,
            axes_of(own.mesh, options.strategy, has_scalars=decision.has_scalars),
            axes.everyone.size if own.has_mean_of_model else None,
        )
        for own in dict.fromkeys(decision.own_meshes.values())
    }
    placement = Placement(
        axes,
        options.reduction,
        decision.precision.policy_of_parameter,
        device if options.offload.is_on else None,
        decision.dim_of_parameter,
        {name: own_axes[own] for name, own in decision.own_meshes.items()},
        decision.communication_of_unit,
    )
    return lay_out(decision.units, placement)
