"""FSDP2's methods: what torch's FSDPModule offers, on every module that was sharded by a call of its own.

A method acts on the units that the call has sharded, its own; with `recurse`, on those of sharded modules below, too.
What the schedule decides is changed in the schedule, and the next call compiles by it. What does not exist here is
refused with the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn, cast

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle

from ..checks import check_bool
from ..errors import ConfigError
from ..layout.options import GradientReduction
from ..passes.plan import PrefetchList
from ..runtime.groups import num_shards_of
from .own_units import OwnUnits, Unsharded, own_units_below, own_units_of
from .sharding import Sharding
from .unit_state import UnitState
from .unsharded import start_unsharding


class FSDPMethods(nn.Module):
    """What a module gains by being sharded, besides what only a root has; a name of its own is not replaced."""

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the module's own units: its parameters are full, plain ones, in `mp_policy`'s dtype, until `reshard`.

        All ranks call it. A call of the model reshards first, as do `state_dict`, `load_state_dict`, `zero_grad`, `.to`
        and the like; it gathers for itself, but for units that may stay full (`set_reshard_after_backward`). Inside a
        forward or backward the schedule has decided what is gathered when, and this does nothing; with a single rank,
        where parameters are whole, neither.

        Args:
            async_op: return at once; until `wait()` of the handle that is returned, the parameters are sharded ones.

        Raises:
            RuntimeError: inside summon_full_params; or parameters are on the meta device.
        """
        if torch.compiler.is_compiling() or (own := _resting(self)) is None:
            return _Handle(None) if async_op else None
        sharding = cast(Sharding, _sharding_of(own))
        sharding.refuse_if_summoned("unshard")
        unsharded = start_unsharding(own, sharding)
        if async_op:
            return _Handle(unsharded)
        unsharded.wait()
        return None

    def reshard(self) -> None:
        """Free the full parameters of the module's own units, those that last for several calls, too.

        What was written to the full ones is lost. Inside a forward or backward this does nothing, as `unshard`.

        Raises:
            RuntimeError: full parameters have gradients, which nothing has reduced.
        """
        if not torch.compiler.is_compiling() and (own := _resting(self)) is not None:
            own.reshard()

    def reset_iter_state(self) -> None:
        """After an exception in a forward or backward: parameters are sharded, and gradients that were kept are gone.

        Nothing else is left of such a step; without this, kept gradients would count in the next one that reduces.

        Raises:
            RuntimeError: the module is not the outermost one.
        """
        if "_fsdp_sharding" not in vars(self):
            raise RuntimeError("reset_iter_state is for the outermost sharded module")
        for own in vars(self)["_fsdp_sharding"].owns:
            own.reshard()
            for shard in own.shards:
                if shard.accumulation is not None:
                    shard.accumulation.clear()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """FSDP2's, whose reductions may go on until the backward that it calls the last.

        Every backward ends with its own reductions. Either value leads to the same gradients.
        """
        check_bool("is_last_backward", is_last_backward)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether gradients are reduced; if not, backwards keep them, full, on every rank.

        A forward decides it for its backward, and True in between still reduces at the end of that. The first backward
        that reduces again reduces what was kept, together with its own gradients. Until then `.grad` of the parameters
        does not change, and `optimizer.zero_grad()` does not reach what is kept; `model.zero_grad()` does. With a
        single rank there is nothing to reduce.
        """
        check_bool("requires_gradient_sync", requires_gradient_sync)
        for own in _own_units(self, recurse):
            for shard in own.shards:
                shard.reduces = shard.all_reduces = requires_gradient_sync
                shard.stays_kept.say(not requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether gradients are all-reduced between the replicas of a mesh of two dimensions.

        If not, the reduce-scatter is kept back with the all-reduce: each rank keeps full gradients, where FSDP2 keeps
        shards. A mesh of one dimension has no replicas, and reduces. See `set_requires_gradient_sync`.
        """
        check_bool("requires_all_reduce", requires_all_reduce)
        for own in _own_units(self, recurse):
            for shard in own.shards:
                shard.all_reduces = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether full parameters are freed between forward and backward; the next call compiles by it."""
        check_bool("reshard_after_forward", reshard_after_forward)
        _change_reshard(list(_own_units(self, recurse)), reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether full parameters are freed after a backward; if not, forwards do not gather them.

        That is for units that nobody has asked to reshard after the forward, and until gradients are reduced or an
        optimizer steps. Where somebody has asked not to, units stay full inside `no_sync` as well. Either value leads
        to the same numbers. Where gathers send integers (`communication_dtype`), and with CUDA graphs, every forward
        gathers.
        """
        check_bool("reshard_after_backward", reshard_after_backward)
        for own in _own_units(self, recurse):
            for shard in own.shards:
                shard.stays_full.say(not reshard_after_backward)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather the units of `modules` in the forward where the module's own are used, or earlier.

        Units of no list are gathered `forward_prefetch` units ahead. An empty list takes back what was set; the next
        call compiles anew.

        Raises:
            ConfigError: something is no sharded module of the same model, or the schedule is planned (`hardware`).
        """
        _change_lists(cast(nn.Module, self), modules, "forward_lists")

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather the units of `modules` in the backward where the module's own are used, or earlier.

        Otherwise as `set_modules_to_forward_prefetch`.
        """
        _change_lists(cast(nn.Module, self), modules, "backward_lists")

    def set_post_optim_event(self, event: torch.Event) -> None:
        """An event that the current stream waits for before the next forward, for an optimizer on another one."""
        if not callable(getattr(event, "wait", None)):
            raise ConfigError(f"event is a torch.Event, not {event!r}")
        if "_fsdp_sharding" not in vars(self):
            raise ConfigError("set_post_optim_event is for the outermost sharded module")
        vars(self)["_fsdp_sharding"].post_optim_event = event

    def set_gradient_divide_factor(self, factor: float) -> None:
        """From the next forward on, gradients of the module's own units are sums over the ranks divided by `factor`.

        The next call compiles anew, if the number is another.

        Raises:
            ConfigError: `factor` is no positive number; nothing has changed.
        """
        reduction = GradientReduction.divided_by(factor)
        for own in _own_units(self, recurse=False):
            own.reduce_by(reduction, sums=own.sums)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of `set_gradient_divide_factor`."""
        reduction = GradientReduction.divided_by(factor)
        for own in _own_units(self, recurse=False):
            own.reduce_by(reduction, sums=own.sums)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Whether collectives only sum the gradients of the module's own units, and a division follows."""
        check_bool("enable", enable)
        for own in _own_units(self, recurse=False):
            own.reduce_by(own.reduction, sums=enable)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """FSDP2's, which with True reduces zeros for parameters that this rank has no gradient for.

        That is always so for what any rank has a gradient for. Either value leads to the same gradients; ranks whose
        forwards use different parameters raise RankError with both.
        """
        check_bool("reduce_scatter_unused_params", reduce_scatter_unused_params)
        check_bool("recurse", recurse)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many reductions may be under way at once: the largest number that a module of the model was given."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int) or max_input_buffers < 1:
            raise ConfigError(f"max_input_buffers is a positive int, not {max_input_buffers!r}")
        owns = list(_own_units(self, recurse))
        unplanned = [
            (each, each.schedule.unplanned("set_reduce_scatter_max_input_buffers")) for each in _shardings(owns)
        ]
        for own in owns:
            own.reductions = max_input_buffers
        for sharding, schedule in unplanned:
            most = max(own.reductions for own in sharding.owns if own.reductions is not None)
            sharding.change_schedule(dataclasses.replace(schedule, reductions=most))

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """FSDP2's, which says with False that the backward does not read the module's parameters.

        Here the graph of the backward says it: what it does not read, as the weight of an embedding, is not gathered
        for it, and what it reads is. Either value leads to the same graphs.
        """
        check_bool("unshard_in_backward", unshard_in_backward)

    def set_custom_all_gather(self, comm: object) -> NoReturn:
        """Refused: graphs call functional collectives, which a compiler knows."""
        raise _refusal("set_custom_all_gather", "the collectives of a compiled graph are torch's functional ones")

    def set_custom_reduce_scatter(self, comm: object) -> NoReturn:
        """Refused, as `set_custom_all_gather`."""
        raise _refusal("set_custom_reduce_scatter", "the collectives of a compiled graph are torch's functional ones")

    def set_all_reduce_hook(self, hook: object, *, stream: object = None) -> NoReturn:
        """Refused: hooks of parameters get reduced gradients."""
        instead = "parameter.register_hook and register_post_accumulate_grad_hook get each reduced gradient, a DTensor"
        raise _refusal("set_all_reduce_hook", instead)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Refused with True: gathers and reductions share the mesh's process group; False is how it is."""
        check_bool("enable", enable)
        check_bool("recurse", recurse)
        if enable:
            raise _refusal("set_separate_reduce_scatter_group", "the collectives of a mesh axis share its group")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Refused with True: the compiler allocates the buffers of a graph; False is how it is."""
        check_bool("enable", enable)
        if enable:
            reason = "buffers of collectives are those of the compiled graph"
            raise _refusal("set_allocate_memory_from_process_group_for_comm", reason)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        """Refused: the compiler allocates the buffers of a graph."""
        raise _refusal("set_symm_mem_for_comm", "buffers of collectives are those of the compiled graph")

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """FSDP2's, for how its gathers allocate. Gathers here always run beside compute; either value is the same."""
        check_bool("async_op", async_op)

    def _get_fsdp_state(self) -> UnitState:
        return UnitState(cast(nn.Module, self))


