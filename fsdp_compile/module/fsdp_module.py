"""FSDP2's methods: what `fully_shard` gives to every module that it is applied to.

Such a module's own parameters are those at or below it that are not of another such module below it.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle

from ..checks import check_bool
from ..errors import ConfigError
from ..layout.options import GradientReduction
from ..runtime.flat_shard import FlatShard
from .reading import generated_subclass, original_class
from .sharding import sharding_around
from .unsharding import Unsharded, unshard


def become_fsdp_module(module: nn.Module) -> None:
    """Give a module that is sharded, or a part of one that is, FSDP2's class and methods."""
    if not isinstance(module, ShardedUnit):
        module.__class__ = generated_subclass(type(module), {}, ShardedUnit)


def own_shards(module: nn.Module) -> list[FlatShard]:
    """The shards of the module's own parameters."""
    below = {part for inner in _units_below(module) for part in inner.modules()}
    own = set(module.modules()) - below
    return [shard for shard in sharding_around(module).shards if any(owner in own for owner, _ in shard.owners)]


def _units_below(module: nn.Module) -> Iterator[nn.Module]:
    return (inner for inner in module.modules() if inner is not module and isinstance(inner, ShardedUnit))


def _shards(module: nn.Module, recurse: bool) -> list[FlatShard]:
    """The shards of a module's own parameters, and of those of the units below it."""
    check_bool("recurse", recurse)
    modules = [module, *_units_below(module)] if recurse else [module]
    return list(dict.fromkeys(itertools.chain.from_iterable(own_shards(each) for each in modules)))


@dataclasses.dataclass(frozen=True)
class Handle(UnshardHandle):
    """What `unshard(async_op=True)` returns."""

    parts: tuple[Unsharded, ...]

    def wait(self) -> None:
        """Wait for the gathers, and put the full parameters in their places."""
        for part in self.parts:
            part.wait()


