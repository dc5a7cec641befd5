"""Which results of a compiled graph got a gradient: what autograd knows, and AOTAutograd fills up with zeros.

A hook before the backward's node sees the gradients as they are. Which of them belongs to which result, the edges of
autograd say, behind the first forward. Private, as of torch 2.11 to 2.15: `_current_autograd_node`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, get_gradient_edge

from ..dependence import Dependence, Slot

HasGradient = Callable[[Slot | int], bool]
"""Whether eager would have a gradient for a sharded parameter, or for an input, by its position."""

_KEY = "fsdp_given"


class Results:
    """The results of one compiled graph, as `Dependence` numbers them.

    Attributes:
        dependence: which of them lead to which gradients; None if all lead to all.
    """

    def __init__(self) -> None:
        self.dependence: Dependence | None = None
        self._number_of: dict[int, int] | None = None  # by result: among the gradients that the node gets
        self._first, self._num_steps = 0, 0  # the way to the node: a result, and how many nodes are before it

    def watch(self, arguments: Sequence[Any], outputs: Sequence[Any], before: set[Node]) -> None:
        """Behind a forward, see to it that its backward will know; `before` are `nodes_of` the arguments before it."""
        if self._number_of is None:
            self._find_edges([*outputs, *arguments], before)
        if not self._number_of:
            return
        first = self._first
        node = (outputs[first] if first < len(outputs) else arguments[first - len(outputs)]).grad_fn
        for _ in range(self._num_steps):
            node = node.next_functions[0][0]
        node.register_prehook(_note)

    def nodes_of(self, arguments: Sequence[Any]) -> set[Node]:
        """The nodes that the arguments of the first forward come from."""
        if self._number_of is not None or not torch.is_grad_enabled():
            return set()
        return {get_gradient_edge(each).node for each in arguments if torch.is_tensor(each) and each.requires_grad}

    def _find_edges(self, values: Sequence[Any], before: set[Node]) -> None:
        self._number_of = {}
        for result, value in enumerate(values):
            if not torch.is_tensor(value) or not value.requires_grad or value.grad_fn is None:
                continue
            (node, number), num_steps = get_gradient_edge(value)[:2], 0
            while node not in before and not isinstance(node, BackwardCFunction) and node.next_functions:
                (node, number), num_steps = node.next_functions[0], num_steps + 1  # type: ignore[assignment]
            if node in before or not isinstance(node, BackwardCFunction):
                continue  # an input, or a view of one: its gradient does not pass through the graph
            if not self._number_of:
                self._first, self._num_steps = result, num_steps
            self._number_of[result] = number

    def in_running_backward(self) -> HasGradient | None:
        """What the gradients say that came to the node which is running; None for: all have one."""
        given = _noted().get(_KEY)
        if given is None or not any(given):
            return None if given is None else lambda key: False
        if self.dependence is None or not self.dependence.can_differ:
            return None
        numbers, results_of = self._number_of or {}, self.dependence.results_of
        results = {result for result, number in numbers.items() if given[number]}
        return lambda key: key not in results_of or not results.isdisjoint(results_of[key])


def _note(gradients: Sequence[torch.Tensor | None]) -> None:
    """Before a node runs: note on it which gradients it gets."""
    _noted()[_KEY] = [gradient is not None for gradient in gradients]


def _noted() -> dict[Any, Any]:
    """What is noted on the node that autograd runs."""
    metadata: Any = torch._C._current_autograd_node().metadata  # declared as a method
    return metadata  # type: ignore[no-any-return]
