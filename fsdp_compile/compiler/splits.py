"""A joint graph in forward and backward, for each layout and activation memory budget that plans ask for.

Private torch API, as of torch 2.11 to 2.15: functorch's configuration, what is traced with, graph modules whose code
is generated late.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch._functorch.config
import torch.fx
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._library.fake_class_registry import FakeScriptObject
from torch.distributed.device_mesh import DeviceMesh
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module

from ..passes import analysis
from ..passes.equal_units import EqualUnits
from ..passes.fewer_units import skip_units
from ..passes.halves import Halves, copy_of
from ..passes.more_units import rename_units, repeat_unit
from ..passes.new_layout import NewLayout
from ..passes.pipeline import Pipeline


@dataclasses.dataclass
class Splits:
    """A joint graph in halves, for every activation memory budget that is asked for; it is left as it is.

    Attributes:
        layout: what the graph is laid out by, if not by what `traced` was.
    """

    joint: torch.fx.GraphModule
    pipeline: Pipeline
    num_fwd_outputs: int
    static_inputs: Sequence[int]
    layout: NewLayout | None = None
    traced: Splits | None = None
    found: dict[float | None, Halves] = dataclasses.field(default_factory=dict)

    def laid_out(self, layout: NewLayout) -> Splits:
        return dataclasses.replace(self, layout=layout, traced=self, found={})

    def of(self, activations: float | None) -> Halves:
        if activations not in self.found:
            self.found[activations] = self._split(activations)
        return self.found[activations]

    def _split(self, activations: float | None) -> Halves:
        if self.traced is not None and self.layout is not None and activations is None and activations_are_free():
            return self.layout.change_halves(self.traced.of(None).copies())
        # What the partitioner chooses within a budget depends on the sizes of shards, too.
        setting = {} if activations is None else {"activation_memory_budget": activations}
        copied = self._merged()
        with (
            torch._functorch.config.patch(setting | _sizes_of_meshes(copied)),
            _use_lazy_graph_module(True),
            _on_fake_tensors(copied),
        ):
            return coded_late(Halves.of(copied, self.num_fwd_outputs, self.static_inputs))

    def _merged(self) -> torch.fx.GraphModule:
        """A copy of the joint graph in this layout, its unshards and gradients merged."""
        self.joint.graph.set_codegen(torch.fx.graph.CodeGen())  # that of trees as arguments warns when it is copied
        copied = copy_of(self.joint)
        self.pipeline.merge(copied)
        if self.layout is not None:
            self.layout.change_graph(copied.graph)
        return copied

    def shortened(self, num_units: int) -> tuple[Splits, float] | None:
        """The same with so many of the equal units, and the part of all units that these are with the others.

        None where there are less than twice as many, or where units cannot be left out.
        """
        copied = self._merged()
        equal = EqualUnits.of(copied.graph)
        if equal is None or len(equal.names) < 2 * num_units:
            return None
        num_before = num_units // 2
        num_skipped = len(equal.names) - num_units
        if not skip_units(equal, num_before, num_before + num_skipped):
            return None
        part = 1 - num_skipped / equal.num_units
        return self._around(copied, self.static_inputs), part

    def lengthened(self, num_traced: int, names: Sequence[str]) -> tuple[Splits, Sequence[str]] | None:
        """The same with a unit for each of these names, and the unit of the graph that each of them was before.

        None where a unit cannot be repeated, or fewer than four of them are equal.

        Args:
            num_traced: so many of the names are units of the graph; copies of one of these are the others.
        """
        copied = self._merged()
        equal, num_copies = EqualUnits.of(copied.graph), len(names) - num_traced
        if equal is None or len(equal.names) < 4 or not set(equal.names) <= set(names[:num_traced]):
            return None
        number = len(equal.names) - 2
        behind = names.index(equal.names[number]) + 1
        rename_units(copied.graph.nodes, dict(zip(names[behind:num_traced], names[behind + num_copies :], strict=True)))
        inputs = analysis.inputs(copied.graph)
        copies = repeat_unit(equal, number, names[behind : behind + num_copies], self.num_fwd_outputs)
        if copies is None:
            return None
        static = {copy for at in self.static_inputs for copy in (inputs[at], *copies.get(inputs[at], ()))}
        positions = [at for at, node in enumerate(analysis.inputs(copied.graph)) if node in static]
        originals = [*names[:behind], *[names[behind - 1]] * num_copies, *names[behind:num_traced]]
        return self._around(copied, positions), originals

    def _around(self, joint: torch.fx.GraphModule, static_inputs: Sequence[int]) -> Splits:
        """Those of another graph, which is merged and laid out."""
        return dataclasses.replace(self, joint=joint, static_inputs=static_inputs, layout=None, traced=None, found={})


def coded_late(halves: Halves) -> Halves:
    """The same halves; their code, and that of copies of them, is generated when it is first asked for.

    To generate it takes as long as several passes, and of most copies nobody asks for it.
    """
    forward, backward = map(_LazyGraphModule.from_graphmodule, (halves.forward, halves.backward))
    return dataclasses.replace(halves, forward=forward, backward=backward)


def _on_fake_tensors(gm: torch.fx.GraphModule) -> AbstractContextManager[Any]:
    """The partitioner makes new values, states of generators, like those of the graph: those that were traced with."""
    if TracingContext.try_get() is not None:
        return nullcontext()
    return tracing(TracingContext(detect_fake_mode([node.meta.get("val") for node in analysis.inputs(gm.graph)])))


def _sizes_of_meshes(gm: torch.fx.GraphModule) -> dict[str, bool]:
    """Settings with which the partitioner, where memory is short, takes the meshes of tensor parallelism for no bytes.

    It asks for the size of every input, and refuses objects: they might hold tensors.
    """
    name = "unsafe_treat_script_objects_as_zero_size"
    values = [node.meta.get("val") for node in analysis.inputs(gm.graph)]
    objects = [value.real_obj for value in values if isinstance(value, FakeScriptObject)]
    are_meshes = all(isinstance(each, DeviceMesh) for each in objects)
    return {name: True} if objects and are_meshes and hasattr(torch._functorch.config, name) else {}


def activations_are_free() -> bool:
    """Whether torch's activation memory budget is as it is by default."""
    return bool(torch._functorch.config.activation_memory_budget == 1.0)
