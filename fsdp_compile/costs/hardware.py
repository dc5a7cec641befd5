"""Hardware: the machines that plans are made for, as values; some are described here, others are measured."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError

_TERA, _GIGA, _MICRO = 1e12, 1e9, 1e-6


@dataclasses.dataclass(frozen=True)
class Link:
    """One level of the network.

    Attributes:
        bandwidth: bytes/s that a rank sends and, at the same time, receives.
        hop: seconds that a step of a ring takes besides.
    """

    bandwidth: float
    hop: float


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A cluster of equal nodes, with as much of it as predictions need.

    Attributes:
        flops: dense peak, in FLOP/s (a multiply-add is two), by dtype ("bfloat16").
        efficiency: the fraction of the peak that large matmuls reach.
        memory_bandwidth: bytes/s between a device and its memory.
        memory: bytes of a device.
        between_nodes: a rank's own share of its node's network.
        host_bandwidth: bytes/s between a device and the CPU's memory.
        collective_start: seconds before a collective's first byte moves.
        kernel_start: seconds of a kernel that does nothing.
        contention: how many times longer compute takes while a collective runs.
        reduce_scatter_factor: how many times the bytes of an all-gather a reduce-scatter of the same size moves.
        all_reduce_factor: the same of an all-reduce.
        reduction_workspace: bytes that a reduce-scatter takes for itself, for each byte that it reduces.
        attention_factor: how many times longer attention takes than matmuls of as many FLOPs.
        message_start: seconds that each message of a grouped collective after the first takes besides its bytes.
    """

    name: str
    flops: Mapping[str, float]
    efficiency: float
    memory_bandwidth: float
    memory: int
    ranks_per_node: int
    within_node: Link
    between_nodes: Link
    host_bandwidth: float
    collective_start: float
    kernel_start: float
    contention: float
    reduce_scatter_factor: float = 1.0
    all_reduce_factor: float = 2.0
    reduction_workspace: float = 0.0
    attention_factor: float = 1.0
    message_start: float = 0.0

    def __post_init__(self) -> None:
        rates = {
            "memory_bandwidth": self.memory_bandwidth,
            "host_bandwidth": self.host_bandwidth,
            "within_node.bandwidth": self.within_node.bandwidth,
            "between_nodes.bandwidth": self.between_nodes.bandwidth,
            **{f"flops[{dtype}]": rate for dtype, rate in self.flops.items()},
        }
        for name, rate in rates.items():
            if not (math.isfinite(rate) and rate > 0):
                raise ConfigError(f"hardware {self.name}: {name} is a number > 0, not {rate}")
        if "float32" not in self.flops:
            raise ConfigError(f"hardware {self.name}: flops needs a figure for float32, and has {sorted(self.flops)}")
        if not 0 < self.efficiency <= 1:
            raise ConfigError(f"hardware {self.name}: efficiency is a fraction of the peak, not {self.efficiency}")

    def flops_of(self, dtype: torch.dtype) -> float:
        """FLOP/s that large matmuls of this dtype reach; those of float32 for a dtype without a figure."""
        name = str(dtype).removeprefix("torch.")
        return self.efficiency * self.flops.get(name, self.flops["float32"])

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Hardware:
        """What `to_json` wrote; raises ConfigError for text that does not describe hardware."""
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as e:
            raise ConfigError(f"no hardware profile: {e}") from None
        if not isinstance(fields, dict):
            raise ConfigError(f"no hardware profile: it is a {type(fields).__name__}, not fields by name")
        known = {field.name: field for field in dataclasses.fields(cls)}
        missing = {name for name, field in known.items() if field.default is dataclasses.MISSING} - set(fields)
        if missing or set(fields) - set(known):
            raise ConfigError(
                f"no hardware profile: missing {sorted(missing)}, unknown {sorted(set(fields) - set(known))}"
            )
        try:
            links = {name: Link(**fields[name]) for name in ("within_node", "between_nodes")}
            return cls(**{**fields, **links})
        except (TypeError, AttributeError) as e:
            raise ConfigError(f"no hardware profile: {e}") from None

    @property
    def digest(self) -> str:
        """The same for the same description, in every process."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


def find_hardware(hardware: Hardware | str | bool) -> Hardware:
    """A description itself, one of `HARDWARE` by its name, or the profile in a file of that name.

    Raises:
        ConfigError: it is nothing of these, or the file holds no profile.
    """
    if isinstance(hardware, Hardware):
        return hardware
    if not isinstance(hardware, str):
        raise ConfigError(f"hardware is a Hardware, a name or the name of a file, not {hardware!r}")
    if hardware in HARDWARE:
        return HARDWARE[hardware]
    if not os.path.isfile(hardware):
        raise ConfigError(f"hardware {hardware!r} is neither a file nor one of {', '.join(HARDWARE)}")
    try:
        return Hardware.from_json(Path(hardware).read_text())
    except (ConfigError, UnicodeDecodeError) as e:
        raise ConfigError(f"hardware {hardware!r}: {e}") from None


def hardware_of_gpu() -> Hardware | None:
    """The description of the GPU at hand; None without one, or without a description of it."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_name()
    memory = torch.cuda.get_device_properties(0).total_memory
    same = [name for name in HARDWARE if name.partition("-")[0] in found.lower()]
    return HARDWARE[min(same, key=lambda name: abs(HARDWARE[name].memory - memory))] if same else None


