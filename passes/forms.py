"""Forms in which values travel: in a dtype, or as blocks of small integers with a scale for each.

A form is a name: that of a dtype ("float32", "bfloat16"), or of blocks, "int8_blocks" or "int4_blocks". Of these, each
row of a parameter or of its gradient (what follows its first dimension) is cut into as few blocks of one length as have
at most `BLOCK` elements::

    scale = max |x| of the block / most        float32; most is 127, or 7 for four bits
    q     = round(x / scale)                   to even; a whole number from -most to most
    x'    = q * scale                          at most scale / 2 from x

A block with an element that is not finite becomes NaN, every element of it. Blocks end with their row, so that they are
the same on any number of ranks: what is read on many ranks is what one would read. Only tensors of two dimensions or
more, with rows of `SHORTEST` elements or more, are sent as integers: of others too little is saved, and norms and
biases need their precision. (Blocks: Dettmers et al., arXiv 2110.02861; in gathers and reductions: Wang et al., ZeRO++,
arXiv 2306.10209)

What computes here takes a function that calls an operator, `call(target, *args)`: on tensors, or on nodes of a graph.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .padding import ALIGNMENT, shard_numel

MESSAGE = torch.int8
"""The dtype of what is sent where a part of it is integers; what is none is sent as its bytes."""
RESIDUAL = torch.bfloat16
"""The dtype in which is kept what messages lose, to be sent with the next."""
BLOCK = 256
SHORTEST = 16
INT8_BLOCKS, INT4_BLOCKS = "int8_blocks", "int4_blocks"
_BITS = {INT8_BLOCKS: 8, INT4_BLOCKS: 4}
_TINY = torch.finfo(torch.float32).tiny
_SCALE = torch.float32
_aten = torch.ops.aten

Call = Callable[..., Any]


def eagerly(target: Any, *args: Any) -> Any:
    """A `call` on tensors."""
    return target(*args)


def is_integers(form: str) -> bool:
    """Whether this is the name of blocks of integers, not of a dtype."""
    return form in _BITS


def is_float8(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


def name_of_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of_name(form: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, form)
    return found


def form_for(shape: Sequence[int], form: str, dtype: torch.dtype) -> str:
    """How a parameter of this shape, or its gradient, travels where `form` is asked for: in `dtype` if not so."""
    is_long = len(shape) > 1 and math.prod(shape[1:]) >= SHORTEST
    is_wanted = is_integers(form) and is_long and dtype.is_floating_point
    return form if is_wanted else name_of_dtype(dtype)


@dataclasses.dataclass(frozen=True)
class Region:
    """Elements [begin, end) of a shard, or of each rank's part of packed gradients, which travel in one form.

    Attributes:
        inner: elements of a row.
    """

    begin: int
    end: int
    inner: int
    form: str

    @property
    def num_bytes(self) -> int:
        """In a message."""
        return num_bytes(self.form, self.end - self.begin, self.inner)


NO_REGIONS: tuple[list[int], list[int], list[int], list[str]] = [], [], [], []
"""The arguments of an operator that takes regions, and is given none."""


def regions_of(arguments: Sequence[Sequence[Any]]) -> list[Region]:
    """From the arguments of an operator: where they begin, where they end, rows, and forms."""
    return [Region(*fields) for fields in zip(*arguments, strict=True)]


def arguments_of(regions: Iterable[Region]) -> list[list[Any]]:
    """The arguments of an operator; see `regions_of`."""
    found = list(regions)
    names = [field.name for field in dataclasses.fields(Region)]
    return [[getattr(region, name) for region in found] for name in names]


def region_at(begin: int, shape: Sequence[int], taken: int, form: str, dtype: torch.dtype, numel: int) -> Region:
    """Of a parameter, or a gradient, that begins there and takes so many elements of a shard of `numel`.

    Messages begin at multiples of 16 bytes of the buffer, as those of shards do.
    """
    chosen = form_for(shape, form, dtype)
    if is_integers(chosen):
        return Region(begin, begin + taken, math.prod(shape[1:]), chosen)
    step = max(1, ALIGNMENT // dtype.itemsize)
    return Region(begin, min(begin + -(-taken // step) * step, numel), 1, chosen)


def reduced_regions(
    offsets: Sequence[int],
    shapes: Sequence[Sequence[int]],
    world_size: int,
    asked: tuple[str, str],
    dtype: torch.dtype,
    numel: int,
    *,
    is_whole: bool,
) -> tuple[list[Region], list[Region]]:
    """The regions of packed gradients, by where each begins in a rank's part, of so many ranks; and of their sums.

    There are none if nothing is sent in another form. What was sent so is summed up in float32 at least.

    Args:
        asked: the form that is asked for between ranks, and between replicas, which send each other sums; "" for none.
        dtype: of what is packed, where a form is one of integers.
        numel: elements of a rank's part.
        is_whole: whether there is more in it than these gradients.
    """

    def regions(form: str, dtype: torch.dtype) -> list[Region]:
        if not is_integers(form):
            return [Region(0, numel, 1, form)] if form else []
        found = [
            region_at(offset, shape, shard_numel(shape, world_size), form, dtype, numel)
            for offset, shape in sorted(zip(offsets, shapes, strict=True))
        ]
        if not any(is_integers(region.form) for region in found):
            return []
        return _with_gaps(found, numel, dtype) if is_whole else found

    of_ranks = regions(asked[0], dtype)
    return of_ranks, regions(asked[1], torch.promote_types(dtype, torch.float32) if of_ranks else dtype)


def _with_gaps(regions: Sequence[Region], numel: int, dtype: torch.dtype) -> list[Region]:
    """The same, with what is between them in this dtype."""
    found, end = [], 0
    for region in [*regions, Region(numel, numel, 1, "")]:
        if region.begin > end:
            found.append(Region(end, region.begin, 1, name_of_dtype(dtype)))
        end = region.end
        found.append(region)
    return found[:-1]


def sizes(regions: Iterable[Region], dtype: torch.dtype) -> list[int]:
    """Elements of this dtype that regions take in a message."""
    return [region.num_bytes // dtype.itemsize for region in regions]


def num_bytes(form: str, numel: int, inner: int) -> int:
    """Bytes of a message for `numel` elements, in rows of `inner`."""
    if not is_integers(form):
        return numel * dtype_of_name(form).itemsize
    return sum(map(_aligned, _bytes_of_blocks(form, numel // inner, inner)))


def _bytes_of_blocks(form: str, rows: int, inner: int) -> tuple[int, int]:
    """Of the integers, and of the scales."""
    count, size = _blocks(form, inner)
    return rows * count * size * _BITS[form] // 8, rows * count * _SCALE.itemsize


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _blocks(form: str, inner: int) -> tuple[int, int]:
    """How many blocks a row has, and how many elements each: an even number, for two may share a byte."""
    count = -(-inner // BLOCK)
    size = -(-inner // count)
    return count, size + (size % 2 if form == INT4_BLOCKS else 0)


# ---------------------------------------------------------------------------------------------------------------
# Into a form, and back
# ---------------------------------------------------------------------------------------------------------------


def cast(call: Call, value: Any, before: torch.dtype, dtype: torch.dtype) -> Any:
    return value if before == dtype else call(torch.ops.prims.convert_element_type.default, value, dtype)


def into_form(call: Call, value: Any, lead: Sequence[int], region: Region, dtype: torch.dtype) -> list[Any]:
    """A region's elements, of this dtype, as its message: the parts of it that are to be put side by side.

    Args:
        value: [*lead, elements].

    Returns:
        One of [*lead, elements] in the dtype of the form, or several of [*lead, bytes] of `MESSAGE`.
    """
    if not is_integers(region.form):
        return [cast(call, value, dtype, dtype_of_name(region.form))]
    return message_of(call, Blocks.of(call, value, lead, region, dtype))


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A region in blocks of integers: what they stand for, the integers themselves (as float32), and their scales.

    Values and integers are [*lead, rows, blocks of a row, elements of a block]; scales have one element for a block.
    """

    lead: Sequence[int]
    region: Region
    values: Any
    whole: Any
    scale: Any

    @classmethod
    def of(cls, call: Call, value: Any, lead: Sequence[int], region: Region, dtype: torch.dtype) -> Blocks:
        """Of [*lead, elements] in this dtype."""
        rows, count, size = _rows_and_blocks(region)
        blocks = cast(call, call(_aten.view.default, value, [*lead, rows, region.inner]), dtype, _SCALE)
        if count * size > region.inner:
            blocks = call(_aten.constant_pad_nd.default, blocks, [0, count * size - region.inner])
        blocks = call(_aten.view.default, blocks, [*lead, rows, count, size])
        largest = call(_aten.amax.default, call(_aten.abs.default, blocks), [-1], True)
        scale = call(_aten.clamp_min.default, call(_aten.div.Tensor, largest, float(most(region.form))), _TINY)
        return cls(lead, region, blocks, call(_aten.round.default, call(_aten.div.Tensor, blocks, scale)), scale)


