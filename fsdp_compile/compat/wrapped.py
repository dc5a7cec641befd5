"""Which modules `FullyShardedDataParallel` has wrapped, and what these gain: here they stay the modules that they were.

A model that is sharded takes over the modules in it that were sharded before; a mark on each of them stays.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from ..errors import ConfigError
from ..module.full_parameters import SummonOptions, summon
from ..module.sharded_module import ShardedMethods, has_itself
from ..module.sharding import Sharding, is_sharded, sharding_around, sharding_of

_MARK = "_fsdp_wrapped"


def mark(modules: Collection[nn.Module], attributes: dict[str, Any]) -> None:
    """Mark modules that were sharded as wrapped, and give them FSDP1's attributes, but for names that they have."""
    for module in modules:
        vars(module)[_MARK] = True
        vars(module).update({name: value for name, value in attributes.items() if not has_itself(module, name)})


def was_wrapped(module: nn.Module) -> bool:
    """Whether `FullyShardedDataParallel` itself has sharded the module, and no larger one has taken it over."""
    return _MARK in vars(module) and is_sharded(module)


def is_wrapped(module: object) -> bool:
    return isinstance(module, nn.Module) and (_MARK in vars(module) or is_sharded(module))


def check_same(module: nn.Module, attributes: Mapping[str, Any], *, is_plain: bool) -> None:
    """Raise ConfigError if a module that was wrapped is to be wrapped again in another way.

    Args:
        is_plain: whether nothing was given that decides about parameters besides, as a policy or a process group does.
    """
    differing = [name for name, value in attributes.items() if vars(module).get(name, value) != value]
    if sharding_of(module).mesh is None and "sharding_strategy" in differing:
        differing.remove("sharding_strategy")  # a single rank has NO_SHARD, whatever is asked for
    if differing or not is_plain:
        what = f"another {differing[0]}" if differing else "options that decide about parameters"
        raise ConfigError(
            f"the {type(module).__name__} is wrapped already, so that all of its parameters are sharded, and {what} "
            "would change nothing: wrap it again with the same options, or wrap a new one"
        )


class WrappedType(type):
    """isinstance(module, FullyShardedDataParallel) is whether the module was wrapped, by itself or by a policy."""

    def __instancecheck__(cls, instance: object) -> bool:
        return is_wrapped(instance)


def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[nn.Module]:
    """The wrapped modules among `module` and those below it; with `root_only` without those in another one."""
    return [part for part in module.modules() if is_wrapped(part)] if not root_only else list(_outermost(module))


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    if is_wrapped(module):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)


def outermost(module: nn.Module) -> list[nn.Module]:
    """`fsdp_modules(module, root_only=True)`; ConfigError if there are none."""
    if not (found := list(dict.fromkeys(_outermost(module)))):
        raise ConfigError(f"this takes the model that was sharded, and a {type(module).__name__} was given")
    return found


def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> AbstractContextManager[None]:
    """A context in which the parameters of `module` are full: a sharded model, a part of one, or what holds several.

    Args:
        recurse: False leaves out those of modules below that were wrapped themselves.
        writeback, rank0_only, offload_to_cpu, with_grads: as for `ShardedMethods.summon_full_params`.
    """
    if not isinstance(recurse, bool):
        raise ConfigError(f"recurse is a bool, not {recurse!r}")
    options = SummonOptions(writeback, rank0_only, offload_to_cpu, with_grads)
    return _summoned([(part, sharding_around(part)) for part in outermost(module)], recurse, options)


@contextmanager
def _summoned(parts: list[tuple[nn.Module, Sharding | None]], recurse: bool, options: SummonOptions) -> Iterator[None]:
    with ExitStack() as stack:
        for part, sharding in parts:
            if sharding is not None:
                stack.enter_context(summon(part, options, sharding, None if recurse else _own_parameters(part)))
        yield


def _own_parameters(module: nn.Module) -> Collection[nn.Parameter]:
    """Those of `module` that no wrapped module below it has."""
    inner = [part for part in fsdp_modules(module) if part is not module]
    return set(module.parameters()) - {parameter for part in inner for parameter in part.parameters()}


