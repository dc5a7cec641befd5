"""Policies of FSDP1, in what `fsdp_compile` takes: those of torch 1.11, and those with options for single modules."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import torch.nn as nn
from torch.distributed.fsdp.wrap import CustomPolicy

from ..checks import check_call
from ..errors import ConfigError

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
    if isinstance(policy, CustomPolicy) and callable(policy._lambda_fn):
        return _with_options(policy, module, left_alone)
    if _takes(policy, "unwrapped_params"):
        return Wrapping(
            lambda module, recurse, nonwrapped_numel: policy(
                module=module, recurse=recurse, unwrapped_params=nonwrapped_numel
            )
        )
    return Wrapping(policy)


def _with_options(policy: CustomPolicy, module: nn.Module, left_alone: Collection[Any]) -> Wrapping:
    check_call("auto_wrap_policy", policy._lambda_fn, "module")
    skipped = {inner for item in left_alone if isinstance(item, nn.Module) for inner in item.modules()}
    answers = {part: policy._lambda_fn(part) for part in module.modules() if part is not module and part not in skipped}
    options_of_module = {part: answer for part, answer in answers.items() if isinstance(answer, dict) and answer}
    for part, options in options_of_module.items():
        if unknown := [name for name in options if name not in OPTIONS]:
            raise ConfigError(
                f"auto_wrap_policy returned {unknown[0]!r} for a {type(part).__name__}: the options of a single module "
                f"are {', '.join(OPTIONS)}"
            )

    def is_unit(part: nn.Module) -> Any:
        answer = answers.get(part, False)
        return bool(answer) if isinstance(answer, dict) else answer

    return Wrapping(CustomPolicy(is_unit), dict(reversed(options_of_module.items())))


def _takes(function: Any, name: str) -> bool:
    """Whether `function` is one that says that it takes an argument of this name."""
    with suppress(TypeError, ValueError):
        return callable(function) and name in inspect.signature(function).parameters
    return False
