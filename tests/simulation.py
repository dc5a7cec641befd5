"""All ranks of a sharded step in one process: the lowered graphs, node by node, for every rank at once.

Collectives behave as asynchronous ones: until its wait, what a collective returns is NaN, or a large number. The graphs
are those of `rewrite`, as aot_eager runs them; nothing is compiled, and there is no process group.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.fx
from torch import Tensor, nn

from fsdp_compile import rewrite, traced_call
from fsdp_compile.compiler.capture import Capture
from fsdp_compile.graphs import RewrittenGraphs
from fsdp_compile.passes.padding import shard_rows
from fsdp_compile.runtime.reads import Read

_c10d = torch.ops._c10d_functional


@dataclasses.dataclass(frozen=True)
class Sharded:
    """What one flat shard holds: `slots` are (parameter, offset, shape, the dimension on which it is sharded)."""

    stand_in: Tensor
    bucket: str
    slots: Sequence[tuple[str, int, tuple[int, ...], int]]
    size: int

    def of_rank(self, values: dict[str, Tensor], index: int) -> Tensor:
        """A rank's flat tensor of full ones by parameter: chunks along a dimension, zero padded."""
        flat = torch.zeros_like(self.stand_in)
        for name, offset, shape, dim in self.slots:
            part = values[name].detach().reshape(shape or (1,))
            if self.size > 1:
                most = shard_rows(shape[dim:], self.size)
                part = part.transpose(0, dim)[index * most : (index + 1) * most].transpose(0, dim)
            flat[offset : offset + part.numel()] = part.reshape(-1)
        return flat


