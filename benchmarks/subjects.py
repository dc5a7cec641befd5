"""The subjects: the ways to train a model that the benchmarks compare, and the training itself."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from allocation import Allocation
from simple_fsdp import BUCKETED, overlapped, simple_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map
from workloads import Workload

from fsdp_compile import CommunicationDtype, fsdp_compile
from fsdp_compile.costs import Hardware
from fsdp_compile.costs.calibrate import calibrate


@dataclasses.dataclass
class Case:
    """A model to be sharded.

    Attributes:
        units: the names of its modules that are a unit each.
        hardware: what was measured, for subjects that ask for it.
        memory_budget: bytes, for subjects that ask for it.
        inductor: options of torch.compile, for subjects that compile.
        root: the mesh whose dimension "tp" splits the model already; None for one that is not split.
    """

    model: nn.Module
    inputs: tuple[Tensor, ...]
    units: list[str]
    hardware: Hardware | None = None
    memory_budget: int | None = None
    inductor: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    root: DeviceMesh | None = None

    @property
    def mesh(self) -> DeviceMesh:
        """Over the ranks that parameters are to be sharded over."""
        if self.root is not None:
            return self.root["dp"]
        return init_device_mesh(self.inputs[0].device.type, (dist.get_world_size(),))

    def modules(self) -> list[nn.Module]:
        return [self.model.get_submodule(name) for name in self.units]

    def compiled(self, options: Mapping[str, Any] | None = None) -> nn.Module:
        return torch.compile(self.model, fullgraph=True, dynamic=False, options={**self.inductor, **(options or {})})


# ----------------------------------------------------------------------------------------------------------
# Peers
# ----------------------------------------------------------------------------------------------------------


def ddp(case: Case) -> nn.Module:
    return DistributedDataParallel(case.model, gradient_as_bucket_view=True)


def fsdp1(case: Case, **options: Any) -> nn.Module:
    units = set(case.modules())
    policy = CustomPolicy(lambda module: module in units)
    device = case.inputs[0].device
    return FullyShardedDataParallel(
        case.model, auto_wrap_policy=policy, use_orig_params=True, device_id=device, **options
    )


def fsdp2(case: Case, **options: Any) -> nn.Module:
    mesh = case.mesh
    for unit in case.modules():
        fully_shard(unit, mesh=mesh, **options)
    return fully_shard(case.model, mesh=mesh, **options)


def fsdp2_prefetch(case: Case) -> nn.Module:
    """With gathers that do not block, each started one unit ahead."""
    model, units = fsdp2(case), case.modules()
    model._set_unshard_async_op(True)
    order = [model, *units]
    for earlier, later in zip(order, order[1:], strict=False):
        earlier.set_modules_to_forward_prefetch([later])
        later.set_modules_to_backward_prefetch([earlier])
    return model


def fsdp2_compiled(case: Case) -> nn.Module:
    """Each unit compiled, the hooks between them not, as torchtitan does."""
    options = dict(case.inductor)
    for name in case.units:
        unit = torch.compile(case.model.get_submodule(name), fullgraph=True, dynamic=False, options=options)
        case.model.set_submodule(name, unit)
    return fsdp2(case)


def simple(case: Case, options: Mapping[str, Any] | None = None) -> nn.Module:
    simple_fsdp(case.model, case.mesh)
    return case.compiled(options)


def simple_overlap(case: Case) -> nn.Module:
    hardware = case.hardware
    return simple(case, overlapped(hardware.flops_of(torch.float32), hardware.between_nodes.bandwidth))


# ----------------------------------------------------------------------------------------------------------
# All
# ----------------------------------------------------------------------------------------------------------


def ours(case: Case, **options: Any) -> nn.Module:
    inductor = None if "backend" in options else dict(case.inductor) or None
    # The ranks build equal models; with the "fake" process group there is nobody to get values from.
    mesh = None if case.root is None else case.mesh
    return fsdp_compile(case.model, mesh, sync_module_states=False, options=inductor, **options)


def ours_planned(case: Case, **options: Any) -> nn.Module:
    return ours(case, hardware=case.hardware, memory_budget=case.memory_budget, **options)


class Messages(nn.Module):
    """The collectives of a model's graphs, one after another, and nothing that is computed."""

    def __init__(self, model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(1))
        model(*inputs).backward()
        lowered = model.graphs[-1].lowered
        self.calls = [
            (node.target, tree_map(_ones, list(node.args)))
            for gm in (lowered.forward, lowered.backward)
            for node in gm.graph.nodes
            if str(node.target).startswith("_c10d_functional") and node.target is not _WAIT
        ]

    def forward(self, *_: Tensor) -> Tensor:
        for target, arguments in self.calls:
            pending = target(*arguments)
            for result in pending if isinstance(pending, list) else [pending]:
                _WAIT(result)
        return self.nothing.sum()


