"""Policies of FSDP1, in what `fsdp_compile` takes: those of torch 1.11, and those with options for single modules."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import torch.nn as nn
from torch.distributed.fsdp.wrap import CustomPolicy

from ..errors import ConfigError
from ..layout.policies import run_policy_with_arguments

OPTIONS = (
    "process_group",
    "sharding_strategy",
    "cpu_offload",
    "backward_prefetch",
    "mixed_precision",
    "param_init_fn",
    "device_id",
    "sync_module_states",
    "forward_prefetch",
    "limit_all_gathers",
    "use_orig_params",
    "device_mesh",
)
"""What a `CustomPolicy` may decide for a single module, by a dict."""


@dataclasses.dataclass(frozen=True)
class Wrapping:
    """What a policy says.

    Attributes:
        policy: as `fsdp_compile` takes it.
        options_of_module: of the modules that have options of their own, those; inner modules come first.
    """

    policy: Any
    options_of_module: Mapping[nn.Module, Mapping[str, Any]] = dataclasses.field(default_factory=dict)


def wrapping_by(policy: Any, of_torch_1_11: Any, module: nn.Module, left_alone: Collection[Any]) -> Wrapping:
    """What a policy says of `module`; a callable of torch 1.11 names its third argument `unwrapped_params`.

    Args:
        of_torch_1_11: the policy, by the name that the argument had in torch 1.11.
        left_alone: modules, and parameters, that are ignored: a `CustomPolicy` is not asked about these modules.

    Raises:
        ConfigError: both policies are given, or a `CustomPolicy` gives a module an option that is not in `OPTIONS`.
    """
    if policy is not None and of_torch_1_11 is not None:
        raise ConfigError("give an auto_wrap_policy or an fsdp_auto_wrap_policy, which is its name in torch 1.11")
    if of_torch_1_11 is not None:
        policy = of_torch_1_11
    if policy is None:
        return Wrapping([module])
    if isinstance(policy, CustomPolicy):
        return _with_options(policy, module, left_alone)
    if _takes(policy, "unwrapped_params"):
        return Wrapping(
            lambda module, recurse, nonwrapped_numel: policy(
                module=module, recurse=recurse, unwrapped_params=nonwrapped_numel
            )
        )
    return Wrapping(policy)


def _with_options(policy: CustomPolicy, module: nn.Module, left_alone: Collection[Any]) -> Wrapping:
    skipped = {inner for item in left_alone if isinstance(item, nn.Module) for inner in item.modules()}
    found = run_policy_with_arguments(policy, module, skipped)
    found.pop(module, None)  # has the options of the call
    for part, options in found.items():
        if unknown := [name for name in options if name not in OPTIONS]:
            raise ConfigError(
                f"auto_wrap_policy returned {unknown[0]!r} for a {type(part).__name__}: the options of a single module "
                f"are {', '.join(OPTIONS)}"
            )
    return Wrapping(list(found), {part: options for part, options in reversed(found.items()) if options})


def _takes(function: Any, name: str) -> bool:
    """Whether `function` is one that says that it takes an argument of this name."""
    with suppress(TypeError, ValueError):
        return callable(function) and name in inspect.signature(function).parameters
    return False
