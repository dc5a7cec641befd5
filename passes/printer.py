"""Print graphs and schedules. The text is the language of the tests: it depends on the graph alone.

    forward(layers.0: f32[96], x: f32[4,8])
      layers.0.pending: f32[192] = fsdp.all_gather(layers.0)
      layers.0.gathered: f32[192] = fsdp.wait(layers.0.pending)
      layers.0.weight: f32[16,8] = fsdp.copy_out(layers.0.gathered, 0)
      fsdp.free(layers.0.gathered)
      ...

Shards are named by their bucket, full parameters by their name in the model, everything else as in the graph. Shapes
are what this rank holds.
"""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
import torch.fx

from . import analysis, metadata, ops

_DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
}

_LEFT_OUT = ("accumulated", "residual", "form", "forms")
"""Arguments that are printed only if there is something in them."""
_ARGUMENT = re.compile(r"{(\w+)}")


def print_graph(gm: torch.fx.GraphModule, title: str = "forward") -> str:
    """The graph as text, one node a line."""
    names = display_names(gm.graph)
    inputs = ", ".join(f"{names[node]}{_type(node)}" for node in analysis.inputs(gm.graph))
    lines = [f"{title}({inputs})"]
    lines += [f"  {_line_of_any(node, names)}" for node in gm.graph.nodes if node.op != "placeholder"]
    return "\n".join(lines)


def excerpt(node: torch.fx.Node, num_context: int = 2) -> str:
    """The printed graph around a node, `num_context` lines on either side, with `>` at the node.

    A graph that is broken may have no such text; then it is that of torch.fx.
    """
    nodes = list(node.graph.nodes)
    index = nodes.index(node)
    near = nodes[max(0, index - num_context) : index + num_context + 1]
    names = _names_if_any(node.graph)
    lines = [_line_of_any(other, names) if names else str(other.format_node()) for other in near]
    return "\n".join(f"{'>' if other is node else ' '} {line}" for other, line in zip(near, lines, strict=True))


def printed_name(node: torch.fx.Node) -> str:
    """The name of a node in `excerpt`."""
    return _names_if_any(node.graph).get(node, node.name)


def _names_if_any(graph: torch.fx.Graph) -> dict[torch.fx.Node, str]:
    """The printed names, of a graph that can be printed."""
    try:
        names = display_names(graph)
        for node in graph.nodes:
            _line_of_any(node, names)
    except Exception:  # whatever is broken, the error that asks for names says it
        return {}
    return names


def _line_of_any(node: torch.fx.Node, names: dict[torch.fx.Node, str]) -> str:
    if node.op == "placeholder":
        return f"{names[node]}{_type(node)}, an input"
    return f"return {_argument(tuple(node.args[0]), names)}" if node.op == "output" else _line(node, names)  # type: ignore[arg-type]


def display_names(graph: torch.fx.Graph) -> dict[torch.fx.Node, str]:
    """The printed name of every node; a name that is taken gets a number."""
    taken: set[str] = set()
    names: dict[torch.fx.Node, str] = {}
    for node in graph.nodes:
        wanted = _wanted_name(node, names)
        name, number = wanted, 1
        while name in taken:
            number += 1
            name = f"{wanted}#{number}"
        taken.add(name)
        names[node] = name
    return names


def _wanted_name(node: torch.fx.Node, names: dict[torch.fx.Node, str]) -> str:
    if kept := metadata.kept_parameter(node):
        return ops.escaped(kept.parameter)
    if node.op == "placeholder":
        if (parameter := _parameter_of_gathered(node)) is not None:
            return f"{parameter}.gathered"
        return metadata.gathered_bucket(node) or _bucket_of_input(node) or node.name
    if ops.is_call(node, ops.WAIT, ops.COPY_WAIT):
        start: Any = node.args[0]
        if start.op == "placeholder":
            return f"{_parameter_of_gathered(start)}.ready"
        return _filled_in(ops.OPERATORS[start.target].name_of_wait, start, names)
    row = ops.OPERATORS.get(node.target)
    return (_filled_in(row.name, node, names) if row else "") or node.name


def _filled_in(name: str, node: torch.fx.Node, names: dict[torch.fx.Node, str]) -> str:
    """A name of an operator's row, with the arguments of this node in place of those in braces."""

    def printed(found: re.Match[str]) -> str:
        text = _argument(ops.argument(node, found[1]), names)
        return ops.escaped(text) if found[1] == "parameter" else text

    return _ARGUMENT.sub(printed, name)


def _bucket_of_input(node: torch.fx.Node) -> str | None:
    for user in node.users:
        if ops.is_call(user, ops.UNSHARD):
            return str(ops.argument(user, "bucket"))
        for gather in user.users if ops.is_call(user, ops.JOIN) else [user]:
            if ops.is_all_gather(gather):
                shards = ops.gathered_shards(gather)
                return next((bucket for bucket, shard in shards.items() if shard is node), None)
        if ops.is_call(user, ops.VIEW_OUT):
            return f"{ops.escaped(ops.argument(user, 'parameter'))}.shard"
        if ops.is_conversion(user) and (bucket := _bucket_of_input(user)):
            return bucket
        for left in ("accumulated", "residual"):
            if ops.is_call(user, ops.PACK, ops.REDUCE_GRADIENT) and ops.argument(user, left) is node:
                return f"{ops.argument(user, 'bucket')}.{left}"
    return None