class ShardedUnit(FSDPModule, nn.Module):
    """Mixed into the class of every module that was sharded by a call of its own; torch's class, for isinstance."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Without arguments an empty one, for copies; with some, one of the user's class: a slice of a container."""
        return original_class(cls)(*args, **kwargs) if args or kwargs else object.__new__(cls)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own parameters: until `reshard()` they are full, plain parameters.

        They have the dtype that the forward computes with. The next call of the model gathers as its schedule says, and
        ends this before; so does `state_dict()`. What is written to the full parameters is lost, with a warning. Every
        rank calls it.

        Args:
            async_op: whether to return before the gathers are done, with a handle whose `wait()` ends them. Until then
                the sharded parameters are in place.

        Raises:
            RuntimeError: in a forward or backward, or inside summon_full_params.
        """
        check_bool("async_op", async_op)
        sharding = sharding_around(self)
        sharding.refuse_if_summoned("unshard")
        if sharding.running:
            raise RuntimeError("unshard was called in a forward or a backward: the schedule gathers there")
        shards = own_shards(self)
        for shard in shards:
            if shard.unsharded is None:
                shard.check_views()
        handle = Handle(tuple(unshard(self, shards)))
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free what `unshard` gathered of this module's own parameters: the sharded ones are back in their places."""
        for shard in own_shards(self):
            shard.reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether the backwards of the next forwards reduce gradients; if not, they keep them, full, on every rank.

        The first backward that reduces again reduces what was kept, together with its own gradients. Until then `.grad`
        of the parameters does not change, and `optimizer.zero_grad()` does not reach what is kept; `model.zero_grad()`
        does. With a single rank there is nothing to reduce.

        Args:
            recurse: whether it is said of the units below, too.
        """
        check_bool("requires_gradient_sync", requires_gradient_sync)
        for shard in _shards(self, recurse):
            shard.keeps_gradients = not requires_gradient_sync
            shard.keeps_for_replicas = not requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether the next backwards end with the reduction over the replicas of a mesh of two dimensions.

        If not, gradients are kept, full, as by `set_requires_gradient_sync(False)`: the reduction over the shards waits
        for that over the replicas, and the gradients in the end are the same. With one dimension there are no replicas,
        and nothing changes.
        """
        check_bool("requires_all_reduce", requires_all_reduce)
        for shard in _shards(self, recurse):
            shard.keeps_for_replicas = not requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """FSDP2's, which lets backwards end before their reductions. Here each ends with its own, by either value."""
        check_bool("is_last_backward", is_last_backward)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether units are resharded between forward and backward, from the next call on.

        The first call with another value compiles anew. Calls without gradients free every unit by either value.

        Raises:
            ConfigError: it is no bool.
        """
        check_bool("reshard_after_forward", reshard_after_forward)
        sharding_around(self).reshard_by(_shards(self, recurse), reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """FSDP2's, which with False trades memory for a gather in the next forward.

        No full parameter outlives a compiled backward: the next forward gathers again. The numbers are the same, and
        False says so in a warning.
        """
        check_bool("reshard_after_backward", reshard_after_backward)
        check_bool("recurse", recurse)
        if not reshard_after_backward:
            warnings.warn(
                "set_reshard_after_backward(False): a compiled backward frees what it gathered, and the next forward "
                "gathers again",
                stacklevel=2,
            )

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """FSDP2's, which says with False that the backward does not read the module's parameters.

        Here the graph of the backward says it: what it does not read, as the weight of an embedding, is not gathered
        for it, and what it reads is. Either value leads to the same graphs.
        """
        check_bool("unshard_in_backward", unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """The own parameters of these modules are gathered, at the latest, where the forward first uses this one's.

        An empty list takes it back. The next call compiles anew, once for each list.

        Raises:
            ValueError: one of the modules is no FSDPModule.
            ConfigError: it is not a part of the same model, or the schedule is planned (`hardware=`).
        """
        self._gather_ahead("forward", modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """As `set_modules_to_forward_prefetch`, in the backward."""
        self._gather_ahead("backward", modules)

    def _gather_ahead(self, side: str, modules: Iterable[FSDPModule]) -> None:
        sharding, modules = sharding_around(self), list(modules)
        for each in modules:
            if not isinstance(each, FSDPModule):
                raise ValueError(f"expects modules that fully_shard was applied to, and got a {type(each).__name__}")
            if not isinstance(each, ShardedUnit) or sharding_around(each) is not sharding:
                raise ConfigError(
                    f"set_modules_to_{side}_prefetch: a {type(each).__name__} is no part of the same sharded model: "
                    "shard the model that holds both first"
                )
        ahead = itertools.chain.from_iterable(own_shards(each) for each in modules if isinstance(each, ShardedUnit))
        sharding.gather_ahead(side, own_shards(self), ahead)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """From the next forward on, gradients of this module's own parameters are sums over the ranks, divided.

        The next call compiles anew, if the number is another.

        Raises:
            ConfigError: `factor` is no positive number; nothing has changed.
            RuntimeError: there is a single rank, and this is not the outermost sharded module.
        """
        reduction, sharding = GradientReduction.divided_by(factor), sharding_around(self)
        if sharding.mesh is None:
            _check_outermost(self, "set_gradient_divide_factor")
            sharding.divisor = reduction.divisor
        for shard in own_shards(self):
            shard.reduce_by(reduction)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Whether collectives only sum, and a division follows, where they would compute means.

        It is the same as `set_gradient_divide_factor` by the number of ranks. False returns to means, unless another
        divisor was set.
        """
        check_bool("enable", enable)
        for shard in own_shards(self):
            reduction, num_ranks = shard.layout.reduction, float(shard.mesh.size())
            if enable and reduction.operator == "avg":
                shard.reduce_by(GradientReduction("sum", num_ranks))
            elif not enable and reduction == GradientReduction("sum", num_ranks):
                shard.reduce_by(GradientReduction())

    def set_post_optim_event(self, event: torch.Event) -> None:
        """An event that the gathers of the next call wait for, besides the work that the current stream has."""
        sharding_around(self).post_optim_event = event

    def reset_iter_state(self) -> None:
        """Forget what a forward or backward left that ended in an exception: gradients that `no_sync` kept, too.

        Raises:
            RuntimeError: the module is a part of a model that was sharded after it.
        """
        _check_outermost(self, "reset_iter_state")
        sharding_around(self).forget_step()

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Refused with True: ranks may leave out outputs in their losses, but forwards have to read the same."""
        check_bool("recurse", recurse)
        check_bool("reduce_scatter_unused_params", reduce_scatter_unused_params)
        if reduce_scatter_unused_params:
            _refuse("set_reduce_scatter_unused_params(True)", "ranks whose forwards differ raise RankError")

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Refused, except for 1: one reduction is under way at a time, unless a plan (`hardware=`) allows more."""
        check_bool("recurse", recurse)
        if isinstance(max_input_buffers, bool) or max_input_buffers != 1:
            _refuse("set_reduce_scatter_max_input_buffers", "hardware= plans how many reductions are under way")

    def set_custom_all_gather(self, comm: Any) -> NoReturn:
        """Refused: collectives are nodes of the graph."""
        _refuse("set_custom_all_gather", "collectives are nodes of the graph: collective_lowering= says in which form")

    def set_custom_reduce_scatter(self, comm: Any) -> NoReturn:
        """Refused: collectives are nodes of the graph."""
        _refuse(
            "set_custom_reduce_scatter", "collectives are nodes of the graph: collective_lowering= says in which form"
        )

    def set_all_reduce_hook(self, hook: Any, *, stream: Any = None) -> NoReturn:
        """Refused: a hook of a parameter gets its reduced gradient."""
        _refuse("set_all_reduce_hook", "parameter.register_hook gets the reduced gradient of a parameter, a DTensor")

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Refused with True: reductions run in the order of the schedule, in the group of the mesh."""
        check_bool("enable", enable)
        if enable:
            _refuse("set_separate_reduce_scatter_group", "reductions run in the group of the mesh, as scheduled")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Refused with True: the compiled program allocates its own buffers."""
        check_bool("enable", enable)
        if enable:
            _refuse("set_allocate_memory_from_process_group_for_comm", "the compiled program allocates its buffers")

    def set_symm_mem_for_comm(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the compiled program allocates its own buffers."""
        _refuse("set_symm_mem_for_comm", "the compiled program allocates its buffers")

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """FSDP2's: whether gathers run beside compute. They do by either value, as the schedule says."""
        check_bool("async_op", async_op)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """What `.to`, `.half` and `.cuda` do, for sharded parameters; torch's would look for FSDP2's state."""
        self.reshard()
        return super(FSDPModule, self)._apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """As of any module; what was unsharded at or below it is resharded before."""
        for shard in _shards(self, recurse=True):
            shard.reshard()
        return super().state_dict(*args, **kwargs)


def _check_outermost(module: nn.Module, what: str) -> None:
    if "_fsdp_sharding" not in vars(module):
        raise RuntimeError(f"{what} of a {type(module).__name__}: call that of the outermost sharded module")


def _refuse(what: str, instead: str) -> NoReturn:
    raise ConfigError(f"{what} is not supported: {instead}")
