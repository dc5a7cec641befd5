"""Narrower messages: what a step would take if gathers and reductions were sent in other forms (`passes/forms.py`).

The schedule stays as it is; collectives take the time of the bytes that they would send. What integers are made of, and
what is made of them, is not counted: it runs in kernels that copy the same values anyway.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
import torch.fx

from ..layout.communication import CommunicationDtype
from ..passes import forms, ops
from ..passes.padding import shard_numel
from . import collectives
from .collectives import Ring
from .hardware import Hardware
from .nodes import full_bytes
from .predict import Prediction
from .timeline import Step, rings_of, run, steps_of

CANDIDATES = (
    CommunicationDtype(reduce=torch.bfloat16),
    CommunicationDtype("int8", torch.bfloat16),
    CommunicationDtype("int8", "int8"),
    CommunicationDtype(all_reduce=torch.bfloat16),
    CommunicationDtype(all_reduce="int8"),
)
"""From the one that rounds least; the last two where there are replicas."""


@dataclasses.dataclass(frozen=True)
class Narrower:
    """A step with another `communication_dtype`.

    Attributes:
        seconds: of the step.
        sent, sent_now: bytes of full tensors that its collectives would send, and that they send; an all-reduce sends
            everything twice.
    """

    communication: CommunicationDtype
    seconds: float
    sent: int
    sent_now: int

    @property
    def error(self) -> str:
        """How far what arrives may be from what was sent."""
        bounds = []
        if self.communication.gather:
            bounds.append(f"parameters by {_bound(self.communication.gather_form)}")
        if self.communication.reduce_form:
            bounds.append(f"gradients by {_bound(self.communication.reduce_form)}")
        if self.communication.all_reduce_form:
            bounds.append(f"the sums of replicas by {_bound(self.communication.all_reduce_form)}")
        return " and ".join(bounds)


def _bound(form: str) -> str:
    if forms.is_integers(form):
        return f"1/{2 * forms.most(form)} of the largest of {forms.BLOCK} neighbours"
    return f"{torch.finfo(forms.dtype_of_name(form)).eps / 2:.2g} of themselves"


def narrower_steps(prediction: Prediction) -> Iterator[Narrower]:
    """What each of `CANDIDATES` would make of a step."""
    hardware, rings = prediction.hardware, rings_of(prediction.work, prediction.hardware)
    steps = steps_of(prediction.work, hardware, rings)
    sending = {step.node: _bytes_now(step.node) for step in steps if ops.is_collective(step.node)}
    has_replicas = any(map(ops.is_over_replicas, sending))
    for candidate in CANDIDATES:
        if candidate.all_reduce is not None and not has_replicas:
            continue
        narrow = {node: size for node in sending if (size := _bytes_of(node, candidate)) is not None}
        changed = [
            _resized(step, narrow[step.node], rings[step.lane], hardware) if step.node in narrow else step
            for step in steps
        ]
        seconds = run(changed, hardware).seconds + prediction.optimizer_seconds
        yield Narrower(candidate, seconds, sum({**sending, **narrow}.values()), sum(sending.values()))


def _bytes_now(node: torch.fx.Node) -> int:
    """Bytes of the full tensor that a collective sends, as often as it sends them."""
    return full_bytes(node) * (2 if ops.is_call(node, ops.ALL_REDUCE) else 1)


def _bytes_of(node: torch.fx.Node, asked: CommunicationDtype) -> int | None:
    """Bytes of the full tensor that a collective would send; None for one that does not change."""
    if ops.is_all_gather(node):
        return _bytes_of_gather(node, asked.gather_form)
    if ops.is_call(node, ops.ALL_REDUCE):
        return _bytes_of_reduction(node, asked.all_reduce_form)
    if ops.is_call(node, ops.REDUCE_SCATTER, ops.REDUCE_SCATTER_GROUPED):
        return _bytes_of_reduction(node, asked.reduce_form)
    return None


def _bytes_of_gather(node: torch.fx.Node, form: str) -> int | None:
    slots = [(ops.argument(out, "shape"), out.meta["val"].dtype) for out in ops.parameters_of(node)]
    is_narrow = node.meta["val"].dtype not in {dtype for _, dtype in slots}
    if is_narrow or not form:
        return None
    world_size: int = ops.argument(node, "world_size")
    size = _total(slots, form, world_size)
    return None if size is None else world_size * size


def _bytes_of_reduction(node: torch.fx.Node, form: str) -> int | None:
    value = node.meta["val"]
    num_sent: int = ops.argument(node, "world_size")
    if not form:
        return None
    if not forms.is_integers(form):
        narrow: int = forms.dtype_of_name(form).itemsize
        return num_sent * int(value.numel()) * narrow
    source = node
    while not ops.is_call(source, ops.PACK, ops.REDUCE_SCATTER_GROUPED):
        source = source.all_input_nodes[0]
    slots = [(gradient.meta["val"].shape, value.dtype) for gradient in ops.argument(source, "gradients")]
    size = _total(slots, form, ops.argument(source, "world_size"))
    return None if size is None else num_sent * size


def _total(slots: list[tuple[tuple[int, ...], torch.dtype]], asked: str, world_size: int) -> int | None:
    """Bytes of one rank's message in blocks of integers; None if none of it is sent so."""
    found = [forms.form_for(shape, asked, dtype) for shape, dtype in slots]
    if not any(map(forms.is_integers, found)):
        return None
    return sum(
        forms.num_bytes(form, shard_numel(shape, world_size), math.prod(shape[1:]))
        for form, (shape, _) in zip(found, slots, strict=True)
    )


def _resized(step: Step, num_bytes: int, ring: Ring, hardware: Hardware) -> Step:
    is_exchanged = ops.is_reduction(step.node) and not ops.is_over_replicas(step.node)
    price = collectives.all_to_all if is_exchanged else collectives.all_gather
    return dataclasses.replace(step, seconds=price(num_bytes, ring, hardware))