_WAIT = torch.ops._c10d_functional.wait_tensor.default


def _ones(argument: Any) -> Any:
    if not isinstance(argument, torch.fx.Node):
        return argument
    value = argument.meta["val"]
    return torch.ones(value.shape, dtype=value.dtype, device=value.device)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A way to train.

    Attributes:
        shard: makes of a case what is called, a module with parameters for an optimizer.
        is_calibrated: whether it asks for the hardware, measured.
        measures: whether it measures the hardware itself.
        budget: the part of FSDP2's peak that it may have; None for no limit.
        computes: whether it trains at all.
        in_backward: whether its optimizer steps in the backward.
    """

    shard: Callable[[Case], nn.Module]
    is_calibrated: bool = False
    measures: bool = False
    budget: float | None = None
    computes: bool = True
    in_backward: bool = False


NARROWER = {
    "bf16": CommunicationDtype(reduce=torch.bfloat16),
    "int8-bf16": CommunicationDtype("int8", torch.bfloat16),
    "int8": CommunicationDtype("int8", "int8"),
    "int8-fed-back": CommunicationDtype("int8", "int8", error_feedback=True),
    "int4": CommunicationDtype("int4", "int4"),
    "int4-fed-back": CommunicationDtype("int4", "int4", error_feedback=True),
    "reduced-int4": CommunicationDtype(reduce="int4"),
    "reduced-int4-fed-back": CommunicationDtype(reduce="int4", error_feedback=True),
}
"""What is sent in a narrower form; by the end of the subject's name."""

REPLICAS = {
    "replicas": CommunicationDtype(),
    "replicas-bf16": CommunicationDtype(all_reduce=torch.bfloat16),
    "replicas-int8": CommunicationDtype(all_reduce="int8"),
}
"""What replicas send each other; by the end of the subject's name."""


def narrower(sent: CommunicationDtype) -> Subject:
    return Subject(partial(ours, communication_dtype=sent), measures=True)


def replicas(sent: CommunicationDtype) -> Subject:
    """Every rank keeps all parameters, and sends the others its gradients in this form."""
    return Subject(partial(ours, hardware=False, sharding_strategy=ShardingStrategy.NO_SHARD, communication_dtype=sent))


SUBJECTS = {
    "single": Subject(lambda case: case.model),
    "single-compiled": Subject(lambda case: case.compiled()),
    "ddp": Subject(ddp),
    "fsdp1": Subject(fsdp1),
    "fsdp2": Subject(fsdp2),
    "fsdp1-kept": Subject(partial(fsdp1, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)),
    "fsdp2-kept": Subject(partial(fsdp2, reshard_after_forward=False)),
    "fsdp2-prefetch": Subject(fsdp2_prefetch),
    "fsdp2-compiled": Subject(fsdp2_compiled),
    "simple": Subject(simple),
    "simple-bucketed": Subject(lambda case: simple(case, BUCKETED)),
    "simple-overlap": Subject(simple_overlap, is_calibrated=True),
    "fsdp_compile": Subject(ours, measures=True),
    "fsdp_compile-updates": Subject(ours, measures=True, in_backward=True),
    "fsdp_compile-plain": Subject(partial(ours, hardware=False)),
    "fsdp_compile-kept": Subject(partial(ours, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)),
    "fsdp_compile-planned": Subject(ours_planned, is_calibrated=True),
    "fsdp_compile-fit": Subject(ours_planned, is_calibrated=True, budget=1.0),
    "fsdp_compile-tight": Subject(ours_planned, is_calibrated=True, budget=0.8),
    "fsdp_compile-auto": Subject(
        lambda case: ours_planned(case, sharding_strategy="auto", example_inputs=case.inputs), is_calibrated=True
    ),
    "messages": Subject(
        lambda case: Messages(ours(case, backend="aot_eager", hardware=False), case.inputs), computes=False
    ),
    **{f"fsdp_compile-{name}": narrower(sent) for name, sent in NARROWER.items()},
    **{f"fsdp_compile-{name}": replicas(sent) for name, sent in REPLICAS.items()},
    "fsdp_compile-pieces": Subject(partial(ours, hardware=False, collective_pieces=2)),
    "fsdp_compile-packed": Subject(partial(ours, hardware=False, collective_lowering="packed")),
    "fsdp_compile-grouped": Subject(partial(ours, hardware=False, collective_lowering="grouped")),
}
"""updates: the optimizer steps in the backward; kept: parameters stay full after the forward; plain: without a plan;
fit: planned in FSDP2's memory, tight: in 0.8 of it; messages: what fsdp_compile sends without a plan, and nothing
computed; pieces: the model's own collectives are decomposed."""


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adamw-fused": partial(torch.optim.AdamW, fused=True),
    "adamw-foreach": partial(torch.optim.AdamW, foreach=True),
    "adamw-loop": partial(torch.optim.AdamW, foreach=False),
    "sgd": torch.optim.SGD,
}


