"""The idea of SimpleFSDP (arXiv 2411.00284), in short: a peer to measure against, and no part of fsdp_compile.

Parameters are DTensors, `Shard(0)`. To read one is to compute the whole from it, with a redistribution that autograd
differentiates: an all-gather before the use, a reduce-scatter of the gradient. torch.compile sees all of it, and orders
and merges the collectives by Inductor's own passes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._runtime_estimation
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

_c10d = torch.ops._c10d_functional  # private, as of torch 2.11 to 2.13; so are Inductor's options
_GATHER = {_c10d.all_gather_into_tensor.default, _c10d.wait_tensor.default}

BUCKETED = {"bucket_all_gathers_fx": "all", "bucket_reduce_scatters_fx": "all"}


def overlapped(flops: float, bandwidth: float) -> dict[str, Any]:
    """Inductor's options to schedule collectives over compute, for a machine of these FLOP/s and bytes/s.

    Inductor has figures of its own for GPUs only, and asks for those of one even if it is given others.
    """
    if not torch.cuda.is_available():
        torch.utils._runtime_estimation.get_gpu_dram_gbps = lambda: 20
    scheduling = {
        "enable_overlap_scheduling": True,
        "collective_bucketing": True,
        "insert_overlap_deps": True,
        "enable_fusion_regions": False,
        "custom_runtime_estimation": Estimate(flops, bandwidth),
    }
    nested = {f"aten_distributed_optimizations.{name}": value for name, value in scheduling.items()}
    return {"reorder_for_peak_memory": False, **nested}


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Milliseconds of a node: of matmuls and the like by their FLOPs, of collectives by their bytes."""

    flops: float
    bandwidth: float

    def __call__(self, node: torch.fx.Node, num_bytes: int | None = None) -> float:
        out = node.meta.get("val")
        if getattr(node.target, "namespace", "") == "_c10d_functional":
            of_tensors = [value.nbytes for value in (out, node.args[0].meta["val"]) if torch.is_tensor(value)]
            return 1e3 * (num_bytes or max(of_tensors)) / self.bandwidth
        count = flop_registry.get(getattr(node.target, "overloadpacket", None))
        if count is None:
            return 0.0
        args, kwargs = tree_map_only(torch.fx.Node, lambda argument: argument.meta["val"], (node.args, node.kwargs))
        return 1e3 * count(*args, **kwargs, out_val=out) / self.flops


def simple_fsdp(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard `model` in place over the mesh; parameters that two modules share are no longer shared.

    The backward gathers again.
    """
    for module in list(model.modules()):
        names = [name for name, parameter in module._parameters.items() if parameter is not None]
        for name in names:
            shard = distribute_tensor(module._parameters[name].detach(), mesh, [Shard(0)])
            module._parameters[name] = nn.Parameter(shard)
        if names:
            properties = {name: _property(name) for name in names}
            module.__class__ = type(type(module).__name__, (type(module),), properties)


def _property(name: str) -> property:
    def read(module: nn.Module) -> Tensor:
        return checkpoint(_whole, module._parameters[name], use_reentrant=False, context_fn=_gathering_again)

    return property(read)


def _whole(shard: DTensor) -> Tensor:
    return shard.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])


def _gathering_again() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: object, op: Callable[..., Any], *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE if op in _GATHER else CheckpointPolicy.PREFER_SAVE
