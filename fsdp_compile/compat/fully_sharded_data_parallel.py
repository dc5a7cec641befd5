"""FSDP1's name: `FullyShardedDataParallel`."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.tensor import DTensor

from ..api import fsdp_compile
from ..checks import check_bool, listed
from ..environment import is_full_in_evaluation
from ..errors import ConfigError
from ..layout.options import OffloadConfig
from ..layout.units import selected_modules
from ..module.resetting import param_init_by_reset
from ..module.sharded_module import gain_methods
from ..module.sharding import is_sharded, sharding_of
from . import optimizer_state_dicts, state_dicts, wrapped
from .mixed_precision import (
    cast_as_parts,
    cast_buffers,
    keep_full_in_evaluation,
    keep_low_precision_gradients,
    mp_policy_of,
)
from .policies import wrapping_by
from .wrapped import WrappedType

_MOST_GPUS = 128  # that torch.device can name


class FullyShardedDataParallel(metaclass=WrappedType):
    """torch.distributed.fsdp.FullyShardedDataParallel, by today's signature or that of torch 1.11.

    The call returns the module itself, sharded and compiled; `.module` is that module, too, unless it has a child of
    this name. Parameters are always the original ones (`use_orig_params`), prefetching is always on (`forward_prefetch`
    may be either). The schedule decides how many gathers are in flight, and the CPU never waits for them: either value
    of `limit_all_gathers` is honoured. In torch 1.11 the third and following positional arguments were
    `cpu_offload, fsdp_auto_wrap_policy, backward_prefetch`; that is recognised by the type of the third.

    A `CustomPolicy` may return a dict with options for a module. What was wrapped before is returned as it is, if the
    options are the same: it has no parameters left for another wrapper.

    Raises:
        ConfigError: as `fsdp_compile`; and for what is not supported of the arguments.
    """

    def __new__(  # type: ignore[misc]  # returns the module, as functions do that take the place of classes
        cls,
        module: nn.Module,
        process_group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None = None,
        sharding_strategy: ShardingStrategy | CPUOffload | None = None,
        cpu_offload: Any = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], Any] | None = None,
        device_id: int | str | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = True,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
        *,
        fsdp_auto_wrap_policy: Any = None,
        backend: str = "inductor",
    ) -> nn.Module:
        if isinstance(sharding_strategy, CPUOffload):  # the positions of torch 1.11
            if isinstance(auto_wrap_policy, BackwardPrefetch):
                backward_prefetch = auto_wrap_policy
            sharding_strategy, cpu_offload, auto_wrap_policy = None, sharding_strategy, cpu_offload
        given = {
            "process_group": process_group,
            "sharding_strategy": ShardingStrategy.FULL_SHARD if sharding_strategy is None else sharding_strategy,
            "cpu_offload": cpu_offload,
            "backward_prefetch": backward_prefetch,
            "mixed_precision": mixed_precision,
            "param_init_fn": param_init_fn,
            "device_id": device_id,
            "sync_module_states": sync_module_states,
            "forward_prefetch": forward_prefetch,
            "limit_all_gathers": limit_all_gathers,
            "use_orig_params": use_orig_params,
            "device_mesh": device_mesh,
        }
        _check(module, given)
        left_alone = _ignored(ignored_modules, ignored_states)
        if any(item is module for item in left_alone):  # FSDP1's words
            warnings.warn(
                "Trying to ignore the top-level module passed into the FSDP constructor itself will result in all "
                "parameters being ignored and is not well-supported",
                stacklevel=2,
            )
        if wrapped.was_wrapped(module):
            decides = (process_group, device_mesh, auto_wrap_policy, fsdp_auto_wrap_policy, param_init_fn)
            is_plain = not left_alone and all(each is None for each in decides)
            wrapped.check_same(module, _attributes(given), is_plain=is_plain)
            return module
        wrapping = wrapping_by(auto_wrap_policy, fsdp_auto_wrap_policy, module, left_alone)
        selected = selected_modules(module, wrapping.policy)
        for part, options in wrapping.options_of_module.items():
            wrap: Any = cls
            wrap(part, ignored_states=left_alone, backend=backend, **{**given, **options})
        sharded = _shard(module, wrapping.policy, selected, given, left_alone, backend)
        strategy = _strategy_in_effect(given["sharding_strategy"], sharded)
        wrapped.mark({sharded, *selected}, {**_attributes(given), "sharding_strategy": strategy})
        state_dicts.have_full_states([sharded, *selected])
        gain_methods(sharded, {**_static_methods(), **wrapped.METHODS})
        return sharded

    fsdp_modules = staticmethod(wrapped.fsdp_modules)
    summon_full_params = staticmethod(wrapped.summon_full_params)
    set_state_dict_type = staticmethod(state_dicts.set_state_dict_type)
    get_state_dict_type = staticmethod(state_dicts.settings_of)
    state_dict_type = staticmethod(state_dicts.state_dict_type)
    optim_state_dict = staticmethod(optimizer_state_dicts.optim_state_dict)
    optim_state_dict_to_load = staticmethod(optimizer_state_dicts.optim_state_dict_to_load)
    full_optim_state_dict = staticmethod(optimizer_state_dicts.full_optim_state_dict)
    sharded_optim_state_dict = staticmethod(optimizer_state_dicts.sharded_optim_state_dict)
    shard_full_optim_state_dict = staticmethod(optimizer_state_dicts.shard_full_optim_state_dict)
    flatten_sharded_optim_state_dict = staticmethod(optimizer_state_dicts.flatten_sharded_optim_state_dict)
    scatter_full_optim_state_dict = staticmethod(optimizer_state_dicts.scatter_full_optim_state_dict)
    rekey_optim_state_dict = staticmethod(optimizer_state_dicts.rekey_optim_state_dict)


def _static_methods() -> dict[str, Any]:
    """What scripts call through a model as well as through the class."""
    found = vars(FullyShardedDataParallel).items()
    return {name: each for name, each in found if isinstance(each, staticmethod) and not name.startswith("_")}


def _check(module: object, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for a module that is none, and for what `fsdp_compile` does not check of the arguments."""
    if not isinstance(module, nn.Module):
        raise ConfigError(f"module is an nn.Module, not {type(module).__name__}")
    for name in ("forward_prefetch", "limit_all_gathers", "use_orig_params"):
        check_bool(name, given[name])
    mesh = given["device_mesh"]
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"device_mesh is a DeviceMesh, not {mesh!r}")
    OffloadConfig.of(given["cpu_offload"], "cpu_offload")
    mixed = given["mixed_precision"]
    if isinstance(mixed, MixedPrecision) and mixed.keep_low_precision_grads and is_full_in_evaluation():
        raise ConfigError(
            "mixed_precision: keep_low_precision_grads is not supported together with FSDP_USE_FULL_PREC_IN_EVAL=1, "
            "by which gradients of an evaluation have full precision: leave out one of them"
        )


