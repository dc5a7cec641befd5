"""Models of transformers and peft, sharded: what their libraries read of one to leave it alone, and how it is saved.

Of transformers 5.23: `_is_distributed_loading_by_transformers` has a Trainer apply autocast but not wrap, and save on
every rank. `_is_fsdp_managed_module` has `generate` go on until the last rank has finished; Dynamo reads it too, and
breaks the graph if `_fsdp_use_orig_params` is not beside it (private, as of torch 2.11 to 2.15).
`config.distributed_config` is read where gradients are accumulated; it is not saved. Where its tensor and expert
parallelism computes with plain tensors, it puts these in the place of a module's parameters meanwhile
(`_use_local_dtensor_params`); a module whose parameters are sharded is told to read plain tensors instead. Norms of
single heads add up their gradients over the ranks of tensor parallelism by hooks on full parameters, which no compiled
forward has: their reads do it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from ..runtime.whole_states import whole_state
from .reading import ReadingModule, reading_parts

_LOADED = "_is_distributed_loading_by_transformers"


def mark_pretrained(model: nn.Module, num_ranks: int) -> None:
    """Tell transformers, of its models that are `model` or in it, that they are sharded."""
    _read_parts_where_transformers_would()
    _sum_where_transformers_would(model)
    for module in outermost_pretrained(model):
        vars(module).update({_LOADED: True, "_is_fsdp_managed_module": True, "_fsdp_use_orig_params": True})
        if getattr(module.config, "distributed_config", None) is None:
            from transformers.distributed import DistributedConfig

            module.config.distributed_config = DistributedConfig(fsdp_size=num_ranks)  # type: ignore[union-attr]


_PARALLEL = "transformers.distributed."
_LOCAL = "_use_local_dtensor_params"
_SUMMING = "ReplicatedWithGradAllReduce.install_forward."


def _read_parts_where_transformers_would() -> None:
    theirs = getattr(sys.modules.get(f"{_PARALLEL}parallel_utils"), _LOCAL, None)
    if theirs is None or hasattr(theirs, "_fsdp_theirs"):
        return

    @functools.wraps(theirs)
    def use_local_parameters(module: nn.Module) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = (
            reading_parts(module) if isinstance(module, ReadingModule) else theirs(module)
        )
        return context

    use_local_parameters._fsdp_theirs = theirs  # type: ignore[attr-defined]
    for name in ("parallel_utils", "tensor_parallel", "expert_parallel"):
        holder = sys.modules.get(f"{_PARALLEL}{name}")
        if getattr(holder, _LOCAL, None) is theirs:
            setattr(holder, _LOCAL, use_local_parameters)


def _sum_where_transformers_would(model: nn.Module) -> None:
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(module, ReadingModule) and getattr(forward, "__qualname__", "").startswith(_SUMMING):
            held = inspect.getclosurevars(forward).nonlocals
            hook, original = held.get("_all_reduce_grad"), held.get("original_forward")
            mesh = None if hook is None else inspect.getclosurevars(hook).nonlocals.get("mesh")
            if mesh is not None and original is not None:  # else the hook will say that it cannot be registered
                for read in module._fsdp_reads.values():
                    read.sum_over(mesh)
                module.forward = original


def outermost_pretrained(module: nn.Module) -> Iterator[nn.Module]:
    """The models of transformers that are `module` or in it, and in no other of them."""
    if hasattr(type(module), _LOADED):
        yield module
        return
    for child in module.children():
        yield from outermost_pretrained(child)


def saving_whole(save_pretrained: Callable[..., Any]) -> Callable[..., Any]:
    """`save_pretrained` of a class, for a sharded model: full tensors, from the first rank."""

    @functools.wraps(save_pretrained)
    def save(model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As of the unsharded model. Every rank calls it; given a `state_dict`, those that have it."""
        is_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        if not is_sharded or kwargs.get("distributed_checkpoint"):
            save_pretrained(model, save_directory, *args, **kwargs)
            return
        is_given = kwargs.get("state_dict") is not None
        if not is_given:
            kwargs["state_dict"] = whole_state(model)
            kwargs["is_main_process"] = dist.get_rank() == 0
        if is_given or dist.get_rank() == 0:
            with _as_if_unsharded(model):
                save_pretrained(model, save_directory, *args, **kwargs)
        if not is_given:
            dist.barrier()

    return save


@contextmanager
def _as_if_unsharded(model: nn.Module) -> Iterator[None]:
    """transformers would gather on every rank what one rank has whole already."""
    configs = [module.config for module in outermost_pretrained(model)]
    before = [config.distributed_config for config in configs]  # type: ignore[union-attr]
    for config in configs:
        config.distributed_config = None  # type: ignore[union-attr]
    try:
        yield
    finally:
        for config, value in zip(configs, before, strict=True):
            config.distributed_config = value  # type: ignore[union-attr]
