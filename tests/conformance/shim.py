"""Lets PyTorch's own FSDP tests, which are written for GPUs, run on the CPU with gloo.

Every converted test imports this first, on every rank. What it changes is in torch, for this process; the tests' own
subject is changed only if the environment asks for it:

    CONFORMANCE_SUBJECT=compat     torch.distributed.fsdp has the classes of fsdp_compile.compat; "torch" leaves them
    CONFORMANCE_BACKEND=aot_eager  what these compile with
    CONFORMANCE_WORLD=2            the number of ranks of tests that take one for each GPU
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import unittest
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._composable as composable
import torch.distributed._composable.fsdp as composable_fsdp
import torch.distributed.fsdp as fsdp
import torch.distributed.fsdp._init_utils as fsdp1_init
import torch.distributed.fsdp.fully_sharded_data_parallel as fsdp1
import torch.distributed.fsdp.sharded_grad_scaler as grad_scaler
import torch.testing._internal.common_cuda as common_cuda
import torch.testing._internal.common_distributed as common_distributed
import torch.testing._internal.common_fsdp as common_fsdp
import torch.testing._internal.inductor_utils as inductor_utils
import torch.utils._triton as triton

from fsdp_compile import compat

WORLD = int(os.environ.get("CONFORMANCE_WORLD", "2"))
SUBJECT = os.environ.get("CONFORMANCE_SUBJECT", "torch")
BACKEND = os.environ.get("CONFORMANCE_BACKEND", "aot_eager")
CPU = torch.device("cpu")


def count_ranks_as_gpus() -> None:
    """As many GPUs as ranks are said to exist, and no test is left out for their number."""

    def enough(number: int, **_: Any) -> Callable[[Any], Any]:
        def decorate(test: Any) -> Any:
            return test if number <= WORLD else unittest.skip(f"takes {number} ranks")(test)

        return decorate

    def always(*_: Any, **__: Any) -> Callable[[Any], Any]:
        return lambda test: test

    common_distributed.skip_if_lt_x_gpu = enough
    common_distributed.requires_nccl = common_distributed.requires_accelerator_dist_backend = always
    common_distributed.requires_nccl_version = always
    common_fsdp.DEVICE_COUNT = WORLD
    if hasattr(common_fsdp, "FSDPTestContinuous"):
        common_fsdp.FSDPTestContinuous.world_size = WORLD
    common_cuda.TEST_CUDA = common_cuda.TEST_MULTIGPU = True
    # Dynamo reads __wrapped__ of these
    torch.accelerator.device_count = functools.lru_cache(maxsize=1)(lambda: WORLD)  # type: ignore[assignment]
    torch.cuda.device_count = functools.lru_cache(maxsize=1)(lambda: WORLD)  # type: ignore[assignment]


class Nothing:
    """A stream or an event."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return (lambda *_, **__: 1.0) if name == "elapsed_time" else (lambda *_, **__: Nothing())


def stay_on_the_cpu() -> None:
    """What moves to a GPU stays; streams, events and the choice of a device do nothing."""
    for name in (
        "set_device",
        "synchronize",
        "empty_cache",
        "reset_peak_memory_stats",
        "_sleep",
        "manual_seed",
        "init",
    ):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment,return-value]
    torch.cuda.is_available = lambda: False
    torch.cuda.Stream = torch.cuda.Event = Nothing  # type: ignore[misc,assignment]
    torch.cuda.current_stream = lambda *_: Nothing()  # type: ignore[assignment,return-value]
    torch.cuda.stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment,return-value]
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign,assignment]
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[assignment,method-assign]
    torch.cpu.set_device = lambda *_: None  # type: ignore[attr-defined,assignment]
    torch.cpu.Stream = torch.cpu.Event = Nothing  # type: ignore[misc,assignment]
    torch.cpu.current_stream = lambda *_: Nothing()  # type: ignore[assignment,return-value]
    torch.cpu.stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment,return-value]
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda *_: None  # type: ignore[attr-defined]
    grad_scaler.ShardedGradScaler.__init__.__defaults__ = (
        "cpu",
        *grad_scaler.ShardedGradScaler.__init__.__defaults__[1:],
    )
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False  # type: ignore[assignment]