def _attributes(given: Mapping[str, Any]) -> dict[str, Any]:
    """What FSDP1 keeps of the arguments on a module that it has wrapped."""
    without = {"cpu_offload": CPUOffload(), "mixed_precision": MixedPrecision()}
    kept = ("sharding_strategy", "backward_prefetch", "forward_prefetch", "limit_all_gathers", *without)
    return {name: without.get(name) if given[name] is None else given[name] for name in kept}


def _shard(
    module: nn.Module,
    policy: Any,
    selected: Collection[nn.Module],
    given: Mapping[str, Any],
    left_alone: Iterable[nn.Module | nn.Parameter],
    backend: str,
) -> nn.Module:
    parts = [part for part in module.modules() if part is not module and is_sharded(part)]
    prefetch = given["backward_prefetch"]
    mixed, param_init_fn, ignored = given["mixed_precision"], given["param_init_fn"], _parameters_of(left_alone, module)
    if param_init_fn is None:
        param_init_fn = param_init_by_reset(module, _values_on(given["device_id"]), ignored)
    with _moved(module, given["device_id"]):
        sharded = fsdp_compile(
            module,
            given["device_mesh"],
            process_group=given["process_group"],
            auto_wrap_policy=policy,
            sharding_strategy=given["sharding_strategy"],
            mp_policy=None if mixed is None else mp_policy_of(mixed, module, parts),
            offload_policy=given["cpu_offload"],
            backward_prefetch="auto" if prefetch is BackwardPrefetch.BACKWARD_PRE else prefetch,
            ignored_params=ignored,
            param_init_fn=param_init_fn,
            sync_module_states=given["sync_module_states"],
            backend=backend,
        )
    cast_as_parts(parts)
    if mixed is None:
        return sharded
    if mixed.keep_low_precision_grads:
        keep_low_precision_gradients(module, mixed)
    ignored_modules = [item for item in left_alone if isinstance(item, nn.Module)]
    buffers = cast_buffers(module, mixed, [*ignored_modules, *parts])
    if is_full_in_evaluation():
        keep_full_in_evaluation(module, selected, parts, buffers)
    return sharded


