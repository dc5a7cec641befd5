"""FSDP2's names: `fully_shard`, and `FSDPModule`, which is torch's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import fully_shard as torchs_fully_shard

from ..api import fsdp_compile, shard
from ..checks import listed
from ..compiler.options import CompileConfig
from ..errors import ConfigError
from ..module.adoption import sharded_around
from ..module.sharded_module import become_sharded_together
from ..module.sharding import is_sharded, sharding_of
from .data_dims import on_data_dims

__all__ = ["FSDPModule", "fully_shard"]

_Modules = TypeVar("_Modules", bound=nn.Module | Sequence[nn.Module])


def fully_shard(
    module: _Modules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    backend: str = "inductor",
) -> _Modules:
    """torch.distributed.fsdp.fully_shard: the parameters of `module` that were not sharded before become one unit.

    Apply it to blocks first and to the whole model last, as there; the whole then runs as one compiled program.
    `reshard_after_forward=None` leaves the unit that the forward uses last gathered for the backward, whichever it is.
    `shard_placement_fn` returns a Shard of any dimension, whether the ranks divide it or not, None, or torch's
    ShardPlacementResult.

    With `dp_mesh_dims`, torch's DataParallelMeshDims, `mesh` has other dimensions, too: parameters that are DTensors on
    all of it are read as such, and plain tensors are each rank's of those.

    Args:
        module: or a list of modules, whose parameters become one unit of the model that holds them, but for modules
            that were sharded with one around them, of which a warning says that they stay there. Until that model is
            sharded, they run in eager.

    Raises:
        ConfigError: as `fsdp_compile`; and for an empty list, or one of a module that is sharded by itself already.
    """
    CompileConfig(backend)  # of a list, nothing is compiled by itself
    ignored = [] if ignored_params is None else listed("ignored_params", ignored_params, "parameters")
    whole: nn.Module = module if isinstance(module, nn.Module) else nn.ModuleList(_outermost(module))
    is_list = whole is not module
    if is_list and not list(whole.children()):
        return module
    apply: Callable[..., nn.Module] = shard if is_list else partial(fsdp_compile, backend=backend)
    members = [name for name, _ in whole.named_children()]
    held = set(whole.parameters())
    with on_data_dims(whole, mesh, dp_mesh_dims, ignored) as data_mesh:
        apply(
            whole,
            data_mesh,
            auto_wrap_policy=[whole],
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=shard_placement_fn,
            mp_policy=mp_policy if mp_policy is None or not is_list else dict.fromkeys(["", *members], mp_policy),
            offload_policy=offload_policy,
            ignored_params=[item for item in ignored if not isinstance(item, nn.Parameter) or item in held],
            sync_module_states=False,
        )
    if is_list:
        become_sharded_together(tuple(whole.children()), sharding_of(whole))
    return module


fully_shard.state = torchs_fully_shard.state  # type: ignore[attr-defined]


def _outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules of the list that are in no other of them, and were not sharded with one around them."""
    if not isinstance(modules, Sequence) or not modules or not all(isinstance(item, nn.Module) for item in modules):
        raise ConfigError(f"fully_shard takes a module or a list of modules, not {modules!r}")
    for item in modules:
        if is_sharded(item):
            raise ConfigError(f"fully_shard: a {type(item).__name__} of the list is sharded already")
    inner = {below for item in modules for below in item.modules() if below is not item}
    outermost = [item for item in dict.fromkeys(modules) if item not in inner]
    around = [item for item in outermost if _is_sharded_around(item)]
    if around:
        named = ", ".join(type(item).__name__ for item in around)
        warnings.warn(
            f"fully_shard: sharded with a module around them, and left there with the options of that: {named}",
            stacklevel=3,
        )
    return [item for item in outermost if item not in around]


def _is_sharded_around(module: nn.Module) -> bool:
    """Whether all that a module holds was sharded with one around it."""
    held = {name for name, _ in module.named_parameters()}
    return bool(held) and sharded_around(module, {}) >= held
