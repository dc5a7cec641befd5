"""The dialect: operators that stand for sharding in a graph, until `lower_collectives` turns them into torch's own.

A *shard* is the 1-D tensor in which a rank keeps its part of every parameter of one *bucket* (the parameters of one
unit that share dtype, requires_grad and device). For a parameter of `rows` x `inner` elements on `world_size` ranks the
shard holds `ceil(rows / world_size)` rows at `offset`, zero padded: dim-0 chunks, as `torch.chunk` and DTensor's
`Shard(0)` cut them. Of a parameter that ranks share along another dimension, the rows are the ranks' parts, which the
front end puts side by side (`runtime/assembly.py`). With `world_size` 1 the shard holds the whole parameter and nothing
needs to be gathered.

What the front end emits, differentiable, one of each per read of a parameter::

    unshard(shard, accumulated, residual, ...)     the full parameter, in the dtype that the forward computes in
    reduce_gradient(gradients, accumulated, residual, ...)
                                                   the shard's gradient from full gradients of some of its parameters
    pack(gradients, ...)                           those gradients as they are, to be reduced with a later step's

`unshard` says where its gradient goes: "reduce" makes it a `reduce_gradient` of the shard, "keep" a `pack` that is the
gradient of `accumulated`, and "none" is for frozen parameters. With "reduce", `accumulated` is what earlier steps kept,
and `residual` what their messages have lost of gradients by rounding, where that is fed back; both as `pack` lays out.
Where the parameter was gathered before this call, for several, `gathered` has all ranks' rows of it; it may be on its
way, and the caller keeps it.

What the passes turn that into. The packed form of a gather or a reduction sends one buffer, with copies on one side;
the grouped form sends one message per parameter in one call, and needs none::

    all_gather(shard), all_gather_grouped(shards)     pending; all ranks' shards, one after another
    join(shards)                                      the shards of several buckets, one after another
    wait(pending)                                     the buffer, ready
    narrow(shard, ...)                                parameters of a shard, each in a form (see `forms`)
    scale(shard, scales, ...)                         a shard in float32, some parameters scaled and clamped
    copy_out(gathered, ...), view_out(gathered, ...)  one full parameter, as a new tensor or as a view
    store(value)                                      the value itself, in memory rather than computed where it is read
    free(full)                                        the end of the life of a gathered buffer or a full parameter
    poison(full)                                      what a debug mode makes of a free: NaN in every element
    part(shard), reshard(gathered)                    a part of the gathered buffer, kept for a gather by fewer ranks
    pack(gradients, accumulated, residual, ...)       full gradients in the layout that reduce_scatter reads, in forms
    remainder(gradients, accumulated, residual, ...)  what the forms of that message lose of what is packed
    keep(remainder, residual)                         the remainder is the residual of the next step
    reduce_scatter(packed), reduce_scatter_grouped(gradients, accumulated), all_reduce(gradient)
                                                      pending; the shard's gradient
    all_to_all(packed), sum_up(received)              pending: what all ranks packed for this one; the shard's gradient
    all_gather_sums(sums), sum_up(received)           pending: what each replica has summed up; the shard's gradient
    cast(value), divide(value), move(value)           another dtype, a smaller gradient, another device
    copy_start(source), copy_wait(copied, source)     a move in two: a copy that runs beside the computation
    copies_done(on_cpu)                               the host waits until these have been read or filled by copies
    update(gradient)                                  an optimizer updates the shard, whose gradient this is

An operator is a row of this file, an `Operator`. What it becomes is in `lower_collectives`, after which passes it may
stand in a graph is in `verifier`. The operators have fake implementations (shapes); `unshard`, `reduce_gradient`,
`pack`, `store`, `poison`, `keep`, `update` and the three of copies also run, by the kernels in `fsdp_compile.runtime`.
The others never run.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal
from urllib.parse import quote, unquote

import torch
import torch.fx

from . import forms, metadata
from .padding import shard_numel

LIBRARY = torch.library.Library("fsdp", "DEF")

OPERATORS: dict[Any, Operator] = {}
"""The operators of the dialect, by what a node calls."""


@dataclasses.dataclass(frozen=True)
class Operator:
    """All that is known of an operator, in one row.

    Attributes:
        schema: its signature, which says whether the result is a view.
        fake: computes the result, on tensors without memory.
        shown: the arguments that are printed; names tell the others.
        name: the printed name of the result, with arguments in braces. Without one it is called as in the graph.
        name_of_wait: the printed name of the wait for it, if it starts something.
        kind: what it is, where several are of a kind.
        is_dispatched: whether `fake` needs torch's dispatcher, since its device may not be there outside of it.
    """

    schema: str
    fake: Callable[..., Any]
    shown: tuple[str, ...]
    name: str = ""
    name_of_wait: str = ""
    kind: Literal["", "all_gather", "reduction", "parameter_out", "conversion"] = ""
    is_dispatched: bool = False

    def defined(self) -> Any:
        """Make it known to torch; returns what a node calls."""
        LIBRARY.define(self.schema)
        name = self.schema.partition("(")[0]
        torch.library.register_fake(f"fsdp::{name}", self.fake, lib=LIBRARY)
        target = getattr(torch.ops.fsdp, name).default
        if not target._schema.returns:
            torch.fx.node.has_side_effect(target)
        OPERATORS[target] = self
        return target


# ---------------------------------------------------------------------------------------------------------------
# The operators: one row each
# ---------------------------------------------------------------------------------------------------------------

_SHARD_GROUP = "int world_size, str group"
_REDUCTION = (
    "int replicas, str replica_group, str reduction, float divisor, ScalarType? reduce_dtype, "
    "str reduce_form, str all_reduce_form"
)
_PACKED = "Tensor[] gradients, Tensor? accumulated, Tensor? residual"
_GRADIENTS = f"{_PACKED}, str bucket, str[] parameters, int[] offsets, int numel"
_PARAMETER = "str parameter, int offset, int[] shape, int world_size"
_COMPUTE = "ScalarType? dtype, Device? device, str gather_form"
_REGIONS = "int[] begins, int[] ends, int[] inners, str[] forms"


def _numel(shards: list[torch.Tensor]) -> int:
    return sum(shard.numel() for shard in shards)


def _empty(
    like: list[torch.Tensor], numel: int, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> torch.Tensor:
    return like[0].new_empty(numel, dtype=dtype, device=device)


UNSHARD = Operator(
    f"unshard(Tensor shard, Tensor? accumulated, Tensor? residual, str gradient, str bucket, {_PARAMETER}, str group, "
    f"{_COMPUTE}, {_REDUCTION}, Tensor? gathered=None) -> Tensor",
    lambda shard, accumulated, residual, gradient, bucket, parameter, offset, shape, world_size, group, *computed: (
        shard.new_empty(shape, dtype=computed[0], device=computed[1])
    ),
    shown=("shard", "offset"),
    name="{parameter}",
).defined()
REDUCE_GRADIENT = Operator(
    f"reduce_gradient({_GRADIENTS}, {_SHARD_GROUP}, ScalarType dtype, Device device, {_REDUCTION}) -> Tensor",
    lambda gradients, accumulated, residual, bucket, parameters, offsets, numel, world_size, group, dtype, device, *_: (
        _empty(gradients, numel, dtype, device)
    ),
    shown=("gradients", "offsets", "accumulated", "residual"),
    name="{bucket}.grad",
).defined()
ALL_GATHER = Operator(
    f"all_gather(Tensor shard, str bucket, {_SHARD_GROUP}) -> Tensor",
    lambda shard, bucket, world_size, group: shard.new_empty(shard.numel() * world_size),
    shown=("shard",),
    name="{bucket}.pending",
    name_of_wait="{bucket}.gathered",
    kind="all_gather",
).defined()
ALL_GATHER_GROUPED = Operator(
    f"all_gather_grouped(Tensor[] shards, str bucket, {_SHARD_GROUP}) -> Tensor",
    lambda shards, bucket, world_size, group: _empty(shards, _numel(shards) * world_size),
    shown=("shards",),
    name="{bucket}.pending",
    name_of_wait="{bucket}.gathered",
    kind="all_gather",
).defined()
JOIN = Operator(
    "join(Tensor[] shards, str bucket) -> Tensor",
    lambda shards, bucket: _empty(shards, _numel(shards)),
    shown=("shards",),
    name="{bucket}.joined",
).defined()
NARROW = Operator(
    f"narrow(Tensor shard, str bucket, {_REGIONS}, ScalarType dtype) -> Tensor",
    lambda shard, bucket, begins, ends, inners, names, dtype: shard.new_empty(
        sum(forms.sizes(forms.regions_of([begins, ends, inners, names]), dtype)), dtype=dtype
    ),
    shown=("shard", "begins", "forms"),
    name="{bucket}.{dtype}",
    kind="conversion",
).defined()
WAIT = Operator(
    "wait(Tensor pending) -> Tensor",
    torch.empty_like,
    shown=("pending",),
).defined()
SCALE = Operator(
    "scale(Tensor shard, Tensor[] scales, str bucket, int[] begins, int[] ends, float[] most, ScalarType dtype)"
    " -> Tensor",
    lambda shard, *_: torch.empty_like(shard, dtype=torch.float32),
    shown=("shard", "scales", "begins"),
    name="{bucket}.scaled",
    kind="conversion",
).defined()
COPY_OUT = Operator(
    f"copy_out(Tensor gathered, {_PARAMETER}, ScalarType? dtype, str? form) -> Tensor",
    lambda gathered, parameter, offset, shape, world_size, dtype, form: gathered.new_empty(shape, dtype=dtype),
    shown=("gathered", "offset", "form"),
    name="{parameter}",
    kind="parameter_out",
).defined()
VIEW_OUT = Operator(
    f"view_out(Tensor(a) gathered, {_PARAMETER}) -> Tensor(a)",
    lambda gathered, parameter, offset, shape, world_size: gathered.narrow(0, 0, math.prod(shape)).view(shape),
    shown=("gathered", "offset"),
    name="{parameter}",
    kind="parameter_out",
).defined()
STORE = Operator(
    "store(Tensor(a) value) -> Tensor(a)",
    lambda value: value.view_as(value),
    shown=("value",),
    name="{value}.stored",
).defined()
FREE = Operator(
    "free(Tensor full) -> ()",
    lambda full: None,
    shown=("full",),
).defined()
POISON = Operator(
    "poison(Tensor(a!) full) -> ()",
    lambda full: None,
    shown=("full",),
).defined()
PART = Operator(
    "part(Tensor shard, str bucket, int world_size, int parts, int index, ScalarType dtype) -> Tensor",
    lambda shard, bucket, world_size, parts, index, dtype: shard.new_empty(
        shard.numel() * world_size // parts, dtype=dtype
    ),
    shown=("shard", "parts", "index"),
    name="{bucket}.part",
).defined()
RESHARD = Operator(
    "reshard(Tensor gathered, str bucket, int parts, int index) -> Tensor",
    lambda gathered, bucket, parts, index: gathered.new_empty(gathered.numel() // parts),
    shown=("gathered", "parts", "index"),
    name="{bucket}.part",
).defined()
PACK = Operator(
    f"pack({_GRADIENTS}, int world_size, ScalarType dtype, {_REGIONS}) -> Tensor",
    lambda gradients, accumulated, residual, bucket, parameters, offsets, numel, world_size, dtype, *regions: _empty(
        gradients, world_size * (sum(forms.sizes(forms.regions_of(regions), dtype)) or numel), dtype=dtype
    ),
    shown=("gradients", "offsets", "accumulated", "residual", "forms"),
    name="{bucket}.packed",
).defined()
REMAINDER = Operator(
    f"remainder({_GRADIENTS}, int world_size, {_REGIONS}) -> Tensor",
    lambda gradients, accumulated, residual, *_: torch.empty_like(residual),
    shown=("gradients", "offsets", "accumulated", "residual", "forms"),
    name="{bucket}.remainder",
).defined()
KEEP = Operator(
    "keep(Tensor remainder, Tensor(a!) residual, str bucket) -> ()",
    lambda remainder, residual, bucket: None,
    shown=("remainder", "residual"),
).defined()
REDUCE_SCATTER = Operator(
    f"reduce_scatter(Tensor packed, str bucket, {_SHARD_GROUP}, str reduction) -> Tensor",
    lambda packed, bucket, world_size, group, reduction: packed.new_empty(packed.numel() // world_size),
    shown=("packed",),
    name="{bucket}.grad.pending",
    name_of_wait="{bucket}.grad",
    kind="reduction",
).defined()
REDUCE_SCATTER_GROUPED = Operator(
    f"reduce_scatter_grouped({_GRADIENTS}, {_SHARD_GROUP}, ScalarType dtype, str reduction) -> Tensor",
    lambda gradients, accumulated, residual, bucket, parameters, offsets, numel, world_size, group, dtype, reduction: (
        _empty(gradients, numel, dtype)
    ),
    shown=("gradients", "offsets", "accumulated"),
    name="{bucket}.grad.pending",
    name_of_wait="{bucket}.grad",
    kind="reduction",
).defined()
ALL_REDUCE = Operator(
    f"all_reduce(Tensor gradient, str bucket, {_SHARD_GROUP}, str reduction) -> Tensor",
    lambda gradient, bucket, world_size, group, reduction: torch.empty_like(gradient),
    shown=("gradient",),
    name="{bucket}.grad.pending",
    name_of_wait="{bucket}.grad",
    kind="reduction",
).defined()
ALL_TO_ALL = Operator(
    f"all_to_all(Tensor packed, str bucket, {_SHARD_GROUP}) -> Tensor",
    lambda packed, bucket, world_size, group: torch.empty_like(packed),
    shown=("packed",),
    name="{bucket}.grad.pending",
    name_of_wait="{bucket}.grad.received",
    kind="reduction",
).defined()
ALL_GATHER_SUMS = Operator(
    f"all_gather_sums(Tensor sums, str bucket, {_SHARD_GROUP}) -> Tensor",
    lambda sums, bucket, world_size, group: sums.new_empty(sums.numel() * world_size),
    shown=("sums",),
    name="{bucket}.grad.pending",
    name_of_wait="{bucket}.grad.received",
    kind="reduction",
).defined()
SUM_UP = Operator(
    f"sum_up(Tensor received, str bucket, {_REGIONS}, int numel, int world_size, ScalarType dtype, str reduction)"
    " -> Tensor",
    lambda received, bucket, begins, ends, inners, names, numel, world_size, dtype, reduction: received.new_empty(
        numel, dtype=dtype
    ),
    shown=("received", "begins", "forms"),
    name="{bucket}.grad",
    kind="conversion",
).defined()
CAST = Operator(
    "cast(Tensor value, ScalarType dtype) -> Tensor",
    lambda value, dtype: torch.empty_like(value, dtype=dtype),
    shown=("value",),
    name="{value}.{dtype}",
    kind="conversion",
).defined()
DIVIDE = Operator(
    "divide(Tensor value, float divisor) -> Tensor",
    lambda value, divisor: torch.empty_like(value),
    shown=("value", "divisor"),
    name="{value}.divided",
    kind="conversion",
).defined()
MOVE = Operator(
    "move(Tensor value, Device device) -> Tensor",
    lambda value, device: torch.empty_like(value, device=device),
    shown=("value", "device"),
    name="{value}.{device}",
    kind="conversion",
    is_dispatched=True,
).defined()
COPY_START = Operator(
    "copy_start(Tensor source, Device device, bool pin_memory) -> Tensor",
    lambda source, device, pin_memory: torch.empty_like(source, device=device, memory_format=torch.contiguous_format),
    shown=("source", "device"),
    name="{source}.{device}.pending",
    name_of_wait="{source}.{device}",
    kind="conversion",
    is_dispatched=True,
).defined()
COPY_WAIT = Operator(
    "copy_wait(Tensor(a) copied, Tensor source) -> Tensor(a)",
    lambda copied, source: copied.view_as(copied),
    shown=("copied", "source"),
    kind="conversion",
).defined()
COPIES_DONE = Operator(
    "copies_done(Tensor[] on_cpu) -> ()",
    lambda on_cpu: None,
    shown=("on_cpu",),
).defined()

UPDATE = Operator(
    "update(Tensor gradient, str bucket, int output, int states) -> ()",
    lambda gradient, bucket, output, states: None,
    shown=("gradient",),
    name="{bucket}.update",
).defined()

COPIES = frozenset({COPY_START, COPY_WAIT, COPIES_DONE})
LOWERED = frozenset({STORE, POISON, KEEP, UPDATE, *COPIES})
"""What is left of the dialect in a graph that is lowered: these run."""


# ---------------------------------------------------------------------------------------------------------------
# Reading graphs
# ---------------------------------------------------------------------------------------------------------------


def regions(node: torch.fx.Node) -> list[forms.Region]:
    """Those of a call that takes some."""
    return forms.regions_of([argument(node, name) for name in ("begins", "ends", "inners", "forms")])


_FUNCTIONAL = ("_c10d_functional", "c10d_functional", "_dtensor")
_WAIT_TENSOR = torch.ops._c10d_functional.wait_tensor.default


def argument(node: torch.fx.Node, name: str) -> Any:
    """The argument `name` of a call of one of our operators, which are always called with positional arguments."""
    for index, formal in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if formal.name == name:
            return node.args[index] if index < len(node.args) else formal.default_value
    raise KeyError(f"{node.target} has no argument {name}")


def set_argument(node: torch.fx.Node, name: str, value: Any) -> None:
    """Give a call of one of our operators another argument `name`; its value in the metadata stays."""
    names = [formal.name for formal in node.target._schema.arguments]  # type: ignore[union-attr]
    node.update_arg(names.index(name), value)


def is_call(node: torch.fx.Node, *targets: Any) -> bool:
    return node.op == "call_function" and node.target in targets


def is_dialect(node: torch.fx.Node) -> bool:
    return node.target in OPERATORS


def _is_kind(node: torch.fx.Node, *kinds: str) -> bool:
    row = OPERATORS.get(node.target)
    return row is not None and row.kind in kinds


def is_all_gather(node: torch.fx.Node) -> bool:
    return _is_kind(node, "all_gather")


def is_reduction(node: torch.fx.Node) -> bool:
    return _is_kind(node, "reduction")


def is_over_replicas(node: torch.fx.Node) -> bool:
    """Whether this is a collective between the replicas of a shard."""
    return is_call(node, ALL_REDUCE, ALL_GATHER_SUMS)


def is_collective(node: torch.fx.Node) -> bool:
    return _is_kind(node, "all_gather", "reduction")


def is_functional(node: torch.fx.Node) -> bool:
    """Whether this is one of torch's functional collectives, or a wait: the model's own, or ours in a lowered graph."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in _FUNCTIONAL


