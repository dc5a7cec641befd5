"""Scaled reads: the parameters that a program reads only scaled and cast to float8, by which scales.

    w = unshard(shard); s = f(max(abs(w))); q = convert(clamp(mul(w, s), -448, 448), f8)

`w` may be a transposed view, and `f` any function of single elements. The tensor has a scale, or each of its rows, of
equal blocks of a row, or of its columns has one: the maximum is over all dimensions, over all but the first, which is
sharded, over the last one of a view whose elements are the blocks', or over the first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Literal, TypeVar

import torch
import torch.fx

from . import analysis, forms, metadata, ops
from .commute_casts import CASTS, loses_enough
from .padding import shard_numel

_aten = torch.ops.aten
_T = TypeVar("_T")
_VIEWS = (_aten.permute.default, _aten.t.default, _aten.transpose.int)
_RESHAPES = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)

Along = Literal["tensor", "rows", "columns"]
_Order = tuple[int, ...]  # of a view: which dimension of the parameter each of its dimensions is
_IN_BLOCK = -1  # the last dimension of a view whose elements are a block's; its others, which are below, count blocks


@dataclasses.dataclass(frozen=True)
class ScaledRead:
    """A parameter that is only scaled, clamped to [-most, most], and cast.

    Attributes:
        along: what has a scale of its own: the tensor, each of its rows or of the blocks of a row, or each column.
        size: elements of a row, or of a block.
        maxima: of the absolute values of its elements.
        chain: what is computed from those, up to the scale, element by element.
        read: that of them which is read by more than what scales, or what it is cast from.
        cast_of_view: the results, by the view of the parameter that they are of.
    """

    unshard: torch.fx.Node
    along: Along
    size: int
    maxima: list[torch.fx.Node]
    chain: list[torch.fx.Node]
    read: torch.fx.Node
    most: float
    cast_of_view: dict[torch.fx.Node, list[torch.fx.Node]]

    @property
    def scale(self) -> torch.fx.Node:
        return self.chain[-1]

    @property
    def wide(self) -> torch.dtype:
        """That it is gathered in otherwise."""
        found: torch.dtype = self.unshard.meta["val"].dtype
        return found

    @property
    def dtype(self) -> torch.dtype:
        first: torch.dtype = next(iter(self.cast_of_view.values()))[0].meta["val"].dtype
        return first

    @property
    def num_rows(self) -> int:
        """Rows, or blocks, that a shard has room for."""
        return shard_numel(*self._shape_and_ranks) // self.size

    @property
    def section(self) -> tuple[int, int]:
        """Where in the shard it begins and ends."""
        begin: int = ops.argument(self.unshard, "offset")
        return begin, begin + shard_numel(*self._shape_and_ranks)

    @property
    def _shape_and_ranks(self) -> tuple[Sequence[int], int]:
        return ops.argument(self.unshard, "shape"), ops.argument(self.unshard, "world_size")


def scaled_reads(graph: torch.fx.Graph) -> Iterator[ScaledRead]:
    """The parameters that are to be gathered in float8."""
    found = [node for node in graph.nodes if ops.is_call(node, ops.UNSHARD) and node.users]
    unshards = [node for node in found if ops.argument(node, "gathered") is None]
    for of_bucket in by(unshards, lambda node: ops.argument(node, "shard")):
        movable = [unshard for unshard in of_bucket if not _is_left_alone(unshard)]
        reads = [read for unshard in movable if (read := _scaled_read(unshard)) is not None]
        best = max(by(reads, lambda read: read.wide), key=_num_saved, default=[])
        if loses_enough(_num_saved(best), of_bucket):
            yield from best


def _num_saved(reads: Sequence[ScaledRead]) -> int:
    """Bytes that gathers of full parameters would not carry."""
    return sum(int(read.unshard.meta["val"].numel()) * (read.wide.itemsize - 1) for read in reads)


@dataclasses.dataclass(frozen=True)
class _Maximum:
    """The dimensions of the parameter that a maximum is over; the view that it is of where some are left, and the shape
    that scales of this view have."""

    over: frozenset[int]
    view: torch.fx.Node | None = None
    shape: tuple[int, ...] = ()

    @classmethod
    def of(cls, node: torch.fx.Node, view: torch.fx.Node, order: _Order) -> _Maximum | None:
        """Of a view with this order of dimensions, or None for something else."""
        if ops.is_call(node, _aten.max.default):
            return cls(frozenset(order))
        if ops.is_call(node, _aten.amax.default) and len(node.args) > 1 and node.args[1]:
            dims: Sequence[int] = node.args[1]  # type: ignore[assignment]
            over = frozenset(order[dim] for dim in dims)
            sizes = zip(order, view.meta["val"].shape, strict=True)
            return cls(over, view, tuple(1 if dim in over else size for dim, size in sizes))
        return None

    def along(self, num_dims: int) -> Along | None:
        """What has a scale of its own."""
        if self.view is None:
            return "tensor"
        if self.over in ({_IN_BLOCK}, frozenset(range(1, num_dims))):
            return "rows"
        return "columns" if self.over == {0} and num_dims == 2 else None


def _is_left_alone(unshard: torch.fx.Node) -> bool:
    """Whether it stays as it is, however it is read."""
    shard, value = ops.argument(unshard, "shard"), unshard.meta["val"]
    is_whole = ops.argument(unshard, "world_size") == 1 or metadata.kept_part(shard) is not None
    is_parted = any(ops.is_call(user, ops.PART) for user in shard.users)  # which gathers a part that is kept
    is_elsewhere = shard.meta["val"].device != value.device
    is_double = shard.meta["val"].dtype.itemsize > torch.float32.itemsize  # others of the shard would lose bits
    return is_whole or is_parted or is_elsewhere or is_double or bool(ops.argument(unshard, "gather_form"))


@dataclasses.dataclass
class _Users:
    """What reads a parameter, and views of it.

    Attributes:
        maxima: of absolute values.
        scaled: what multiplies by a scale.
        forms: the scale, the bound, and the dtype that is cast to.
        cast_of_view: what is cast, by the view that it is of.
    """

    maxima: dict[torch.fx.Node, _Maximum | None] = dataclasses.field(default_factory=dict)
    scaled: set[torch.fx.Node] = dataclasses.field(default_factory=set)
    forms: set[tuple[torch.fx.Node, float, torch.dtype]] = dataclasses.field(default_factory=set)
    cast_of_view: dict[torch.fx.Node, list[torch.fx.Node]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, unshard: torch.fx.Node) -> _Users | None:
        """None if there are others."""
        found = cls()
        views: list[tuple[torch.fx.Node, _Order]] = [(unshard, tuple(range(unshard.meta["val"].dim())))]
        for view, order in views:
            for user in view.users:
                if ops.is_call(user, *_VIEWS):
                    views.append((user, _order(user, order)))
                elif view is unshard and _is_of_blocks(user):
                    views.append((user, tuple(range(-user.meta["val"].dim(), 0))))
                elif ops.is_call(user, _aten.abs.default):
                    found.maxima |= {maximum: _Maximum.of(maximum, view, order) for maximum in user.users}
                elif not found.takes_scaled(view, user):
                    return None
        return found

    def takes_scaled(self, view: torch.fx.Node, user: torch.fx.Node) -> bool:
        """Whether `user` begins to scale and cast this view."""
        if (scaled := _scaled_cast(view, user)) is None:
            return False
        scale, product, most, cast = scaled
        self.scaled.add(product)
        self.forms.add((scale, most, cast.meta["val"].dtype))
        self.cast_of_view.setdefault(view, []).append(cast)
        return True


def _scaled_read(unshard: torch.fx.Node) -> ScaledRead | None:
    users = _Users.of(unshard)
    if users is None or len(users.forms) != 1 or len(set(users.maxima.values())) != 1:
        return None
    ((scale, most, _),), maxima, maximum = users.forms, list(users.maxima), next(iter(users.maxima.values()))
    if maximum is None or not (maximum.view is None or [*users.cast_of_view] == [maximum.view]):
        return None
    shape = unshard.meta["val"].shape
    along, chain = maximum.along(len(shape)), _chain(scale, maxima)
    if along is None or chain is None or maximum.shape != tuple(scale.meta["val"].shape):
        return None
    computed = [*maxima, *(node for node in chain if not _is_constant(node))]
    read = [node for node in computed if not users.scaled.union(chain).issuperset(node.users)]
    if along == "rows" and (len(read) != 1 or read[0] in maxima):
        return None  # of what belongs to a row, one value is gathered
    size = _last_size(maximum.view) if maximum.over == {_IN_BLOCK} else math.prod(shape[1:])
    return ScaledRead(unshard, along, size, maxima, chain, _narrowest([*read, scale][0]), most, users.cast_of_view)


def _narrowest(read: torch.fx.Node) -> torch.fx.Node:
    """What this is cast from, if that is narrower."""
    source = read.all_input_nodes[0]
    is_narrower = ops.is_call(read, *CASTS) and source.meta["val"].dtype.itemsize < read.meta["val"].dtype.itemsize
    return source if is_narrower else read


def _is_of_blocks(view: torch.fx.Node) -> bool:
    """Whether this view of a parameter has, in its last dimension, parts of single rows."""
    if not ops.is_call(view, *_RESHAPES) or view.meta["val"].dim() < 2 or not view.meta["val"].numel():
        return False
    row: int = math.prod(view.all_input_nodes[0].meta["val"].shape[1:])
    return row % _last_size(view) == 0


def _last_size(view: torch.fx.Node | None) -> int:
    return 1 if view is None else int(view.meta["val"].shape[-1])


def _order(view: torch.fx.Node, order: _Order) -> _Order:
    """Of a view of a view of this order."""
    if ops.is_call(view, _aten.permute.default):
        return tuple(order[dim] for dim in view.args[1])  # type: ignore[union-attr,index]
    first, second = (0, -1) if ops.is_call(view, _aten.t.default) else view.args[1:3]
    found = list(order)
    found[first], found[second] = order[second], order[first]  # type: ignore[index]
    return tuple(found)


def _scaled_cast(
    view: torch.fx.Node, user: torch.fx.Node
) -> tuple[torch.fx.Node, torch.fx.Node, float, torch.fx.Node] | None:
    """The scale, the product, the bound, and the result, where `user` begins to scale and cast this value.

    None if it does not.
    """
    source, node = view, user
    if _is_cast_to(node, torch.float32):
        source, node = node, _only_user(node)
    if not ops.is_call(node, _aten.mul.Tensor) or source not in node.args:
        return None
    scale, product = node.args[1] if node.args[0] is source else node.args[0], node
    if not isinstance(scale, torch.fx.Node) or node.meta["val"].dtype != torch.float32:
        return None
    bounds, node = _bounds(_only_user(node))
    if bounds is None or bounds[0] != -bounds[1]:
        return None
    value = node.meta["val"]
    is_cast = ops.is_call(node, *CASTS) and forms.is_float8(value.dtype)
    if not is_cast or value.stride() != view.meta["val"].stride():
        return None
    return scale, product, bounds[1], node


def _bounds(node: torch.fx.Node) -> tuple[tuple[float, float] | None, torch.fx.Node]:
    """What a clamp that begins here, in one node or in two, clamps to, and what reads its result."""
    if ops.is_call(node, _aten.clamp.default) and len(node.args) == 3:
        return (float(node.args[1]), float(node.args[2])), _only_user(node)  # type: ignore[arg-type]
    above = _only_user(node)
    if ops.is_call(node, _aten.clamp_min.default) and ops.is_call(above, _aten.clamp_max.default):
        return (float(node.args[1]), float(above.args[1])), _only_user(above)  # type: ignore[arg-type]
    return None, node


def _only_user(node: torch.fx.Node) -> torch.fx.Node:
    """What reads this, if that is one; the node itself, which nothing that is asked for is, if not."""
    return next(iter(node.users)) if len(node.users) == 1 else node


def _is_cast_to(node: torch.fx.Node, dtype: torch.dtype) -> bool:
    return ops.is_call(node, *CASTS) and node.meta["val"].dtype == dtype


def _chain(scale: torch.fx.Node, maxima: list[torch.fx.Node]) -> list[torch.fx.Node] | None:
    """What computes the scale, element by element, in order; None if it needs more than these maxima and constants."""
    found: set[torch.fx.Node] = set()
    sources, num = [scale], maxima[0].meta["val"].numel()
    for node in sources:
        if node in maxima or node in found:
            continue
        is_computed = _is_elementwise(node) or is_reshape(node)
        if not (is_computed and node.meta["val"].numel() == num) and not _is_constant(node):
            return None
        found.add(node)
        sources += node.all_input_nodes
    return sorted(found) or None


def is_reshape(node: torch.fx.Node) -> bool:
    """Whether it has the elements of what it reads, in their order, in another shape."""
    return ops.is_call(node, *_RESHAPES, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.dims)


def _is_constant(node: torch.fx.Node) -> bool:
    """Whether it is one number."""
    return ops.is_call(node, _aten.full.default, _aten.scalar_tensor.default) and node.meta["val"].dim() == 0


def _is_elementwise(node: torch.fx.Node) -> bool:
    target = node.target
    is_pointwise = isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
    return ops.is_call(node, *CASTS) or (is_pointwise and bool(node.all_input_nodes) and not analysis.is_random(node))


def by(values: Sequence[_T], key: Callable[[_T], Hashable]) -> list[list[_T]]:
    """The values in lists of those with an equal key, in the order of the first."""
    found: dict[Hashable, list[_T]] = {}
    for value in values:
        found.setdefault(key(value), []).append(value)
    return list(found.values())
