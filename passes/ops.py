"""The dialect: operators that stand for sharding in a graph, until `lower_collectives` turns them into torch's own.

A *shard* is the 1-D tensor in which a rank keeps its part of every parameter of one *bucket* (the parameters of one
unit that share dtype, requires_grad and device). For a parameter of `rows` x `inner` elements on `world_size` ranks the
shard holds `ceil(rows / world_size)` rows at `offset`, zero padded: dim-0 chunks, as `torch.chunk` and DTensor's
`Shard(0)` cut them. With `world_size` 1 the shard holds the whole parameter and nothing needs to be gathered.

What the front end emits, differentiable, one of each per read of a parameter::

    unshard(shard, accumulated, ...)               the full parameter, in the dtype that the forward computes in
    reduce_gradient(gradients, accumulated, ...)   the shard's gradient from full gradients of some of its parameters
    pack(gradients, ...)                           those gradients as they are, to be reduced with a later step's

`unshard` says where its gradient goes: "reduce" makes it a `reduce_gradient` of the shard, "keep" a `pack` that is the
gradient of `accumulated`, and "none" is for frozen parameters. With "reduce", `accumulated` is what earlier steps kept.

What the passes turn that into. The packed form of a gather or a reduction sends one buffer, with copies on one side;
the grouped form sends one message per parameter in one call, and needs none::

    all_gather(shard), all_gather_grouped(shards)     pending; all ranks' shards, one after another
    join(shards)                                      the shards of several buckets, one after another
    wait(pending)                                     the buffer, ready
    copy_out(gathered, ...), view_out(gathered, ...)  one full parameter, as a new tensor or as a view
    store(value)                                      the value itself, in memory rather than computed where it is read
    free(full)                                        the end of the life of a gathered buffer or a full parameter
    poison(full)                                      what a debug mode makes of a free: NaN in every element
    part(shard), reshard(gathered)                    a part of the gathered buffer, kept for a gather by fewer ranks
    pack(gradients, accumulated, ...)                 full gradients in the layout that reduce_scatter reads
    reduce_scatter(packed), reduce_scatter_grouped(gradients, accumulated), all_reduce(gradient)
                                                      pending; the shard's gradient
    cast(value), divide(value), move(value)           another dtype, a smaller gradient, another device

The operators have fake implementations (shapes); `unshard`, `reduce_gradient`, `pack`, `store` and `poison` also run,
by the kernels in `fsdp_compile.runtime`. The others never run.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import torch
import torch.fx

LIBRARY = torch.library.Library("fsdp", "DEF")

_SHARD_GROUP = "int world_size, str group"
_REDUCTION = "int replicas, str replica_group, str reduction, float divisor, ScalarType? reduce_dtype"
_GRADIENTS = "Tensor[] gradients, Tensor? accumulated, str bucket, str[] parameters, int[] offsets, int numel"
_PARAMETER = "str parameter, int offset, int[] shape, int world_size"
_COMPUTE = "ScalarType? dtype, Device? device"

for _schema in (
    f"unshard(Tensor shard, Tensor? accumulated, str gradient, str bucket, {_PARAMETER}, str group, {_COMPUTE}, "
    f"{_REDUCTION}) -> Tensor",
    f"reduce_gradient({_GRADIENTS}, {_SHARD_GROUP}, ScalarType dtype, Device device, {_REDUCTION}) -> Tensor",
    f"all_gather(Tensor shard, str bucket, {_SHARD_GROUP}) -> Tensor",
    f"all_gather_grouped(Tensor[] shards, str bucket, {_SHARD_GROUP}) -> Tensor",
    "join(Tensor[] shards, str bucket) -> Tensor",
    "wait(Tensor pending) -> Tensor",
    f"copy_out(Tensor gathered, {_PARAMETER}) -> Tensor",
    f"view_out(Tensor(a) gathered, {_PARAMETER}) -> Tensor(a)",
    "store(Tensor(a) value) -> Tensor(a)",
    "free(Tensor full) -> ()",
    "poison(Tensor(a!) full) -> ()",
    "part(Tensor shard, str bucket, int world_size, int parts, int index, ScalarType dtype) -> Tensor",
    "reshard(Tensor gathered, str bucket, int parts, int index) -> Tensor",
    f"pack({_GRADIENTS}, int world_size, ScalarType dtype) -> Tensor",
    f"reduce_scatter(Tensor packed, str bucket, {_SHARD_GROUP}, str reduction) -> Tensor",
    f"reduce_scatter_grouped({_GRADIENTS}, {_SHARD_GROUP}, ScalarType dtype, str reduction) -> Tensor",
    f"all_reduce(Tensor gradient, str bucket, {_SHARD_GROUP}, str reduction) -> Tensor",
    "cast(Tensor value, ScalarType dtype) -> Tensor",
    "divide(Tensor value, float divisor) -> Tensor",
    "move(Tensor value, Device device) -> Tensor",
):
    LIBRARY.define(_schema)

UNSHARD = torch.ops.fsdp.unshard.default
REDUCE_GRADIENT = torch.ops.fsdp.reduce_gradient.default
ALL_GATHER = torch.ops.fsdp.all_gather.default
ALL_GATHER_GROUPED = torch.ops.fsdp.all_gather_grouped.default
JOIN = torch.ops.fsdp.join.default
WAIT = torch.ops.fsdp.wait.default
COPY_OUT = torch.ops.fsdp.copy_out.default
VIEW_OUT = torch.ops.fsdp.view_out.default
STORE = torch.ops.fsdp.store.default
FREE = torch.ops.fsdp.free.default
POISON = torch.ops.fsdp.poison.default
PART = torch.ops.fsdp.part.default
RESHARD = torch.ops.fsdp.reshard.default
PACK = torch.ops.fsdp.pack.default
REDUCE_SCATTER = torch.ops.fsdp.reduce_scatter.default
REDUCE_SCATTER_GROUPED = torch.ops.fsdp.reduce_scatter_grouped.default
ALL_REDUCE = torch.ops.fsdp.all_reduce.default
CAST = torch.ops.fsdp.cast.default
DIVIDE = torch.ops.fsdp.divide.default
MOVE = torch.ops.fsdp.move.default

torch.fx.node.has_side_effect(FREE)
torch.fx.node.has_side_effect(POISON)

# ---------------------------------------------------------------------------------------------------------------
# The layout of a shard, in elements
# ---------------------------------------------------------------------------------------------------------------


def shard_rows(shape: Sequence[int], world_size: int) -> int:
    """Rows of a parameter of this shape that every rank's shard has room for."""
    return -(-shape[0] // world_size) if len(shape) else 1


def shard_numel(shape: Sequence[int], world_size: int) -> int:
    """Elements of a rank's shard that a parameter of this shape takes, padding of its last rows included."""
    return shard_rows(shape, world_size) * math.prod(shape[1:])


# ---------------------------------------------------------------------------------------------------------------
# Shapes
# ---------------------------------------------------------------------------------------------------------------


_Function = TypeVar("_Function", bound=Callable[..., Any])


_VALUES: dict[Any, Callable[..., Any]] = {}
"""By operator, what computes its fake value. `move` has none: its device may not be there outside the dispatcher."""


def _fake(name: str) -> Callable[[_Function], _Function]:
    def register(function: _Function) -> _Function:
        _VALUES[getattr(torch.ops.fsdp, name).default] = function
        return torch.library.register_fake(f"fsdp::{name}", function, lib=LIBRARY)  # type: ignore[no-any-return]

    return register


@_fake("unshard")
def _(
    shard: torch.Tensor,
    accumulated: torch.Tensor | None,
    gradient: str,
    bucket: str,
    parameter: str,
    offset: int,
    shape: list[int],
    world_size: int,
    group: str,
    dtype: torch.dtype | None,
    device: torch.device | None,
    *_: Any,
) -> torch.Tensor:
    return shard.new_empty(shape, dtype=dtype, device=device)


@_fake("reduce_gradient")
def _(
    gradients: list[torch.Tensor],
    accumulated: torch.Tensor | None,
    bucket: str,
    parameters: list[str],
    offsets: list[int],
    numel: int,
    world_size: int,
    group: str,
    dtype: torch.dtype,
    device: torch.device,
    *_: Any,
) -> Any:
    return gradients[0].new_empty(numel, dtype=dtype, device=device)


@_fake("all_gather")
def _(shard: torch.Tensor, bucket: str, world_size: int, group: str) -> torch.Tensor:
    return shard.new_empty(shard.numel() * world_size)


@_fake("all_gather_grouped")
def _(shards: list[torch.Tensor], bucket: str, world_size: int, group: str) -> torch.Tensor:
    return shards[0].new_empty(sum(shard.numel() for shard in shards) * world_size)


@_fake("join")
def _(shards: list[torch.Tensor], bucket: str) -> torch.Tensor:
    return shards[0].new_empty(sum(shard.numel() for shard in shards))


@_fake("wait")
def _(pending: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(pending)


@_fake("copy_out")
def _(gathered: torch.Tensor, parameter: str, offset: int, shape: list[int], world_size: int) -> torch.Tensor:
    return gathered.new_empty(shape)


@_fake("view_out")
def _(gathered: torch.Tensor, parameter: str, offset: int, shape: list[int], world_size: int) -> torch.Tensor:
    return gathered.narrow(0, 0, math.prod(shape)).view(shape)


@_fake("store")
def _(value: torch.Tensor) -> torch.Tensor:
    return value.view_as(value)


@_fake("free")
@_fake("poison")
def _(full: torch.Tensor) -> None:
    return None


@_fake("part")
def _(shard: torch.Tensor, bucket: str, world_size: int, parts: int, index: int, dtype: torch.dtype) -> torch.Tensor:
    return shard.new_empty(shard.numel() * world_size // parts, dtype=dtype)


@_fake("reshard")
def _(gathered: torch.Tensor, bucket: str, parts: int, index: int) -> torch.Tensor:
    return gathered.new_empty(gathered.numel() // parts)


@_fake("pack")
def _(
    gradients: list[torch.Tensor],
    accumulated: torch.Tensor | None,
    bucket: str,
    parameters: list[str],
    offsets: list[int],
    numel: int,
    world_size: int,
    dtype: torch.dtype,
) -> Any:
    return gradients[0].new_empty(numel * world_size, dtype=dtype)


@_fake("reduce_scatter")
def _(packed: torch.Tensor, bucket: str, world_size: int, group: str, reduction: str) -> torch.Tensor:
    return packed.new_empty(packed.numel() // world_size)


@_fake("reduce_scatter_grouped")
def _(
    gradients: list[torch.Tensor],
    accumulated: torch.Tensor | None,
    bucket: str,
    parameters: list[str],
    offsets: list[int],
    numel: int,
    world_size: int,
    group: str,
    dtype: torch.dtype,
    reduction: str,
) -> Any:
    return gradients[0].new_empty(numel, dtype=dtype)


@_fake("all_reduce")
def _(gradient: torch.Tensor, bucket: str, world_size: int, group: str, reduction: str) -> torch.Tensor:
    return torch.empty_like(gradient)


@_fake("cast")
def _(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(value, dtype=dtype)


@_fake("divide")
def _(value: torch.Tensor, divisor: float) -> torch.Tensor:
    return torch.empty_like(value)


@torch.library.register_fake("fsdp::move", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(value, device=device)


# ---------------------------------------------------------------------------------------------------------------
# Reading graphs
# ---------------------------------------------------------------------------------------------------------------


def argument(node: torch.fx.Node, name: str) -> Any:
    """The argument `name` of a call of one of our operators, which are always called with positional arguments."""
    for index, formal in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if formal.name == name:
            return node.args[index]
    raise KeyError(f"{node.target} has no argument {name}")


def is_call(node: torch.fx.Node, *targets: Any) -> bool:
    return node.op == "call_function" and node.target in targets


def is_dialect(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "fsdp"


def is_all_gather(node: torch.fx.Node) -> bool:
    return is_call(node, ALL_GATHER, ALL_GATHER_GROUPED)


def is_reduction(node: torch.fx.Node) -> bool:
    return is_call(node, REDUCE_SCATTER, REDUCE_SCATTER_GROUPED, ALL_REDUCE)


def is_collective(node: torch.fx.Node) -> bool:
    return is_all_gather(node) or is_reduction(node)


def is_parameter_out(node: torch.fx.Node) -> bool:
    return is_call(node, COPY_OUT, VIEW_OUT)


def wait_of(collective: torch.fx.Node) -> torch.fx.Node:
    """The wait for a collective, in a graph that is verified: nothing else reads its result."""
    (wait,) = collective.users
    return wait


def parameters_of(gather: torch.fx.Node) -> list[torch.fx.Node]:
    """What takes the parameters that are read out of a gathered buffer, one for each."""
    return [user for user in wait_of(gather).users if is_parameter_out(user)]


def is_tangent(node: torch.fx.Node) -> bool:
    """Whether an input of a backward is the gradient of an output of the model, by the name that AOTAutograd gives."""
    return "tangents" in str(node.target)


def is_generator(node: torch.fx.Node) -> bool:
    """An input that holds a state of a GPU's generator: both graphs take one for each random operator computed again."""
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


def is_conversion(node: torch.fx.Node) -> bool:
    """Whether this changes the form of a shard or of its gradient: dtype, scale, device."""
    return is_call(node, CAST, DIVIDE, MOVE)


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
    """Marks a backward input that is a full parameter kept from the forward instead of being gathered again."""

    parameter: str
    bucket: str


def kept_parameter(node: torch.fx.Node) -> FullParameter | None:
    """What `keep_parameter` noted on a graph input, or None."""
    return node.meta.get("fsdp_full_parameter")


def keep_parameter(node: torch.fx.Node, parameter: FullParameter) -> None:
    """Note that this graph input is a full parameter."""
    node.meta["fsdp_full_parameter"] = parameter


def kept_part(node: torch.fx.Node) -> Part | None:
    """What `keep_part` noted on a graph input, or None."""
    return node.meta.get("fsdp_part")


def keep_part(node: torch.fx.Node, part: Part) -> None:
    """Note that this graph input is a part of a gathered buffer, to be gathered over a smaller group."""
    node.meta["fsdp_part"] = part


def is_whole_copy(node: torch.fx.Node) -> bool:
    """Whether `copy_whole` marked this node."""
    return bool(node.meta.get("fsdp_whole_copy"))


def copy_whole(node: torch.fx.Node) -> None:
    """Note that this node copies buffers and computes nothing: a compiler need not generate code for it."""
    node.meta["fsdp_whole_copy"] = True


# ---------------------------------------------------------------------------------------------------------------
# Writing graphs
# ---------------------------------------------------------------------------------------------------------------


def call(graph: torch.fx.Graph, target: Any, *args: Any, like: torch.fx.Node | None = None) -> torch.fx.Node:
    """Insert a call at the graph's insertion point, with `meta["val"]` computed from its arguments' values.

    The call takes over the other metadata of `like`: the source line and the partitioner's tags.
    """
    node = graph.call_function(target, args)
    node.meta = {} if like is None else dict(like.meta)
    node.meta.pop("tensor_meta", None)
    compute = _VALUES.get(target, target)  # the dispatcher would take twice as long to come to it
    with torch.no_grad():
        node.meta["val"] = compute(*torch.fx.map_arg(args, lambda argument: argument.meta["val"]))
    return node