def _strategy_in_effect(given: ShardingStrategy, sharded: nn.Module) -> ShardingStrategy:
    mesh = sharding_of(sharded).mesh
    if given is ShardingStrategy.NO_SHARD or (mesh is not None and mesh.size() > 1):
        return given
    # FSDP1's words
    warnings.warn(f"FSDP is switching to use `NO_SHARD` instead of {given} since the world size is 1.", stacklevel=3)
    return ShardingStrategy.NO_SHARD


@contextmanager
def _moved(module: nn.Module, device_id: Any) -> Iterator[None]:
    """Inside, what has values of the module is on the device; it is moved back if there is an error.

    What is sharded already is where its options want it.
    """
    if device_id is None:
        yield
        return
    device = _device(device_id)
    held = (*module.parameters(), *module.buffers())
    tensors = [tensor for tensor in held if not tensor.is_meta and not isinstance(tensor, DTensor)]
    before = [tensor.device for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.to(device)
        yield
    except BaseException:
        for tensor, was_on in zip(tensors, before, strict=True):
            tensor.data = tensor.data.to(was_on)
        raise


def _values_on(device_id: Any) -> torch.device:
    """Where what is on the meta device gets its values."""
    if device_id is not None:
        return _device(device_id)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _device(device_id: Any) -> torch.device:
    if isinstance(device_id, int) and not isinstance(device_id, bool) and 0 <= device_id < _MOST_GPUS:
        return torch.device("cuda", device_id)
    if isinstance(device_id, str):
        with suppress(RuntimeError):
            device_id = torch.device(device_id)
    if isinstance(device_id, torch.device) and device_id.type != "meta":
        return device_id
    raise ConfigError(f"device_id is the number of a GPU, or a torch.device that has memory, not {device_id!r}")


def _ignored(modules: object, states: object) -> list[nn.Module | nn.Parameter]:
    """What `ignored_modules` and `ignored_states` hold."""
    found: list[nn.Module | nn.Parameter] = []
    for name, given in (("ignored_modules", modules), ("ignored_states", states)):
        items = [] if given is None else listed(name, given, "modules or parameters")
        for item in items:
            if not isinstance(item, (nn.Module, nn.Parameter)):
                raise ConfigError(f"{name} holds modules or parameters, not {item!r}")
        found += items
    return found


def _parameters_of(items: Iterable[nn.Module | nn.Parameter], module: nn.Module) -> list[nn.Parameter]:
    """The parameters of `module` that are among these or in them."""
    held = set(module.parameters())
    parameters = [item.parameters() if isinstance(item, nn.Module) else [item] for item in items]
    return [parameter for parameter in dict.fromkeys(itertools.chain(*parameters)) if parameter in held]
