"""Layouts: which place every parameter takes in the shard of its bucket. Pure arithmetic, the same on every rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import ConfigError
from ..passes import forms, ops
from ..passes.forms import name_of_dtype
from ..passes.padding import room
from .communication import UNCHANGED, CommunicationDtype
from .distribution import Distribution, local_part, read_as
from .options import GradientReduction
from .parts import holds_others
from .units import Unit

_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


@dataclasses.dataclass(frozen=True)
class Axis:
    """A mesh axis: how many ranks, and the name of their process group."""

    size: int
    group: str


NO_AXIS = Axis(1, "")


@dataclasses.dataclass(frozen=True)
class Axes:
    """Over which ranks parameters are sharded, over which they are replicated, and all of them as one axis."""

    shards: Axis
    replicas: Axis
    everyone: Axis


@dataclasses.dataclass(frozen=True)
class OwnAxes:
    """Those of parameters on a mesh of their own.

    Attributes:
        label: of the mesh, in the names of buckets.
        averages: over how many ranks the mean of their gradients is taken, if not over those that add them up.
    """

    label: str
    axes: Axes
    averages: int | None = None


@dataclasses.dataclass(frozen=True)
class Slot:
    """The place of one parameter in a shard, in elements.

    Attributes:
        shape: of the full parameter; of one that is distributed, of the part that a rank shards.
        dim: which of its dimensions the ranks share.
        distribution: over other ranks, before it is sharded over these.
        read_as: what a forward reads, where that is distributed in another way.
    """

    parameter: str
    offset: int
    shape: tuple[int, ...]
    dim: int = 0
    distribution: Distribution | None = None
    read_as: Distribution | None = None

    def distributed(self, full: torch.Tensor) -> torch.Tensor:
        """The parameter, from all of what its ranks share."""
        return full if self.distribution is None else self.distribution.around(full)

    @property
    def rows(self) -> tuple[int, ...]:
        """The shape with the shared dimension in front: what is sent, padded and counted by its rows."""
        return (*self.shape[self.dim : self.dim + 1], *self.shape[: self.dim], *self.shape[self.dim + 1 :])


@dataclasses.dataclass(frozen=True)
class Layout:
    """The shard of one bucket: the parameters of a unit that share dtype, requires_grad, device and precision policy.

    Attributes:
        bucket: `unit`, or `unit/dtype...` where the unit has several buckets.
        numel: elements of the shard, on every rank.
        dtype, device: of the shard.
        requires_grad: of the parameters, when they were sharded.
        shards: the axis over which it is sharded; of size 1 for parameters that every rank keeps whole.
        replicas: the axis over which gradients are reduced besides; all ranks, for parameters kept whole.
        param_dtype, reduce_dtype: that gathers and reductions cast to; None leaves what they get.
        compute_device: the device of the forward, if that is not the shard's.
        gradient_dtype: of the parameters' gradients, if that is not the parameters'.
        is_full: whether nothing is cast for now, but for reductions that are cast to `full_reduce_dtype`.
        averages: over how many ranks the mean of gradients is taken, if not over those that add them up.
        communication: in which form gathers and reductions send what they send.
    """

    bucket: str
    slots: tuple[Slot, ...]
    numel: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    shards: Axis
    replicas: Axis
    reduction: GradientReduction
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    compute_device: torch.device | None = None
    gradient_dtype: torch.dtype | None = None
    is_full: bool = False
    full_reduce_dtype: torch.dtype | None = None
    averages: int | None = None
    communication: CommunicationDtype = UNCHANGED

    @property
    def casts(self) -> tuple[torch.dtype | None, torch.dtype | None]:
        """What gathers and reductions cast to for now; None leaves what they get."""
        return (None, self.full_reduce_dtype) if self.is_full else (self.param_dtype, self.reduce_dtype)

    @property
    def sent_forms(self) -> tuple[str, str, str]:
        """In which form gathers, reductions and those between replicas send for now; "" leaves them as they are."""
        sent = UNCHANGED if self.is_full else self.communication
        of_shards = sent if self.shards.size > 1 else UNCHANGED
        return of_shards.gather_form, of_shards.reduce_form, sent.all_reduce_form if self.replicas.size > 1 else ""

    @cached_property
    def feeds_back(self) -> bool:
        """Whether messages lose something of gradients for now that is added to the next."""
        regions, _ = self.reduced_regions(self.dtype) if self.communication.error_feedback else ([], [])
        return self.requires_grad and any(forms.is_integers(region.form) for region in regions)

    def reduced_regions(self, dtype: torch.dtype) -> tuple[list[forms.Region], list[forms.Region]]:
        """The forms in which gradients of all its parameters are sent, packed in this dtype; none if they are not.

        The second are those in which replicas send each other their sums.
        """
        _, *asked = self.sent_forms
        offsets, shapes = [slot.offset for slot in self.slots], [slot.rows for slot in self.slots]
        size = self.shards.size
        return forms.reduced_regions(offsets, shapes, size, (asked[0], asked[1]), dtype, self.numel, is_whole=True)

    def reduced_by(self, reduction: GradientReduction, *, sums: bool) -> GradientReduction:
        """What a reduction means for it, where collectives may sum only."""
        if reduction.operator != "avg" or not (sums or self.averages):
            return reduction
        return GradientReduction.mean_over(self.averages or self.shards.size * self.replicas.size)

    @property
    def groups(self) -> list[str]:
        """The names of the process groups over which its gradients are reduced."""
        return [axis.group for axis in (self.shards, self.replicas) if axis.size > 1]

    def unshard_arguments(self, slot: Slot) -> tuple[Any, ...]:
        """The arguments of `fsdp::unshard` after the tensors and the destination of the gradient."""
        param_dtype, reduce_dtype = self.casts
        gather_form, reduce_form, all_reduce_form = self.sent_forms
        return (
            self.bucket,
            slot.parameter,
            slot.offset,
            slot.rows,
            self.shards.size,
            self.shards.group,
            param_dtype,
            self.compute_device,
            gather_form,
            self.replicas.size,
            self.replicas.group,
            self.reduction.operator,
            self.reduction.divisor,
            reduce_dtype,
            reduce_form,
            all_reduce_form,
        )

    def assemble_arguments(self, slot: Slot) -> tuple[Any, ...] | None:
        """The arguments of `fsdp::assemble` after what `fsdp::unshard` returns; None if that is the parameter."""
        return (slot.shape, slot.dim, self.shards.size) if slot.dim else None


def check_parameters(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ConfigError, naming the parameter, for one that cannot be sharded."""
    for name, parameter in parameters.items():
        if not (parameter.dtype.is_floating_point or parameter.dtype in _INTEGERS):
            raise ConfigError(
                f"{name} is {name_of_dtype(parameter.dtype)}; FSDP shards parameters of floating point numbers and of "
                "integers only: pass it in ignored_params, or make it a buffer"
            )
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ConfigError(f"{name} has no shape yet: run the lazy module once before sharding it")
        local = local_part(parameter)
        can_be_unwrapped = holds_others(parameter) and not parameter.requires_grad
        if not can_be_unwrapped:
            check_extension(name, local)
        if is_traceable_wrapper_subclass(local):
            unwrapped = "Make its parts parameters with fsdp_compile.unwrap_tensor_subclasses(model)"
            raise ConfigError(
                f"{name} is a {type(local).__name__}, a tensor that holds others: its part of a shard would be a plain "
                f"tensor of its values. {unwrapped if can_be_unwrapped else 'Use a plain tensor'}, or pass it in "
                "ignored_params"
            )


