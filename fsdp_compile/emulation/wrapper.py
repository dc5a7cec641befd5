"""A generated wrapper as data: the calls of its `call` function in order, with the buffers that each reads and writes.

Inductor's wrapper is straight-line Python, as of torch 2.13 to 2.15: assignments, calls, `del`, `with` for the device.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator

_NOT_CALLS = {"start_graph", "end_graph", "get_raw_stream", "copy_if_misaligned"}
_VIEWS = {"reinterpret_tensor", "as_strided"}
_ALLOCATIONS = {"empty_strided_cuda", "empty_strided_cpu", "empty_strided", "empty_strided_cpu_pinned"}
_COPIES = {"copy_start": "copy", "copy_wait": "wait", "copies_done": "host"}


@dataclasses.dataclass(frozen=True)
class Step:
    """One thing that the wrapper does.

    Attributes:
        kind: "kernel" (Triton's), "extern" (a library's: of `extern_kernels`, or an operator of ATen), "collective",
            "copy" (the start of one between devices), "wait" (for either), "host" (the host waits for the device),
            "allocate", "alias" (another name of a buffer), "reuse" (a new buffer, in the memory of one that is freed
            next), "free" or "return".
        name: the kernel or operator, without its namespace and overload; "" for what is no call.
        reads: the buffers it is given, by the names that the wrapper has for them.
        result: the name it assigns to, or "".
        line: of the wrapper's text, from 1.
    """

    kind: str
    name: str
    reads: tuple[str, ...]
    result: str
    line: int

    @property
    def is_renaming(self) -> bool:
        """Whether the result is the memory of the first buffer that is read."""
        return self.kind in ("alias", "reuse") or (self.kind == "wait" and self.result != "")


def steps_of(wrapper: str) -> list[Step]:
    """What the wrapper does, in order.

    Raises:
        ValueError: the text has no function `call`.
    """
    for node in ast.walk(ast.parse(wrapper)):
        if isinstance(node, ast.FunctionDef) and node.name == "call":
            steps = [step for statement in node.body for step in _steps(statement)]
            return [_as_reuse(step, after) for step, after in zip(steps, [*steps[1:], None], strict=True)]
    raise ValueError("no generated wrapper: it has no function `call`")


def _as_reuse(step: Step, after: Step | None) -> Step:
    is_reuse = after is not None and step.kind == "alias" and after.kind == "free" and step.reads == after.reads
    return dataclasses.replace(step, kind="reuse") if is_reuse and after.line == step.line else step  # type: ignore[union-attr]


def inputs_of(wrapper: str) -> list[str]:
    """The names of the wrapper's arguments."""
    for node in ast.walk(ast.parse(wrapper)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id == "args":
            (target,) = node.targets
            return [each.id for each in getattr(target, "elts", [target]) if isinstance(each, ast.Name)]
    return []


def _steps(statement: ast.stmt) -> Iterator[Step]:
    match statement:
        case ast.With(body=body):
            for inner in body:
                yield from _steps(inner)
        case ast.Delete(targets=targets):
            yield Step("free", "", tuple(name for each in targets for name in _names(each)), "", statement.lineno)
        case ast.Return(value=value):
            yield Step("return", "", tuple(_names(value)), "", statement.lineno)
        case ast.Assign(targets=[ast.Name(id=result)], value=value):
            yield from _of_value(value, result)
        case ast.Expr(value=value):
            yield from _of_value(value, "")


def _of_value(value: ast.expr, result: str) -> Iterator[Step]:
    reads = tuple(_names(value))
    if not isinstance(value, ast.Call):
        if result and reads and reads != ("args",):
            yield Step("alias", "", reads, result, value.lineno)
        return
    path = ast.unparse(value.func).split(".")
    name = path[-1]
    if name in _VIEWS:
        yield Step("alias", "", reads, result, value.lineno)
    elif name in _ALLOCATIONS:
        yield Step("allocate", name, (), result, value.lineno)
    elif name == "run":
        yield Step("kernel", path[-2], reads, result, value.lineno)
    elif "_c10d_functional" in path:
        kind = "wait" if path[-2] == "wait_tensor" else "collective"
        yield Step(kind, path[-2], reads, result, value.lineno)
    elif path[:3] == ["torch", "ops", "fsdp"] and path[3] in _COPIES:
        yield Step(_COPIES[path[3]], path[3], reads, result, value.lineno)
    elif path[0] == "extern_kernels" or path[:2] == ["torch", "ops"]:
        yield Step("extern", name if path[0] == "extern_kernels" else path[-2], reads, result, value.lineno)
    elif name in _NOT_CALLS or name.startswith("assert_") or path[0] in {"args", "torch"}:
        return
    else:
        yield Step("extern", name, reads, result, value.lineno)


def _names(value: ast.AST | None) -> list[str]:
    """The buffers and inputs that an expression names, in order, each once."""
    if value is None:
        return []
    found = [node for node in ast.walk(value) if isinstance(node, ast.Name)]
    found.sort(key=lambda node: (node.lineno, node.col_offset))
    functions = {id(part) for node in ast.walk(value) if isinstance(node, ast.Call) for part in ast.walk(node.func)}
    names = [node.id for node in found if id(node) not in functions]
    return list(dict.fromkeys(name for name in names if name not in {"torch", "stream", "raw_stream0"}))
