"""Outline blocks: equal parts of a graph between communication become calls of one function, which is compiled once.

    Before   wait(...); y = mm(x, a); r = relu(y); wait(...); z = mm(r, b); s = relu(z); wait(...)
    After    wait(...); r = block_0(x, a); wait(...); s = block_0(r, b); wait(...)
    Needs    a lowered graph
    Keeps    values, order; kernels, which do not reach across communication, but for what a block returns
    Cost     O(nodes)

A compiler takes as long for the layers of a model as for a few of them. A block is what stands between two collectives,
waits or copies. Blocks are equal that call the same operators with the same constants on values of the same shapes,
strides, dtypes and devices, and of which the same values are read elsewhere. Every reader has views of its own, so what
a block takes and returns is in memory of its own: an addition that ends a layer is stored, where Inductor would compute
some of them twice. Sizes that vary, writes and custom control flow stay outside.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Hashable, Iterator, Mapping

import torch
import torch.fx

from . import analysis, metadata, ops
from .errors import refuse_calls

_aten, _prims = torch.ops.aten, torch.ops.prims
_CONSTANTS = (_aten.full.default, _aten.scalar_tensor.default, _prims.iota.default)
_FEWEST = 4  # nodes of a block, views aside, for which a call is worth it


@dataclasses.dataclass(frozen=True)
class OutlineBlocks:
    def __call__(self, gm: torch.fx.GraphModule) -> None:
        refuse_calls(gm.graph, *ops.OPERATORS.keys() - ops.LOWERED, until="LowerCollectives")
        for node in reversed(list(gm.graph.nodes)):
            if node.target is operator.getitem and _is_inside(node):
                node.all_input_nodes[0].append(node)
        _read_stored(gm.graph)
        equal: dict[Hashable, list[_Block]] = {}
        for nodes in _runs(gm.graph):
            if len(nodes) >= _FEWEST and (block := _Block.of(nodes)) is not None:
                equal.setdefault(block.key, []).append(block)
        several = [blocks for blocks in equal.values() if len(blocks) > 1]
        if several:
            _outline(gm, several)


def _is_inside(node: torch.fx.Node) -> bool:
    """Whether this node may be a part of a block."""
    if node.op != "call_function" or _is_free(node):
        return False
    if node.target is operator.getitem:
        return _is_inside(node.all_input_nodes[0])
    if not isinstance(node.target, torch._ops.OpOverload) or _description(node) is None:
        return False
    is_computed = not ops.is_functional(node) and node.target.namespace != "fsdp" and not node.target._schema.is_mutable
    return (is_computed and not _is_lookup(node)) or ops.is_call(node, ops.STORE)


def _is_lookup(node: torch.fx.Node) -> bool:
    """Whether this takes one of Inductor's seeds for random numbers, each of which a step uses once."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.name() == "prims::inductor_lookup_seed"


def _is_free(node: torch.fx.Node) -> bool:
    """Whether every reader may have a node like this of its own."""
    return ops.is_call(node, *_CONSTANTS) or (analysis.is_alias(node) and not ops.is_call(node, ops.STORE))


def _read_stored(graph: torch.fx.Graph) -> None:
    """Have what follows a `store` read that in place of the value, which a block would return a second time."""
    position = analysis.positions(graph)
    for store in graph.find_nodes(op="call_function", target=ops.STORE):
        value = store.all_input_nodes[0]
        for reader in [user for user in value.users if position[user] > position[store]]:
            reader.replace_input_with(value, store)


def _runs(graph: torch.fx.Graph) -> Iterator[list[torch.fx.Node]]:
    """The longest sequences of nodes that may be a block; free nodes are in none, and end none."""
    run: list[torch.fx.Node] = []
    for node in graph.nodes:
        if _is_inside(node):
            run.append(node)
        elif not _is_free(node):
            yield run
            run = []


def _description(node: torch.fx.Node) -> Hashable | None:
    """What a compiler knows of a value; None where a size varies, or the value is neither a tensor nor some of them."""
    value = node.meta.get("val")
    tensors = value if isinstance(value, (tuple, list)) else [value]
    described = []
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            return None
        sizes = (*tensor.shape, *tensor.stride())
        if not all(isinstance(size, int) for size in sizes):
            return None
        described.append((tensor.dtype, tensor.device, sizes))
    return tuple(described)