def _nvidia(
    name: str,
    *,
    bf16: float,
    tf32: float,
    memory_bandwidth: float,
    memory: float,
    nvlink: Link,
    network: Link,
    host: float,
    efficiency: float,
    fp8: float | None = None,
) -> Hardware:
    flops: dict[str, Any] = {"bfloat16": bf16 * _TERA, "float16": bf16 * _TERA, "float32": tf32 * _TERA}
    if fp8 is not None:
        flops |= {"float8_e4m3fn": fp8 * _TERA, "float8_e5m2": fp8 * _TERA}
    return Hardware(
        name=name,
        flops=flops,
        efficiency=efficiency,
        memory_bandwidth=memory_bandwidth * _GIGA,
        memory=int(memory * _GIGA),
        ranks_per_node=8,
        within_node=nvlink,
        between_nodes=network,
        host_bandwidth=host * _GIGA,
        collective_start=8.4 * _MICRO,  # NCCL's base latency of a ring with the SIMPLE protocol
        kernel_start=3 * _MICRO,
        contention=1.189,  # arXiv 2507.03114: collectives slow overlapped compute by 18.9 % on average
    )


# Dense peaks and memory from NVIDIA's data sheets (float32: TF32). Bus bandwidths and latencies of NVLink and network
# from the tuning constants of NCCL for rings with the SIMPLE protocol, one network card for each GPU of a node.
_NVLINK_HOP, _NETWORK_HOP = 3.4 * _MICRO, 14 * _MICRO
# Efficiencies: the least squares of log(predicted / published) over published training runs, one number for A100 and
# one for H100 (benchmarks/published.py --fit, docs/performance.md). H200 is an H100 with more memory; for B200 nothing
# was fitted: it has the efficiency of H100.
_A100_EFFICIENCY, _H100_EFFICIENCY = 0.72, 0.58
_A100: dict[str, Any] = {
    "efficiency": _A100_EFFICIENCY,
    "nvlink": Link(240 * _GIGA, _NVLINK_HOP),
    "network": Link(25 * _GIGA, _NETWORK_HOP),
    "host": 25.0,
}
_H100: dict[str, Any] = {
    "efficiency": _H100_EFFICIENCY,
    "nvlink": Link(370 * _GIGA, _NVLINK_HOP),
    "network": Link(50 * _GIGA, _NETWORK_HOP),
    "host": 55.0,
}

HARDWARE: dict[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        _nvidia("a100-40", bf16=312, tf32=156, memory_bandwidth=1555, memory=40, **_A100),
        _nvidia("a100-80", bf16=312, tf32=156, memory_bandwidth=2039, memory=80, **_A100),
        _nvidia("h100", bf16=989, tf32=494, fp8=1979, memory_bandwidth=3350, memory=80, **_H100),
        _nvidia("h200", bf16=989, tf32=494, fp8=1979, memory_bandwidth=4800, memory=141, **_H100),
        _nvidia(
            "b200",
            bf16=2250,
            tf32=1125,
            fp8=4500,
            memory_bandwidth=8000,
            memory=180,
            **_H100 | {"nvlink": Link(740 * _GIGA, _NVLINK_HOP)},
        ),
    )
}