def message_of(call: Call, blocks: Blocks) -> list[Any]:
    """What is sent of blocks, as `into_form` returns it: their integers and their scales."""
    lead, region = blocks.lead, blocks.region
    rows, count, size = _rows_and_blocks(region)
    whole = call(torch.ops.prims.convert_element_type.default, blocks.whole, MESSAGE)
    of_integers, of_scales = _bytes_of_blocks(region.form, rows, region.inner)
    integers = call(_aten.view.default, _packed(call, whole, region.form, size), [*lead, of_integers])
    scales = call(_aten.view.dtype, call(_aten.view.default, blocks.scale, [*lead, rows * count]), MESSAGE)
    return [_padded(call, integers, of_integers), _padded(call, scales, of_scales)]


def lost_of(call: Call, blocks: Blocks) -> Any:
    """What blocks stand for less what arrives of them: float32 [*lead, elements].

    It is zero for a block with an element that is not finite, for it is added to what is sent next.
    """
    lead, region = blocks.lead, blocks.region
    rows, count, size = _rows_and_blocks(region)
    lost = call(_aten.sub.Tensor, blocks.values, call(_aten.mul.Tensor, blocks.whole, blocks.scale))
    magnitude = call(_aten.abs.default, lost)
    zero = cast(call, call(_aten.lt.Scalar, magnitude, 0.0), torch.bool, _SCALE)  # NaN is not less, either
    lost = call(_aten.where.self, call(_aten.lt.Scalar, magnitude, math.inf), lost, zero)
    lost = call(_aten.view.default, lost, [*lead, rows, count * size])
    if count * size > region.inner:
        lost = call(_aten.clone.default, call(_aten.slice.Tensor, lost, len(lead) + 1, 0, region.inner))
    return call(_aten.view.default, lost, [*lead, rows * region.inner])


