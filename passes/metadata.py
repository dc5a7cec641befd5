"""What nodes carry: the keys of `node.meta` that are ours are written and read here only.

`val` is a node's value on tensors without memory; torch's own passes and ours keep it up to date.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.fx


def describe(node: torch.fx.Node, value: Any, like: torch.fx.Node | None = None) -> None:
    """Give a new node its value; the source line, the partitioner's tags and so on are those of `like`."""
    node.meta = {} if like is None else dict(like.meta)
    node.meta.pop("tensor_meta", None)  # it would describe the value of `like`
    node.meta["val"] = value


@dataclasses.dataclass(frozen=True)
class Part:
    """Which part of a bucket's gathered buffer a rank keeps, when it is sharded again over a smaller group.

    Attributes:
        size: ranks of the smaller group, and parts of the buffer.
        index: this rank's place in the smaller group.
    """

    size: int
    group: str
    index: int


@dataclasses.dataclass(frozen=True)
class FullParameter:
    """Marks a backward input that is a full parameter kept from the forward instead of being gathered again.

    Attributes:
        outlives: whether the caller has it for other calls, so that it does not end here.
    """

    parameter: str
    bucket: str
    outlives: bool = False


def kept_parameter(node: torch.fx.Node) -> FullParameter | None:
    """What `note_shard` noted on a graph input, or None."""
    return node.meta.get("fsdp_full_parameter")


def kept_part(node: torch.fx.Node) -> Part | None:
    """What `note_shard` noted on a graph input, or None."""
    return node.meta.get("fsdp_part")


def note_shard(node: torch.fx.Node, kept: FullParameter | Part | None) -> None:
    """Note what a graph input is in place of a shard, if it is: a full parameter, or a part of a gathered buffer."""
    if isinstance(kept, FullParameter):
        node.meta["fsdp_full_parameter"] = kept
    elif kept is not None:
        node.meta["fsdp_part"] = kept


def gathered_bucket(node: torch.fx.Node) -> str | None:
    """What `note_gathered` noted on a graph input, or None."""
    return node.meta.get("fsdp_gathered_bucket")


def note_gathered(node: torch.fx.Node, bucket: str) -> None:
    """Note of which bucket a graph input is the shard that was gathered before the call, so that nothing reads it."""
    node.meta["fsdp_gathered_bucket"] = bucket


def is_whole_copy(node: torch.fx.Node) -> bool:
    """Whether `copy_whole` marked this node."""
    return bool(node.meta.get("fsdp_whole_copy"))


def copy_whole(node: torch.fx.Node) -> None:
    """Note that this node copies buffers and computes nothing: a compiler need not generate code for it."""
    node.meta["fsdp_whole_copy"] = True


def is_pack(node: torch.fx.Node) -> bool:
    """Whether `note_pack` marked this node."""
    return bool(node.meta.get("fsdp_pack"))


def note_pack(node: torch.fx.Node) -> None:
    """Note that this node computes the gradients of a bucket into one buffer: a compiler may do so in one kernel."""
    node.meta["fsdp_pack"] = True