class _Handle(UnshardHandle):
    """What `unshard(async_op=True)` returns."""

    def __init__(self, unsharded: Unsharded | None) -> None:
        self._unsharded = unsharded

    def wait(self) -> None:
        """Have the full parameters in their places, unless they were resharded or the model was called since."""
        unsharded, self._unsharded = self._unsharded, None
        if unsharded is not None and not unsharded.is_over:
            unsharded.wait()


def _resting(module: nn.Module) -> OwnUnits | None:
    """The module's own units, outside of forwards and backwards of a model that is sharded over several ranks."""
    own = own_units_of(module)
    sharding = None if own is None else _sharding_of(own)
    return None if sharding is None or sharding.running else own


def _sharding_of(own: OwnUnits) -> Sharding | None:
    """Of the model that the units are a part of; None if they have no shards, as with a single rank."""
    return cast("Sharding | None", own.shards[0].sharding) if own.shards else None


def _own_units(module: nn.Module, recurse: bool) -> list[OwnUnits]:
    check_bool("recurse", recurse)
    return list(own_units_below(module, recurse=recurse))


def _shardings(owns: Sequence[OwnUnits]) -> list[Sharding]:
    """Of the models that have these units; without those of a single rank."""
    return list(dict.fromkeys(found for own in owns if (found := _sharding_of(own)) is not None))


