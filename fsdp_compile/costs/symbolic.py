"""Symbolic graphs: rewritten graphs whose tensors have expressions for sizes, in ranks and in dynamic dimensions.

A graph is traced for one number of ranks. What depends on it is the size of every shard, and of what is gathered,
packed and reduced: 1-D tensors of a bucket. A shard holds `ceiling(rows / N)` rows of every parameter (`padding.room`),
and the operators that take a parameter out of a bucket, or reduce its gradient, say its shape.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
import torch.fx

from ..errors import ConfigError
from ..graphs import RewrittenGraphs
from ..layout.padding import room
from ..passes import metadata, ops
from ..runtime.shapes import size_expression
from .nodes import Compiler, Extent, kernels_of
from .work import Work, WorkOfGraph

NUM_SHARDS = sympy.Symbol("N", integer=True, positive=True)
NUM_REPLICAS = sympy.Symbol("R", integer=True, positive=True)


def symbolic(graphs: RewrittenGraphs, names: Sequence[str], *, compiler: Compiler) -> Work:
    """The work of copies of the graphs, with an `Extent` for every tensor, and expressions for the ranks of a group.

    Args:
        names: of the dynamic dimensions, in the order in which the inputs of the forward show them; some may be equal.
        compiler: what compiles the graphs; see `nodes.Compiler`.

    Raises:
        ConfigError: there are fewer dimensions than names, or the graphs do not show all parameters of a bucket.
    """
    sides = [side for side in (graphs.forward, graphs.backward) if side is not None]
    symbol_of_dimension = _dimensions([side.graph for side in sides], names)
    ranks_of_group = _ranks_of_groups([side.graph for side in sides])
    numel_of_bucket = _shard_numels([side.graph for side in sides])
    found = []
    for side in sides:
        graph = copy.deepcopy(side.graph)
        for node in graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = _value(node.meta["val"], symbol_of_dimension)
        for node in graph.nodes:
            _scale(node, ranks_of_group, numel_of_bucket)
        found.append(WorkOfGraph(side.title, graph, kernels_of(graph, compiler=compiler)))
    return Work(found[0], found[1] if len(found) > 1 else None, compiler)


def tidy(expression: sympy.Expr) -> sympy.Expr:
    """The same with common factors in front of sums, and `ceiling(x)` for what Python's `-(-a // b)` becomes."""
    upwards = expression.replace(
        lambda part: isinstance(part, sympy.floor) and part.args[0].could_extract_minus_sign(),
        lambda part: -sympy.ceiling(-part.args[0]),
    )
    return sympy.factor_terms(upwards)


# ---------------------------------------------------------------------------------------------------------------
# Dynamic dimensions
# ---------------------------------------------------------------------------------------------------------------


def _dimensions(graphs: Sequence[torch.fx.Graph], names: Sequence[str]) -> dict[sympy.Symbol, sympy.Symbol]:
    """The symbol of every dynamic dimension, by the one that torch has for it."""
    sizes = [size for graph in graphs for node in graph.nodes for size in _sizes(node.meta.get("val"))]
    dimensions = list(
        dict.fromkeys(
            symbol
            for size in sizes
            for symbol in sorted(sympy.sympify(size_expression(size)).free_symbols, key=lambda found: str(found.name))
        )
    )
    if len(names) > len(dimensions):
        raise ConfigError(
            f"names has {len(names)} dimensions, {', '.join(names)}; the graphs have {len(dimensions)} that are "
            "dynamic: trace them with inputs that torch._dynamo.mark_dynamic was called with"
        )
    called = [*names, *(symbol.name for symbol in dimensions[len(names) :])]
    return {
        symbol: sympy.Symbol(name, integer=True, positive=True) for symbol, name in zip(dimensions, called, strict=True)
    }