def _rows_and_blocks(region: Region) -> tuple[int, int, int]:
    """How many rows it has, how many blocks each of them, and how many elements each of those."""
    return (region.end - region.begin) // region.inner, *_blocks(region.form, region.inner)


def _as_it_is(value: Any) -> Any:
    return value


def out_of_form(
    call: Call,
    message: Any,
    lead: Sequence[int],
    region: Region,
    dtype: torch.dtype,
    store: Callable[[Any], Any] = _as_it_is,
) -> Any:
    """A region's elements in this dtype, [*lead, elements], from its message, [*lead, bytes]; a new tensor.

    Or from [*lead, elements] in the dtype of the form, where that is one.

    Args:
        store: what is to be done with what integers were, before it is viewed as rows.
    """
    if not is_integers(region.form):
        return cast(call, message, dtype_of_name(region.form), dtype)
    rows, count, size = _rows_and_blocks(region)
    of_integers, of_scales = _bytes_of_blocks(region.form, rows, region.inner)
    begin, dim = _aligned(of_integers), len(lead)
    integers = call(_aten.slice.Tensor, message, dim, 0, of_integers)
    integers = _unpacked(
        call, call(_aten.view.default, integers, [*lead, rows, count, size * _BITS[region.form] // 8]), region.form
    )
    scales = call(_aten.view.dtype, call(_aten.slice_copy.Tensor, message, dim, begin, begin + of_scales), _SCALE)
    wide = cast(call, integers, MESSAGE, _SCALE)
    blocks = call(_aten.mul.Tensor, wide, call(_aten.view.default, scales, [*lead, rows, count, 1]))
    found = cast(call, blocks, _SCALE, dtype)
    if count * size > region.inner:
        whole = call(_aten.view.default, found, [*lead, rows, count * size])
        found = call(_aten.clone.default, call(_aten.slice.Tensor, whole, dim + 1, 0, region.inner))
    return call(_aten.view.default, store(found), [*lead, rows * region.inner])


def most(form: str) -> int:
    """The largest integer of blocks in this form."""
    return int(2 ** (_BITS[form] - 1) - 1)


def _packed(call: Call, integers: Any, form: str, size: int) -> Any:
    """Integers of 8 bits, of which two share a byte if the form has 4: one of each half of a block."""
    if form == INT8_BLOCKS:
        return integers
    low = call(_aten.slice.Tensor, integers, -1, 0, size // 2)
    high = call(_aten.slice.Tensor, integers, -1, size // 2, size)
    low = call(_aten.bitwise_and.Scalar, low, 15)
    return call(_aten.bitwise_or.Tensor, low, call(_aten.mul.Tensor, high, 16))


def _unpacked(call: Call, integers: Any, form: str) -> Any:
    if form == INT8_BLOCKS:
        return integers
    low = call(_aten.bitwise_right_shift.Tensor_Scalar, call(_aten.mul.Tensor, integers, 16), 4)
    high = call(_aten.bitwise_right_shift.Tensor_Scalar, integers, 4)
    return call(_aten.cat.default, [low, high], -1)


def _padded(call: Call, value: Any, size: int) -> Any:
    missing = _aligned(size) - size
    return call(_aten.constant_pad_nd.default, value, [0, missing]) if missing else value
