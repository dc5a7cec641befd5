"""Analyses that the passes share (positions, aliases, last uses, full buffers), and the one way in which nodes move."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.fx

from . import metadata, ops


def positions(graph: torch.fx.Graph) -> dict[torch.fx.Node, int]:
    """The place of every node in the order of execution."""
    return {node: index for index, node in enumerate(graph.nodes)}


def is_alias(node: torch.fx.Node) -> bool:
    """Whether this node's value is a view of its first input, by the schema of its operator."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is operator.getitem and any(map(is_alias, node.all_input_nodes[:1]))
    return _returns_view(target) and bool(node.all_input_nodes)  # asked last: it takes longest


@functools.cache
def _returns_view(target: torch._ops.OpOverload) -> bool:
    if target is ops.WAIT:
        return True  # the buffer is the one that the collective fills
    returns = target._schema.returns
    return any(value.alias_info is not None and not value.alias_info.is_write for value in returns)


def aliases(node: torch.fx.Node) -> list[torch.fx.Node]:
    """`node` and every node that is a view of it, or a view of such a view."""
    found = [node]
    for alias in found:
        found += [user for user in alias.users if is_alias(user) and user.all_input_nodes[0] is alias]
    return found


def uses(node: torch.fx.Node) -> set[torch.fx.Node]:
    """`node`, its views, and every node that reads one of them; a collective of the model reads until its wait."""
    found = aliases(node)
    readers = {user for alias in found for user in alias.users}
    return {*found, *readers, *(wait for reader in readers for wait in waits_of(reader) if not _copies(reader))}


