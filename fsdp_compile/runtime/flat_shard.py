"""Flat shards: the storage of a bucket on this rank, and the DTensor parameters that are views into it."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from typing import Any, NoReturn, Protocol

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..errors import ConfigError
from ..layout.buckets import Layout, Slot, check_extension, has_extension
from ..layout.distribution import local_part
from .accumulation import Accumulation
from .agreement import Agreement, agreement_of
from .assigned_data import keep_assigned_data
from .holders import Holders
from .lasting import GatheredOnce, Lasting
from .optimizers import install_hooks
from .reads import Read
from .residuals import no_residual
from .views import Places, local_tensor, local_views, made_dtensor, part_of_rank, places_of, sharded_as, views_at


@dataclasses.dataclass(eq=False)
class Divisor:
    """What divides gradients, for now."""

    value: float = 1.0


class StepsInBackward(Protocol):
    """Optimizers that step in the backward; see `updates.Updates`."""

    is_due: bool
    is_kept: bool

    @property
    def are_early(self) -> bool: ...

    def update(self, shard: FlatShard) -> None: ...

    def finish(self) -> None: ...


@dataclasses.dataclass(eq=False, kw_only=True)
class Shards:
    """The shards of one model, and what is under way with their gradients.

    With a single rank `mesh` is None and there are no shards: the parameters are the model's own.

    Attributes:
        is_step_over: whether a backward has reduced gradients since the last forward began.
        is_finishing: whether gradients will be reduced at the end of the running backward.
        checks_gradients: whether a backward raises NonFiniteError for gradients that are not finite.
        is_checking: whether they will be checked at the end of the running backward.
        num_backwards: how many backwards were checked.
        holders: the ranks that hold it; None where a rank holds all of it.
        whole: with a single rank, unit and parameter by name.
        divisors: with a single rank, what the gradient of each parameter is divided by.
        watched: ids of those of them whose gradients are divided or checked, and the names of the hooks that do it.
        updates: the optimizers that step in the backward, if any do.
    """

    mesh: DeviceMesh | None
    shards: list[FlatShard] = dataclasses.field(default_factory=list)
    is_step_over: bool = False
    is_finishing: bool = False
    checks_gradients: bool = False
    is_checking: bool = False
    num_backwards: int = 0
    holders: Holders | None = None
    whole: dict[str, tuple[str, nn.Parameter]] = dataclasses.field(default_factory=dict)
    divisors: dict[nn.Parameter, Divisor] = dataclasses.field(default_factory=dict)
    watched: set[tuple[int, str]] = dataclasses.field(default_factory=set)
    updates: StepsInBackward | None = None

    @property
    def agreement(self) -> Agreement | None:
        """Between the ranks of this model; None with a single one."""
        return agreement_of(self.mesh)


@dataclasses.dataclass(eq=False)
class FlatShard:
    """This rank's shard of one bucket.

    Attributes:
        data: the 1-D leaf that compiled graphs take; its gradient is handed over to `parameters` and then cleared.
        places: where in `data` the part of each parameter is.
        views: the local tensors of the parameters, once they were found to be there.
        parameters: the DTensor parameters that the user sees, one for each slot of the layout, views into `data`.
        owners: for each of them a module that holds it, and its name there.
        reads: for each of them how the forward reads it.
        sharding: what this is a part of, once it is complete.
        received: offsets of the parameters that the running backward has a gradient for.
        accumulation: gradients that are yet to be reduced, once there were any.
        residual: what messages have lost of gradients, where that is fed back, once there may be any.
        gradient, accumulated, fed_back: what reads pass to `fsdp::unshard` for now.
        reduces, all_reduces: whether gradients are reduced at all, and over the first of two mesh axes.
        stays_kept, stays_full: whether gradients last unreduced, and full parameters, from call to call.
        gathered: full parameters that last, once there are any.
        is_kept_by_user: whether the last forward keeps gradients because those two say so, and until they do not.
        awaited: with optimizers that step in the backward, how many reads and compiled graphs of this step have their
            backwards before them.
        key: as `reads.Readable` has it; another, too, for every schedule that the shard was given.
    """

    layout: Layout
    mesh: DeviceMesh
    data: nn.Parameter = dataclasses.field(init=False)
    places: Places = dataclasses.field(init=False)
    views: list[torch.Tensor] = dataclasses.field(default_factory=list, init=False)
    parameters: list[nn.Parameter]
    owners: list[tuple[nn.Module, str]]
    reads: list[Read] = dataclasses.field(default_factory=list)
    sharding: Shards | None = None
    received: set[int] = dataclasses.field(default_factory=set)
    accumulation: Accumulation | None = None
    residual: nn.Parameter | None = None
    gradient: str = "reduce"
    accumulated: nn.Parameter | None = None
    fed_back: nn.Parameter | None = None
    reduces: bool = True
    all_reduces: bool = True
    stays_kept: Lasting = dataclasses.field(default_factory=Lasting)
    stays_full: Lasting = dataclasses.field(default_factory=Lasting)
    gathered: GatheredOnce | None = None
    is_kept_by_user: bool = False
    awaited: int = 0
    key: str = dataclasses.field(default_factory=map(str, itertools.count(1)).__next__)

    def __post_init__(self) -> None:
        self.places = places_of(self.layout, self.mesh)

    @classmethod
    def create(
        cls,
        layout: Layout,
        originals: list[torch.Tensor],
        owners: list[tuple[nn.Module, str]],
        mesh: DeviceMesh,
        *,
        pin_memory: bool = False,
    ) -> FlatShard:
        """Shard `originals`, one full tensor for each slot: a DTensor for one that is distributed."""
        flat = torch.zeros(layout.numel, dtype=layout.dtype, device=layout.device, pin_memory=pin_memory)
        views = local_views(flat, layout, mesh)
        for slot, view, original in zip(layout.slots, views, originals, strict=True):
            view.copy_(part_of_rank(local_part(original), slot.dim, layout, mesh))
        return cls.around(flat, layout, owners, mesh)

    @classmethod
    def around(
        cls, flat: torch.Tensor, layout: Layout, owners: list[tuple[nn.Module, str]], mesh: DeviceMesh
    ) -> FlatShard:
        """The shard with the values in `flat`, and new parameters."""
        install_hooks()
        keep_assigned_data()
        parameters = []
        for slot, local in zip(layout.slots, local_views(flat, layout, mesh), strict=True):
            sharded = sharded_as(slot, local, layout, mesh)
            parameters.append(nn.Parameter(sharded, requires_grad=layout.requires_grad))
        shard = cls(layout, mesh, parameters, owners)
        shard._hold(flat)
        return shard

    def _hold(self, flat: torch.Tensor) -> None:
        """Make `flat` the leaf that graphs take."""
        self.views = []
        trainable = any(parameter.requires_grad for parameter in self.parameters)
        self.data = nn.Parameter(flat, requires_grad=trainable)
        self.data.fsdp_flat_shard = self  # type: ignore[attr-defined]  # how the backend knows its inputs
        self._hand_over_gradients()

    def _hand_over_gradients(self) -> None:
        """Install the hook that hands the gradient of the leaf over whenever a backward has completed it.

        Autograd holds the hook where the garbage collector does not look, so the hook does not hold the shard.
        """
        reference = weakref.ref(self)

        def hook(_: torch.Tensor) -> None:
            if (found := reference()) is not None:
                found._hand_over()

        if self.data.requires_grad:
            self.data.register_post_accumulate_grad_hook(hook)

    @torch.no_grad()
    def _hand_over(self) -> None:
        flat, self.data.grad = self.data.grad, None
        if flat is None:
            return  # autograd calls hooks of a leaf that takes part and gets none, too: one whose gradients are kept
        received, self.received = self.received, set()
        self.give(flat, received, self.take_kept())

    def take_kept(self) -> set[int]:
        """The offsets of what earlier steps have kept, if a backward has taken that along: it is over then."""
        kept: set[int] = set()
        if self.accumulation is not None and self.accumulation.is_taken:
            kept |= self.accumulation.offsets
            self.accumulation.clear()
        return kept

    def give(self, flat: torch.Tensor, received: set[int], kept: set[int]) -> None:
        """Views of `flat` to the parameters at these offsets: what a step has kept, to parameters frozen since, too."""
        if (dtype := self.layout.gradient_dtype) is not None:
            flat = flat.to(dtype)
            for parameter in self.parameters:
                parameter.grad_dtype = dtype
        for slot, view, parameter in zip(self.layout.slots, views_at(flat, self.places), self.parameters, strict=True):
            if slot.offset in kept or (slot.offset in received and parameter.requires_grad):
                _accumulate(parameter, made_dtensor(view, parameter._spec))  # type: ignore[attr-defined]

    def change_layout(self, layout: Layout) -> None:
        """Another layout of the same places: forwards read by it from now on."""
        self.layout = layout
        for read, slot in zip(self.reads, layout.slots, strict=True):
            read.change_layout(layout, slot)

    def check_views(self) -> None:
        """Before a forward, see that every parameter is a view into the shard; take over values moved elsewhere.

        `to_empty`, `.to(dtype)` or `load_state_dict(assign=True)` give the parameters storage of their own.

        Raises:
            ConfigError: a parameter was replaced by something that cannot take its place in the shard, or would not be
                gathered as its tensor says.
        """
        self.received.clear()  # what a backward noted that ended in an exception
        if self._is_as_it_was():
            return
        self.parameters = [self._current(index) for index in range(len(self.parameters))]
        if all(
            self._is_view(slot, parameter) for slot, parameter in zip(self.layout.slots, self.parameters, strict=True)
        ):
            if self.data.requires_grad != any(parameter.requires_grad for parameter in self.parameters):
                self._hold(self.data.detach())
            self.views = list(map(local_tensor, self.parameters))
            return
        locals_ = [local_tensor(parameter) for parameter in self.parameters]
        kinds = {(local.dtype, local.device) for local in locals_}
        if len(kinds) > 1:
            raise ConfigError(
                f"the parameters of {self.layout.bucket}, sharded together, now differ in dtype or device: {kinds}"
            )
        dtype, device = kinds.pop()
        with torch.no_grad():
            flat = torch.zeros(self.layout.numel, dtype=dtype, device=device)
            views = views_at(flat, self.places)
            for view, parameter, local in zip(views, self.parameters, locals_, strict=True):
                view.copy_(local)
                parameter._local_tensor = view  # type: ignore[attr-defined]
        self._hold(flat)
        if self.accumulation is not None:
            self.accumulation = self.accumulation.moved(self.layout, flat)
        if self.residual is not None:
            self.residual = nn.Parameter(self.residual.to(self.layout.compute_device or device), requires_grad=False)

    def _is_as_it_was(self) -> bool:
        """Whether the parameters are those that were views of `data`, and still are; most forwards find that."""
        for (module, name), parameter, view in zip(self.owners, self.parameters, self.views, strict=False):
            if (
                module._parameters.get(name) is not parameter
                or local_tensor(parameter) is not view
                or has_extension(view)
            ):
                return False
        is_trained = any(parameter.requires_grad for parameter in self.parameters)
        return bool(self.views) and is_trained == self.data.requires_grad

    def _current(self, index: int) -> nn.Parameter:
        """The parameter that the model holds now in place of `parameters[index]`."""
        (module, name), slot = self.owners[index], self.layout.slots[index]
        found, known = module._parameters.get(name), self.parameters[index]
        if not isinstance(found, DTensor) or found.shape != known.shape or found.placements != known.placements:
            raise ConfigError(
                f"{slot.parameter} was sharded as a DTensor of shape {tuple(known.shape)} and is now "
                f"{type(found).__name__}: assign a DTensor of the same shape and placements, or shard a new model "
                "(torch.func.functional_call takes such DTensors; in place of torch.func.grad, go backward and read "
                ".grad)"
            )
        if local_tensor(found).shape != local_tensor(known).shape:
            raise ConfigError(f"{slot.parameter} was replaced by a DTensor with the rows of another rank")
        check_extension(slot.parameter, local_tensor(found))
        return found

    @property
    def agreement(self) -> Agreement | None:
        """Between the ranks of its model, once that is complete."""
        return None if self.sharding is None else self.sharding.agreement

    @property
    def has_hooks(self) -> bool:
        """Whether a hook of the user's sees the gradient of a parameter, and may keep it."""
        return any(each._backward_hooks or each._post_accumulate_grad_hooks for each in self.parameters)

    @property
    def has_accumulated(self) -> bool:
        return self.accumulation is not None and self.accumulation.leaf.grad is not None

    @property
    def keeps_gradients(self) -> bool:
        """Whether the user has said that gradients are to be kept until the user says otherwise."""
        return not self.reduces or (self.mesh.ndim > 1 and not self.all_reduces)

    def prepare(self, *, keeps_gradients: bool) -> None:
        """Before a forward: where the gradients of its backward are to go.

        Raises:
            ConfigError: there are no values to compute with.
        """
        if self.data.is_meta:
            raise ConfigError(
                f"{self.layout.slots[0].parameter} is on the meta device and has no values: pass param_init_fn, "
                "or call model.to_empty(device=...) and load or initialize its values"
            )
        for read, parameter in zip(self.reads, self.parameters, strict=True):
            if read.is_frozen == parameter.requires_grad:
                read.is_frozen = not parameter.requires_grad
        self.gradient, self.accumulated, self.fed_back = "reduce", None, None
        if self.accumulation is not None:
            self.accumulation.is_taken = False  # by a backward that ended in an exception
        if not self.data.requires_grad or not torch.is_grad_enabled():
            return
        is_kept = self.keeps_gradients or self.stays_kept.is_for_call()
        self.is_kept_by_user = is_kept and not keeps_gradients
        if keeps_gradients or is_kept:
            self.accumulation = self.accumulation or Accumulation.of(self.layout, self.data)
            self.gradient, self.accumulated = "keep", self.accumulation.leaf
            return
        if self.accumulation is not None and self.accumulation.leaf.grad is not None:
            self.accumulated = nn.Parameter(self.accumulation.leaf.grad, requires_grad=False)
        if self.layout.feeds_back:
            self.fed_back = self.known_residual()

    def let_go_of_kept(self) -> None:
        """After a forward, whose backward has what earlier steps kept: that is not held until the next forward."""
        if self.gradient == "reduce":
            self.accumulated = None

    def known_residual(self) -> nn.Parameter:
        """What messages have lost of gradients: nothing, before there were any."""
        if self.residual is None:
            self.residual = no_residual(self.layout, self.data)
        return self.residual

    def _is_view(self, slot: Slot, parameter: nn.Parameter) -> bool:
        local, data = local_tensor(parameter), self.data
        if local.dtype != data.dtype or local.device != data.device:
            return False
        begin = data.data_ptr() + slot.offset * data.element_size()
        return local.is_meta or local.numel() == 0 or local.data_ptr() == begin

    def copy_into(self, memo: dict[int, Any]) -> FlatShard:
        """A copy with parameters of its own, noted in `memo` for `copy.deepcopy`; its owners are yet to be set."""
        copied = FlatShard.around(self.data.detach().clone(), self.layout, [], self.mesh)
        for old, new in zip(self.parameters, copied.parameters, strict=True):
            new.requires_grad_(old.requires_grad)
        memo |= {id(self): copied, id(self.data): copied.data}
        memo |= {id(old): new for old, new in zip(self.parameters, copied.parameters, strict=True)}
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigError(
            "parts of a sharded model cannot be copied or pickled: copy or save the whole model, or its state_dict"
        )


def _accumulate(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """What autograd does at a leaf, for one it never sees: gradient hooks, accumulation, hooks after it.

    The hooks' attributes are private, as of torch 2.11 to 2.15.
    """
    for hook in list((parameter._backward_hooks or {}).values()):
        replaced = hook(gradient)
        gradient = gradient if replaced is None else replaced
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient
    for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
        hook(parameter)
