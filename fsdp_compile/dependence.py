"""Dependence: which results of a graph lead, by autograd, to which of its inputs and sharded parameters.

In eager a parameter gets no gradient if no path of autograd leads to it from the outputs that the loss takes. Of a
compiled graph AOTAutograd computes all gradients, from zeros for the outputs that are left out, which are not told from
others any more. So while the graph is traced, the paths are noted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch.autograd.graph import Node, get_gradient_edge

Slot = tuple[str, int]
"""A sharded parameter: its bucket, and its offset there."""


@dataclasses.dataclass(frozen=True)
class Dependence:
    """Which results lead to which gradients. Results are numbered: the outputs, then the inputs that were written to.

    Attributes:
        results_of: by sharded parameter, or by position of another input that needs a gradient.
        passed_on: inputs whose gradient goes on to what computed them.
    """

    results_of: Mapping[Slot | int, frozenset[int]]
    passed_on: frozenset[int]

    @property
    def can_differ(self) -> bool:
        """Whether there are gradients for some of the results that lead to a part of these parameters and inputs."""
        return len(set(self.results_of.values())) > 1

    def __str__(self) -> str:
        """One line for each gradient: `root at 0: results 0, 1`."""
        lines = []
        for key, results in self.results_of.items():
            name = f"input {key}" if isinstance(key, int) else f"{key[0]} at {key[1]}"
            lines.append(f"{name}: results {', '.join(map(str, sorted(results)))}")
        return "\n".join(lines)


class Paths:
    """The nodes of autograd at the inputs and at the results of a graph that is traced.

    Attributes:
        leaves: which inputs nothing has computed.
    """

    def __init__(self, leaves: Sequence[bool]) -> None:
        self.leaves = leaves
        self._inputs: list[Node | None] = []
        self._results: list[Node | None] = []

    @classmethod
    def note(cls, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Paths | None:
        """Have a graph from Dynamo note them whenever it is traced; None if it has one result or none."""
        *inputs, output = [node for node in gm.graph.nodes if node.op in ("placeholder", "output")]
        outputs: Any = output.args[0]
        if sum(_needs_gradient(value) for value in outputs) < 2:
            return None
        paths = cls([not isinstance(value, torch.Tensor) or value.is_leaf for value in example_inputs])
        gm.add_module("fsdp_inputs", _Noting(paths._note_inputs))
        gm.add_module("fsdp_results", _Noting(paths._note_results))
        with gm.graph.inserting_after(inputs[-1]) if inputs else gm.graph.inserting_before(output):
            gm.graph.call_module("fsdp_inputs", tuple(inputs))
        with gm.graph.inserting_before(output):
            gm.graph.call_module("fsdp_results", (*outputs, *inputs))
        gm.recompile()
        return paths

    def dependence(self) -> Dependence:
        """What the paths say; called once, when the graph has been traced. They are let go of."""
        results_of_node = _results_reaching(self._results)
        results_of: dict[Slot | int, frozenset[int]] = {}
        for node, results in results_of_node.items():
            if (slot := getattr(node, "fsdp_slot", None)) is not None:  # an attribute of torch's node, if it reads one
                results_of[slot] = results_of.get(slot, frozenset()) | results
        for index, given in enumerate(self._inputs):
            if given is not None and given in results_of_node:
                results_of[index] = results_of_node[given]
        self._inputs, self._results = [], []
        passed_on = [key for key in results_of if isinstance(key, int) and not self.leaves[key]]
        return Dependence(results_of, frozenset(passed_on))

    def _note_inputs(self, *inputs: Any) -> None:
        self._inputs = [_node_of(value) for value in inputs]

    def _note_results(self, *values: Any) -> None:
        nodes = [_node_of(value) for value in values]
        begin = len(nodes) - len(self._inputs)
        written = [None if now is before else now for now, before in zip(nodes[begin:], self._inputs, strict=True)]
        self._results = nodes[:begin] + written


class _Noting(torch.nn.Module):
    """A call of a function in a graph that is interpreted; what optimizes graphs leaves it where it is."""

    _is_impure = True

    def __init__(self, function: Callable[..., None]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *values: Any) -> None:
        self.function(*values)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Noting:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (type(self).__name__,)  # in the key of AOTAutograd's cache


def _needs_gradient(value: Any) -> bool:
    example = value.meta.get("example_value") if isinstance(value, torch.fx.Node) else None
    return isinstance(example, torch.Tensor) and example.requires_grad


def _node_of(value: Any) -> Node | None:
    return get_gradient_edge(value).node if isinstance(value, torch.Tensor) and value.requires_grad else None


def _results_reaching(results: Sequence[Node | None]) -> dict[Node, frozenset[int]]:
    """By node of autograd: the results from which a path leads to it. Paths end at reads of sharded parameters."""
    found: dict[Node, set[int]] = {}
    for index, node in enumerate(results):
        if node is not None:
            found.setdefault(node, set()).add(index)
    for node in _in_order(list(found)):
        for following in _following(node):
            found.setdefault(following, set()).update(found[node])
    return {node: frozenset(indices) for node, indices in found.items()}


def _following(node: Node) -> list[Node]:
    return [] if hasattr(node, "fsdp_slot") else [each for each, _ in node.next_functions if each is not None]


def _in_order(roots: Iterable[Node]) -> list[Node]:
    """All nodes behind `roots`, each before those that follow it."""
    order: list[Node] = []
    seen: set[Node] = set()
    for root in roots:
        stack = [(root, iter(_following(root)))] if root not in seen else []
        seen.add(root)
        while stack:
            node, following = stack[-1]
            fresh = next((each for each in following if each not in seen), None)
            if fresh is None:
                order.append(stack.pop()[0])
            else:
                seen.add(fresh)
                stack.append((fresh, iter(_following(fresh))))
    return order[::-1]
