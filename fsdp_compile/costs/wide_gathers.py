"""Wide gathers: parameters that the program casts to a narrower dtype behind their gather, and why not before it.

`passes/commute_casts.py` and `passes/commute_scales.py` cast shards where nothing else reads a parameter, and a bucket
loses enough of its bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import torch.fx

from ..passes import analysis, forms, ops
from ..passes.commute_casts import CASTS
from ..passes.printer import display_names, target_name
from .nodes import num_bytes
from .work import Work


@dataclasses.dataclass(frozen=True)
class WideGather:
    """A parameter in one graph.

    Attributes:
        parameter: its name.
        wide: the dtype that it is gathered in.
        narrow: those that it is cast to.
        readers: the operators that read it as it is.
        num_bytes: that its gather would not carry in the widest of those.
        is_kept: of one that is scaled and cast to float8, whether the backward takes it over; None of others.
    """

    parameter: str
    wide: torch.dtype
    narrow: tuple[torch.dtype, ...]
    readers: tuple[str, ...]
    num_bytes: int
    is_kept: bool | None = None

    @property
    def reason(self) -> str:
        """Why it was not cast before."""
        if self.is_kept is not None:
            otherwise = "more reads it than what scales it, or its unit keeps a part"
            return "it is kept for the backward" if self.is_kept else otherwise
        if self.readers:
            return f"{', '.join(self.readers)} reads it as it is"
        if len(self.narrow) > 1:
            return "several dtypes are read"
        return "its bucket would not lose a quarter of its bytes"


def wide_gathers_of(work: Work) -> list[WideGather]:
    """Those of forward and backward, the largest first."""
    found = [gather for side in work.sides for gather in _of_graph(side.graph)]
    return sorted(found, key=lambda gather: -gather.num_bytes)


def _of_graph(graph: torch.fx.Graph) -> Iterator[WideGather]:
    position, name_of = analysis.positions(graph), display_names(graph)
    for out in filter(ops.is_parameter_out, graph.nodes):
        value = out.meta["val"]
        others = sorted(analysis.uses(out).difference(analysis.aliases(out)), key=position.__getitem__)
        readers = [node for node in others if not ops.is_dialect(node) and node.op != "output"]
        casts = [node for node in readers if _is_narrowing(node, value)]
        if casts:
            narrow = tuple(dict.fromkeys(cast.meta["val"].dtype for cast in casts))
            names = dict.fromkeys(target_name(node) for node in readers if node not in casts)
            saved = num_bytes(value) - max(num_bytes(cast.meta["val"]) for cast in casts)
            yield WideGather(name_of[out], value.dtype, narrow, tuple(names), saved)
        elif scaled := _scaled(out):
            narrow, is_kept = (scaled[0].meta["val"].dtype,), any(node.op == "output" for node in others)
            saved = num_bytes(value) - num_bytes(scaled[0].meta["val"])
            yield WideGather(name_of[out], value.dtype, narrow, (), saved, is_kept)


def _scaled(out: torch.fx.Node) -> list[torch.fx.Node]:
    """What a parameter is in float8, computed from it element by element."""
    found: list[torch.fx.Node] = []
    sources = [out]
    for node in sources:
        for user in node.users:
            if not isinstance(user.target, torch._ops.OpOverload) or user in sources:
                continue
            is_cast, value = ops.is_call(user, *CASTS), user.meta.get("val")
            is_alike = is_cast or analysis.is_alias(user) or torch.Tag.pointwise in user.target.tags
            if not is_alike or not isinstance(value, torch.Tensor) or value.numel() != out.meta["val"].numel():
                continue
            (found if is_cast and forms.is_float8(value.dtype) else sources).append(user)
    return found


def _is_narrowing(node: torch.fx.Node, value: torch.Tensor) -> bool:
    """Whether this is `value` in a floating dtype of fewer bytes."""
    if not ops.is_call(node, *CASTS):
        return False
    dtype = node.meta["val"].dtype
    return value.is_floating_point() and dtype.is_floating_point and dtype.itemsize < value.dtype.itemsize