def is_functional_collective(node: torch.fx.Node) -> bool:
    """Whether this is one of torch's functional collectives."""
    return is_functional(node) and not is_functional_wait(node)


def is_functional_wait(node: torch.fx.Node) -> bool:
    """Whether this waits for one of torch's functional collectives."""
    return is_call(node, _WAIT_TENSOR)


def is_parameter_out(node: torch.fx.Node) -> bool:
    return _is_kind(node, "parameter_out")


def wait_of(collective: torch.fx.Node) -> torch.fx.Node:
    """The wait for a collective, in a graph that is verified: nothing else reads its result."""
    (wait,) = collective.users
    return wait


def parameters_of(gather: torch.fx.Node) -> list[torch.fx.Node]:
    """What takes the parameters that are read out of a gathered buffer, one for each."""
    return [user for user in wait_of(gather).users if is_parameter_out(user)]


def taken_by(out: torch.fx.Node) -> int:
    """Elements of every rank's part of a gathered buffer that the parameter takes which `out` takes out of it."""
    gathered: Any = out.args[0]
    shape = argument(out, "shape")
    taken = shard_numel(shape, argument(out, "world_size"))
    if is_call(out, COPY_OUT) and (form := argument(out, "form")):
        return forms.num_bytes(form, taken, math.prod(shape[1:]))
    num_sent: int = out.meta["val"].dtype.itemsize // gathered.meta["val"].dtype.itemsize  # for each element
    return taken * num_sent


