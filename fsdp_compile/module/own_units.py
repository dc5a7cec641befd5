"""Own units: what one call has sharded of a model, however many calls were made for other parts of it.

A module that was sharded keeps them when a model that holds it takes over: its methods act on them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch.nn as nn

from ..layout.options import GradientReduction
from ..runtime.flat_shard import Divisor, FlatShard
from ..runtime.gathered_once import drop
from .full_precision import FullInEvaluation


@dataclasses.dataclass(frozen=True)
class Replaced:
    """A place of a sharded parameter, and the full one that stands there for now."""

    module: nn.Module
    name: str
    sharded: nn.Parameter
    full: nn.Parameter
    version: int

    @property
    def is_written(self) -> bool:
        """Whether something has written to the full parameter, or put another one in its place."""
        return self.full._version != self.version or self.module._parameters.get(self.name) is not self.full


@dataclasses.dataclass(eq=False)
class Unsharded:
    """Full parameters in the places of sharded ones, once what gathers them is waited for.

    Attributes:
        gather: waits for all-gathers that were started; the places of what they gather.
        places: once it was waited for.
        is_over: whether the sharded parameters are back.
    """

    gather: Callable[[], list[Replaced]]
    places: list[Replaced] | None = None
    is_over: bool = False

    def wait(self) -> None:
        """Have the full parameters take their places."""
        if self.places is None:
            self.places = self.gather()
            for place in self.places:
                place.module._parameters[place.name] = place.full

    def end(self) -> list[str]:
        """Put the sharded parameters back; returns the names of those whose full ones had a gradient."""
        self.is_over = True
        places = self.gather() if self.places is None else self.places
        for place in places:
            place.module._parameters[place.name] = place.sharded
            if place.full.requires_grad != place.sharded.requires_grad:
                place.sharded.requires_grad_(place.full.requires_grad)
        return [place.name for place in places if place.full.grad is not None]


@dataclasses.dataclass(eq=False)
class OwnUnits:
    """The units that one call has sharded.

    Attributes:
        modules: what it was called with: one, or a list.
        names: of the units, in the model that they are a part of now.
        divisors: with a single rank, what divides the gradients of each parameter.
        reduction: how gradients become one, as the user has said.
        sums: whether collectives sum only, and a division follows.
        reductions: how many reductions may be under way at once, if the user has said.
        full_in_evaluation: of units that cast nothing while they are in evaluation mode, what they cast otherwise.
        unsharded: the full parameters, between `unshard` and `reshard`.
    """

    modules: tuple[nn.Module, ...]
    names: list[str]
    shards: list[FlatShard]
    divisors: list[Divisor]
    reduction: GradientReduction
    sums: bool = False
    reductions: int | None = None
    full_in_evaluation: list[FullInEvaluation] = dataclasses.field(default_factory=list)
    unsharded: Unsharded | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a module, or one from a file, has no units, until the copy of the whole model gives it some."""
        return type(None), ()

    def note(self) -> None:
        """Tell the modules."""
        for module in self.modules:
            vars(module)["_fsdp_own"] = self

    def copied(self, memo: dict[int, Any]) -> OwnUnits:
        """The same of a copy of the model, with what that has instead of the parts of the model."""
        return dataclasses.replace(
            self,
            modules=tuple(copy.deepcopy(module, memo) for module in self.modules),
            names=list(self.names),
            shards=[memo[id(shard)] for shard in self.shards],
            divisors=[memo[id(divisor)] for divisor in self.divisors],
            full_in_evaluation=copy.deepcopy(self.full_in_evaluation, memo),
            unsharded=None,
        )

    def reduce_by(self, reduction: GradientReduction, *, sums: bool) -> None:
        """From the next forward on, gradients are reduced so."""
        self.reduction, self.sums = reduction, sums
        for divisor in self.divisors:
            divisor.value = reduction.divisor
        for shard in self.shards:
            layout = shard.layout
            shard.change_layout(dataclasses.replace(layout, reduction=layout.reduced_by(reduction, sums=sums)))

    def reshard(self) -> None:
        """Nothing is full any more: sharded parameters take the places of full ones. What was written to those is lost.

        Raises:
            RuntimeError: full parameters have gradients, which nothing has reduced; the sharded ones are back.
        """
        for shard in self.shards:
            drop(shard)
        self._put_back()

    def _put_back(self) -> None:
        unsharded, self.unsharded = self.unsharded, None
        if unsharded is not None and (names := unsharded.end()):
            raise RuntimeError(
                f"{', '.join(names)} of a unit that was unsharded by hand has a gradient, which is of this rank only "
                "and lost: compute with parameters in a forward, or in a method of register_fsdp_forward_method"
            )

    def prepare(self) -> None:
        """Before a forward: sharded parameters are in their places, and units have the casts of their mode."""
        self.reshard_for_call()
        self.choose_casts()

    def choose_casts(self) -> None:
        """Have the casts that the modes of the units ask for now."""
        for each in self.full_in_evaluation:
            each.prepare(self.shards)

    def reshard_for_call(self) -> None:
        """As `reshard`, but for what lasts for several calls.

        Raises:
            RuntimeError: the call would not see what was written to the full parameters.
        """
        places = self.unsharded.places if self.unsharded is not None else None
        written = [place.name for place in places or () if place.is_written]
        self._put_back()
        if written:
            raise RuntimeError(
                f"{', '.join(written)} was written to between unshard() and a call of the model, which gathers the "
                "sharded parameters: write inside model.summon_full_params()"
            )


def own_units_of(module: nn.Module) -> OwnUnits | None:
    """Of a module that was sharded; None of others, and of copies that were made of a part of a model."""
    return vars(module).get("_fsdp_own")


def own_units_below(module: nn.Module, *, recurse: bool = True) -> Iterator[OwnUnits]:
    """Those of `module`, and with `recurse` of modules below it, each once."""
    modules = module.modules() if recurse else [module]
    yield from dict.fromkeys(own for each in modules if (own := own_units_of(each)) is not None)
