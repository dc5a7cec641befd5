"""End lives: no kernel reads a full buffer after its free, not even by computing a value from it once more.

    Before   e = embedding(w, i); free(w); y = mm(e, v); z = add(e, y)
    After    e = store(embedding(w, i)); free(w); y = mm(e, v); z = add(e, y)
    Needs    frees in their final places (insert_free)
    Keeps    values, order
    Cost     O(nodes)

Inductor computes cheap values where they are needed, more than once if need be: an embedding that a residual connection
reads later would be looked up again, in a buffer that should be gone. A value that follows from a full buffer by light
operators, and is read after the next heavy operator behind the buffer's free, is stored in memory instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx

from . import analysis, ops
from .errors import pass_error
from .insert_free import missing_frees
from .printer import printed_name

_RECOMPUTED = (ops.COPY_OUT, torch.ops.aten.embedding.default, torch.ops.aten.clone.default)


@dataclasses.dataclass(frozen=True)
class EndLives:
    def __call__(self, gm: torch.fx.GraphModule) -> None:
        for buffer in missing_frees(gm.graph):
            raise pass_error(f"{printed_name(buffer)} has no free at its end: run InsertFree first", buffer)
        for value in values_to_store(gm.graph):
            readers = [user for user in value.users if not ops.is_call(user, ops.FREE)]
            with gm.graph.inserting_before(value.next):
                stored = ops.call(gm.graph, ops.STORE, value, like=value, value=value.meta["val"])
            for reader in readers:
                reader.replace_input_with(value, stored)


def values_to_store(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The values that follow from a full buffer by light operators and are read after the next heavy one."""
    position = analysis.positions(graph)
    found: dict[torch.fx.Node, None] = {}
    for free in graph.nodes:
        if ops.is_call(free, ops.FREE):
            found |= dict.fromkeys(_read_late(free.args[0], position[_next_heavy(free)], position))
    return list(found)


def _read_late(buffer: Any, end: int, position: Mapping[torch.fx.Node, int]) -> list[torch.fx.Node]:
    """What Inductor would compute from `buffer` again at position `end` or later; not what follows from such values."""
    late = []
    followed = [buffer]
    for value in followed:
        readers = [user for user in value.users if not ops.is_call(user, ops.FREE)]
        if value is not buffer and not analysis.is_alias(value) and any(position[reader] > end for reader in readers):
            late.append(value)
            continue
        followed += [
            reader
            for reader in readers
            if reader not in followed and position[reader] < end and (_is_light(reader) or analysis.is_alias(reader))
        ]
    return late


def _next_heavy(node: torch.fx.Node) -> torch.fx.Node:
    """The next heavy operator after `node`."""
    while node.op != "output" and not analysis.is_heavy(node):
        node = node.next
    return node


def _is_light(node: torch.fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    return ops.is_call(node, *_RECOMPUTED) or torch.Tag.pointwise in node.target.tags
