"""Parameters that a model was given after it was sharded: nothing reduces their gradients, so ranks would part."""

from __future__ import annotations

from collections.abc import Collection

import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..errors import ConfigError

Owner = tuple[nn.Module, str]
"""A module, and the name of a parameter that it holds."""


def owners_left(model: nn.Module) -> set[Owner]:
    """Where the modules hold parameters that are not sharded; nor is what takes the place of one."""
    return {
        (module, name)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and not _is_read(module, name)
    }


def newcomers(module: nn.Module, left: Collection[Owner]) -> dict[str, nn.Parameter]:
    """The trainable parameters at or below `module` that came after it was sharded, by name.

    Args:
        left: places of parameters that were left as they are when it was sharded.
    """
    modules = list(module.modules())
    known = {place for inner in modules if (found := vars(inner).get("_fsdp_sharding")) for place in found.left}
    known |= {*left}
    reduced = {inner for outer in modules if isinstance(outer, DistributedDataParallel) for inner in outer.modules()}
    return {
        f"{path}.{name}".removeprefix("."): parameter
        for path, owner in module.named_modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None
        and parameter.requires_grad
        and not isinstance(parameter, DTensor)
        and not _is_read(owner, name)
        and (owner, name) not in known
        and owner not in reduced
    }


def refuse(found: Collection[str], what: str) -> None:
    """Raise ConfigError if there are any; `what` they came after."""
    if not found:
        return
    first, others = list(found)[:3], len(found) - 3
    names = ", ".join(first) + (f" and {others} more" if others > 0 else "")
    raise ConfigError(
        f"{names}: added after {what} was sharded, so that every rank would train on its own gradients. Add modules "
        "and parameters (adapters, say) before sharding, and pass those in ignored_params whose gradients are reduced "
        "elsewhere; what is not trained takes requires_grad_(False)"
    )


def _is_read(module: nn.Module, name: str) -> bool:
    return name in vars(module).get("_fsdp_reads", {})