def is_tangent(node: torch.fx.Node) -> bool:
    """Whether an input of a backward is the gradient of an output of the model, by the name that AOTAutograd gives."""
    return "tangents" in str(node.target)


def is_generator(node: torch.fx.Node) -> bool:
    """A state of a GPU's generator: both graphs take one for each random operator that is computed again."""
    return isinstance(node.meta.get("val"), torch.Generator)


def bucket_of_unit(unit: str, kind: str = "") -> str:
    """The name of a unit's bucket: `layers.0`, or `layers.0/bf16.frozen` where the unit has several.

    A unit may have any name: it is escaped.
    """
    return f"{escaped(unit)}/{kind}" if kind else escaped(unit)


def escaped(name: str) -> str:
    """A name without what joins names and what ends lines: these are written as in a URL (`a,b` is `a%2Cb`)."""
    return re.sub(r"[%/,\s]", lambda found: quote(found[0], safe=""), name)


def unit_of_bucket(bucket: str) -> str:
    """The unit a bucket belongs to, by its own name."""
    return unquote(bucket.partition("/")[0])


def kind_of_bucket(bucket: str) -> str:
    """What distinguishes a bucket from others of its unit; empty where there are none."""
    return bucket.partition("/")[2]


def name_of_buckets(buckets: Sequence[str]) -> str:
    """What a gather of several buckets at once says for its bucket."""
    return ",".join(buckets)


