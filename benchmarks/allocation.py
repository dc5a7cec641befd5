"""Bytes of tensors, now and at most: the same count for every subject, whoever allocates.

On the CPU torch's allocator is replaced by one that counts, before anything is allocated. What is not a tensor (code,
buffers inside gloo, the workspaces of kernels) is not in it. On a GPU torch counts itself.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import torch
from torch.utils import cpp_extension

LIBRARY = "libcounting.so"
_SOURCE = """
#include <c10/core/CPUAllocator.h>
#include <atomic>
#include <malloc.h>

static std::atomic<int64_t> live{0}, peak{0};
static c10::DeleterFnPtr release;

static void counted_release(void* data) {
  live -= malloc_usable_size(data);
  release(data);
}

struct Counting final : c10::Allocator {
  c10::Allocator* inner = c10::GetDefaultCPUAllocator();
  c10::DataPtr allocate(size_t n) override {
    c10::DataPtr data = inner->allocate(n);
    int64_t now = live += malloc_usable_size(data.get());
    for (int64_t before = peak; before < now && !peak.compare_exchange_weak(before, now);) {}
    bool is_ours = data.compare_exchange_deleter(release, &counted_release);
    TORCH_CHECK(is_ours || n == 0, "an allocation of another kind");
    return data;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &counted_release; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
};

extern "C" void install() {
  release = c10::GetDefaultCPUAllocator()->raw_deleter();
  c10::SetCPUAllocator(new Counting);
}
extern "C" int64_t live_bytes() { return live; }
extern "C" int64_t peak_bytes() { return peak; }
extern "C" void reset_peak() { peak = live.load(); }
"""


def build(folder: Path) -> None:
    """Compile the counting allocator into this folder, as `LIBRARY`."""
    source = folder / "counting.cpp"
    source.write_text(_SOURCE)
    headers = [f"-I{path}" for path in cpp_extension.include_paths()]
    torch_libraries = Path(torch.__file__).parent / "lib"
    command = ["g++", "-std=c++20", "-O2", "-shared", "-fPIC", *headers, str(source), "-o", str(folder / LIBRARY)]
    subprocess.run([*command, f"-L{torch_libraries}", "-lc10"], check=True)


class Allocation:
    """What this process has allocated on a device; on the CPU from now on, with the library of `build`."""

    def __init__(self, device: torch.device, library: Path | None = None) -> None:
        self.device = device
        self._counts = None if device.type == "cuda" else ctypes.CDLL(str(library))
        if self._counts is not None:
            self._counts.live_bytes.restype = self._counts.peak_bytes.restype = ctypes.c_int64
            self._counts.install()

    @property
    def live(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self._counts is None else self._counts.live_bytes()

    @property
    def peak(self) -> int:
        """The most since `reset`."""
        return torch.cuda.max_memory_allocated(self.device) if self._counts is None else self._counts.peak_bytes()

    def reset(self) -> None:
        if self._counts is None:
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self._counts.reset_peak()
