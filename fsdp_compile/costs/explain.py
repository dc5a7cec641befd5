"""Explanations: what the compiler did with a model, what that costs, and what the user could change."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import torch
import torch.fx

from ..errors import ConfigError
from ..graphs import RewrittenGraphs
from ..layout.communication import CommunicationDtype
from ..passes import analysis, ops
from ..passes.plan import StepPlan
from ..passes.printer import printed_name
from .exposure import why_exposed
from .hardware import HARDWARE, Hardware, find_hardware, hardware_of_gpu
from .memory import Memory
from .narrower import narrower_steps
from .nodes import Compiler, full_bytes, num_bytes
from .optimizers import find_optimizer
from .predict import Prediction, bytes_text, memory_text, predict, step_memory, table, time_text
from .wide_gathers import wide_gathers_of
from .work import Work

_WHICH = f"explain(NAME) with one of {', '.join(HARDWARE)}, or the file that `python -m fsdp_compile calibrate` wrote"
_SHOWN = 3  # waits that are listed
_WORTH_IT = 0.01  # of a step


@dataclasses.dataclass(frozen=True)
class Outline:
    """What a step does on any hardware: its work, what a rank holds meanwhile, and the plan, if there is one."""

    work: Work
    memory: Memory
    plan: StepPlan | None


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `model.explain()` returns; `str()` is the text to print.

    Attributes:
        graphs: one for each set of guards that was compiled.
        predictions: of a step of each, in the same order; none where the hardware is not known.
        outlines: what is known of a step of each on any hardware.
        units: the names of the model's, to be shown.
        reason: why the sharding strategy was chosen, if it was.
        compilations: graph breaks and recompilations so far, a line each.
        comparison: of a prediction with what was measured, as text.
    """

    graphs: Sequence[RewrittenGraphs]
    predictions: Sequence[Prediction]
    outlines: Sequence[Outline] = ()
    units: Sequence[str] = ()
    reason: str | None = None
    compilations: str = ""
    comparison: str = ""

    def __str__(self) -> str:
        if not self.graphs:
            return "nothing was compiled so far: call the model once"
        head = [("strategy", self.reason)] if self.reason else []
        head += [("units", f"{len(self.units)}: {', '.join(self.units)}")] if self.units else []
        texts = [table(head)] if head else []
        for number, outline in enumerate(self.outlines, 1):
            prediction = self.predictions[number - 1] if self.predictions else None
            texts.append("\n".join([f"graph {number} of {len(self.graphs)}", *_lines(outline, prediction)]))
        if not self.predictions:
            texts.append(table([("seconds", f"are predicted for hardware that is known: {_WHICH}")]))
        if self.compilations:
            texts.append(table(("compilations", line) for line in self.compilations.splitlines()))
        return "\n\n".join([*texts, self.comparison] if self.comparison else texts)


def explain(
    graphs: Sequence[RewrittenGraphs],
    hardware: Hardware | str | None = None,
    *,
    optimizer: str = "adam",
    compiler: Compiler = "inductor",
    units: Sequence[str] = (),
    reason: str | None = None,
    compilations: str = "",
) -> Explanation:
    """What was decided in these graphs, and what a step of them is predicted to take.

    Args:
        hardware: one of `HARDWARE` by name, a file that `calibrate` wrote, or a description; None is the GPU at hand,
            and without one that is known nothing is said in seconds.
        optimizer: one of `predict.OPTIMIZERS`.
        compiler: what compiles the graphs; see `nodes.Compiler`.
        reason: why the sharding strategy was chosen, to be shown.
        compilations: graph breaks and recompilations, a line each, to be shown.

    Raises:
        ConfigError: there is no such hardware or optimizer.
    """
    find_optimizer(optimizer)
    found = hardware_of_gpu() if hardware is None else find_hardware(hardware)
    if found is None:
        predictions = []
        works = [Work.of(each, compiler=compiler) for each in graphs]
        memories = [step_memory(work, optimizer) for work in works]
    else:
        predictions = [predict(each, found, optimizer=optimizer, compiler=compiler) for each in graphs]
        works, memories = [each.work for each in predictions], [each.memory for each in predictions]
    plans = [each.plan for each in graphs]
    outlines = [Outline(*each) for each in zip(works, memories, plans, strict=True)]
    return Explanation(graphs, predictions, outlines, units, reason, compilations)


def hardware_is_missing() -> ConfigError:
    """What to raise where something is to be shown in seconds."""
    return ConfigError(f"say for which hardware: {_WHICH}")


def _lines(outline: Outline, prediction: Prediction | None) -> list[str]:
    rows = [("schedule", _schedule(outline.plan)), ("collectives", _collectives(outline.work))]
    if gathered := analysis.gathered_inputs(outline.work.forward.graph):
        size = bytes_text(sum(num_bytes(node.meta["val"]) for node in gathered))
        rows.append(("gathered", f"before this call, once for several: {len(gathered)} parameters, {size}"))
    if outline.work.backward is not None and (updates := ops.updates(outline.work.backward.graph)):
        rows.append(("optimizer", f"steps in the backward: {len(updates)} updates, each as its gradient is there"))
    rows += [("wide gather", text) for text in _wide(outline.work)]
    texts = [table(rows)]
    if prediction is None:
        texts.append(table([("memory", memory_text(outline.memory))]))
    else:
        texts += [
            str(prediction),
            table(("exposed", text) for text in _exposed(prediction) or ["nothing"]),
            table(("could change", text) for text in _changes(prediction) or ["nothing that is predicted to help"]),
        ]
    return [f"  {line}" for text in texts for line in text.splitlines()]