@dataclasses.dataclass(frozen=True)
class _Block:
    """A run as a function.

    Attributes:
        nodes: those of the run.
        body: those and the free ones that they read, in an order in which they can be computed.
        inputs: the nodes outside that the body reads.
        outputs: the nodes of the run that others read.
        key: the same for equal blocks.
    """

    nodes: list[torch.fx.Node]
    body: list[torch.fx.Node]
    inputs: list[torch.fx.Node]
    outputs: list[torch.fx.Node]
    key: Hashable

    @classmethod
    def of(cls, nodes: list[torch.fx.Node]) -> _Block | None:
        """The block of a run; None where a size of what it takes varies, or nothing reads it."""
        inside = set(nodes)
        place: dict[torch.fx.Node, int] = {}  # in the body
        argument: dict[torch.fx.Node, int] = {}
        calls: list[Hashable] = []

        def visit(node: torch.fx.Node) -> str:
            if node not in place and (node in inside or _is_free(node)):
                read = repr(torch.fx.map_arg((node.args, node.kwargs), visit))
                notes = metadata.is_whole_copy(node), metadata.is_pack(node)
                calls.append((node.target, read, _description(node), notes))
                place[node] = len(place)
            return f"%{place[node]}" if node in place else f"${argument.setdefault(node, len(argument))}"

        for node in nodes:
            visit(node)
        taken = tuple(map(_description, argument))
        outputs = [node for node in nodes if _is_tensor(node) and not inside.issuperset(_readers(node))]
        if None in taken or not outputs:
            return None
        key = tuple(calls), taken, tuple(place[node] for node in outputs)
        return cls(nodes, list(place), list(argument), outputs, key)

    def function(self) -> torch.fx.GraphModule:
        graph = torch.fx.Graph()
        value: dict[torch.fx.Node, torch.fx.Node] = {}
        for index, node in enumerate(self.inputs):
            value[node] = graph.placeholder(f"arg{index}")
            metadata.describe(value[node], node.meta["val"])
        for node in self.body:
            value[node] = graph.node_copy(node, value.__getitem__)
        graph.output(tuple(value[node] for node in self.outputs))
        return torch.fx.GraphModule(torch.nn.Module(), graph)


def _is_tensor(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _readers(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """What reads a value, or a view of it."""
    for user in node.users:
        if _is_free(user):
            yield from _readers(user)
        else:
            yield user


def _outline(gm: torch.fx.GraphModule, equal: list[list[_Block]]) -> None:
    """Put calls in the places of blocks: of a function for each of these lists."""
    block_at: dict[torch.fx.Node, tuple[torch.fx.Node, _Block]] = {}
    for index, blocks in enumerate(equal):
        gm.add_submodule(f"block_{index}", blocks[0].function())
        with gm.graph.inserting_before(blocks[0].nodes[0]):
            function = gm.graph.get_attr(f"block_{index}")
        block_at |= {block.nodes[0]: (function, block) for block in blocks}
    returned: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in [node for node in gm.graph.nodes if node in block_at]:
        with gm.graph.inserting_before(node):
            returned |= _call(*block_at[node], returned)
    for node, item in returned.items():
        node.replace_all_uses_with(item)
    for node in reversed(list(gm.graph.nodes)):
        if not node.users and (_is_inside(node) or _is_free(node) or _is_lookup(node)):
            gm.graph.erase_node(node)


def _call(
    function: torch.fx.Node, block: _Block, returned: Mapping[torch.fx.Node, torch.fx.Node]
) -> dict[torch.fx.Node, torch.fx.Node]:
    """Call a function: what it returns in place of each value of the block. `returned` has that of the calls before."""
    graph = function.graph
    taken = [_seed(node) if _is_lookup(node) else returned.get(node, node) for node in block.inputs]
    call = graph.call_function(torch.ops.higher_order.invoke_subgraph, (function, str(function.target), *taken))
    metadata.describe(call, tuple(node.meta["val"] for node in block.outputs))
    return {node: ops.call(graph, operator.getitem, call, index, like=node) for index, node in enumerate(block.outputs)}


def _seed(lookup: torch.fx.Node) -> torch.fx.Node:
    """A seed of the graph as a view of all of them: a kernel for each takes longer."""
    seeds, index = lookup.args
    return ops.call(lookup.graph, _aten.select.int, seeds, 0, index, like=lookup)
