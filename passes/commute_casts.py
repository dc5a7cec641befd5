"""Commute casts: a parameter that the program reads in a narrower dtype alone is gathered in that dtype.

    Before   w = unshard(shard): f32; c = convert(w, bf16); mm(x, t(c))
    After    c = unshard(shard): bf16; mm(x, t(c))
    Needs    one unshard per parameter (merge_unshards)
    Keeps    every value to the last bit: it is the same whether elements are cast before they are put together or after
    Cost     O(nodes)

Autocast makes such programs: it casts the weights of matmuls and convolutions, and leaves those of norms as they are.
Both are gathered in one message, the bytes of what stays wide beside what is cast (`insert_all_gather`). Gradients are
what they were: the program itself casts them back before they are reduced.

A parameter stays wide where something else reads it as well. So does a bucket that would not lose a quarter of its
bytes, since its shard has to be copied for that, and a unit of which a part is kept for the backward (`parted`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

import torch
import torch.fx

from . import metadata, ops
from .merge_unshards import refuse_repeated_unshards

CASTS = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)


@dataclasses.dataclass(frozen=True)
class CommuteCasts:
    """`parted` names the units of which a part is kept for the backward; see the module's text."""

    parted: frozenset[str] = frozenset()

    def __call__(self, gm: torch.fx.GraphModule) -> None:
        refuse_repeated_unshards(gm.graph)
        for unshard, dtype in narrow_reads(gm.graph, self.parted).items():
            casts = list(unshard.users)
            ops.set_argument(unshard, "dtype", dtype)
            metadata.describe(unshard, casts[0].meta["val"], like=unshard)
            for cast in casts:
                cast.replace_all_uses_with(unshard)
                gm.graph.erase_node(cast)


def narrow_reads(graph: torch.fx.Graph, parted: frozenset[str] = frozenset()) -> dict[torch.fx.Node, torch.dtype]:
    """The unshards that are to be read in another dtype, with that."""
    unshards_of_shard: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for node in graph.nodes:
        if ops.is_call(node, ops.UNSHARD) and node.users and ops.argument(node, "gathered") is None:
            unshards_of_shard.setdefault(ops.argument(node, "shard"), []).append(node)
    found: dict[torch.fx.Node, torch.dtype] = {}
    for unshards in unshards_of_shard.values():
        if ops.unit_of_bucket(ops.argument(unshards[0], "bucket")) not in parted:
            found |= _narrow_reads_of_bucket(unshards)
    return found


def _narrow_reads_of_bucket(unshards: list[torch.fx.Node]) -> dict[torch.fx.Node, torch.dtype]:
    cast_to = {unshard: dtype for unshard in unshards if (dtype := _only_cast(unshard)) is not None}
    num_bytes: Counter[torch.dtype] = Counter()
    for unshard, dtype in cast_to.items():
        num_bytes[dtype] += _num_bytes(unshard)
    if not num_bytes:
        return {}
    wanted, num_cast = num_bytes.most_common(1)[0]
    wide = unshards[0].meta["val"].dtype
    if not loses_enough(num_cast * (1 - wanted.itemsize / wide.itemsize), unshards):
        return {}
    return {unshard: dtype for unshard, dtype in cast_to.items() if dtype == wanted}


def loses_enough(num_saved: float, unshards: Iterable[torch.fx.Node]) -> bool:
    """Whether so many bytes are a quarter of a bucket's, all of whose reads these are: its shard is copied for that."""
    return num_saved >= sum(map(_num_bytes, unshards)) / 4


def _only_cast(unshard: torch.fx.Node) -> torch.dtype | None:
    """The narrower dtype that all who read the parameter cast it to; None where there is not one."""
    wide, stored = unshard.meta["val"], ops.argument(unshard, "shard").meta["val"].dtype
    found = [user.meta["val"] for user in unshard.users if ops.is_call(user, *CASTS)]
    dtypes = {value.dtype for value in found}
    if len(found) < len(unshard.users) or len(dtypes) != 1 or wide.dtype != stored:  # to cast twice rounds twice
        return None
    (dtype,) = dtypes
    is_alike = all((value.device, value.stride()) == (wide.device, wide.stride()) for value in found)
    is_narrower = dtype in (torch.float16, torch.bfloat16, torch.float32) and dtype.itemsize < wide.dtype.itemsize
    return dtype if is_alike and is_narrower else None


def _num_bytes(unshard: torch.fx.Node) -> int:
    value = unshard.meta["val"]
    return int(value.numel() * value.dtype.itemsize)