def _parameter_of_gathered(node: torch.fx.Node) -> str | None:
    """Whose rows an input brings that was gathered before the call; None for another input."""
    for user in node.users:
        if ops.is_call(user, ops.WAIT):
            user = next(iter(user.users))
        elif not ops.is_call(user, ops.UNSHARD) or ops.argument(user, "gathered") is not node:
            continue
        return ops.escaped(ops.argument(user, "parameter"))
    return None


def _line(node: torch.fx.Node, names: dict[torch.fx.Node, str]) -> str:
    row = ops.OPERATORS.get(node.target)
    values = list(node.args)
    if row is not None:
        found = {name: ops.argument(node, name) for name in row.shown}
        values = [value for name, value in found.items() if value or name not in _LEFT_OUT]
    arguments = [_argument(value, names) for value in values]
    arguments += [f"{name}={_argument(value, names)}" for name, value in node.kwargs.items()]
    call = f"{target_name(node)}({', '.join(arguments)})"
    return call if ops.is_call(node, ops.FREE, ops.UPDATE, ops.KEEP) else f"{names[node]}{_type(node)} = {call}"


def target_name(node: torch.fx.Node) -> str:
    """The printed name of what a node calls."""
    if node.op == "get_attr":
        return f"get_attr[{node.target}]"
    if isinstance(node.target, torch._ops.OpOverload):
        name = f"{node.target.namespace}.{node.target._schema.name.partition('::')[2]}"
        overload = node.target._overloadname
        return name.removeprefix("aten.") + ("" if overload in ("default", "Tensor") else f".{overload}")
    return str(getattr(node.target, "__name__", node.target))


def _type(node: torch.fx.Node) -> str:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ""
    dtype = _DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
    return f": {dtype}[{','.join(map(str, value.shape))}]"


def _argument(value: Any, names: dict[torch.fx.Node, str]) -> str:
    if isinstance(value, torch.fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument(item, names) for item in value)}]"
    if isinstance(value, torch.dtype):
        return _DTYPES.get(value, str(value).removeprefix("torch."))
    return str(value)


def num_bytes(node: torch.fx.Node) -> int | torch.SymInt:
    """Bytes of the tensor that `node` returns."""
    value = node.meta["val"]
    return value.numel() * value.element_size()  # type: ignore[no-any-return]


def print_schedule(gm: torch.fx.GraphModule, title: str = "forward") -> str:
    """Compute on the left, communication on the right, at the margin the bytes of full buffers alive after each line.

    A buffer counts from the start of its gather (or its copy) to its free; packed gradients from `pack` to their wait.
    """
    names = display_names(gm.graph)
    buffers = set(analysis.full_buffers(gm.graph))
    taken_over = [node for node in analysis.inputs(gm.graph) if metadata.kept_parameter(node)]
    alive: dict[torch.fx.Node, Any] = {
        node: num_bytes(node) for node in (*taken_over, *analysis.gathered_inputs(gm.graph))
    }
    lines = [title]
    for node in gm.graph.nodes:
        if not _is_scheduled(node):
            continue
        if (
            ops.is_all_gather(node)
            or ops.is_call(node, ops.PACK)
            or (node in buffers and not ops.is_call(node, ops.WAIT))
        ):
            alive[node] = num_bytes(node)
        for ended in _ended_by(node):
            alive.pop(ended, None)
        communication = _communication(node, names)
        text = f"{'':<26}{communication}" if communication else _compute(node, names)
        lines.append(f"  {text:<65} {sum(alive.values())}")
    return "\n".join(lines)


def _is_scheduled(node: torch.fx.Node) -> bool:
    """Whether the node takes time or holds memory: views and parts of a result do not."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    return ops.is_call(node, ops.WAIT) or not analysis.is_alias(node)


def _communication(node: torch.fx.Node, names: dict[torch.fx.Node, str]) -> str:
    if ops.is_collective(node):
        return f"{target_name(node).removeprefix('fsdp.')} {ops.argument(node, 'bucket')}"
    if ops.is_call(node, ops.WAIT):
        return f"wait {names[node]}"
    if ops.is_call(node, ops.FREE):
        return f"free {names[node.args[0]]}"  # type: ignore[index]
    return ""


def _compute(node: torch.fx.Node, names: dict[torch.fx.Node, str]) -> str:
    target = target_name(node).removeprefix("fsdp.")
    if ops.is_call(node, ops.UPDATE, ops.KEEP):
        return f"{target} {names[node.args[0]]}"  # type: ignore[index]
    return f"{target} {names[node]}" if ops.is_call(node, ops.COPY_OUT, ops.PACK, ops.REMAINDER) else target


def _ended_by(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The buffers (by the node that began them) whose life this node ends."""
    source: Any = node.args[0] if node.args else None
    if ops.is_call(node, ops.FREE):
        return [source.args[0] if ops.is_call(source, ops.WAIT) else source]
    if ops.is_call(node, ops.WAIT) and ops.is_reduction(source):
        return [found for found in source.all_input_nodes if ops.is_call(found, ops.PACK)]
    return []
