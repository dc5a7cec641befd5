"""A generated wrapper as data: the calls of its `call` function in order, with the buffers that each reads and writes.

Inductor's wrapper is straight-line Python, as of torch 2.13 to 2.15: assignments, calls, `del`, `with` for the device.
Of a function that it calls, as equal blocks of a graph become one, every call counts: its steps stand where it is
called, with names of their own for each call.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

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
    functions = functions_of(wrapper)
    if "call" not in functions:
        raise ValueError("no generated wrapper: it has no function `call`")
    steps = list(_Reader(functions).steps(functions["call"].body))
    return [_as_reuse(step, after) for step, after in zip(steps, [*steps[1:], None], strict=True)]


def functions_of(wrapper: str) -> dict[str, ast.FunctionDef]:
    """The functions of a wrapper that take a list of arguments: `call`, and those that it calls, by name."""
    functions = [node for node in ast.walk(ast.parse(wrapper)) if isinstance(node, ast.FunctionDef)]
    return {node.name: node for node in functions if node.args.args and node.args.args[-1].arg == "args"}


def num_bytes(name: str, bytes_of_buffer: Mapping[str, int]) -> int:
    """What a buffer of a step takes, by the name that the wrapper's text has for it; 0 where that is not known."""
    return bytes_of_buffer.get(name.partition("@")[0], 0)


def _as_reuse(step: Step, after: Step | None) -> Step:
    is_reuse = after is not None and step.kind == "alias" and after.kind == "free" and step.reads == after.reads
    return dataclasses.replace(step, kind="reuse") if is_reuse and after.line == step.line else step  # type: ignore[union-attr]


def inputs_of(wrapper: str) -> list[str]:
    """The names of the wrapper's arguments."""
    return _formals(functions_of(wrapper)["call"])


@dataclasses.dataclass
class _Reader:
    """Reads statements one after another.

    Attributes:
        functions: those of the wrapper.
        num_calls: how many calls of them were read.
        returned: the names of what each call returned, by the name of the whole.
    """

    functions: dict[str, ast.FunctionDef]
    num_calls: int = 0
    returned: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def steps(self, statements: Sequence[ast.stmt]) -> Iterator[Step]:
        for statement in statements:
            yield from self._of(statement)

    def _of(self, statement: ast.stmt) -> Iterator[Step]:
        match statement:
            case ast.With(body=body):
                yield from self.steps(body)
            case ast.Delete(targets=targets):
                names = [name for each in targets for name in _names(each)]
                freed = [part for name in names for part in self.returned.get(name, [name])]
                yield Step("free", "", tuple(freed), "", statement.lineno)
            case ast.Return(value=value):
                yield Step("return", "", tuple(_names(value)), "", statement.lineno)
            case ast.Assign(targets=[ast.Name(id=result)], value=value):
                yield from self._assigned(value, result)
            case ast.Expr(value=value):
                yield from _of_value(value, "")

    def _assigned(self, value: ast.expr, result: str) -> Iterator[Step]:
        match value:
            case ast.List(elts=taken) if (name := result.removesuffix("_args")) in self.functions:
                self.num_calls += 1
                for formal, each in zip(_formals(self.functions[name]), taken, strict=True):
                    yield Step("alias", "", tuple(_names(each)), self._own(formal), value.lineno)
            case ast.Call(func=ast.Name(id=name)) if name in self.functions:
                for step in _Reader(self.functions).steps(self.functions[name].body):
                    reads = [self._own(read) for read in step.reads]
                    if step.kind == "return":
                        self.returned[result] = reads
                    else:
                        own = self._own(step.result) if step.result else ""
                        yield dataclasses.replace(step, reads=tuple(reads), result=own)
            case ast.Subscript(value=ast.Name(id=whole), slice=ast.Constant(value=int(at))) if whole in self.returned:
                yield Step("alias", "", (self.returned[whole][at],), result, value.lineno)
            case _:
                yield from _of_value(value, result)

    def _own(self, name: str) -> str:
        return f"{name}@{self.num_calls}"


def _formals(function: ast.FunctionDef) -> list[str]:
    """The names to which a function assigns what is in `args`."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id == "args":
            (target,) = node.targets
            return [each.id for each in getattr(target, "elts", [target]) if isinstance(each, ast.Name)]
    return []


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
