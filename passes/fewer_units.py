"""Fewer units: a joint graph without some of the equal units in its middle, as of a model with fewer layers.

To plan for all layers of a model takes as long as for a few of them, times their number. What wins for a few wins for
all, where they are equal (`equal_units.py`). Where some are left out, the forward of the unit behind them reads what
the unit before them computes, and the backward of the unit before them what the unit behind them does:

    x1 = f(x0, w0); x2 = f(x1, w1); x3 = f(x2, w2); x4 = f(x3, w3)    becomes    x1 = f(x0, w0); x4 = f(x1, w3)

All inputs stay. The gradients of what is left out become None.
"""

from __future__ import annotations

from . import analysis, ops
from .equal_units import SINKS, EqualUnits


def skip_units(equal: EqualUnits, begin: int, end: int) -> bool:
    """Take the units from `begin` to `end` (excluded) out of the graph; False if it cannot be, and nothing is done.

    Both have a neighbour: 0 < `begin` < `end` < the number of units.
    """
    removed = {node for nodes in (*equal.forward[begin:end], *equal.backward[begin:end]) for node in nodes}
    graph = equal.graph
    output = graph.output_node()
    if not all(ops.is_call(value, *SINKS) for value in analysis.outputs(graph) if value in removed):
        return False
    # The forward of the units behind reads the unit before, and the backward of the units before the unit behind.
    previous = dict(zip(equal.forward[end - 1], equal.forward[begin - 1], strict=True))
    following = dict(zip(equal.forward[begin], equal.forward[end], strict=True))
    following |= dict(zip(equal.backward[begin], equal.backward[end], strict=True))
    in_backward = {node for nodes in equal.backward[:begin] for node in nodes}
    replaced = [
        (reader, source, (following if reader in in_backward else previous).get(source))
        for reader in graph.nodes
        if reader not in removed and reader is not output
        for source in reader.all_input_nodes
        if source in removed
    ]
    if any(new is None for _, _, new in replaced):
        return False
    for reader, source, new in replaced:
        reader.replace_input_with(source, new)
    output.args = (tuple(None if value in removed else value for value in analysis.outputs(graph)),)
    for node in reversed(list(graph.nodes)):
        if node in removed:
            graph.erase_node(node)
    analysis.erase_dead(graph)
    analysis.put_in_order(graph, graph.nodes)
    return True
