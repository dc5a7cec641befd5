"""Inductor's options: those that leave the schedule as it is, and the user's.

Private torch API, as of torch 2.11 to 2.15: Inductor's configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch._inductor

from ..errors import ConfigError
from ..runtime.inductor import Fences, InOrder

_REORDERING = {  # what Inductor would otherwise do to the order of the nodes, or to collectives, in some version
    "reorder_for_locality": False,
    "reorder_for_peak_memory": False,
    "reorder_for_compute_comm_overlap": False,
    "aten_distributed_optimizations.allow_comms_decompositions": False,
    "aten_distributed_optimizations.enable_low_contention_collectives": False,
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
    "aten_distributed_optimizations.enable_simple_overlap": False,  # on by default, from torch 2.14 on
    "bucket_all_gathers_fx": "none",
    "bucket_all_reduces_fx": "none",
    "bucket_reduce_scatters_fx": "none",
    "combo_kernels": False,
    "graph_partition": False,  # of two CUDA graphs, one would start a collective and the other wait for it
    "triton.reorder_for_reducing_graph_partitions": False,
    "_fuse_ddp_communication": False,
    "_micro_pipeline_tp": False,
    "_post_fusion_custom_pass": InOrder(),
    "_pre_fusion_custom_pass": Fences(),
}
KEEP_SCHEDULE = {name: value for name, value in _REORDERING.items() if name in torch._inductor.list_options()}

AS_EAGER = {"fallback_random": True, "pattern_matcher": False, "joint_graph_constant_folding": False}
"""Without code generation, a graph has eager's operators and random numbers, and so its results to the last bit."""


def inductor_options(options: object) -> dict[str, Any]:
    """The options by the names that Inductor has for them.

    Raises:
        ConfigError: Inductor does not have one, or not with a value of this type, or it would undo the schedule.
    """
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(f"options is a map from names of Inductor's options, not {options!r}")
    known = torch._inductor.list_options()
    found = {}
    for given, value in (options or {}).items():
        name = given.replace("-", "_") if isinstance(given, str) else given
        if name not in known:
            raise ConfigError(f"options: Inductor has no option {given!r}")
        if name in KEEP_SCHEDULE or name == "custom_partitioner_fn":
            raise ConfigError(f"options: {given} would undo the schedule of the rewritten graphs")
        kind = torch._inductor.config.get_type(name)  # type: ignore[attr-defined]
        if not _is_of(value, kind):
            raise ConfigError(f"options: {given} is of the type {getattr(kind, '__name__', kind)}, not {value!r}")
        found[name] = value
    return found


def _is_of(value: object, kind: Any) -> bool:
    """Whether an option that Inductor declares as of this type may have the value; yes, where only a call can tell."""
    if kind is type(None):  # declared by its default only
        return True
    try:
        return isinstance(value, kind) or (isinstance(value, int) and isinstance(0.0, kind))
    except TypeError:  # of generic types, such as list[str]
        return True