def leave_out_device_ids() -> None:
    """Numbers of GPUs, which gloo, DDP and replicate do not take on the CPU, and which name the CPU for FSDP."""
    barrier, ddp = dist.barrier, torch.nn.parallel.DistributedDataParallel.__init__
    dist.barrier = lambda *args, device_ids=None, **kwargs: barrier(*args, **kwargs)  # type: ignore[assignment]

    def ddp_init(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **kwargs: Any) -> None:
        ddp(self, module, **kwargs)

    torch.nn.parallel.DistributedDataParallel.__init__ = ddp_init  # type: ignore[method-assign]
    replicate_module = sys.modules["torch.distributed._composable.replicate"]
    original = replicate_module.replicate  # type: ignore[attr-defined]

    def replicate(module: Any, ignored_modules: Any = None, **kwargs: Any) -> Any:
        kwargs.pop("device_ids", None)
        return original(module, ignored_modules, **kwargs)

    replicate.state = original.state  # type: ignore[attr-defined]
    replicate_module.replicate = composable.replicate = replicate  # type: ignore[attr-defined,assignment]
    device_from_id = fsdp1_init._get_device_from_device_id
    fsdp1_init._get_device_from_device_id = lambda device_id, *args: device_from_id(_device(device_id), *args)
    init_device_handle = fsdp1_init._init_device_handle

    def device_handle(state: Any, module: Any, ignored_params: Any, device_id: Any) -> Any:
        return init_device_handle(state, module, ignored_params, _device(0 if device_id is None else device_id))

    fsdp1_init._init_device_handle = fsdp1._init_device_handle = device_handle


def _device(device_id: Any) -> Any:
    return CPU if isinstance(device_id, int) else device_id


def have_ranks_in_the_place_of_threads() -> None:
    """Tests whose ranks are threads of one process run on processes: compilation is for one rank at a time."""

    class Ranks(common_fsdp.FSDPTest):
        @classmethod
        def _run(cls, *args: Any, **kwargs: Any) -> None:
            torch.accelerator.device_count = lambda: cls.most_ranks  # of this process, for what it asks at its start
            super()._run(*args, **kwargs)

        most_ranks = 8

    common_fsdp.FSDPTestMultiThread = Ranks


def use_names_of_older_torch() -> None:
    if hasattr(common_fsdp, "compiled_fsdp_test"):
        common_fsdp.test_compiled_fsdp = common_fsdp.compiled_fsdp_test
    if not hasattr(inductor_utils, "HAS_CUDA"):
        inductor_utils.HAS_CUDA = False
    triton.has_triton = common_fsdp.has_triton = lambda: False


def spawn_from_a_warm_process() -> None:
    """Ranks are forked from a process that has imported all of this; a new Python would take ten seconds for it."""
    context: Any = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])

    def spawn(self: Any) -> None:
        self._start_processes(context.Process)

    common_distributed.MultiProcessTestCase._spawn_processes = spawn  # type: ignore[method-assign]


class FullyShardedDataParallel(compat.FullyShardedDataParallel):
    """compat's, compiled with another backend; the number of a GPU names the CPU."""

    def __new__(cls, module: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["device_id"] = _device(kwargs.get("device_id"))
        sharded = compat.FullyShardedDataParallel(module, *args, backend=BACKEND, **kwargs)
        vars(sharded)["_assert_state"] = _assert_state
        return sharded


def _assert_state(_: Any) -> None:
    """FSDP1's own, which the tests' helper for training calls at its end."""


def _fully_shard(*args: Any, **kwargs: Any) -> Any:
    return compat.fully_shard(*args, backend=BACKEND, **kwargs)


def put_compat_in_the_place_of_torch() -> None:
    _fully_shard.__name__ = "fully_shard"
    _fully_shard.state = compat.fully_shard.state  # type: ignore[attr-defined]
    for module in (fsdp, composable_fsdp, common_fsdp):
        module.fully_shard, module.FSDPModule = _fully_shard, compat.FSDPModule  # type: ignore[attr-defined]
        module.register_fsdp_forward_method = compat.register_fsdp_forward_method  # type: ignore[attr-defined]
    for module in (fsdp, fsdp1):
        module.FullyShardedDataParallel = FullyShardedDataParallel  # type: ignore[attr-defined]
    common_fsdp.FSDP = FullyShardedDataParallel
    give_methods_to_children_named_module()


def give_methods_to_children_named_module() -> None:
    """`model.module` is the wrapped model for FSDP1; sharded in place, a model that has a child of this name keeps it.

    The helpers for training call three methods through it, on models that have such a child.
    """
    for kind in (common_fsdp.NestedWrappedModule, common_fsdp.NonUniformReqGradNWM, common_fsdp.MixtureOfExperts):
        kind.__init__ = _with_methods(kind.__init__)  # type: ignore[method-assign]


def _with_methods(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for name in ("get_input", "get_loss", "run_backward"):
            vars(self.module)[name] = getattr(self, name)

    return wrapped


count_ranks_as_gpus()
stay_on_the_cpu()
leave_out_device_ids()
have_ranks_in_the_place_of_threads()
use_names_of_older_torch()
spawn_from_a_warm_process()
if SUBJECT == "compat":
    put_compat_in_the_place_of_torch()
