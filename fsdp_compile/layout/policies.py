"""Policies of torch.distributed.fsdp.wrap, whose entry point is private."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch.nn as nn
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

from ..checks import check_call
from ..errors import ConfigError


def run_policy(policy: ModuleWrapPolicy | CustomPolicy, model: nn.Module) -> set[nn.Module]:
    """The modules that the policy selects, except for the model itself.

    Raises:
        ConfigError: the policy returns something else than bool; arguments for single modules are not supported.
    """
    arguments_of_module = run_policy_with_arguments(policy, model)
    for module, arguments in arguments_of_module.items():
        if arguments:
            raise ConfigError(
                f"auto_wrap_policy returned {arguments!r} for {type(module).__name__}: arguments for single modules "
                "are not supported; return a bool"
            )
    return set(arguments_of_module) - {model}


def run_policy_with_arguments(
    policy: ModuleWrapPolicy | CustomPolicy, model: nn.Module, ignored: Collection[nn.Module] = ()
) -> dict[nn.Module, dict[str, Any]]:
    """The modules that the policy selects, the model among them, with the arguments that it gives to each.

    Outer modules come first.

    Args:
        ignored: modules that the policy is not asked about.

    Raises:
        ConfigError: the policy returns something else than a bool or a dict.
    """
    if isinstance(policy, CustomPolicy):
        if not callable(policy._lambda_fn):
            raise ConfigError(f"auto_wrap_policy: a CustomPolicy calls a function, not {policy._lambda_fn!r}")
        check_call("auto_wrap_policy", policy._lambda_fn, "module")
    try:  # `_lambda_fn` and `_run_policy` as of torch 2.11 to 2.15
        return policy._run_policy(model, ignored_modules=set(ignored), root_kwargs={})
    except ValueError as e:
        raise ConfigError(f"auto_wrap_policy: {e}") from e
