"""FSDP1's `MixedPrecision`, in the policies of FSDP2."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from ..checks import check_bool, check_dtype, listed
from ..errors import ConfigError
from ..layout.precision import remove_input_casts
from ..module.reading import local_reads
from ..module.sharding import sharding_of


def mp_policy_of(mixed: MixedPrecision, module: nn.Module) -> Any:
    """The policies that mean what FSDP1's MixedPrecision means.

    Modules of the classes to ignore compute in fp32, and return what the rest computes in.
    """
    if not isinstance(mixed, MixedPrecision):
        raise ConfigError(f"mixed_precision is a MixedPrecision of torch.distributed.fsdp, not {mixed!r}")
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
    for field in ("cast_forward_inputs", "cast_root_forward_inputs", "keep_low_precision_grads"):
        check_bool(f"mixed_precision: {field}", getattr(mixed, field))
    for kind in listed("mixed_precision: _module_classes_to_ignore", mixed._module_classes_to_ignore, "classes"):
        if not isinstance(kind, type):
            raise ConfigError(f"mixed_precision: _module_classes_to_ignore holds classes, not {kind!r}")


def cast_buffers(module: nn.Module, mixed: MixedPrecision, others: Iterable[nn.Module]) -> None:
    """Cast the floating point buffers of all modules but those that are computed without the policy.

    Args:
        others: modules that are ignored, or have a policy of their own: they were wrapped before.
    """
    left_alone = {inner for outer in others for inner in outer.modules()}
    for owner in module.modules():
        if owner in left_alone or isinstance(owner, tuple(mixed._module_classes_to_ignore)):
            continue
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                owner._buffers[name] = buffer.to(mixed.buffer_dtype)


def keep_low_precision_gradients(module: nn.Module, mixed: MixedPrecision) -> None:
    """Parameters of `module`, which was just sharded, get gradients of the dtype that they are reduced in."""
    sharding = sharding_of(module)
    for shard in sharding.owns[0].shards:
        layout = shard.layout
        shard.change_layout(dataclasses.replace(layout, gradient_dtype=layout.reduce_dtype or layout.param_dtype))
    for parameter, read in local_reads(module):
        if parameter is not None and read.dtype is not None and read.dtype == mixed.param_dtype:
            parameter.grad_dtype = mixed.reduce_dtype or mixed.param_dtype


def cast_as_parts(modules: Iterable[nn.Module]) -> None:
    """Modules that were wrapped and are a part of a larger one now: `cast_root_forward_inputs` holds for that one."""
    for module in modules:
        mixed = vars(module).get("mixed_precision")
        if isinstance(mixed, MixedPrecision) and not mixed.cast_forward_inputs:
            remove_input_casts(module)
