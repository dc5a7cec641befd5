"""Formulas: what a step costs as sympy expressions in the number of ranks, the dynamic dimensions, and the hardware.

Nothing is modelled a second time: every tensor of the rewritten graphs gets its sizes as expressions, the hardware gets
a symbol for each of its figures, and the code that predicts with numbers (`nodes`, `collectives`, `timeline`) runs on
them. With numbers for all symbols a formula is what `predict` says of the graphs traced with those numbers, as long as
these differ in sizes only: which operators there are, which of them the backward computes again, and whether a bucket's
only parameter must be copied out of what was gathered, is as it was traced.

The symbols:

    N                     ranks that parameters are sharded over; with NO_SHARD, those that gradients are reduced over
    R                     with hybrid sharding, how many such groups of N ranks there are
    batch, seq, ...       dynamic dimensions, as `names` calls them
    flops_bfloat16, ...   FLOP/s that large matmuls of a dtype reach: the dense peak times the efficiency
    others                fields of `Hardware`, those of a link after its name (`within_node_bandwidth`)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
import torch.fx

from ..errors import ConfigError
from ..graphs import RewrittenGraphs
from ..passes import analysis, metadata, ops
from .arithmetic import largest
from .collectives import Ring
from .hardware import Hardware, Link
from .memory import is_shard, received_by_backward
from .nodes import Compiler, base, num_bytes
from .optimizers import Optimizer, find_optimizer, gradient_bytes, state_bytes
from .symbolic import symbolic, tidy
from .timeline import COMPUTE, COPIES, Clock, Step, rings_of, sent_by, steps_of
from .work import Work

DEFINITIONS = {
    "shard_bytes": "bytes of the shards of a rank, with padding",
    "gradient_bytes": "bytes of the gradients that the backward returns, which are those of shards",
    "optimizer_bytes": "bytes of the optimizer's states: its states for each byte of gradient",
    "saved_bytes": "bytes of the tensors that the forward computes and the backward reads: the activations it saves",
    "bytes_moved": "bytes that a rank sends: M (N-1)/N of a message of M bytes in full, twice that of an all-reduce",
    "flops": "FLOPs of forward and backward, a multiply-add being two",
    "compute_time": "seconds of all kernels of forward and backward, one after another",
    "communication_time": "seconds of all collectives, one after another",
    "exposed_time": "seconds that compute stands still: of every wait, how much later than compute its collective is",
    "optimizer_time": "seconds of the optimizer's step: its traffic with memory",
    "step_time": "seconds of forward, backward and optimizer, in the order of the graphs",
    "lower_bound": "seconds that no order of the same work can go below: all of the compute or all messages of one "
    "process group, whichever is more, and the optimizer",
}
"""What every formula is; see `formulas_of`."""


@dataclasses.dataclass(frozen=True)
class Formula:
    """One expression, and the definitions of what it is written with; `str()` is the text to print.

    Attributes:
        name: one of `DEFINITIONS`.
        where: symbols that stand for other expressions; each uses symbols of earlier ones only. Times in a schedule
            follow from earlier times: written out, an expression would double with every collective.
    """

    name: str
    expression: sympy.Expr
    where: Mapping[sympy.Symbol, sympy.Expr]

    @property
    def symbols(self) -> set[sympy.Symbol]:
        """Those that `at` needs values for."""
        used: set[sympy.Symbol] = self.expression.free_symbols.union(*(one.free_symbols for one in self.where.values()))
        return used - self.where.keys()

    @property
    def written_out(self) -> sympy.Expr:
        """A single expression without definitions; for formulas of time, of graphs with a few collectives only."""
        return self._with({})

    def at(self, hardware: Hardware | None = None, **sizes: int) -> float:
        """The number that the formula gives on this hardware.

        Args:
            sizes: of the dynamic dimensions, and numbers of ranks (N, R), by name.

        Raises:
            ConfigError: a symbol of the formula got no value.
        """
        values = {**({} if hardware is None else _figures(hardware)), **sizes}
        if missing := sorted({symbol.name for symbol in self.symbols} - values.keys()):
            raise ConfigError(f"{self.name} depends on {', '.join(missing)}: pass hardware, and sizes by name")
        return float(self._with({symbol: sympy.sympify(values[symbol.name]) for symbol in self.symbols}))

    def _with(self, values: dict[sympy.Symbol, sympy.Expr]) -> sympy.Expr:
        for symbol, definition in self.where.items():
            values[symbol] = definition.xreplace(values)
        return self.expression.xreplace(values)

    def __str__(self) -> str:
        lines = [f"{self.name} = {self.expression}"]
        lines += [f"    {symbol} = {definition}" for symbol, definition in self.where.items()]
        return "\n".join(lines)


def formulas_of(
    graphs: RewrittenGraphs, *, optimizer: str = "adam", compiler: Compiler = "inductor", names: Sequence[str] = ()
) -> dict[str, Formula]:
    """The formulas of a step of these graphs, by the names in `DEFINITIONS`, which says what each is.

    Args:
        optimizer: one of `OPTIMIZERS`.
        compiler: what compiles the graphs; see `nodes.Compiler`.
        names: of the dynamic dimensions, in the order in which the inputs of the forward show them; dimensions that
            are always equal can share one, and those left out keep the names that torch gave them.

    Raises:
        ConfigError: there is no such optimizer, a name is taken, there are fewer dynamic dimensions than names, a unit
            has a communication_dtype, or the graphs do not show all parameters of a bucket, whose shapes say how its
            shard grows with fewer ranks.
    """
    if taken := [name for name in names if name in ("N", "R", *_FIGURES)]:
        raise ConfigError(f"names: {', '.join(taken)} would stand for two things, a dimension and a symbol of formulas")
    of_optimizer = find_optimizer(optimizer)
    work, hardware, define = symbolic(graphs, names, compiler=compiler), _symbolic_hardware(), _Definitions()
    rings = _named_rings(rings_of(work, hardware), hardware, define)
    steps = steps_of(work, hardware, rings)
    amounts = _amounts(work, rings, of_optimizer)
    optimizer_time = of_optimizer.traffic * amounts["gradient_bytes"] / hardware.memory_bandwidth
    expressions = amounts | _times(steps, rings, hardware, optimizer_time, define)
    return {name: define.formula(name, expressions[name]) for name in DEFINITIONS}


def _amounts(work: Work, rings: Mapping[str, Ring], optimizer: Optimizer) -> dict[str, Any]:
    """What is held, sent and computed, by the names of formulas."""
    shards = [node for node in analysis.inputs(work.forward.graph) if is_shard(node)]
    collectives = [node for side in work.sides for node in side.graph.nodes if ops.is_collective(node)]
    return {
        "shard_bytes": _sum(num_bytes(node.meta["val"]) for node in shards),
        "gradient_bytes": gradient_bytes(work),
        "optimizer_bytes": state_bytes(work, optimizer),
        "saved_bytes": _sum(num_bytes(node.meta["val"]) for node in _saved(work)),
        "bytes_moved": _sum(sent_by(node, rings[ops.argument(node, "group")]) for node in collectives),
        "flops": _sum(side.flops for side in work.sides),
    }


def _times(
    steps: Sequence[Step], groups: Collection[str], hardware: Hardware, optimizer_time: Any, define: _Definitions
) -> dict[str, Any]:
    """Seconds, by the names of formulas."""
    clock = Clock(hardware.contention, define.number)
    clock.run(_named_steps(steps, define))
    lanes = dict.fromkeys((COMPUTE, *groups, *(step.lane for step in steps)))
    seconds = {lane: _sum(step.seconds for step in steps if step.lane == lane) for lane in lanes}
    return {
        "compute_time": seconds[COMPUTE],
        "communication_time": _sum(seconds[group] for group in groups),
        "exposed_time": _sum(clock.exposed.values()),
        "optimizer_time": optimizer_time,
        "step_time": clock.end + optimizer_time,
        "lower_bound": _busiest(seconds, define) + optimizer_time,
    }


def _busiest(seconds: Mapping[str, Any], define: _Definitions) -> Any:
    """The seconds of compute, of one process group, or of copies between devices, whichever are most."""
    suffixes = _suffixes([lane for lane in seconds if lane not in (COMPUTE, COPIES)])
    sending = [define(f"communication_time{suffix}", seconds[lane]) for lane, suffix in suffixes.items()]
    sending += [define("copy_time", seconds[COPIES])] if COPIES in seconds else []
    return largest(define("compute_time", seconds[COMPUTE]), *sending)


def _suffixes(groups: Collection[str]) -> dict[str, str]:
    """What the symbols of a process group have after their names, where there are several."""
    return {group: f"_{group}" if len(groups) > 1 else "" for group in groups}


class _Definitions:
    """Expressions that got a name, in the order in which they did."""

    def __init__(self) -> None:
        self.expression_of_symbol: dict[sympy.Symbol, sympy.Expr] = {}
        self.symbol_of_expression: dict[sympy.Expr, sympy.Symbol] = {}
        self.num_of_kind: dict[str, int] = {}

    def __call__(self, name: str, value: Any) -> sympy.Expr:
        """The symbol of this name, which stands for `value` from now on; a number or a symbol stands for itself."""
        expression = tidy(sympy.sympify(value))
        if expression.is_Atom:
            return expression
        symbol = sympy.Symbol(name, nonnegative=True)
        self.expression_of_symbol[symbol] = expression
        return symbol

    def number(self, kind: str, value: Any) -> sympy.Expr:
        """A symbol for `value`, numbered among those of its kind; equal expressions have one symbol."""
        if value not in self.symbol_of_expression:
            num = self.num_of_kind.get(kind, 0) + 1
            named = self.symbol_of_expression[value] = self(f"{kind}_{num}", value)
            self.num_of_kind[kind] = num if named in self.expression_of_symbol else num - 1
        return self.symbol_of_expression[value]

    def formula(self, name: str, value: Any) -> Formula:
        """The formula of this value, with those definitions that it needs."""
        expression = tidy(sympy.sympify(value))
        needed = set(expression.free_symbols)
        for symbol, definition in reversed(self.expression_of_symbol.items()):
            if symbol in needed:
                needed |= definition.free_symbols
        where = {symbol: found for symbol, found in self.expression_of_symbol.items() if symbol in needed}
        return Formula(name, expression, where)


def _sum(values: Iterable[Any]) -> Any:
    return sympy.Add(*values)


def _saved(work: Work) -> list[torch.fx.Node]:
    """The tensors that the forward computes and the backward reads; full parameters that it keeps are none."""
    if work.backward is None:
        return []
    received_of_sent = received_by_backward(work.forward.graph, work.backward.graph)
    computed = [
        base(sent)
        for sent, received in received_of_sent.items()
        if metadata.kept_parameter(received) is None and metadata.kept_part(received) is None
    ]
    return [node for node in dict.fromkeys(computed) if node.op != "placeholder"]


# ---------------------------------------------------------------------------------------------------------------
# Time
# ---------------------------------------------------------------------------------------------------------------


def _named_steps(steps: Sequence[Step], define: _Definitions) -> Iterator[Step]:
    """The same steps, with symbols for their seconds; kernels with nothing in between are one step.

    They end when they would one by one: compute is slower up to the end of the last collective, and not after.
    """
    kernels: list[Step] = []
    for step in steps:
        if step.lane == COMPUTE and not step.is_wait:
            kernels.append(step)
            continue
        yield from _joined(kernels, define)
        kernels.clear()
        yield step if step.is_wait else dataclasses.replace(step, seconds=define.number("message", step.seconds))
    yield from _joined(kernels, define)


def _joined(kernels: Sequence[Step], define: _Definitions) -> Iterator[Step]:
    if kernels:
        seconds = define.number("compute", _sum(step.seconds for step in kernels))
        yield dataclasses.replace(kernels[-1], seconds=seconds)


@dataclasses.dataclass(frozen=True)
class _NamedRing(Ring):
    """A ring with symbols for what follows from its size and the hardware."""

    named_nodes: Any
    named_hops: Any = None
    named_bandwidth: Any = None

    @property
    def num_nodes(self) -> Any:
        return self.named_nodes

    def hops(self, hardware: Hardware) -> Any:
        return self.named_hops

    def bandwidth(self, hardware: Hardware) -> Any:
        return self.named_bandwidth


def _named_rings(rings: Mapping[str, Ring], hardware: Hardware, define: _Definitions) -> dict[str, Ring]:
    found: dict[str, Ring] = {}
    for group, suffix in _suffixes(rings).items():
        size, ranks_of_a_node = rings[group].size, define(f"ranks_of_a_node{suffix}", rings[group].ranks_per_node)
        nodes = define(f"nodes{suffix}", Ring(size, ranks_of_a_node).num_nodes)
        named = _NamedRing(size, ranks_of_a_node, nodes)
        hops = define(f"hops{suffix}", Ring.hops(named, hardware))
        bandwidth = define(f"bandwidth{suffix}", Ring.bandwidth(named, hardware))
        found[group] = dataclasses.replace(named, named_hops=hops, named_bandwidth=bandwidth)
    return found


# ---------------------------------------------------------------------------------------------------------------
# Hardware and ranks
# ---------------------------------------------------------------------------------------------------------------


class _SymbolicHardware(Hardware):
    """Hardware with symbols for its figures, which cannot be checked."""

    def __post_init__(self) -> None:
        pass

    def flops_of(self, dtype: torch.dtype) -> Any:
        return sympy.Symbol(_flops(dtype), positive=True)


def _symbolic_hardware() -> Hardware:
    symbol_of_name: dict[str, Any] = {
        name: sympy.Symbol(name, positive=True, integer=name == "ranks_per_node" or None) for name in _FIGURES
    }
    links: dict[str, Any] = {
        link: Link(symbol_of_name.pop(f"{link}_bandwidth"), symbol_of_name.pop(f"{link}_hop"))
        for link in ("within_node", "between_nodes")
    }
    return _SymbolicHardware(name="symbols", flops={}, efficiency=1, memory=0, **links, **symbol_of_name)


_FIGURES = (
    "memory_bandwidth",
    "ranks_per_node",
    "within_node_bandwidth",
    "within_node_hop",
    "between_nodes_bandwidth",
    "between_nodes_hop",
    "host_bandwidth",
    "collective_start",
    "kernel_start",
    "contention",
    "reduce_scatter_factor",
    "all_reduce_factor",
    "attention_factor",
    "message_start",
)


def _figures(hardware: Hardware) -> dict[str, Any]:
    """The value of every symbol of the hardware, by name."""
    fields = dataclasses.asdict(hardware)
    for link in ("within_node", "between_nodes"):
        fields |= {f"{link}_{name}": value for name, value in fields[link].items()}
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return {name: fields[name] for name in _FIGURES} | {_flops(dtype): hardware.flops_of(dtype) for dtype in dtypes}


def _flops(dtype: torch.dtype) -> str:
    return f"flops_{str(dtype).removeprefix('torch.')}"
