"""Policies of torch.distributed.fsdp.wrap, whose entry point is private."""

from __future__ import annotations

import torch.nn as nn
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

from ..checks import check_call
from ..errors import ConfigError


def run_policy(policy: ModuleWrapPolicy | CustomPolicy, model: nn.Module) -> set[nn.Module]:
    """The modules that the policy selects, except for the model itself.

    Raises:
        ConfigError: the policy returns something else than bool; arguments for single modules are not supported.
    """
    if isinstance(policy, CustomPolicy):
        if not callable(policy._lambda_fn):
            raise ConfigError(f"auto_wrap_policy: a CustomPolicy calls a function, not {policy._lambda_fn!r}")
        check_call("auto_wrap_policy", policy._lambda_fn, "module")
    try:  # `_lambda_fn` and `_run_policy` as of torch 2.11 to 2.15
        arguments_of_module = policy._run_policy(model, ignored_modules=set(), root_kwargs={})
    except ValueError as e:
        raise ConfigError(f"auto_wrap_policy: {e}") from e
    for module, arguments in arguments_of_module.items():
        if arguments:
            raise ConfigError(
                f"auto_wrap_policy returned {arguments!r} for {type(module).__name__}: arguments for single modules "
                "are not supported; return a bool"
            )
    return set(arguments_of_module) - {model}