def buckets_of(collective: torch.fx.Node) -> list[str]:
    """The buckets that a collective sends, of `name_of_buckets`."""
    return str(argument(collective, "bucket")).split(",")


def gathered_shards(gather: torch.fx.Node) -> dict[str, torch.fx.Node]:
    """What an all-gather gathers, by bucket: their shards, or what these were converted to."""
    (source,) = gather.args[:1]
    if isinstance(source, torch.fx.Node) and is_call(source, JOIN):
        source = source.args[0]
    shards: Any = source if isinstance(source, (list, tuple)) else [source]
    return dict(zip(buckets_of(gather), shards, strict=True))


def is_copy(node: torch.fx.Node) -> bool:
    """Whether this is the start of a copy between devices, a wait for it, or for all."""
    return is_call(node, *COPIES)


def updates(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The updates by an optimizer that steps in the backward, in order."""
    return list(graph.find_nodes(op="call_function", target=UPDATE))


def is_conversion(node: torch.fx.Node) -> bool:
    """Whether this changes the form of a shard or of its gradient: dtype, scale, device."""
    return _is_kind(node, "conversion")


# ---------------------------------------------------------------------------------------------------------------
# Writing graphs
# ---------------------------------------------------------------------------------------------------------------


def call(
    graph: torch.fx.Graph, target: Any, *args: Any, like: torch.fx.Node | None = None, value: Any = None
) -> torch.fx.Node:
    """Insert a call at the graph's insertion point, with its value computed from those of its arguments.

    The call takes over the other metadata of `like`: the source line and the partitioner's tags. A `value` that is
    known, because another node has one of the same shape, dtype and device, is not computed: that takes longest.
    """
    node = graph.call_function(target, args)
    if value is not None:
        metadata.describe(node, value, like)
        return node
    row = OPERATORS.get(target)
    compute = target if row is None or row.is_dispatched else row.fake  # the dispatcher would take twice as long
    with torch.no_grad():
        value = compute(*torch.fx.map_arg(args, lambda argument: argument.meta["val"]))
    metadata.describe(node, value, like)
    return node