def _change_reshard(owns: list[OwnUnits], reshard: bool) -> None:
    for sharding in _shardings(owns):
        names = [name for own in owns if _sharding_of(own) is sharding for name in own.names]
        known = sharding.schedule.reshard_of_unit(sharding.units, num_shards_of(sharding.mesh))
        changed = {**known, **dict.fromkeys(names, reshard)}
        sharding.change_schedule(dataclasses.replace(sharding.schedule, reshard_after_forward=changed))


def _change_lists(module: nn.Module, modules: object, field: str) -> None:
    """Have the units of `modules` gathered where those of `module` are used, in one of the lists of the schedule."""
    if not isinstance(modules, (list, tuple)) or not all(isinstance(each, FSDPModule) for each in modules):
        raise ConfigError(f"modules is a list of FSDPModules, not {modules!r}")
    here = _units_at_or_below(module)
    ahead = [own for each in modules if (own := own_units_of(cast(nn.Module, each))) is not None]
    if not (shardings := _shardings([*here, *ahead])):
        return  # a single rank gathers nothing
    if len(shardings) > 1:
        raise ConfigError("prefetching is between modules of one model: shard the module that holds them first")
    [sharding] = shardings
    schedule = sharding.schedule.unplanned("a list of modules to prefetch")
    anchor = tuple(name for own in here for name in own.names)
    new = PrefetchList(anchor, tuple(name for own in ahead for name in own.names))
    lists = [each for each in getattr(schedule, field) if each.units != anchor]
    lists += [new] if new.ahead else []
    changes: dict[str, Any] = {field: tuple(lists)}
    sharding.change_schedule(dataclasses.replace(schedule, **changes))


def _units_at_or_below(module: nn.Module) -> list[OwnUnits]:
    """The module's own units; of one that has none, those below it, with the first of which it begins."""
    own = own_units_of(module)
    return [own] if own is not None and own.names else list(own_units_below(module))


def _refusal(name: str, reason: str) -> ConfigError:
    return ConfigError(f"{name} is not supported: {reason}")
