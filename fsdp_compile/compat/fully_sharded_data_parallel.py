"""FSDP1's name: `FullyShardedDataParallel`."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictType,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from ..api import fsdp_compile
from ..checks import check_bool, check_dtype, listed
from ..errors import ConfigError
from ..layout.options import OffloadConfig
from ..module.full_parameters import SummonOptions, summon
from ..module.sharding import Sharding, is_sharded, sharding_of
from .sharded_type import ShardedType

_MOST_GPUS = 128  # that torch.device can name


class FullyShardedDataParallel(metaclass=ShardedType):
    """torch.distributed.fsdp.FullyShardedDataParallel, by today's signature or that of torch 1.11.

    The call returns the module itself, sharded and compiled; `.module` is that module, too. Parameters are always the
    original ones (`use_orig_params`), prefetching is always on (`forward_prefetch` may be either), gathers in flight
    are always limited (`limit_all_gathers`). In torch 1.11 the third and following positional arguments were
    `cpu_offload, fsdp_auto_wrap_policy, backward_prefetch`; that is recognised by the type of the third.

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
        device_id: int | torch.device | None = None,
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
        if not isinstance(module, nn.Module):
            raise ConfigError(f"module is an nn.Module, not {type(module).__name__}")
        flags = {"forward_prefetch": forward_prefetch, "limit_all_gathers": limit_all_gathers}
        for name, flag in {**flags, "use_orig_params": use_orig_params}.items():
            check_bool(name, flag)
        if not limit_all_gathers:
            raise ConfigError("limit_all_gathers=False is not supported: a schedule limits what is gathered ahead")
        if device_mesh is not None and not isinstance(device_mesh, DeviceMesh):
            raise ConfigError(f"device_mesh is a DeviceMesh, not {device_mesh!r}")
        OffloadConfig.of(cpu_offload, "cpu_offload")
        left_alone = _ignored(ignored_modules, ignored_states)
        with _moved(module, device_id):
            sharded = fsdp_compile(
                module,
                device_mesh,
                process_group=process_group,
                auto_wrap_policy=_policy(auto_wrap_policy, fsdp_auto_wrap_policy, module),
                sharding_strategy=ShardingStrategy.FULL_SHARD if sharding_strategy is None else sharding_strategy,
                mp_policy=None if mixed_precision is None else _mp_policy(mixed_precision, module),
                offload_policy=cpu_offload,
                backward_prefetch=backward_prefetch,
                ignored_params=_parameters_of(left_alone, module),
                param_init_fn=param_init_fn,
                sync_module_states=sync_module_states,
                backend=backend,
            )
        if mixed_precision is not None and mixed_precision.buffer_dtype is not None:
            _cast_buffers(module, mixed_precision, [item for item in left_alone if isinstance(item, nn.Module)])
        return sharded

    @staticmethod
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> AbstractContextManager[None]:
        """`module.summon_full_params(...)`; `recurse=False` is not supported."""
        if not recurse:
            raise ConfigError("summon_full_params(recurse=False) is not supported")
        _sharding_of(module)
        options = SummonOptions(writeback, rank0_only, offload_to_cpu, with_grads)
        return summon(module, options)

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """What `module.state_dict()` and `optim_state_dict` give inside: DTensors, or full tensors.

        Outside, `module.state_dict()` gives DTensors, unlike FSDP1's. `load_state_dict` takes either at any time. Every
        rank calls `state_dict()`; with `rank0_only` the others get an empty one. So it is with `optim_state_dict`, and
        `optim_state_dict_to_load` then takes the state from the first rank.
        """
        is_full = state_dict_type is StateDictType.FULL_STATE_DICT
        config = state_dict_config or (FullStateDictConfig() if is_full else ShardedStateDictConfig())
        if state_dict_type is StateDictType.LOCAL_STATE_DICT:
            raise ConfigError("LOCAL_STATE_DICT is not supported: there are no flat parameters to save")
        optimizer_state = optim_state_dict_config or (
            FullOptimStateDictConfig() if is_full else ShardedOptimStateDictConfig()
        )
        for given, kind in ((config, FullStateDictConfig), (optimizer_state, FullOptimStateDictConfig)):
            if isinstance(given, kind) != is_full:
                raise ConfigError(f"{type(given).__name__} is no configuration for {state_dict_type}")
        sharding = _sharding_of(module)
        before, sharding.optimizer_state = sharding.optimizer_state, optimizer_state
        hook = module.register_state_dict_post_hook(lambda module, state, *_: _convert(module, state, config))
        try:
            yield
        finally:
            hook.remove()
            sharding.optimizer_state = before

    @staticmethod
    def optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's state by parameter names: full tensors, or DTensors inside `state_dict_type(SHARDED)`."""
        config = _sharding_of(model).optimizer_state
        is_full = isinstance(config, FullOptimStateDictConfig)
        state = get_optimizer_state_dict(model, optim, options=StateDictOptions(full_state_dict=is_full))
        if _is_rank0_only(config) and not _is_first_rank(model):
            return {}
        return tree_map_only(torch.Tensor, partial(_own, to_cpu=config.offload_to_cpu), state)  # type: ignore[no-any-return]

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module, optim: torch.optim.Optimizer, optim_state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """What `optim.load_state_dict` takes, of what `optim_state_dict` gave; `optim` has loaded it already."""
        config = _sharding_of(model).optimizer_state
        options = StateDictOptions(
            full_state_dict=isinstance(config, FullOptimStateDictConfig), broadcast_from_rank0=_is_rank0_only(config)
        )
        set_optimizer_state_dict(model, optim, optim_state_dict, options=options)
        return optim.state_dict()