def _apply_to_full(self: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
    """nn.Module.apply, which sees full parameters; what it writes is kept."""
    sharding = sharding_around(self)
    if sharding is None or sharding.is_summoned:
        return nn.Module.apply(self, fn)
    with summon_full_params(self):
        return nn.Module.apply(self, fn)


def _summon(self: nn.Module, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
    """FSDP1's is static: called through an instance, it is given a module, too."""
    if args and isinstance(args[0], nn.Module):
        return summon_full_params(*args, **kwargs)
    if isinstance(module := kwargs.pop("module", self), nn.Module) and "recurse" in kwargs:
        return summon_full_params(module, **kwargs)
    names = [field.name for field in dataclasses.fields(SummonOptions)]
    return summon_full_params(module, **dict(zip(names, args, strict=False)), **kwargs)


def _check_is_root(self: nn.Module) -> bool:
    """Whether no other wrapped module has taken it over."""
    return is_sharded(self)


def _clip_grad_norm_(self: nn.Module, max_norm: float, norm_type: float = 2.0, **options: Any) -> torch.Tensor:
    """As `ShardedMethods.clip_grad_norm_`; the norm has the dtype of the gradients, the widest of several.

    Where there is nothing to scale, there is a warning.
    """
    _refuse_inner(self, "clip_grad_norm_")
    dtypes = {parameter.grad.dtype for parameter in self.parameters() if parameter.grad is not None}
    if not dtypes:
        rank = dist.get_rank() if dist.is_initialized() else 0
        warnings.warn(
            f"clip_grad_norm_ was called on rank {rank} with no gradients -- returning the total norm in the default "
            "dtype torch.float32",
            stacklevel=2,
        )
    norm = ShardedMethods.clip_grad_norm_(self, max_norm, norm_type, **options)  # type: ignore[arg-type]
    return norm.to(functools.reduce(torch.promote_types, dtypes)) if dtypes else norm


def _no_sync(self: nn.Module) -> AbstractContextManager[None]:
    _refuse_inner(self, "no_sync")
    return ShardedMethods.no_sync(self)  # type: ignore[arg-type]


def _refuse_inner(module: nn.Module, method: str) -> None:
    if not is_sharded(module):
        raise RuntimeError(f"{method} should only be called on the root FSDP instance: this one is a part of another")


_HOOKS = "torch.distributed.algorithms._comm_hooks.default_hooks"
_DTYPE_OF_HOOK = {
    "allreduce_hook": None,
    "reduce_scatter_hook": None,
    "fp16_compress_hook": torch.float16,
    "bf16_compress_hook": torch.bfloat16,
}
"""What torch's own hooks reduce gradients in; None is what they are reduced in without a hook."""


def _register_comm_hook(self: nn.Module, state: object, hook: Callable[..., Any]) -> None:
    """From the next call on, gradients are reduced as one of torch's hooks does; the average stays one.

    Raises:
        AssertionError: as FSDP1, if the module is a part of another one.
        ConfigError: the hook is another one; nothing has changed.
    """
    if not is_sharded(self):
        raise AssertionError("register_comm_hook can only be called on a root instance.")
    name = getattr(hook, "__name__", "")
    if getattr(hook, "__module__", "") != _HOOKS or name not in _DTYPE_OF_HOOK:
        raise ConfigError(
            f"register_comm_hook takes {', '.join(_DTYPE_OF_HOOK)} of torch, not {hook!r}: reductions are part of the "
            "compiled backward, which runs no other function"
        )
    if (dtype := _DTYPE_OF_HOOK[name]) is not None:
        for shard in sharding_of(self).shards:
            if shard.layout.dtype.is_floating_point:
                shard.change_layout(dataclasses.replace(shard.layout, reduce_dtype=dtype, full_reduce_dtype=dtype))


METHODS: dict[str, Callable[..., Any]] = {
    "apply": _apply_to_full,
    "clip_grad_norm_": _clip_grad_norm_,
    "no_sync": _no_sync,
    "check_is_root": _check_is_root,
    "register_comm_hook": _register_comm_hook,
    "summon_full_params": _summon,
}
