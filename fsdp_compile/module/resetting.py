"""What is on the meta device gets memory, and the values of its modules' own `reset_parameters`, as with FSDP1."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
import torch.nn as nn

from ..errors import ConfigError

ParamInit = Callable[[nn.Module], None]


def param_init_by_reset(
    model: nn.Module, device: torch.device, ignored: Collection[nn.Parameter] = ()
) -> ParamInit | None:
    """A `param_init_fn` for a model that is, in part, on the meta device; None for others.

    Args:
        device: where values are to be.
        ignored: parameters that stay as they are.

    Raises:
        ConfigError: a module on the meta device has no `reset_parameters`.
    """
    on_meta = [module for module in model.modules() if _is_on_meta(module, ignored)]
    for module in on_meta:
        if not callable(getattr(module, "reset_parameters", None)):
            raise ConfigError(
                f"a {type(module).__name__} has tensors on the meta device and no reset_parameters() to give them "
                "values: give a param_init_fn"
            )

    def param_init_fn(module: nn.Module) -> None:
        module.to_empty(device=device, recurse=False)
        module.reset_parameters()  # type: ignore[operator]

    return param_init_fn if on_meta else None


def _is_on_meta(module: nn.Module, ignored: Collection[nn.Parameter]) -> bool:
    held = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return any(tensor.is_meta and not (isinstance(tensor, nn.Parameter) and tensor in ignored) for tensor in held)
