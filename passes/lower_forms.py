"""What `lower_collectives` makes of operators whose messages are in forms (`forms`): arithmetic in ATen."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import torch
import torch.fx

from . import forms, ops
from .lowering import Lowering
from .padding import shard_numel

_aten = torch.ops.aten


def narrow(lowering: Lowering, node: torch.fx.Node) -> torch.fx.Node:
    shard: Any = node.args[0]
    pieces = []
    for region in _joined_regions(ops.regions(node)):
        piece = lowering.section(shard, 0, region.begin, region.end, node)
        pieces += lowering.message(piece, [], region, node)
    return lowering.call(_aten.cat.default, pieces, like=node)


def _joined_regions(regions: list[forms.Region]) -> list[forms.Region]:
    """The same, those as one that lie side by side in one dtype."""
    found: list[forms.Region] = []
    for region in regions:
        last = found[-1] if found and not forms.is_integers(region.form) else None
        if last is not None and (last.end, last.form) == (region.begin, region.form):
            found[-1] = dataclasses.replace(last, end=region.end)
        else:
            found.append(region)
    return found


def sum_up(lowering: Lowering, node: torch.fx.Node) -> torch.fx.Node:
    received: Any = node.args[0]
    numel, world_size, dtype = (ops.argument(node, name) for name in ("numel", "world_size", "dtype"))
    call, sent_as, begin = partial(lowering.call, like=node), received.meta["val"].dtype, 0
    by_rank = call(_aten.view.default, received, [world_size, received.meta["val"].numel() // world_size])
    pieces, is_mean = {}, ops.argument(node, "reduction") == "avg"
    for region, size in zip(ops.regions(node), forms.sizes(ops.regions(node), sent_as), strict=True):
        piece = lowering.section(by_rank, 1, begin, begin + size, node)
        if not forms.is_integers(region.form) and (form := forms.dtype_of_name(region.form)) != sent_as:
            piece = call(_aten.view.dtype, lowering.copied(piece), form)
        values = forms.out_of_form(call, piece, [world_size], region, dtype)
        total = call(_aten.sum.dim_IntList, values, [0], True)
        pieces[region.begin] = call(_aten.div.Tensor, total, float(world_size)) if is_mean else total
        begin += size
    joined = lowering.joined(pieces, numel, lowering.zeros(pieces), node)
    return call(_aten.view.default, joined, [numel])


def out_of_integers(lowering: Lowering, node: torch.fx.Node) -> torch.fx.Node:
    """The chunks of a parameter that was sent as blocks of integers, in memory, as [world_size, elements]."""
    gathered: Any = node.args[0]
    names = ("offset", "shape", "world_size", "dtype", "form")
    offset, shape, world_size, dtype, form = (ops.argument(node, name) for name in names)
    call, taken = partial(lowering.call, like=node), ops.taken_by(node)
    if gathered in lowering.pieces:
        message = call(_aten.view.default, lowering.pieces[gathered][offset], [world_size, taken])
    else:
        numel = gathered.meta["val"].numel() // world_size
        by_rank = call(_aten.view.default, gathered, [world_size, numel])
        message = lowering.section(by_rank, 1, offset, offset + taken, node)
    region = forms.Region(0, shard_numel(shape, world_size), math.prod(shape[1:]), form)
    found: torch.fx.Node = forms.out_of_form(call, message, [world_size], region, dtype, store=partial(call, ops.STORE))
    return found


def pack_in_forms(lowering: Lowering, node: torch.fx.Node, chunks: dict[int, torch.fx.Node]) -> torch.fx.Node:
    world_size, pieces = ops.argument(node, "world_size"), []
    for region in ops.regions(node):
        chunk = chunks.get(region.begin)
        if chunk is None:
            chunk = lowering.left(node, "accumulated", region.begin, region.end)
        missing = region.end - region.begin - chunk.meta["val"].shape[1]
        if missing:
            chunk = lowering.call(_aten.constant_pad_nd.default, chunk, [0, missing], like=node)
        if ops.argument(node, "residual") is not None and forms.is_integers(region.form):
            blocks = _with_residual(lowering, node, chunk, region)
            pieces += forms.message_of(partial(lowering.call, like=node), blocks)
            lowering.blocks[region.begin, ops.argument(node, "gradients")[0]] = blocks
        else:
            pieces += lowering.message(chunk, [world_size], region, node)
    joined = lowering.call(_aten.cat.default, pieces, 1, like=node)
    return lowering.call(_aten.view.default, joined, [node.meta["val"].numel()], like=node)


def _with_residual(lowering: Lowering, node: torch.fx.Node, chunk: torch.fx.Node, region: forms.Region) -> forms.Blocks:
    """What is sent of a gradient and of what earlier messages have lost of it."""
    wide = torch.promote_types(chunk.meta["val"].dtype, torch.float32)
    left = lowering.cast(lowering.left(node, "residual", region.begin, region.end), wide, node)
    total = lowering.call(_aten.add.Tensor, lowering.cast(chunk, wide, node), left, like=node)
    lead = [ops.argument(node, "world_size")]
    return forms.Blocks.of(partial(lowering.call, like=node), total, lead, region, wide)


def remainder(lowering: Lowering, node: torch.fx.Node) -> torch.fx.Node:
    """From the blocks that the message was made of, before this; the residual stays where nothing is lost."""
    residual, first = ops.argument(node, "residual").meta["val"], ops.argument(node, "gradients")[0]
    lost = {}
    for region in filter(lambda region: forms.is_integers(region.form), ops.regions(node)):
        blocks = lowering.blocks[region.begin, first]
        lost[region.begin] = lowering.cast(
            forms.lost_of(partial(lowering.call, like=node), blocks), residual.dtype, node
        )
    joined = lowering.joined(lost, ops.argument(node, "numel"), partial(lowering.left, node, "residual"), node)
    return lowering.call(_aten.view.default, joined, [residual.numel()], like=node)
