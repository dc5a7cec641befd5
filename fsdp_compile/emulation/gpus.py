"""GPUs that can be emulated, described by what torch, Inductor and Triton ask of one."""

from __future__ import annotations

import dataclasses

_KIB, _MIB, _GIB = 2**10, 2**20, 2**30


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU by the names of `torch.cuda.get_device_properties`; memory and caches in bytes.

    Figures are NVIDIA's: architecture white papers, and the table "Technical Specifications per Compute Capability" of
    the CUDA C++ Programming Guide.
    """

    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    L2_cache_size: int
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int
    shared_memory_per_block: int = 48 * _KIB
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    warp_size: int = 32
    clock_rate: int = 1_980_000
    memory_clock_rate: int = 2_619_000
    memory_bus_width: int = 5120
    gcnArchName: str = ""
    type: str = "cuda"

    @property
    def capability(self) -> int:
        """The number that compilers know the architecture by: 90."""
        return 10 * self.major + self.minor


GPUS = {
    "a100-40": Gpu("NVIDIA A100-SXM4-40GB", 8, 0, 108, 40 * _GIB, 40 * _MIB, 163 * _KIB, 164 * _KIB),
    "a100-80": Gpu("NVIDIA A100-SXM4-80GB", 8, 0, 108, 80 * _GIB, 40 * _MIB, 163 * _KIB, 164 * _KIB),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 9, 0, 132, 80 * _GIB, 50 * _MIB, 227 * _KIB, 228 * _KIB),
    "h200": Gpu("NVIDIA H200", 9, 0, 132, 140 * _GIB, 50 * _MIB, 227 * _KIB, 228 * _KIB),
    "b200": Gpu("NVIDIA B200", 10, 0, 148, 179 * _GIB, 126 * _MIB, 227 * _KIB, 228 * _KIB),
}