def has_extension(local: torch.Tensor) -> bool:
    """Whether a tensor has its say in FSDP2's all-gathers."""
    return hasattr(local, "fsdp_pre_all_gather")


def check_extension(name: str, local: torch.Tensor) -> None:
    """Raise ConfigError for a tensor that has its say in all-gathers, as float8 weights of torchao do.

    Args:
        local: what this rank holds of the parameter of that name.
    """
    if has_extension(local):
        raise ConfigError(
            f"{name}, a {type(local).__name__}, has fsdp_pre_all_gather, which would not be called: all-gathers are a "
            "part of compiled graphs, and send values in the param_dtype of mp_policy or as they are. Use a plain "
            "tensor without it (with torchao leave enable_fsdp_float8_all_gather out: weights that are used in float8 "
            "are gathered so), or pass it in ignored_params"
        )


@dataclasses.dataclass(frozen=True)
class Placement:
    """How the buckets of a model are laid out.

    Attributes:
        policy_of_parameter: the precision policy of each parameter, by name; without one it keeps its dtype.
        offload_from: the device of the forward, if the shards are to live on the CPU.
        dim_of_parameter: on which dimension each parameter is sharded, by name; without one on the first.
        own_of_parameter: of parameters on a mesh of their own, by name, what they have instead of `axes`.
        communication_of_unit: in which form gathers and reductions of a unit send, by its name.
    """

    axes: Axes
    reduction: GradientReduction
    policy_of_parameter: Mapping[str, MixedPrecisionPolicy] = dataclasses.field(default_factory=dict)
    offload_from: torch.device | None = None
    dim_of_parameter: Mapping[str, int] = dataclasses.field(default_factory=dict)
    own_of_parameter: Mapping[str, OwnAxes] = dataclasses.field(default_factory=dict)
    communication_of_unit: Mapping[str, CommunicationDtype] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Key:
    """What the parameters of a bucket share."""

    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_scalar: bool
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    own: OwnAxes | None


