"""Another layout: a traced graph, or its halves, as if the shards had been laid out for other ranks.

What a layout says is in the sizes of the shards, in the arguments of `unshard` and in those of `reduce_gradient`. Full
parameters, and what is computed with them, are the same for any number of ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch.fx

from . import analysis, ops
from .halves import Halves


@dataclasses.dataclass(frozen=True)
class NewLayout:
    """What the new layout says; buckets and parameters have the names and the order that they had.

    Attributes:
        arguments_of_parameter: by its name, those of `fsdp::unshard` from the bucket on.
        numel_of_bucket: elements of a shard.
    """

    arguments_of_parameter: Mapping[str, tuple[Any, ...]]
    numel_of_bucket: Mapping[str, int]

    def change_graph(self, graph: torch.fx.Graph) -> None:
        """A graph that still has `unshard` and `reduce_gradient`, with one of these for each bucket."""
        for node in graph.nodes:
            if ops.is_call(node, ops.UNSHARD):
                _resize(ops.argument(node, "shard"), self.numel_of_bucket[ops.argument(node, "bucket")])
                arguments = self.arguments_of_parameter[ops.argument(node, "parameter")]
                node.args = (*node.args[:4], *_with_dtype_of(node.args[4:], arguments))
            elif ops.is_call(node, ops.REDUCE_GRADIENT):
                self._change_reduction(node)

    def change_halves(self, halves: Halves) -> Halves:
        """The same of halves, which are changed, and whose unshards are erased."""
        input_of_name = {node.name: node for node in analysis.inputs(halves.forward.graph)}
        unshards = {}
        for name, unshard in halves.unshards.items():
            _resize(input_of_name[unshard.shard], self.numel_of_bucket[unshard.bucket])
            arguments = _with_dtype_of(unshard.arguments[3:], self.arguments_of_parameter[unshard.parameter])
            unshards[name] = dataclasses.replace(
                unshard, arguments=(*unshard.arguments[:3], *arguments), world_size=arguments[4]
            )
        self.change_graph(halves.backward.graph)
        for node in halves.backward.graph.find_nodes(op="call_function", target=ops.REDUCE_GRADIENT):
            if (residual := ops.argument(node, "residual")) is not None:
                _resize(input_of_name[residual.name], residual.meta["val"].numel())
        return dataclasses.replace(halves, unshards=unshards)

    def _change_reduction(self, node: torch.fx.Node) -> None:
        gradients, accumulated, residual, bucket, parameters, _, _, _, _, dtype, device, *_ = node.args
        assert accumulated is None, f"{node} adds to what was kept in the layout that was traced"
        arguments = [self.arguments_of_parameter[str(name)] for name in parameters]  # type: ignore[union-attr]
        _, _, _, _, world_size, group, _, _, _, *reduction = arguments[0]
        offsets, numel = [offset for _, _, offset, *_ in arguments], self.numel_of_bucket[str(bucket)]
        shards = offsets, numel, world_size, group
        if isinstance(residual, torch.fx.Node):
            _resize(residual, numel * int(world_size))
        node.args = (gradients, None, residual, bucket, parameters, *shards, dtype, device, *reduction)
        _resize(node, numel)


def _resize(node: torch.fx.Node, numel: int) -> None:
    """Note that a tensor of one dimension has so many elements."""
    node.meta = {**node.meta, "val": node.meta["val"].new_empty(numel)}
    node.meta.pop("tensor_meta", None)


def _with_dtype_of(before: Sequence[Any], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """`arguments` of an unshard from the bucket on, but the dtype that those before had: a pass may have changed it."""
    return (*arguments[:6], before[6], *arguments[7:])