def waits_of(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The waits for what a collective of the model itself sends; nothing of another node."""
    if not ops.is_functional_collective(node):
        return []
    taken = [user for user in node.users if user.target is operator.getitem]
    return [user for result in (node, *taken) for user in result.users if ops.is_functional_wait(user)]


def _copies(collective: torch.fx.Node) -> bool:
    """Whether this works on a copy of what it reads."""
    return "all_reduce" in str(collective.target)


def last_use(node: torch.fx.Node, position: Mapping[torch.fx.Node, int]) -> torch.fx.Node:
    """The last node that reads `node` or any view of it; the last of those views itself where none is read."""
    return max(uses(node), key=position.__getitem__)


def first_use(node: torch.fx.Node, position: Mapping[torch.fx.Node, int]) -> torch.fx.Node:
    """The first node that reads `node`."""
    return min(node.users, key=position.__getitem__)


def full_buffers(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The nodes that bring a full buffer to life and that no other node of this list is a view of."""
    return [
        node for node in graph.nodes if _is_gathered(node) or _is_copy(node) or _is_converted(node) or _is_kept(node)
    ]


def gathered_inputs(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The inputs that bring what was gathered before the call, for several calls."""
    return [node for node in inputs(graph) if any(ops.is_call(user, ops.WAIT) for user in node.users)]


def _is_gathered(node: torch.fx.Node) -> bool:
    return ops.is_call(node, ops.WAIT) and ops.is_all_gather(node.args[0])  # type: ignore[arg-type]


def _is_kept(node: torch.fx.Node) -> bool:
    kept = metadata.kept_parameter(node)
    return kept is not None and not kept.outlives


def _is_copy(node: torch.fx.Node) -> bool:
    return ops.is_call(node, ops.COPY_OUT)


def _is_converted(node: torch.fx.Node) -> bool:
    if not ops.is_call(node, ops.CAST, ops.MOVE, ops.COPY_WAIT) or any(map(ops.is_conversion, node.users)):
        return False
    return any(map(ops.is_parameter_out, node.users))


_HEAVY = {
    "_unsafe_index_put",
    "_unsafe_masked_index_put_accumulate",
    "addmm",
    "baddbmm",
    "bmm",
    "convolution",
    "convolution_backward",
    "embedding",
    "embedding_dense_backward",
    "index_put",
    "mm",
}


def is_heavy(node: torch.fx.Node) -> bool:
    """Whether this is a kernel of its own (a matmul, attention, an embedding, a scatter): compilers fuse the rest."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return isinstance(node.target, torch._ops.HigherOrderOperator)
    return _computes_heavy(node.target)


@functools.cache
def _computes_heavy(target: torch._ops.OpOverload) -> bool:
    if target.namespace != "aten":
        return target.namespace not in ("prims", "fsdp")
    name = target._schema.name.removeprefix("aten::")
    return name in _HEAVY or "attention" in name


def kernel_begin(node: torch.fx.Node) -> torch.fx.Node:
    """Where the kernel begins that a compiler will form around `node`: after the last heavy node before a light one."""
    reader = node
    while is_alias(reader) and reader.users:
        reader = next(iter(reader.users))  # a view is no kernel: what reads it is
    begin = node
    while not is_heavy(reader) and not _ends_kernel(begin.prev):
        begin = begin.prev
    return begin


def kernel_end(node: torch.fx.Node) -> torch.fx.Node:
    """Where the kernel ends that a compiler will form around `node`: with the last light node before a heavy one."""
    source = node
    while is_alias(source):
        source = source.all_input_nodes[0]
    end = following = node
    while not is_heavy(source) and not _ends_kernel(following.next):
        following = following.next
        end = end if is_alias(following) else following
    return end


def _ends_kernel(node: torch.fx.Node) -> bool:
    is_sent = ops.is_call(node, ops.PACK, ops.REMAINDER, ops.WAIT) or ops.is_collective(node)
    return node.op in ("placeholder", "output", "root") or is_heavy(node) or is_sent


def graphs_of(gm: torch.fx.GraphModule) -> list[torch.fx.Graph]:
    """The graph of a module, and those of the modules inside it."""
    return [module.graph for module in gm.modules() if isinstance(module, torch.fx.GraphModule)]


def inputs(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def outputs(graph: torch.fx.Graph) -> list[Any]:
    """The values that the graph returns, in order; None where an input gets no gradient."""
    return list(graph.output_node().args[0])  # type: ignore[arg-type]


def written_inputs(graph: torch.fx.Graph) -> dict[torch.fx.Node, torch.fx.Node]:
    """The inputs that are written to in place, each with the first node that does.

    That is the output where AOTAutograd writes when the graph has run, for autograd to see: one of the values that the
    graph returns is described as the new one of that input.
    """
    root = {alias: node for node in inputs(graph) for alias in aliases(node)}
    found: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            for formal, value in zip(node.target._schema.arguments, node.args, strict=False):
                is_written = formal.alias_info is not None and formal.alias_info.is_write
                if is_written and isinstance(value, torch.fx.Node) and value in root:
                    found.setdefault(root[value], node)
    described = [getattr(desc, "mutated_input", None) for desc in graph.output_node().meta.get("desc", ())]
    for node in inputs(graph):
        if node.meta.get("desc") is not None and node.meta["desc"] in described:
            found.setdefault(node, graph.output_node())
    return found


def parameter_only(graph: torch.fx.Graph, roots: set[torch.fx.Node]) -> set[torch.fx.Node]:
    """`roots` (full parameters) and every node computed from them and from nothing else, without random numbers."""
    found = set(roots)
    for node in graph.nodes:
        sources = node.all_input_nodes
        is_pure_call = node.op == "call_function" and sources and not is_random(node)
        if is_pure_call and all(source in found for source in sources):
            found.add(node)
    return found


def is_random(node: torch.fx.Node) -> bool:
    """Whether this draws from a generator of random numbers; attention is tagged so, but needs a dropout_p for it."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    names = [formal.name for formal in target._schema.arguments]
    if "dropout_p" not in names:
        return True
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return bool(given.get("dropout_p", 0.0) != 0.0)


def keeps_place(node: torch.fx.Node) -> bool:
    """Whether order matters: of the model's collectives, of random numbers, of what is written in place."""
    if node.op != "call_function" or ops.is_functional_collective(node):
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return isinstance(node.target, torch._ops.HigherOrderOperator)
    return is_random(node) or (node.target._schema.is_mutable and not ops.is_functional_wait(node))


def erase_dead(graph: torch.fx.Graph) -> None:
    """Erase what nobody reads and what computes for that alone.

    `Graph.eliminate_dead_code` does the same, but also looks at each node that is read, which takes several times as
    long.
    """
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure():
            graph.erase_node(node)


def copied(graph: torch.fx.Graph, node: torch.fx.Node, copy_of: Mapping[torch.fx.Node, torch.fx.Node]) -> torch.fx.Node:
    """Insert a call like `node` of these in the place of what it reads, with the value that this has."""
    found = graph.node_copy(node, copy_of.__getitem__)
    if not node.all_input_nodes:
        return found
    args, kwargs = torch.fx.map_arg((found.args, found.kwargs), lambda argument: argument.meta["val"])
    with torch.no_grad():
        value = found.target(*args, **kwargs)  # type: ignore[operator]
    metadata.describe(found, value, like=node)
    return found


def reorder(graph: torch.fx.Graph, key: Mapping[torch.fx.Node, Any]) -> None:
    """Put the nodes into the order of `key`, which must agree with the data flow; ties keep their order."""
    order = sorted(graph.nodes, key=key.__getitem__)
    place = {node: index for index, node in enumerate(order)}
    for node in order:
        late = [source for source in node.all_input_nodes if place[source] > place[node]]
        assert not late, f"the order puts {node} before {late[0]}, which it reads"
    anchor = graph._root
    for node in order:
        if anchor.next is not node:
            anchor.append(node)
        anchor = node


def put_in_order(graph: torch.fx.Graph, order: Iterable[torch.fx.Node]) -> None:
    """Put the nodes into this order, but what a node reads in front of it."""
    place: dict[torch.fx.Node, int] = {}

    def put(node: torch.fx.Node) -> None:
        for source in node.all_input_nodes:
            if source not in place:
                put(source)
        place.setdefault(node, len(place))

    for node in order:
        put(node)
    reorder(graph, place)