def lay_out(units: list[Unit], placement: Placement) -> list[Layout]:
    """The layout of every bucket, in the order of the units."""
    layouts = []
    for unit in units:
        buckets: dict[_Key, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in unit.parameters:
            buckets.setdefault(_key(name, parameter, placement), []).append((name, parameter))
        for key, parameters in buckets.items():
            name = ops.bucket_of_unit(unit.name, "" if len(buckets) == 1 else _suffix(key, list(buckets)))
            communication = placement.communication_of_unit.get(unit.name, UNCHANGED)
            layouts.append(_layout(name, key, parameters, placement, communication))
    return layouts


def _key(name: str, parameter: nn.Parameter, placement: Placement) -> _Key:
    policy = placement.policy_of_parameter.get(name, MixedPrecisionPolicy())
    return _Key(
        parameter.dtype,
        parameter.device,
        parameter.requires_grad,
        parameter.dim() == 0,
        policy.param_dtype,
        policy.reduce_dtype,
        placement.own_of_parameter.get(name),
    )


def _suffix(key: _Key, keys: list[_Key]) -> str:
    def differs(name: str) -> bool:
        return len({getattr(other, name) for other in keys}) > 1

    parts = [name_of_dtype(key.dtype)]
    parts += [f"as_{name_of_dtype(key.param_dtype or key.dtype)}"] if differs("param_dtype") else []
    parts += [f"reduced_as_{name_of_dtype(key.reduce_dtype)}"] if differs("reduce_dtype") and key.reduce_dtype else []
    parts += [] if key.requires_grad else ["frozen"]
    parts += ["replicated"] if key.is_scalar else []
    parts += [str(key.device)] if differs("device") else []
    parts += [f"on_{key.own.label}"] if key.own is not None else []
    return ".".join(parts)


def _layout(
    bucket: str,
    key: _Key,
    parameters: list[tuple[str, nn.Parameter]],
    placement: Placement,
    communication: CommunicationDtype,
) -> Layout:
    axes = placement.axes if key.own is None else key.own.axes
    if communication.all_reduce is not None and axes.shards.size > 1 and axes.replicas == NO_AXIS:
        raise ConfigError(
            f"communication_dtype has all_reduce={communication.all_reduce!r} for {parameters[0][0]}, which has no "
            "replicas: leave it out, or shard over a mesh (replicate, shard)"
        )
    shards, replicas = (NO_AXIS, axes.everyone) if key.is_scalar else (axes.shards, axes.replicas)
    sent = communication.reduce, communication.all_reduce
    dtypes = [key.dtype, *(each for each in (key.param_dtype, key.reduce_dtype) if each is not None)]
    dtypes += [each for each in sent if isinstance(each, torch.dtype)]
    slots = []
    numel = 0
    for name, parameter in parameters:
        dim = placement.dim_of_parameter.get(name, 0) if shards.size > 1 else 0  # what is whole has no parts
        shape = tuple(local_part(parameter).shape)
        slots.append(Slot(name, numel, shape, dim, Distribution.of(parameter), read_as(parameter)))
        numel += room(slots[-1].rows, shards.size, dtypes)
    is_offloaded = placement.offload_from is not None
    laid_out = Layout(
        bucket,
        tuple(slots),
        numel,
        key.dtype,
        torch.device("cpu") if is_offloaded and key.device.type != "meta" else key.device,
        key.requires_grad,
        shards,
        replicas,
        placement.reduction,
        key.param_dtype,
        key.reduce_dtype,
        placement.offload_from if placement.offload_from != torch.device("cpu") else None,
        averages=None if key.own is None else key.own.averages,
        communication=communication,
    )
    return dataclasses.replace(laid_out, reduction=laid_out.reduced_by(placement.reduction, sums=False))