def _schedule(plan: StepPlan | None) -> str:
    """What was decided, and by whom."""
    if plan is None:
        return "as the options say: a gather for each unit"
    together = [" with ".join(each.buckets) for each in (*plan.forward, *plan.backward) if len(each.buckets) > 1]
    decided = []
    if plan.pieces > 1:
        decided.append(f"collectives of the model itself in {plan.pieces} pieces")
    if plan.kept is None:
        decided.append("the rest as the options say")
    else:
        decided += [
            f"kept between forward and backward: {', '.join(plan.kept) or 'nothing'}",
            f"gathered at once: {', '.join(together) or 'one unit at a time'}",
            f"reductions under way: {plan.reductions}",
        ]
    if plan.activations is not None:
        decided.append(f"activation memory budget: {plan.activations}")
    return f"planned; {'; '.join(decided)}"


def _collectives(work: Work) -> str:
    """How often what is sent, and how many bytes are full tensors of it, in forward and backward."""
    texts = []
    for side in work.sides:
        sent: Counter[str] = Counter()
        size: Counter[str] = Counter()
        for node in side.graph.nodes:
            if ops.is_collective(node):
                kind = "gathers" if ops.is_all_gather(node) else "reductions"
                sent[kind] += 1
                size[kind] += full_bytes(node)
        for kernel in side.collectives:
            sent["of the model itself"] += 1
            size["of the model itself"] += int(kernel.num_bytes)
        listed = ", ".join(f"{sent[kind]} {kind} of {bytes_text(size[kind])}" for kind in sent) or "none"
        texts.append(f"{side.title} {listed}")
    return "; ".join(texts)


def _wide(work: Work) -> list[str]:
    """Parameters that travel in a wider dtype than the program computes with, those with most bytes to lose first."""
    found = wide_gathers_of(work)
    texts = []
    for gather in found[:_SHOWN]:
        wide, *narrow = (str(dtype).removeprefix("torch.") for dtype in (gather.wide, *gather.narrow))
        texts.append(
            f"{gather.parameter} travels as {wide}, and is cast to {' and '.join(narrow)} behind its gather, "
            f"{bytes_text(gather.num_bytes)} more than need be, because {gather.reason}"
        )
    return [*texts, f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else texts


def _exposed(prediction: Prediction) -> list[str]:
    """The longest, with the pass that placed what is waited for."""
    waits = sorted(prediction.timeline.exposed.items(), key=lambda item: -item[1])
    return [
        f"{time_text(seconds)} for {_what(wait, prediction)}; {why_exposed(wait, prediction)}"
        for wait, seconds in waits[:_SHOWN]
    ]


def _what(wait: torch.fx.Node, prediction: Prediction) -> str:
    side = next(side for side in prediction.work.sides if side.graph is wait.graph)
    if ops.is_call(wait, ops.COPY_WAIT):
        return f"copying {printed_name(ops.argument(wait, 'source'))} (in the {side.title})"
    collective = wait.all_input_nodes[0]
    verb = "gathering" if ops.is_all_gather(collective) else "reducing"
    return f"{verb} {ops.argument(collective, 'bucket')} (in the {side.title})"


def _changes(prediction: Prediction) -> list[str]:
    """What would make the step faster or smaller, with the numbers that say so."""
    changes = []
    timeline = prediction.timeline
    sent = max(timeline.communication.values(), default=0.0)
    if sent > timeline.compute > 0:
        factor = sent / timeline.compute
        changes.append(f"communication takes {factor:.1f} times as long as compute: more rows a rank would hide it")
    gathered = _gathered_again(prediction)
    if gathered:
        exposed, size, unit = max(gathered)
        if exposed > _WORTH_IT * prediction.seconds:
            changes.append(
                f"reshard_after_forward={{{unit!r}: False}} would not gather {unit} again, which is exposed for "
                f"{time_text(exposed)}, and hold {bytes_text(size)} more"
            )
    for narrower in narrower_steps(prediction) if prediction.exposed > _WORTH_IT * prediction.seconds else ():
        if prediction.seconds - narrower.seconds > _WORTH_IT * prediction.seconds:
            asked = narrower.communication
            changes.append(
                f"communication_dtype={_written(asked)} would send "
                f"{bytes_text(narrower.sent)} instead of {bytes_text(narrower.sent_now)}, and a step take "
                f"{time_text(narrower.seconds)}; it changes {narrower.error}"
            )
    missing = prediction.peak.total - prediction.hardware.memory
    if missing > 0:
        changes.append(
            f"{bytes_text(missing)} too much for {prediction.hardware.name}: more ranks, fewer rows, or recompute "
            "activations"
        )
    return changes


def _written(asked: CommunicationDtype) -> str:
    of_replicas = f"all_reduce={asked.all_reduce!r}"
    return f"CommunicationDtype({of_replicas if asked.all_reduce else f'{asked.gather!r}, {asked.reduce!r}'})"


def _gathered_again(prediction: Prediction) -> list[tuple[float, int, str]]:
    """For every gather of a single unit in the backward: for how long it is exposed, its bytes, and the unit."""
    backward, found = prediction.work.backward, []
    for node in backward.graph.nodes if backward else ():
        if ops.is_all_gather(node) and len(ops.gathered_shards(node)) == 1:
            unit = ops.unit_of_bucket(ops.argument(node, "bucket"))
            found.append((prediction.timeline.exposed.get(ops.wait_of(node), 0.0), num_bytes(node.meta["val"]), unit))
    return found
