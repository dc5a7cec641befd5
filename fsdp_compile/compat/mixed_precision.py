"""FSDP1's `MixedPrecision`, in the policies of FSDP2."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from ..checks import check_bool, check_dtype, listed
from ..errors import ConfigError
from ..layout.globs import innermost
from ..layout.precision import CastInputs, CastOutputs, remove_input_casts
from ..module.full_precision import CastBuffer, FullInEvaluation
from ..module.reading import local_reads
from ..module.sharding import sharding_of


def mp_policy_of(mixed: MixedPrecision, module: nn.Module, parts: Iterable[nn.Module] = ()) -> Any:
    """The policies that mean what FSDP1's MixedPrecision means.

    Modules of the classes to ignore compute in fp32, and return what the rest computes in.

    Args:
        parts: modules below that were sharded before; their own options say what they do.
    """
    if not isinstance(mixed, MixedPrecision):
        raise ConfigError(f"mixed_precision is a MixedPrecision of torch.distributed.fsdp, not {mixed!r}")
    _check_mixed(mixed)
    casts = mixed.cast_forward_inputs or mixed.cast_root_forward_inputs
    policy = MixedPrecisionPolicy(mixed.param_dtype, mixed.reduce_dtype, cast_forward_inputs=casts)
    ignored: dict[str, MixedPrecisionPolicy] = {}
    if mixed.param_dtype is not None:
        whole = MixedPrecisionPolicy(torch.float32, torch.float32, output_dtype=mixed.param_dtype)
        kinds, others = tuple(mixed._module_classes_to_ignore), {inner for part in parts for inner in part.modules()}
        found = [name for name, m in module.named_modules() if isinstance(m, kinds) and m not in others]
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


def cast_buffers(module: nn.Module, mixed: MixedPrecision, others: Iterable[nn.Module]) -> list[CastBuffer]:
    """Cast the floating point buffers of all modules but those that are computed without the policy.

    Args:
        others: modules that are ignored, or have a policy of their own: they were wrapped before.

    Returns:
        What was cast to another dtype.
    """
    cast: list[CastBuffer] = []
    if (dtype := mixed.buffer_dtype) is None:
        return cast
    left_alone = {inner for outer in others for inner in outer.modules()}
    for owner in module.modules():
        if owner in left_alone or isinstance(owner, tuple(mixed._module_classes_to_ignore)):
            continue
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                owner._buffers[name] = buffer.to(dtype)
                cast.append(CastBuffer(owner, name, dtype, buffer.dtype))
    return cast


def keep_full_in_evaluation(
    module: nn.Module, selected: Collection[nn.Module], parts: Iterable[nn.Module], buffers: list[CastBuffer]
) -> None:
    """Units of `module`, which was just sharded, cast nothing while they are in evaluation mode.

    Args:
        selected: the modules that are units, besides `module` itself.
        parts: those that were sharded before; their own options say what they do.
        buffers: what was cast with `module`, whose mode decides about them.
    """
    own = sharding_of(module).owns[0]
    modules = {name: inner for name, inner in module.named_modules() if inner is module or inner in selected}
    units = {name: FullInEvaluation(inner) for name, inner in modules.items()}
    units[""].buffers = buffers

    def unit_around(name: str) -> FullInEvaluation:
        return units[innermost(name, units) or ""]

    for index, shard in enumerate(own.shards):
        unit_around(shard.layout.slots[0].parameter).indices.append(index)
    others = {inner for part in parts for inner in part.modules()}
    for name, inner in module.named_modules():
        if inner not in others:
            hooks = (*inner._forward_pre_hooks.values(), *inner._forward_hooks.values())
            unit = unit_around(name)
            unit.casts += [hook for hook in hooks if isinstance(hook, (CastInputs, CastOutputs))]
            unit.reads += [read for _, read in local_reads(inner, recurse=False)]
    own.full_in_evaluation = list(units.values())


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