@dataclasses.dataclass(frozen=True)
class Step:
    """What a forward and a backward returned: for every rank its outputs, and gradients by shard or parameter."""

    outputs: list[list[Tensor]]
    gradients: list[list[tuple[Any, Tensor | None]]]


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The graphs of a model's step, and what their inputs are."""

    graphs: RewrittenGraphs
    inputs: list[Any]
    shards: list[Sharded]
    world_size: tuple[int, int]

    @classmethod
    def of(
        cls, model: nn.Module, example: tuple[Tensor, ...], world_size: tuple[int, int], **options: Any
    ) -> Simulation:
        """The simulation of `model` on (replicas, ranks to shard over); options are those of `rewrite`."""
        inputs: list[Any] = []
        readings: list[nn.Module] = []
        compile_graph, reading_copy = Capture.compile, traced_call.reading_copy

        def recording(self: Capture, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
            inputs.extend(example_inputs)
            return compile_graph(dataclasses.replace(self, generates_code=False), gm, example_inputs)

        def reading(*args: Any) -> nn.Module:
            readings.append(reading_copy(*args))
            return readings[-1]

        with patch.object(Capture, "compile", recording), patch.object(traced_call, "reading_copy", reading):
            ranks: Any = world_size if world_size[0] > 1 else world_size[1]
            graphs = rewrite(model, *example, world_size=ranks, **options)
        return cls(graphs, inputs, _shards(readings[-1]), world_size)

    def step(self, parameters: dict[str, Tensor], inputs: list[tuple[Tensor, ...]], seeds: list[int]) -> Step:
        """A forward and a backward, all tangents ones, with every rank's inputs and its seed of random numbers."""
        example, num_ranks = inputs[0], len(inputs)
        states = [torch.Generator().manual_seed(seed).get_state() for seed in seeds]
        values: list[list[Any]] = []
        for value in self.inputs:
            (shard,) = [shard for shard in self.shards if shard.stand_in is value] or [None]
            (index,) = [index for index, tensor in enumerate(example) if tensor is value] or [None]
            if shard is not None:
                values.append([shard.of_rank(parameters, rank % self.world_size[1]) for rank in range(num_ranks)])
            elif index is not None:
                values.append([own[index] for own in inputs])
            else:
                values.append([value.clone() if torch.is_tensor(value) else value for _ in inputs])
        run = _Run(self.world_size, states)
        forward, backward = self.graphs.lowered.forward, self.graphs.lowered.backward
        placeholders = [node.name for node in forward.graph.nodes if node.op == "placeholder"]
        primals = [values[int(name.removeprefix("primals_")) - 1] for name in placeholders]
        returned = run(forward, primals)
        if backward is None:
            return Step(list(zip(*returned, strict=True)), [])  # type: ignore[arg-type]
        taken = [node for node in backward.graph.nodes if node.op == "placeholder"]
        tangents = [[torch.ones(node.meta["val"].shape)] * num_ranks for node in taken if "tangents" in node.name]
        num_outputs = len(returned) - (len(taken) - len(tangents))
        gradients = run(backward, [*returned[num_outputs:], *tangents])
        outputs = [[returned[i][rank] for i in range(num_outputs)] for rank in range(num_ranks)]
        of = [self.inputs[int(name.removeprefix("primals_")) - 1] for name in placeholders]
        pairs = list(zip(of, gradients, strict=True))
        return Step(outputs, [[(key, each and each[rank]) for key, each in pairs] for rank in range(num_ranks)])

    def outputs_leading_to(self, model: nn.Module) -> dict[str, frozenset[int]]:
        """By parameter: the outputs whose gradients lead to one of it, as the graphs say."""
        assert self.graphs.dependence is not None
        results_of = self.graphs.dependence.results_of
        number = {id(value): index for index, value in enumerate(self.inputs)}
        key_of_name: dict[str, Any] = {name: number.get(id(value)) for name, value in model.named_parameters()}
        for shard in self.shards:
            key_of_name |= {name: (shard.bucket, offset) for name, offset, *_ in shard.slots}
        return {name: results_of.get(key, frozenset()) for name, key in key_of_name.items()}


def _shards(reading: nn.Module) -> list[Sharded]:
    found: dict[int, tuple[Tensor, str, int, dict[str, tuple[str, int, tuple[int, ...], int]]]] = {}
    for module in reading.modules():
        for read in vars(module).get("_fsdp_reads", {}).values():
            if isinstance(read, Read):
                *_, parts, (bucket, name, offset, rows, size, *_) = read.constants
                shape, dim, *_ = parts or (rows, 0)
                entry = found.setdefault(id(read.shard.data), (read.shard.data, bucket, size, {}))
                entry[3][name] = name, offset, tuple(shape), dim
    return [Sharded(data, bucket, list(slots.values()), size) for data, bucket, size, slots in found.values()]


@dataclasses.dataclass
class _Run:
    """Runs graphs; values are lists with that of each rank. `states` are the ranks' random number generators."""

    world_size: tuple[int, int]
    states: list[Tensor]
    pending: dict[int, tuple[Tensor, Tensor]] = dataclasses.field(default_factory=dict)

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[list[Any]]) -> list[Any]:
        """What the graph returns: None, or a list with each rank's value."""
        values: dict[torch.fx.Node, list[Any]] = {}
        given = iter(inputs)
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                values[node] = [operator.attrgetter(node.target)(gm)] * len(self.states)
            elif node.op == "call_function":
                values[node] = self._call(node, values)
            else:
                return [values[value] if isinstance(value, torch.fx.Node) else value for value in node.args[0]]
        raise AssertionError("a graph without an output")

    def _call(self, node: torch.fx.Node, values: dict[torch.fx.Node, list[Any]]) -> list[Any]:
        def at(rank: int) -> tuple[Any, Any]:
            return torch.fx.map_arg((node.args, node.kwargs), lambda value: values[value][rank])  # type: ignore[return-value]

        arguments = [at(rank) for rank in range(len(self.states))]
        if node.target is _c10d.wait_tensor.default:
            return [self._wait(args[0]) for args, _ in arguments]
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "_c10d_functional":
            return self._collective(node, [args for args, _ in arguments])
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return [self._random(rank, node.target, *each) for rank, each in enumerate(arguments)]
        return [node.target(*args, **kwargs) for args, kwargs in arguments]  # type: ignore[operator]

    def _random(self, rank: int, target: Any, args: Any, kwargs: Any) -> Any:
        with torch.random.fork_rng():
            torch.set_rng_state(self.states[rank])
            result = target(*args, **kwargs)
            self.states[rank] = torch.get_rng_state()
        return result

    def _wait(self, tensor: Tensor) -> Tensor:
        """The tensor, which has its values from now on; of what is no longer pending, the same."""
        _, value = self.pending.pop(id(tensor), (tensor, tensor))
        return tensor.copy_(value)

    def _collective(self, node: torch.fx.Node, arguments: list[Any]) -> list[Any]:
        kind = node.target._schema.name.split("::")[1]  # type: ignore[union-attr]
        results: list[Any] = [None] * len(arguments)
        for members in self._groups(arguments[0][-1]):
            given = [arguments[rank][0] for rank in members]
            if not kind.endswith("_coalesced"):
                found = _COLLECTIVES[kind](given, arguments[0])
            else:
                combine = _COLLECTIVES[kind.removesuffix("_coalesced")]
                pieces = [combine(list(each), arguments[0]) for each in zip(*given, strict=True)]
                found = [list(each) for each in zip(*pieces, strict=True)]
            for rank, value in zip(members, found, strict=True):
                results[rank] = [self._later(v) for v in value] if isinstance(value, list) else self._later(value)
        return results

    def _later(self, value: Tensor) -> Tensor:
        nothing = math.nan if value.dtype.is_floating_point else torch.iinfo(value.dtype).max
        empty = torch.full_like(value, nothing)
        self.pending[id(empty)] = empty, value
        return empty

    def _groups(self, name: str) -> list[list[int]]:
        replicas, size = self.world_size
        ranks = list(range(replicas * size))
        if name == "shard" and replicas > 1:
            return [ranks[begin : begin + size] for begin in ranks[::size]]
        if name == "replicate":
            return [ranks[i::size] for i in range(size)]
        return [ranks]


def _all_gather(given: list[Tensor], _: Any) -> list[Tensor]:
    return [torch.cat(given) for _ in given]


def _reduced(given: list[Tensor], kind: str) -> Tensor:
    total = torch.stack(given).sum(0)
    return total / len(given) if kind == "avg" else total


def _reduce_scatter(given: list[Tensor], arguments: Any) -> list[Tensor]:
    return list(_reduced(given, arguments[1]).clone().chunk(len(given)))


def _all_reduce(given: list[Tensor], arguments: Any) -> list[Tensor]:
    return [_reduced(given, arguments[1]) for _ in given]


def _all_to_all(given: list[Tensor], _: Any) -> list[Tensor]:
    parts = [tensor.chunk(len(given)) for tensor in given]
    return [torch.cat([of_rank[index] for of_rank in parts]) for index in range(len(given))]


_COLLECTIVES = {
    "all_to_all_single": _all_to_all,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_reduce": _all_reduce,
}