@contextmanager
def without_reductions(model: nn.Module) -> Iterator[None]:
    """Inside, gradients are kept, as users of each subject say it; full parameters, where they may be."""
    if isinstance(model, FSDPModule) and not hasattr(model, "no_sync"):
        _is_last(model, False)
        yield
        _is_last(model, True)
    else:
        with model.no_sync() if hasattr(model, "no_sync") else nullcontext():
            yield


def _is_last(model: FSDPModule, is_last: bool) -> None:
    model.set_requires_gradient_sync(is_last)
    model.set_reshard_after_backward(is_last)


class Training:
    """A subject that trains: the same values, whatever the subject, if all ranks of a group have the same batch."""

    def __init__(
        self,
        subject: Subject,
        workload: Workload,
        allocation: Allocation,
        *,
        memory_budget: int | None = None,
        inductor: Mapping[str, Any] | None = None,
        optimizer: str = "adamw",
        split: int = 1,
        micro_batches: int = 1,
    ) -> None:
        """Shard the model and take the first step; to be called by all ranks at once.

        Args:
            split: neighbouring ranks that split the model, by tensor parallelism.
            micro_batches: of a step; all have the same rows.
        """
        self.device, self.micro_batches = allocation.device, micro_batches
        torch.manual_seed(0)
        with self.device:
            model, self.inputs = workload.build(), workload.inputs()
        names = [f"{workload.units}.{name}" for name, _ in model.get_submodule(workload.units).named_children()]
        self.parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
        root = None
        if split > 1:
            sizes = dist.get_world_size() // split, split
            root = init_device_mesh(self.device.type, sizes, mesh_dim_names=("dp", "tp"))
            model = workload.parallelize(model, root)
        self.around = nullcontext if root is None else loss_parallel
        hardware = calibrate(self.device) if subject.is_calibrated else None
        budget = None if subject.budget is None else int(subject.budget * memory_budget)
        begin = time.perf_counter()
        self.model = subject.shard(Case(model, self.inputs, names, hardware, budget, inductor or {}, root))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters(), lr=1e-4)
        if subject.in_backward:
            self.model.optimizer_in_backward(self.optimizer)
        self.step()
        self.first_step = time.perf_counter() - begin

    def step(self) -> tuple[float, float, float]:
        """Seconds of the forward, the backward and the optimizer."""
        forward = backward = 0.0
        for number in range(1, self.micro_batches + 1):
            begin = time.perf_counter()
            with self.around(), without_reductions(self.model) if number < self.micro_batches else nullcontext():
                loss = self.model(*self.inputs) / self.micro_batches
                middle = self._now()
                loss.backward()
            end = self._now()
            forward, backward = forward + middle - begin, backward + end - middle
        self.optimizer.step()
        self.optimizer.zero_grad()
        optimizer = self._now() - end
        self.loss = loss.detach().to_local() if isinstance(loss, DTensor) else loss.detach()
        return forward, backward, optimizer

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()
