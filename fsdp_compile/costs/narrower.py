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
)
"""From the one that rounds least."""


@dataclasses.dataclass(frozen=True)
class Narrower:
    """A step with another `communication_dtype`.

    Attributes:
        seconds: of the step.
        sent, sent_now: bytes of full tensors that its collectives would send, and that they send.
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
        return " and ".join(bounds)


def _bound(form: str) -> str:
    if forms.is_integers(form):
        return f"1/{2 * forms.most(form)} of the largest of {forms.BLOCK} neighbours"
    return f"{torch.finfo(forms.dtype_of_name(form)).eps / 2:.2g} of themselves"


def narrower_steps(prediction: Prediction) -> Iterator[Narrower]:
    """What each of `CANDIDATES` would make of a step."""
    hardware, rings = prediction.hardware, rings_of(prediction.work, prediction.hardware)
    steps = steps_of(prediction.work, hardware, rings)
    sending = {step.node: full_bytes(step.node) for step in steps if ops.is_collective(step.node)}
    for candidate in CANDIDATES:
        sizes = {node: _bytes_of(node, candidate, size) for node, size in sending.items()}
        changed = [
            _resized(step, sizes[step.node], rings[step.lane], hardware)
            if sizes.get(step.node, 0) < sending.get(step.node, 0)
            else step
            for step in steps
        ]
        seconds = run(changed, hardware).seconds + prediction.optimizer_seconds
        yield Narrower(candidate, seconds, sum(sizes.values()), sum(sending.values()))


def _bytes_of(node: torch.fx.Node, asked: CommunicationDtype, now: int) -> int:
    """Bytes of the full tensor that a collective would send; those that it sends, where it may not change."""
    if ops.is_all_gather(node) and asked.gather:
        dtypes = {out.meta["val"].dtype for out in ops.parameters_of(node)}
        is_narrow = node.meta["val"].dtype not in dtypes
        slots = [(ops.argument(out, "shape"), out.meta["val"].dtype) for out in ops.parameters_of(node)]
        return now if is_narrow else _total(slots, asked.gather_form, ops.argument(node, "world_size"))
    if not asked.reduce_form or not ops.is_call(node, ops.REDUCE_SCATTER, ops.REDUCE_SCATTER_GROUPED):
        return now
    packed = node if ops.is_call(node, ops.REDUCE_SCATTER_GROUPED) else node.all_input_nodes[0]
    dtype = node.meta["val"].dtype
    if not forms.is_integers(asked.reduce_form):
        narrow: int = forms.dtype_of_name(asked.reduce_form).itemsize
        return now * narrow // int(dtype.itemsize)
    gradients = ops.argument(packed, "gradients")
    slots = [(gradient.meta["val"].shape, dtype) for gradient in gradients]
    return _total(slots, asked.reduce_form, ops.argument(node, "world_size"))


def _total(slots: list[tuple[tuple[int, ...], torch.dtype]], asked: str, world_size: int) -> int:
    found = 0
    for shape, dtype in slots:
        taken, form = shard_numel(shape, world_size), forms.form_for(shape, asked, dtype)
        found += world_size * forms.num_bytes(form, taken, math.prod(shape[1:]))
    return found


def _resized(step: Step, num_bytes: int, ring: Ring, hardware: Hardware) -> Step:
    price = collectives.all_to_all if ops.is_reduction(step.node) else collectives.all_gather
    return dataclasses.replace(step, seconds=price(num_bytes, ring, hardware))