def _sizes(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _sizes(item)
    elif isinstance(value, torch.Tensor):
        yield from value.shape
    elif isinstance(value, torch.SymInt):
        yield value


def _value(value: Any, symbol_of_dimension: Mapping[sympy.Symbol, sympy.Symbol]) -> Any:
    """`value` with extents for tensors, and expressions in the symbols of dimensions for sizes."""

    def size(traced: Any) -> Any:
        expression = size_expression(traced)
        return expression if isinstance(expression, int) else expression.xreplace(symbol_of_dimension)

    if isinstance(value, (list, tuple)):
        return [_value(item, symbol_of_dimension) for item in value]
    if isinstance(value, torch.Tensor):
        return Extent(tuple(map(size, value.shape)), value.dtype, Extent.of(value).traced_numel)
    return size(value) if isinstance(value, torch.SymInt) else value


# ---------------------------------------------------------------------------------------------------------------
# Ranks
# ---------------------------------------------------------------------------------------------------------------


def _ranks_of_groups(graphs: Sequence[torch.fx.Graph]) -> dict[str, Any]:
    """How many ranks every process group has."""
    collectives = [node for graph in graphs for node in graph.nodes if ops.is_collective(node)]
    is_hybrid = any(map(_is_of_replicas, collectives))
    ranks: dict[str, Any] = {}
    for node in collectives:
        group = ops.argument(node, "group")
        if _is_of_parts(node):
            ranks[group] = ops.argument(node, "world_size")
        elif _is_of_replicas(node):
            ranks[group] = NUM_REPLICAS
        elif ops.is_call(node, ops.ALL_REDUCE) and is_hybrid:
            ranks[group] = NUM_REPLICAS * NUM_SHARDS
        else:
            ranks[group] = NUM_SHARDS
    return ranks


def _is_of_parts(collective: torch.fx.Node) -> bool:
    """Whether this gathers parts of the buffer that the forward gathered, over a group of a size that was asked for."""
    if not ops.is_all_gather(collective):
        return False
    return any(metadata.kept_part(_source(shard)) is not None for shard in ops.gathered_shards(collective).values())


def _is_of_replicas(collective: torch.fx.Node) -> bool:
    """Whether this reduces what was reduced over the other axis of the mesh before."""
    if not ops.is_call(collective, ops.ALL_REDUCE):
        return False
    return ops.is_call(_source(collective.all_input_nodes[0]), ops.REDUCE_SCATTER, ops.REDUCE_SCATTER_GROUPED)


def _source(node: torch.fx.Node) -> torch.fx.Node:
    """What a shard or a gradient was before it got the form in which a collective sends it."""
    while ops.is_conversion(node) or ops.is_call(node, ops.WAIT):
        node = node.all_input_nodes[0]
    return node


# ---------------------------------------------------------------------------------------------------------------
# Buckets
# ---------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Bucket:
    """What the graphs show of a sharded bucket; shapes of its parameters are by offset."""

    num_shards: int
    numel: int
    shapes: dict[int, Sequence[int]] = dataclasses.field(default_factory=dict)
    dtypes: set[torch.dtype] = dataclasses.field(default_factory=set)

    def numel_of_shard(self, num_shards: Any) -> Any:
        return sum(room(shape, num_shards, self.dtypes) for shape in self.shapes.values())


def _is_packing(node: torch.fx.Node) -> bool:
    """Whether this puts gradients of a sharded bucket into the layout in which they are reduced."""
    return ops.is_call(node, ops.PACK, ops.REDUCE_SCATTER_GROUPED) and ops.argument(node, "world_size") != 1


def _shard_numels(graphs: Sequence[torch.fx.Graph]) -> dict[str, Any]:
    """Elements of the shard of every bucket that is sharded."""
    buckets: dict[str, _Bucket] = {}
    for graph in graphs:
        for node in graph.nodes:
            if ops.is_all_gather(node) and not _is_of_parts(node):
                _note_gather(buckets, node)
            elif _is_packing(node):
                _note_gradients(buckets, node)
    for name, bucket in buckets.items():
        if bucket.numel_of_shard(bucket.num_shards) != bucket.numel:
            raise ConfigError(
                f"the graphs show parameters of {name} that take {bucket.numel_of_shard(bucket.num_shards)} of the "
                f"{bucket.numel} elements of its shard: formulas need the shapes of all of them. Pass parameters that "
                "the forward does not use in ignored_params"
            )
    return {name: tidy(sympy.sympify(bucket.numel_of_shard(NUM_SHARDS))) for name, bucket in buckets.items()}


def _note_gather(buckets: dict[str, _Bucket], gather: torch.fx.Node) -> None:
    shape_of_offset = {ops.argument(out, "offset"): ops.argument(out, "shape") for out in ops.parameters_of(gather)}
    begin = 0
    for name, shard in ops.gathered_shards(gather).items():
        numel = shard.meta["val"].numel()
        bucket = buckets.setdefault(name, _Bucket(ops.argument(gather, "world_size"), numel))
        bucket.dtypes |= {shard.meta["val"].dtype, _source(shard).meta["val"].dtype}
        inside = {offset: shape for offset, shape in shape_of_offset.items() if begin <= offset < begin + numel}
        bucket.shapes.update({offset - begin: shape for offset, shape in inside.items()})
        begin += numel


def _note_gradients(buckets: dict[str, _Bucket], node: torch.fx.Node) -> None:
    num_shards, numel = ops.argument(node, "world_size"), ops.argument(node, "numel")
    bucket = buckets.setdefault(ops.argument(node, "bucket"), _Bucket(num_shards, numel))
    bucket.dtypes.add(ops.argument(node, "dtype"))
    for offset, gradient in zip(ops.argument(node, "offsets"), ops.argument(node, "gradients"), strict=True):
        bucket.shapes[offset] = tuple(gradient.meta["val"].shape)


def _scale(node: torch.fx.Node, ranks_of_group: Mapping[str, Any], numel_of_bucket: Mapping[str, Any]) -> None:
    """Give a tensor of a bucket the size that it has on any number of ranks, and its operator that number."""
    if node.op == "placeholder":
        numel = _numel_of_input(node, numel_of_bucket)
    elif ops.is_collective(node):
        _set_ranks(node, ranks_of_group[ops.argument(node, "group")])
        numel = _numel_of_collective(node, numel_of_bucket)
    elif _is_packing(node):
        _set_ranks(node, NUM_SHARDS)
        numel = numel_of_bucket[ops.argument(node, "bucket")] * NUM_SHARDS
    elif ops.is_call(node, ops.JOIN):
        numel = sum(map(_numel, node.all_input_nodes))
    elif ops.is_call(node, ops.RESHARD):
        numel = _numel(node.all_input_nodes[0]) / ops.argument(node, "parts")
    elif ops.is_conversion(node) or ops.is_call(node, ops.WAIT):
        node.meta["val"] = dataclasses.replace(node.meta["val"], shape=node.all_input_nodes[0].meta["val"].shape)
        return
    else:
        return
    if numel is not None:
        node.meta["val"] = dataclasses.replace(node.meta["val"], shape=(numel,))


def _set_ranks(node: torch.fx.Node, ranks: Any) -> None:
    names = [formal.name for formal in node.target._schema.arguments]  # type: ignore[union-attr]
    node.update_arg(names.index("world_size"), ranks)


def _numel_of_input(node: torch.fx.Node, numel_of_bucket: Mapping[str, Any]) -> Any:
    """Of a shard, a part of what was gathered, or what earlier steps kept of gradients; None of any other input."""
    for reader in node.users:
        if ops.is_conversion(reader):
            return _numel_of_input(reader, numel_of_bucket)
        if _is_packing(reader) and ops.argument(reader, "accumulated") is node:
            return numel_of_bucket[ops.argument(reader, "bucket")] * NUM_SHARDS
        for gather in reader.users if ops.is_call(reader, ops.JOIN) else [reader]:
            if ops.is_all_gather(gather):
                (bucket,) = [name for name, shard in ops.gathered_shards(gather).items() if shard is node]
                part, numel = metadata.kept_part(node), numel_of_bucket[bucket]
                return numel if part is None else numel * NUM_SHARDS / part.size
    return None


def _numel_of_collective(node: torch.fx.Node, numel_of_bucket: Mapping[str, Any]) -> Any:
    ranks = ops.argument(node, "world_size")
    if ops.is_call(node, ops.REDUCE_SCATTER_GROUPED):
        return numel_of_bucket[ops.argument(node, "bucket")]
    numel = sum(map(_numel, node.all_input_nodes))
    if ops.is_all_gather(node):
        return numel * ranks
    return numel / ranks if ops.is_call(node, ops.REDUCE_SCATTER) else numel


def _numel(node: torch.fx.Node) -> Any:
    return math.prod(node.meta["val"].shape)
