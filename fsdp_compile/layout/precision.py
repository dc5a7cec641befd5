"""Mixed precision: which policy holds for which parameter, and where modules cast what they are called with.

Parameters are cast as shards, before they are gathered, and gradients as they are reduced; `layout/buckets.py` and the
passes do that. What is left is the casts at the boundaries of modules, which are hooks that Dynamo traces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map_only

from ..checks import check_bool, check_dtype
from ..errors import ConfigError
from .globs import innermost, is_named
from .parts import names_of_parts

Key = str | type[nn.Module]


@dataclasses.dataclass(frozen=True)
class Precision:
    """The policies of a model.

    Attributes:
        policy_of_parameter: by the parameter's name; parameters without a policy keep their dtype, as integers and
            parts of quantised weights do.
        policy_of_boundary: by the name of a module that casts its inputs or outputs.
    """

    policy_of_parameter: Mapping[str, MixedPrecisionPolicy] = dataclasses.field(default_factory=dict)
    policy_of_boundary: Mapping[str, MixedPrecisionPolicy] = dataclasses.field(default_factory=dict)


def find_precision(model: nn.Module, mp_policy: object, units: Iterable[str]) -> Precision:
    """What `mp_policy` means for `model`.

    Args:
        mp_policy: None, a policy for the whole model, or a map to policies from module classes and globs over module
            names, the root's being "". A parameter has the policy of the innermost module that the map mentions, the
            last entry of those that match it. The modules that the map mentions cast their inputs and outputs. With
            a policy for the whole model the root casts both, and units their inputs.
        units: the names of modules that are units.

    Raises:
        ConfigError: `mp_policy` is none of these, or an entry matches no module.
    """
    if mp_policy is None:
        return Precision()
    policy_of_module = _policies(model, mp_policy)
    boundaries = dict(policy_of_module)
    if isinstance(mp_policy, MixedPrecisionPolicy):
        for unit in units:
            boundaries.setdefault(unit, dataclasses.replace(mp_policy, output_dtype=None))
    parts = names_of_parts(model)
    policy_of_parameter = {
        name: policy_of_module[module]
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point()
        and name not in parts
        and (module := innermost(name, policy_of_module)) is not None
    }
    return Precision(policy_of_parameter, boundaries)


def _policies(model: nn.Module, mp_policy: object) -> dict[str, MixedPrecisionPolicy]:
    """The policy of every module that is mentioned, by name."""
    if isinstance(mp_policy, MixedPrecisionPolicy):
        _check("mp_policy", mp_policy)
        return {"": mp_policy}
    if not isinstance(mp_policy, Mapping):
        raise ConfigError(
            "mp_policy is a MixedPrecisionPolicy of torch.distributed.fsdp, or a map to such policies from module "
            f"classes and globs over module names, not {mp_policy!r}"
        )
    found: dict[str, MixedPrecisionPolicy] = {}
    for key, policy in mp_policy.items():
        if not isinstance(policy, MixedPrecisionPolicy):
            raise ConfigError(f"mp_policy[{key!r}] is a MixedPrecisionPolicy, not {policy!r}")
        _check(f"mp_policy[{key!r}]", policy)
        names = [name for name, module in model.named_modules() if _matches(key, name, module)]
        if not names:
            raise ConfigError(f"mp_policy: no module of the model matches {key!r}")
        found |= dict.fromkeys(names, policy)
    return found


def _check(name: str, policy: MixedPrecisionPolicy) -> None:
    for field in ("param_dtype", "reduce_dtype", "output_dtype"):
        check_dtype(f"{name}: {field}", getattr(policy, field))
    check_bool(f"{name}: cast_forward_inputs", policy.cast_forward_inputs)


def _matches(key: Any, name: str, module: nn.Module) -> bool:
    if isinstance(key, str):
        return is_named(name, key)
    if isinstance(key, type) and issubclass(key, nn.Module):
        return isinstance(module, key)
    raise ConfigError(f"mp_policy: {key!r} is no module class and no glob over module names")


def install_casts(model: nn.Module, precision: Precision) -> None:
    """Make the boundaries cast the floating point tensors they are called with, and those they return."""
    for name, policy in precision.policy_of_boundary.items():
        module = model.get_submodule(name)
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            module.register_forward_pre_hook(CastInputs(policy.param_dtype), prepend=True, with_kwargs=True)
        if policy.output_dtype is not None:
            module.register_forward_hook(CastOutputs(policy.output_dtype))


def remove_input_casts(module: nn.Module) -> None:
    """From now on, this boundary leaves what it is called with as it is."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, CastInputs):
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


@dataclasses.dataclass(eq=False)
class CastInputs:
    """A forward pre-hook; while `is_full`, it casts nothing."""

    dtype: torch.dtype
    is_full: bool = False

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return (args, kwargs) if self.is_full else (_cast(args, self.dtype), _cast(kwargs, self.dtype))


@dataclasses.dataclass(eq=False)
class CastOutputs:
    """A forward hook; while `is_full`, it casts nothing."""

    dtype: torch.dtype
    is_full: bool = False

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output if self.is_full else _cast(output, self.dtype)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(torch.Tensor, cast, tree)
