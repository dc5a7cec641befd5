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
from itertools import accumulate
from typing import Any

import sympy
import torch
import torch.fx

from ..errors import ConfigError
from ..graphs import RewrittenGraphs
from ..passes import forms, metadata, ops
from ..passes.padding import room
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
    buckets = _buckets([side.graph for side in sides])
    found = []
    for side in sides:
        graph = copy.deepcopy(side.graph)
        for node in graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = _value(node.meta["val"], symbol_of_dimension)
        for node in graph.nodes:
            _scale(node, ranks_of_group, buckets)
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
    """What the graphs show of a sharded bucket.

    Attributes:
        traced_numel: elements of the shard, on the ranks of the trace.
        shapes: of its parameters, by offset.
        dtypes: that the shard is laid out for.
        sent: the dtypes that its gathers send; the shard is not laid out for those that the program alone casts to.
    """

    num_shards: int
    traced_numel: int
    shapes: dict[int, Sequence[int]] = dataclasses.field(default_factory=dict)
    dtypes: set[torch.dtype] = dataclasses.field(default_factory=set)
    sent: set[torch.dtype] = dataclasses.field(default_factory=set)

    @property
    def numel(self) -> Any:
        """Elements of the shard on any number of ranks; None if not all shapes of its parameters are known."""
        for dtypes in (self.dtypes | self.sent, self.dtypes):
            if self._numel_of_shard(self.num_shards, dtypes) == self.traced_numel:
                return tidy(sympy.sympify(self._numel_of_shard(NUM_SHARDS, dtypes)))
        return None

    def _numel_of_shard(self, num_shards: Any, dtypes: set[torch.dtype]) -> Any:
        return sum(room(shape, num_shards, dtypes) for shape in self.shapes.values())

    @property
    def taken(self) -> int:
        """Elements of the shard that parameters take whose shapes are known."""
        return int(self._numel_of_shard(self.num_shards, self.dtypes))

    def numel_of_narrow(self, node: torch.fx.Node) -> Any:
        """Elements that `narrow` makes of the shard."""
        dtype = ops.argument(node, "dtype")
        sent = [(region.begin, forms.dtype_of_name(region.form)) for region in ops.regions(node)]
        return sum(
            room(self.shapes[begin], NUM_SHARDS, {form}) * (form.itemsize // dtype.itemsize) for begin, form in sent
        )


def _is_packing(node: torch.fx.Node) -> bool:
    """Whether this puts gradients of a sharded bucket into the layout in which they are reduced."""
    return ops.is_call(node, ops.PACK, ops.REDUCE_SCATTER_GROUPED) and ops.argument(node, "world_size") != 1


def _buckets(graphs: Sequence[torch.fx.Graph]) -> dict[str, _Bucket]:
    """The buckets that are sharded, by name."""
    buckets: dict[str, _Bucket] = {}
    _refuse_forms(graphs)
    for graph in graphs:
        for node in graph.nodes:
            if ops.is_all_gather(node) and not _is_of_parts(node):
                _note_gather(buckets, node)
            elif _is_packing(node):
                _note_gradients(buckets, node)
    for name, bucket in buckets.items():
        if bucket.numel is None:
            raise ConfigError(
                f"the graphs show parameters of {name} that take {bucket.taken} of the {bucket.traced_numel} elements "
                "of its shard: formulas need the shapes of all of them. Pass parameters that the forward does not use "
                "in ignored_params"
            )
    return buckets


def _refuse_forms(graphs: Sequence[torch.fx.Graph]) -> None:
    """Raise ConfigError for a unit whose bytes no formula of this file has."""
    for node in (node for graph in graphs for node in graph.nodes):
        is_integers = ops.is_call(node, ops.NARROW) and ops.argument(node, "dtype") == forms.MESSAGE
        if is_integers or ops.is_call(node, ops.ALL_TO_ALL, ops.ALL_GATHER_SUMS):
            unit = ops.unit_of_bucket(ops.argument(node, "bucket"))
            if any(ops.is_call(source, ops.SCALE) for source in node.all_input_nodes):
                raise ConfigError(f"formulas have no weights that are gathered in float8, which {unit} has")
            raise ConfigError(f"formulas have no communication_dtype, which {unit} has: leave it out")


def _note_gather(buckets: dict[str, _Bucket], gather: torch.fx.Node) -> None:
    shape_of_offset = {ops.argument(out, "offset"): ops.argument(out, "shape") for out in ops.parameters_of(gather)}
    begin = 0
    for name, sent in ops.gathered_shards(gather).items():
        numel, shard = sent.meta["val"].numel(), _source(sent).meta["val"]
        bucket = buckets.setdefault(name, _Bucket(ops.argument(gather, "world_size"), shard.numel()))
        bucket.dtypes.add(shard.dtype)
        bucket.sent.add(sent.meta["val"].dtype)
        place = _places(sent)
        inside = {offset: shape for offset, shape in shape_of_offset.items() if begin <= offset < begin + numel}
        bucket.shapes.update({place.get(offset - begin, offset - begin): shape for offset, shape in inside.items()})
        begin += numel


def _places(sent: torch.fx.Node) -> dict[int, int]:
    """Where in a shard the regions begin that `narrow` takes, by where they begin in what is sent."""
    if not ops.is_call(sent, ops.NARROW):
        return {}
    sizes = forms.sizes(ops.regions(sent), ops.argument(sent, "dtype"))
    return dict(zip([0, *accumulate(sizes)], ops.argument(sent, "begins"), strict=False))


def _note_gradients(buckets: dict[str, _Bucket], node: torch.fx.Node) -> None:
    num_shards, numel = ops.argument(node, "world_size"), ops.argument(node, "numel")
    bucket = buckets.setdefault(ops.argument(node, "bucket"), _Bucket(num_shards, numel))
    bucket.dtypes.add(ops.argument(node, "dtype"))
    for offset, gradient in zip(ops.argument(node, "offsets"), ops.argument(node, "gradients"), strict=True):
        bucket.shapes[offset] = tuple(gradient.meta["val"].shape)


def _scale(node: torch.fx.Node, ranks_of_group: Mapping[str, Any], buckets: Mapping[str, _Bucket]) -> None:
    """Give a tensor of a bucket the size that it has on any number of ranks, and its operator that number."""
    if node.op == "placeholder":
        numel = _numel_of_input(node, buckets)
    elif ops.is_collective(node):
        ops.set_argument(node, "world_size", ranks_of_group[ops.argument(node, "group")])
        numel = _numel_of_collective(node, buckets)
    elif _is_packing(node):
        ops.set_argument(node, "world_size", NUM_SHARDS)
        numel = buckets[ops.argument(node, "bucket")].numel * NUM_SHARDS
    elif ops.is_call(node, ops.NARROW):
        numel = buckets[ops.argument(node, "bucket")].numel_of_narrow(node)
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


def _numel_of_input(node: torch.fx.Node, buckets: Mapping[str, _Bucket]) -> Any:
    """Of a shard, a part of what was gathered, or what earlier steps kept of gradients; None of any other input."""
    for reader in node.users:
        if ops.is_conversion(reader):
            return _numel_of_input(reader, buckets)
        if _is_packing(reader) and ops.argument(reader, "accumulated") is node:
            return buckets[ops.argument(reader, "bucket")].numel * NUM_SHARDS
        for gather in reader.users if ops.is_call(reader, ops.JOIN) else [reader]:
            if ops.is_all_gather(gather):
                (bucket,) = [name for name, shard in ops.gathered_shards(gather).items() if shard is node]
                part, numel = metadata.kept_part(node), buckets[bucket].numel
                return numel if part is None else numel * NUM_SHARDS / part.size
    return None


def _numel_of_collective(node: torch.fx.Node, buckets: Mapping[str, _Bucket]) -> Any:
    ranks = ops.argument(node, "world_size")
    if ops.is_call(node, ops.REDUCE_SCATTER_GROUPED):
        return buckets[ops.argument(node, "bucket")].numel
    numel = sum(map(_numel, node.all_input_nodes))
    if ops.is_all_gather(node):
        return numel * ranks
    return numel / ranks if ops.is_call(node, ops.REDUCE_SCATTER) else numel


def _numel(node: torch.fx.Node) -> Any:
    return math.prod(node.meta["val"].shape)
