"""Decompose collectives of the model into pieces, which travel beside the matmuls that read or feed them.

    Before   f = wait(all_gather_into_tensor(x)); y = mm(f, w)
             z = mm(a, w); r = wait(reduce_scatter_tensor(z))
    After    with two pieces:
             p = all_gather_into_tensor(x[0]); q = all_gather_into_tensor(x[1])
             y0 = mm(wait(p), w); y1 = mm(wait(q), w); y = cat([y0, y1])
             z0 = mm(a[0], w); p = reduce_scatter_tensor(z0); z1 = mm(a[1], w); q = reduce_scatter_tensor(z1)
             r = cat([wait(p), wait(q)])
    Needs    nothing; it runs before communication is inserted, and before the collectives are overlapped
    Keeps    every row of every product; kernels for fewer rows may round them otherwise
    Cost     O(nodes) for each collective; each product, or what it reads, is copied once more

Tensor parallelism waits for activations before the matmuls of a layer, and after them: nothing else is there to be
computed meanwhile. A row of a product needs a row of what is gathered, and a row of what is reduced needs a row of each
product. So the second piece is gathered while the first is multiplied, and the first is reduced while the second is
multiplied (Wang et al., "Overlap communication with dependent computation via decomposition", 2023; "asynchronous
tensor parallelism" elsewhere).

A collective is cut along the longest dimension of what a rank has, but for the columns. Its shape alone says so, and
every collective of rows is cut: what stands around it may differ from rank to rank, as where the last of them has fewer
columns, and pads them. Where it is shorter than there are pieces, each row is one. Symbolic sizes are not cut.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.fx

from . import analysis, metadata, ops

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional
_ALL_GATHER, _REDUCE_SCATTER = _c10d.all_gather_into_tensor.default, _c10d.reduce_scatter_tensor.default
_ALL_REDUCE = _c10d.all_reduce.default
_VIEW, _SPLIT, _SLICE = _aten.view.default, _aten.split.Tensor, _aten.slice.Tensor
_VIEWS = (_VIEW, _aten._unsafe_view.default, _aten.reshape.default)
_PRODUCTS: dict[Any, int] = {_aten.mm.default: 0, _aten.addmm.default: 1}
"""Matmuls, and which argument is the matrix of rows."""


@dataclasses.dataclass(frozen=True)
class DecomposeCollectives:
    """`pieces`: of each collective."""

    pieces: int = 2

    def __call__(self, gm: torch.fx.GraphModule) -> None:
        new = Insert()
        for collective in list(gm.graph.nodes):
            if _is_of_rows(collective):
                decompose = _decompose_gather if ops.is_call(collective, _ALL_GATHER) else _decompose_reduction
                decompose(new, collective, self.pieces)


@dataclasses.dataclass(frozen=True)
class Insert:
    """Inserts calls like a node.

    Attributes:
        values: by kind of a call, of which they are computed once: most pieces are equal, and most layers.
    """

    values: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def __call__(self, like: torch.fx.Node, target: Any, *args: Any) -> torch.fx.Node:
        kind = (target, *map(_kind, (*args[:2], args[3] - args[2]) if target is _SLICE else args))
        node = ops.call(like.graph, target, *args, like=like, value=self.values.get(kind))
        self.values.setdefault(kind, node.meta["val"])
        return node


def _kind(argument: Any) -> Any:
    """What is equal of arguments with which calls have results of equal sizes, strides and dtypes."""
    if isinstance(argument, (list, tuple)):
        return tuple(map(_kind, argument))
    if isinstance(argument, torch.fx.Node):
        value = argument.meta["val"]
        return tuple(value.shape), value.stride(), value.dtype, value.device
    return argument


@dataclasses.dataclass(frozen=True)
class Rows:
    """How the rows of a full tensor are shared among ranks.

    Attributes:
        sizes: of what a rank has, without the columns.
        dim: along which the parts of ranks are put together.
    """

    sizes: tuple[int, ...]
    ranks: int
    dim: int = 0

    @property
    def cut(self) -> int:
        """The dimension that pieces are cut along."""
        return self.sizes.index(max(self.sizes))

    def bounds(self, pieces: int) -> list[tuple[int, int]]:
        """Begin and end of each piece, along that dimension."""
        size = max(self.sizes)
        cuts = [index * size // pieces for index in range(pieces + 1)]
        return [(begin, end) for begin, end in pairwise(cuts) if begin < end]

    def rank_by_rank(self, new: Insert, full: torch.fx.Node) -> torch.fx.Node:
        """[ranks, *sizes, columns] of a full matrix: [rows, columns]."""
        shape = [*self.sizes[: self.dim], self.ranks, *self.sizes[self.dim :], _columns(full)]
        return _moved(new, new(full, _VIEW, full, shape), self.dim, 0)

    def put_together(self, new: Insert, parts: Sequence[torch.fx.Node], like: torch.fx.Node) -> torch.fx.Node:
        """The value of `like`, a full tensor, from pieces of it that are matrices, rank by rank."""
        shape = [self.ranks, *self.sizes, _columns(like)]
        shape[1 + self.cut] = -1
        blocks = [_moved(new, new(like, _VIEW, part, shape), 0, self.dim) for part in parts]
        joined = new(like, _aten.cat.default, blocks, self.cut + (self.cut >= self.dim))
        return new(like, _VIEW, joined, list(like.meta["val"].shape))


def _decompose_gather(new: Insert, collective: torch.fx.Node, pieces: int) -> None:
    graph, (wait,), ranks = collective.graph, analysis.waits_of(collective), collective.args[1]
    rows, full = _in_order(wait, _sizes(collective.all_input_nodes[0]), ranks)
    needed = {product: _needed_before(full, product) for product in _products_of(full)}
    products = [product for product, nodes in needed.items() if nodes is not None]
    for node in dict.fromkeys(node for product in products for node in needed[product] or ()):
        full.prepend(node)
    with graph.inserting_before(collective):
        source = collective.all_input_nodes[0]
        pending = [_sent(collective, _part(new, source, rows.cut, *bound), rows) for bound in rows.bounds(pieces)]
    matrices, results = [], []
    with graph.inserting_before(full):
        for each in pending:
            matrices.append(new(full, _VIEW, _received(wait, each), [-1, _columns(full)]))
            results.append([_with_rows(new, product, matrices[-1]) for product in products])
        for product, parts in zip(products, zip(*results, strict=True), strict=True):
            product.replace_all_uses_with(rows.put_together(new, parts, product))
    _erase_unread(products)
    if full.users:
        with graph.inserting_before(full):
            full.replace_all_uses_with(rows.put_together(new, matrices, full))
        _erase_unread([full])


def _decompose_reduction(new: Insert, collective: torch.fx.Node, pieces: int) -> None:
    graph, (wait,), (sent,) = collective.graph, analysis.waits_of(collective), collective.all_input_nodes
    ranks = collective.args[2] if ops.is_call(collective, _REDUCE_SCATTER) else 1
    rows, summed = _before_order(sent, _sizes(collective), ranks)
    is_sum = _is_sum_of_products(summed)
    pending: list[torch.fx.Node] = []
    received: list[torch.fx.Node] = []
    with graph.inserting_before(collective):
        for bound in rows.bounds(pieces):
            part = _sum_of_part(new, summed, rows, *bound) if is_sum else _part_of(new, sent, rows, *bound)
            pending.append(_sent(collective, _as_sent(new, part, rows, *bound), rows))
            received += [_received(wait, each) for each in pending[-2:-1]]
    with graph.inserting_before(wait):
        received.append(_received(wait, pending[-1]))
        wait.replace_all_uses_with(new(wait, _aten.cat.default, received, rows.cut))
    _erase_unread([wait])


def _is_of_rows(collective: torch.fx.Node) -> bool:
    """Whether this sends rows of columns, of sizes that are numbers, more than one."""
    if not ops.is_call(collective, _ALL_GATHER, _REDUCE_SCATTER, _ALL_REDUCE):
        return False
    shapes = [node.meta["val"].shape for node in (*collective.all_input_nodes, collective)]
    has_numbers = all(isinstance(size, int) for shape in shapes for size in shape)
    return has_numbers and max(shapes[0][:-1], default=0) > 1 and len(analysis.waits_of(collective)) == 1


def _sizes(node: torch.fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape[:-1])


def _columns(node: torch.fx.Node) -> int:
    columns: int = node.meta["val"].shape[-1]
    return columns


def _in_order(wait: torch.fx.Node, sizes: tuple[int, ...], ranks: Any) -> tuple[Rows, torch.fx.Node]:
    """What is gathered, with the rows in the order of the tensor that ranks have parts of.

    A gather puts parts together along the first dimension. Those of another one are split there, and put together
    along that.
    """
    readers = list(wait.users)
    if len(readers) == 1 and (parts := _parts_of(readers[0], ranks)) and _split_along(readers[0]) == 0:
        full = next(iter(parts[0].users))
        if (dim := _joined_along(full, parts)) is not None:
            return Rows(sizes, ranks, dim), full
    return Rows(sizes, ranks), wait


def _before_order(sent: torch.fx.Node, sizes: tuple[int, ...], ranks: Any) -> tuple[Rows, torch.fx.Node]:
    """As `_in_order`, of what is put together for a reduction, which takes parts along the first dimension."""
    splits = {part.all_input_nodes[0] for part in sent.all_input_nodes if part.target is operator.getitem}
    if len(splits) == 1 and (parts := _parts_of(split := splits.pop(), ranks)) and _joined_along(sent, parts) == 0:
        dim, (summed,) = _split_along(split), split.all_input_nodes
        return (Rows(sizes, ranks), sent) if dim == len(sizes) else (Rows(sizes, ranks, dim), summed)
    return Rows(sizes, ranks), sent


def _parts_of(split: torch.fx.Node, ranks: int) -> list[torch.fx.Node]:
    """One for each rank, in their order, where this splits a tensor into as many; else none."""
    if not ops.is_call(split, _SPLIT):
        return []
    parts = {part.args[1]: part for part in split.users}
    return [parts[rank] for rank in range(ranks)] if sorted(parts) == list(range(ranks)) else []  # type: ignore[type-var]


def _split_along(split: torch.fx.Node) -> int:
    dim: int = (split.args[2] if len(split.args) > 2 else 0) % split.all_input_nodes[0].meta["val"].dim()
    return dim


def _joined_along(node: torch.fx.Node, parts: Sequence[torch.fx.Node]) -> int | None:
    """The dimension along which `node` puts exactly these together, in their order, and nothing else reads them.

    None if it does not, or along the columns.
    """
    if not ops.is_call(node, _aten.cat.default) or list(node.args[0]) != list(parts):  # type: ignore[arg-type]
        return None
    num_dims = node.meta["val"].dim()
    dim: int = (node.args[1] if len(node.args) > 1 else 0) % num_dims
    return dim if dim < num_dims - 1 and all(len(part.users) == 1 for part in parts) else None


def _products_of(full: torch.fx.Node) -> list[torch.fx.Node]:
    """The matmuls whose rows are those of `full`."""
    matrices = [full]
    for matrix in matrices:
        matrices += [user for user in matrix.users if _keeps_rows(user)]
    return [user for matrix in matrices for user in matrix.users if _matrix_of(user) is matrix]


def _keeps_rows(view: torch.fx.Node) -> bool:
    return view.target in _VIEWS and _columns(view) == _columns(view.all_input_nodes[0])


def _matrix_of(product: torch.fx.Node) -> torch.fx.Node | None:
    """The matrix whose rows a matmul multiplies; None for another node."""
    index = _PRODUCTS.get(product.target)
    matrix = None if index is None else product.args[index]
    return matrix if isinstance(matrix, torch.fx.Node) and product.args.count(matrix) == 1 else None


def _is_sum_of_products(node: torch.fx.Node) -> bool:
    """Whether this is a matmul, or a sum of such, that nothing reads but what is computed from it here."""
    if len(node.users) != 1:
        return False
    if (matrix := _matrix_of(node)) is not None:
        return bool(matrix.meta["val"].is_contiguous())
    is_sum = ops.is_call(node, _aten.add.Tensor) and not node.kwargs and len(node.all_input_nodes) == 2
    shapes = {source.meta["val"].shape for source in node.all_input_nodes}
    return (_keeps_rows(node) or (is_sum and len(shapes) == 1)) and all(map(_is_sum_of_products, node.all_input_nodes))


def _needed_before(full: torch.fx.Node, product: torch.fx.Node) -> list[torch.fx.Node] | None:
    """What a matmul reads besides the rows and what stands behind `full`, in order; None where that cannot move."""
    found: dict[torch.fx.Node, None] = {}

    def find(node: torch.fx.Node) -> bool:
        if node < full:
            return True
        if not _may_move(node) or not all(map(find, node.all_input_nodes)):
            return False
        found[node] = None
        return True

    others = [source for source in product.all_input_nodes if source is not _matrix_of(product)]
    return list(found) if all(map(find, others)) else None


def _may_move(node: torch.fx.Node) -> bool:
    """Whether this is a parameter, or light to compute from one."""
    has_order = analysis.keeps_place(node) or ops.is_functional_wait(node)
    return isinstance(node.target, torch._ops.OpOverload) and not has_order and not analysis.is_heavy(node)


def _sent(collective: torch.fx.Node, part: torch.fx.Node, rows: Rows) -> torch.fx.Node:
    """A collective like this one, of a piece of what it sends."""
    value, (first, *others) = part.meta["val"], part.meta["val"].shape
    if ops.is_call(collective, _ALL_GATHER):
        value = value.new_empty([first * rows.ranks, *others])
    elif ops.is_call(collective, _REDUCE_SCATTER):
        value = value.new_empty([first // rows.ranks, *others])
    rest = collective.args[1:]
    return ops.call(collective.graph, collective.target, part, *rest, like=collective, value=value)


def _received(wait: torch.fx.Node, pending: torch.fx.Node) -> torch.fx.Node:
    return ops.call(wait.graph, wait.target, pending, like=wait, value=pending.meta["val"])


def _as_sent(new: Insert, part: torch.fx.Node, rows: Rows, begin: int, end: int) -> torch.fx.Node:
    """Rows of a piece, rank by rank, as a reduction takes them."""
    sizes = [*rows.sizes[: rows.cut], end - begin, *rows.sizes[rows.cut + 1 :]]
    return new(part, _VIEW, part, [rows.ranks * sizes[0], *sizes[1:], _columns(part)])


def _part_of(new: Insert, sent: torch.fx.Node, rows: Rows, begin: int, end: int) -> torch.fx.Node:
    """A piece of the rows of what a reduction sends, rank by rank."""
    of_ranks = new(sent, _aten.reshape.default, sent, [rows.ranks, *rows.sizes, _columns(sent)])
    return _part(new, of_ranks, 1 + rows.cut, begin, end)


def _sum_of_part(new: Insert, node: torch.fx.Node, rows: Rows, begin: int, end: int) -> torch.fx.Node:
    """What `node`, a sum of products, is of a piece of the rows, rank by rank: [rows, columns]."""
    if node.target in _VIEWS:
        return _sum_of_part(new, node.all_input_nodes[0], rows, begin, end)
    if (matrix := _matrix_of(node)) is None:
        added = [_sum_of_part(new, source, rows, begin, end) for source in node.args]  # type: ignore[arg-type]
        return new(node, _aten.add.Tensor, *added)
    part = _part(new, rows.rank_by_rank(new, matrix), 1 + rows.cut, begin, end)
    return _with_rows(new, node, new(matrix, _VIEW, part, [-1, _columns(matrix)]))


def _with_rows(new: Insert, product: torch.fx.Node, matrix: torch.fx.Node) -> torch.fx.Node:
    """A matmul like this one, of other rows."""
    arguments = list(product.args)
    arguments[_PRODUCTS[product.target]] = matrix
    return new(product, product.target, *arguments)


def _part(new: Insert, node: torch.fx.Node, dim: int, begin: int, end: int) -> torch.fx.Node:
    """A part along a dimension, one element after another in memory."""
    part = new(node, _SLICE, node, dim, begin, end)
    if (value := part.meta["val"]).is_contiguous():
        return part
    copied = node.graph.call_function(_aten.clone.default, (part,), {"memory_format": torch.contiguous_format})
    metadata.describe(copied, value.new_empty(value.shape), like=node)
    return copied


def _moved(new: Insert, node: torch.fx.Node, dim: int, place: int) -> torch.fx.Node:
    """One dimension in another place among the others."""
    if dim == place:
        return node
    order = list(range(node.meta["val"].dim()))
    order.insert(place, order.pop(dim))
    return new(node, _aten.permute.default, node, order)


def _erase_unread(nodes: Sequence[torch.fx.Node]) -> None:
    """Erase these, and what they alone read."""
    for node in nodes:
        if not node.users and node.op == "call_function":
            sources = node.all_input_nodes
            node.graph.erase_node(node)
            _erase_unread(sources)