def _own(value: torch.Tensor, to_cpu: bool) -> torch.Tensor:
    """A copy of what torch.distributed.checkpoint gives out as it is: numbers, as the count of steps."""
    owned = value.clone() if value.dim() == 0 else value
    return owned.cpu() if to_cpu else owned


def _is_rank0_only(config: StateDictConfig | OptimStateDictConfig) -> bool:
    return isinstance(config, (FullStateDictConfig, FullOptimStateDictConfig)) and config.rank0_only


def _is_first_rank(model: nn.Module) -> bool:
    """Whether this is the first rank of the model's mesh."""
    mesh = sharding_of(model).mesh
    return mesh is None or mesh.get_rank() == int(mesh.mesh.flatten()[0])


def _sharding_of(module: nn.Module) -> Sharding:
    if not is_sharded(module):
        raise ConfigError(f"this takes the model that was sharded, and a {type(module).__name__} was given")
    return sharding_of(module)


def _convert(module: nn.Module, state: dict[str, Any], config: StateDictConfig) -> None:
    """Make the tensors of a state dict full or not, and move them, as `config` says."""
    is_full = isinstance(config, FullStateDictConfig)
    for name, value in list(state.items()):
        if torch.is_tensor(value):
            full = value.full_tensor() if isinstance(value, DTensor) and is_full else value
            state[name] = full.cpu() if config.offload_to_cpu else full
    if _is_rank0_only(config) and not _is_first_rank(module):
        state.clear()


@contextmanager
def _moved(module: nn.Module, device_id: Any) -> Iterator[None]:
    """Inside, what has values of the module is on the device; it is moved back if there is an error."""
    if device_id is None:
        yield
        return
    device = _device(device_id)
    tensors = [tensor for tensor in (*module.parameters(), *module.buffers()) if not tensor.is_meta]
    before = [tensor.device for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.to(device)
        yield
    except BaseException:
        for tensor, was_on in zip(tensors, before, strict=True):
            tensor.data = tensor.data.to(was_on)
        raise


def _device(device_id: Any) -> torch.device:
    if isinstance(device_id, int) and not isinstance(device_id, bool) and 0 <= device_id < _MOST_GPUS:
        return torch.device("cuda", device_id)
    if isinstance(device_id, torch.device) and device_id.type != "meta":
        return device_id
    raise ConfigError(f"device_id is the number of a GPU, or a torch.device that has memory, not {device_id!r}")


def _policy(policy: Any, of_torch_1_11: Any, module: nn.Module) -> Any:
    """A policy as `fsdp_compile` takes it; a callable of torch 1.11 names its third argument `unwrapped_params`."""
    if policy is not None and of_torch_1_11 is not None:
        raise ConfigError("give an auto_wrap_policy or an fsdp_auto_wrap_policy, which is its name in torch 1.11")
    if of_torch_1_11 is not None:
        policy = of_torch_1_11
    if policy is None:
        return [module]
    if _takes(policy, "unwrapped_params"):
        return lambda module, recurse, nonwrapped_numel: policy(
            module=module, recurse=recurse, unwrapped_params=nonwrapped_numel
        )
    return policy


def _takes(function: Any, name: str) -> bool:
    """Whether `function` is one that says that it takes an argument of this name."""
    with suppress(TypeError, ValueError):
        return callable(function) and name in inspect.signature(function).parameters
    return False


def _mp_policy(mixed: MixedPrecision, module: nn.Module) -> Any:
    """The policies that mean what FSDP1's MixedPrecision means.

    Modules of the classes to ignore compute in fp32, and return what the rest computes in.
    """
    if not isinstance(mixed, MixedPrecision):
        raise ConfigError(f"mixed_precision is a MixedPrecision of torch.distributed.fsdp, not {mixed!r}")
    if mixed.keep_low_precision_grads:
        raise ConfigError("keep_low_precision_grads is not supported: gradients have the dtype of their parameters")
    _check_mixed(mixed)
    casts = mixed.cast_forward_inputs or mixed.cast_root_forward_inputs
    policy = MixedPrecisionPolicy(mixed.param_dtype, mixed.reduce_dtype, cast_forward_inputs=casts)
    ignored: dict[Any, MixedPrecisionPolicy] = {}
    if mixed.param_dtype is not None:
        whole = MixedPrecisionPolicy(torch.float32, torch.float32, output_dtype=mixed.param_dtype)
        found = [kind for kind in mixed._module_classes_to_ignore if any(isinstance(m, kind) for m in module.modules())]
        ignored = dict.fromkeys(found, whole)
    if not ignored and mixed.cast_forward_inputs:
        return policy  # units cast their inputs, too
    return {"": policy, **ignored}


def _check_mixed(mixed: MixedPrecision) -> None:
    for field in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        check_dtype(f"mixed_precision: {field}", getattr(mixed, field))
    for field in ("cast_forward_inputs", "cast_root_forward_inputs"):
        check_bool(f"mixed_precision: {field}", getattr(mixed, field))
    for kind in listed("mixed_precision: _module_classes_to_ignore", mixed._module_classes_to_ignore, "classes"):
        if not isinstance(kind, type):
            raise ConfigError(f"mixed_precision: _module_classes_to_ignore holds classes, not {kind!r}")


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


def _cast_buffers(module: nn.Module, mixed: MixedPrecision, ignored: Iterable[nn.Module]) -> None:
    """Cast the floating point buffers of all modules but those that are ignored, or computed without the policy."""
    left_alone = {inner for outer in ignored for inner in outer.modules()}
    for owner in module.modules():
        if owner in left_alone or isinstance(owner, tuple(mixed._module_classes_to_ignore)):
            continue
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                owner._buffers[name] = buffer.to(mixed.buffer_dtype)
