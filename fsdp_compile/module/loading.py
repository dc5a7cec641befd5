"""load_state_dict of a sharded model, or of a part of it: which rows of what is given are those of this rank."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from ..runtime.reads import Read
from ..runtime.rows import as_laid_out
from ..runtime.views import laid_out_as, part_of_rank


def shard_state(module: nn.Module, state: MutableMapping[str, Any], prefix: str) -> None:
    """Replace the tensors in a state dict that stand for parameters at or below `module` by this rank's rows of them.

    Raises:
        ConfigError: a tensor holds the rows of another rank; nothing was loaded into `module`.
    """
    for path, owner in module.named_modules(prefix=prefix.removesuffix("."), remove_duplicate=False):
        reads = vars(owner).get("_fsdp_reads", {})
        for own_name, parameter in owner._parameters.items():
            name = f"{path}.{own_name}" if path else own_name
            value = state.get(name)
            if parameter is None or not isinstance(value, torch.Tensor):
                continue
            value = as_laid_out(name, value, parameter)
            if isinstance(parameter, DTensor) and own_name in reads and not isinstance(value, DTensor):
                value = _sharded(value, parameter, reads[own_name])
            state[name] = value


def _sharded(full: torch.Tensor, parameter: DTensor, read: Read) -> torch.Tensor:
    if full.shape != parameter.shape:
        return full  # load_state_dict says so
    shard: Any = read.shard
    placement: Any = parameter.placements[shard.mesh.ndim - 1]
    dim = 0 if placement.is_replicate() else placement.dim
    local = full.detach() if read.distribution is None else read.distribution.local(full)
    part = part_of_rank(local, dim, shard.layout, shard.mesh)
    return laid_out_as(parameter, part.clone(memory_format=torch.contiguous_format))
