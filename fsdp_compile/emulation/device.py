"""What Python code of torch, Inductor and Triton asks of a GPU, answered for one that is not there.

Private, as of torch 2.13 to 2.15 and Triton 3.9: what is replaced below, each with who asks.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch._inductor.fx_passes.fuse_attention as fuse_attention
import torch._inductor.runtime.triton_helpers as triton_helpers
import torch._inductor.runtime.triton_heuristics as triton_heuristics
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config

from ..errors import ConfigError
from .gpus import GPUS, Gpu


class _Generator(torch.Generator):
    """The GPU's generator, from which nothing is drawn.

    A recomputed operator that may be random has to find it as the forward did, and takes it along: attention, for its
    dropout, which attention.py refuses.
    """

    device = torch.device("cuda", 0)

    def clone_state(self) -> _Generator:
        return _Generator()

    def graphsafe_get_state(self) -> _Generator:
        return self

    def graphsafe_set_state(self, state: torch.Generator) -> _Generator:
        return self


def emulate(name: str) -> None:
    """From here on, this process has the GPU of this name, which computes nothing.

    Raises:
        ConfigError: no such GPU is described, or Triton is not installed, or there is a GPU.
    """
    if name not in GPUS:
        raise ConfigError(f"no GPU {name!r} is described: one of {', '.join(GPUS)}")
    if torch.cuda.is_available():
        raise ConfigError("this process has a GPU, and a second one is not emulated beside it")
    gpu = GPUS[name]
    _answer_for_torch(gpu)
    _answer_for_triton(gpu)
    _answer_for_inductor()


def _answer_for_torch(gpu: Gpu) -> None:
    generator = _Generator()
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: gpu,
        "get_device_capability": lambda device=None: (gpu.major, gpu.minor),
        "get_device_name": lambda device=None: gpu.name,
        "synchronize": lambda device=None: None,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device="cuda": None,
        "is_bf16_supported": lambda including_emulation=True: gpu.major >= 8,
        "default_generators": (generator,),
        "_get_device_properties": lambda device: gpu,
        "_lazy_init": lambda: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
    }
    private: dict[str, Any] = {
        "_cuda_getDevice": lambda: 0,
        "_cuda_getCurrentRawStream": lambda device: 0,
        "_cuda_cudaCachingAllocator_is_enabled": lambda: True,  # Inductor, before it makes CUDA graphs
        "_accelerator_getDefaultGenerator": lambda device: generator,  # Inductor of torch 2.15
    }
    for owner, replaced in ((torch.cuda, answers), (torch._C, private)):
        for name, answer in replaced.items():
            setattr(owner, name, answer)
    torch.version.cuda = "13.0"
    CudaInterface.is_available = staticmethod(lambda: True)  # type: ignore[method-assign]
    CudaInterface.Worker.get_device_properties = staticmethod(lambda device=None: gpu)  # type: ignore[method-assign]


def _answer_for_triton(gpu: Gpu) -> None:
    try:
        from triton.backends.compiler import GPUTarget
        from triton.runtime.driver import driver
    except ImportError as e:
        raise ConfigError("emulation compiles with Triton: pip install 'fsdp-compile[gpu]'") from e
    properties = {
        "max_shared_mem": gpu.shared_memory_per_block_optin,
        "multiprocessor_count": gpu.multi_processor_count,
        "warpSize": gpu.warp_size,
        "max_num_regs": gpu.regs_per_multiprocessor,
    }
    answers: dict[str, Any] = {
        "get_current_target": lambda: GPUTarget("cuda", gpu.capability, gpu.warp_size),
        "get_current_device": lambda: 0,
        "get_current_stream": lambda device=0: 0,
        "get_active_torch_device": lambda: torch.device("cuda", 0),
        "get_device_interface": lambda: torch.cuda,
        "is_active": lambda: True,
        "utils": types.SimpleNamespace(get_device_properties=lambda device: properties),
    }
    driver.set_active(types.SimpleNamespace(**answers))
    triton_helpers.set_driver_to_gpu = lambda: None  # it would look for libcuda


_SETTINGS = {
    "compile_threads": 1,  # others would be processes without the emulation
    "fx_graph_cache": False,
    "joint_graph_constant_folding": False,  # it would compute constants on the device
    "shape_padding": False,  # it would measure whether a padded matmul is faster
}


def _answer_for_inductor() -> None:
    for name, value in _SETTINGS.items():
        setattr(config, name, value)
    # Kernels are compiled to the last step, and not loaded: that takes a device.
    triton_heuristics.CachingAutotuner._make_launchers = _launch_nothing  # type: ignore[method-assign]
    # The patterns of attention are traced on the device that there is; the CPU's are the same.
    register = fuse_attention._sfdp_init
    fuse_attention._sfdp_init = lambda device=None: register(torch.device("cpu"))  # type: ignore[assignment]


def _launch_nothing(tuned: Any) -> None:
    tuned.launchers = [None]
