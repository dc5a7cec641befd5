"""Optimizer steps on this rank's parts, and of small parameters that lie next to each other as one.

Optimizers of torch that treat every element by itself compute with this rank's parts of parameters, gradients and
states as plain tensors: the same values as with DTensors, whose dispatch in Python takes most of a step of many small
layers, and on a GPU in the few kernels that torch has for lists of plain tensors. The parts of a shard's parameters lie
next to each other in memory, and so do those of their gradients: a run of small ones is one tensor for the optimizer,
and their states are moved next to each other. What users see, states included, are DTensors of each parameter.

Private torch API, as of torch 2.11 to 2.15: `_init_group`, with which these optimizers collect what a step works on,
and where an optimizer keeps its hooks.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, optim
from torch._guards import TracingContext
from torch.distributed.tensor import DTensor

from .views import laid_out_as, local_tensor, without_offset

_ELEMENTWISE = {
    *(optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.ASGD, optim.NAdam, optim.RAdam),
    *(optim.RMSprop, optim.Rprop, optim.SGD),
}

_RUN_NUMEL = 2**16
"""Elements of a run at most: with more, an optimizer's time is not Python's, and what it allocates would be noticed."""

_GRADIENT = 1
"""Where a row has it."""

_Row = tuple[Any, ...]
_Lists = Sequence[list[Any]]


def compute_locally(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Before every step: see that an optimizer that treats every element by itself gets plain tensors."""
    end_runs(optimizer, args, kwargs)  # of a step that ended in an exception
    if not is_elementwise(optimizer) or "_init_group" in vars(optimizer):
        return
    vars(optimizer).update(_fsdp_seen={}, _fsdp_runs=[])  # are not pickled or copied with it
    after_init_group(optimizer, _begin_runs)
    handle = optimizer.register_step_post_hook(end_runs)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]  # the user's come after


def is_elementwise(optimizer: optim.Optimizer) -> bool:
    """Whether it is one of torch that treats every element by itself, and no subclass, which might do anything."""
    return type(optimizer) in _ELEMENTWISE


def after_init_group(optimizer: optim.Optimizer, change: Callable[[Any, dict[str, Any], _Lists], None]) -> None:
    """From now on, let `change` (optimizer, group, lists) change what this optimizer's steps work on.

    The lists are parameters, their gradients, and their states of each kind; a list is empty if there are none.
    """
    reference = weakref.ref(optimizer)

    def init_group(group: dict[str, Any], *lists: list[Any]) -> Any:
        found: Any = reference()
        result = type(found)._init_group(found, group, *lists)
        # Dynamo, which traces with what this returns, would take the gradients of now for those of later steps.
        if not torch.compiler.is_dynamo_compiling() and TracingContext.try_get() is None:
            change(found, group, lists)
        return result

    vars(optimizer)["_init_group"] = init_group  # is not pickled or copied with it


def _begin_runs(optimizer: Any, group: dict[str, Any], lists: _Lists) -> None:
    filled = [values for values in lists if values]
    if group["differentiable"] or not filled:
        return
    known: Seen | None = optimizer._fsdp_seen.get(id(group))
    runs = (known.runs_again(filled) if known is not None else None) or _runs(filled)
    if not runs:
        return
    for values, joined in zip(filled, zip(*(run.join() for run in runs), strict=True), strict=True):
        values[:] = joined
    optimizer._fsdp_runs.append((id(group), runs))


def end_runs(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    """After every step: what it left in the states of runs becomes the states of their parameters."""
    running: list[tuple[int, list[Run]]] = vars(optimizer).get("_fsdp_runs", [])
    for group, runs in running:
        for run in runs:
            run.end(optimizer.state)
        pairs = [pair for run in runs for pair in run.numbers()]
        if pairs:
            torch._foreach_copy_([other for _, other in pairs], [first for first, _ in pairs])
        vars(optimizer)["_fsdp_seen"][group] = Seen.of(runs) if all(run.is_sharded for run in runs) else None
    running.clear()


def _runs(filled: _Lists) -> list[Run]:
    """None of them, if a gradient or a state does not belong to this rank's part of its parameter."""
    rows: list[_Row] = list(zip(*filled, strict=True))
    if not all(is_sharded_alike(*row) for row in rows):
        return []
    runs: list[Run] = []
    for row in rows:
        parts = tuple(map(_part, row))
        if not runs or not runs[-1].take(row, parts):
            runs.append(Run([row], [parts]))
    return runs


@dataclasses.dataclass
class Seen:
    """What the last step of sharded parameters worked on; most steps find it again, but for the values of gradients.

    It keeps no tensor alive: states may be loaded, and the model may move. Nor does it refer to what users see, which
    torch would not convert then (`torch.utils.swap_tensors`).

    Attributes:
        ends: how many rows the runs had up to each.
        parts: columns of parameters and each kind of state, of this rank's parts; None for a state that there was not.
        specs: the same columns: how each was sharded; None for what was not.
        versions: of the states that are numbers, as the step has left them.
        offsets: where the gradients lay in their storage.
    """

    ends: list[int]
    parts: list[list[Callable[[], Any]]]
    specs: list[list[Any]]
    versions: list[int]
    offsets: list[Any]

    @classmethod
    def of(cls, runs: list[Run]) -> Seen:
        columns = list(zip(*(row for run in runs for row in run.rows), strict=True))
        parts = list(zip(*(row for run in runs for row in run.parts), strict=True))
        return cls(
            list(itertools.accumulate(len(run.rows) for run in runs)),
            [[_nothing if part is None else weakref.ref(part) for part in column] for column in _but_gradients(parts)],
            [list(map(_spec, column)) for column in _but_gradients(columns)],
            _versions(columns),
            list(map(Tensor.storage_offset, parts[_GRADIENT])),
        )

    def runs_again(self, filled: _Lists) -> list[Run] | None:
        """The runs of another step; None if anything is not as the last one has left it."""
        parts = [list(map(_part, column)) for column in filled]
        gradients, known = parts[_GRADIENT], [map(operator.call, column) for column in self.parts]
        if len(filled) != len(known) + 1 or len(gradients) != self.ends[-1]:
            return None
        for column, expected in zip(_but_gradients(parts), known, strict=True):
            if not all(map(operator.is_, column, expected)):
                return None
        specs = [self.specs[0], *self.specs]  # a gradient is sharded as its parameter
        for column, expected_specs in zip(filled, specs, strict=True):
            if not all(map(operator.is_, map(_spec, column), expected_specs)):
                return None
        if self.versions != _versions(filled) or self.offsets != list(map(Tensor.storage_offset, gradients)):
            return None
        if not all(map(Tensor.is_contiguous, gradients)):
            return None
        rows, rows_of_parts = list(zip(*filled, strict=True)), list(zip(*parts, strict=True))
        storages = list(map(id, map(_BASE, gradients)))
        runs = []
        for begin, end in itertools.pairwise([0, *self.ends]):
            if end - begin > 1 and (len(set(storages[begin:end])) > 1 or gradients[begin]._base is None):
                return None
            runs.append(Run(rows[begin:end], rows_of_parts[begin:end], is_joined=True))
        return runs


_BASE, _VERSION = operator.attrgetter("_base"), operator.attrgetter("_version")


def _spec(value: Any) -> Any:
    """How a tensor is sharded; None for one that is not."""
    return value._spec if isinstance(value, DTensor) else None


def _but_gradients(columns: Sequence[Any]) -> list[Any]:
    return [*columns[:_GRADIENT], *columns[_GRADIENT + 1 :]]


def _nothing() -> None:
    pass


def _versions(columns: Sequence[Sequence[Any]]) -> list[int]:
    """Of the states that are numbers."""
    return [version for column in columns[2:] if _is_number(column[0]) for version in map(_VERSION, column)]


def _is_number(state: Any) -> bool:
    return isinstance(state, Tensor) and not isinstance(state, DTensor)


class Run:
    """Parameters that an optimizer updates as one: at first the only one of a row.

    A row is a parameter, its gradient, and its states, as users see them. A state is a DTensor of the parameter's
    shape, a number (a plain 0-d tensor), or None, if there is none yet. Of a parameter that is not sharded, all are
    plain.

    Attributes:
        rows: one for each parameter.
        parts: the same rows of this rank's parts.
        is_joined: whether the states are known to lie next to each other.
        numel: elements of this rank's parts of the parameters.
        parameter: what the optimizer gets for the parameters.
    """

    def __init__(self, rows: list[_Row], parts: list[_Row], *, is_joined: bool = False) -> None:
        self.rows, self.parts, self.is_joined = rows, parts, is_joined
        self.parameter: Tensor = parts[0][0]
        self.numel: int = sum(part[0].numel() for part in parts)

    @property
    def is_sharded(self) -> bool:
        return isinstance(self.rows[0][0], DTensor)

    def take(self, row: _Row, parts: _Row) -> bool:
        """Add a row, if its parameter is small and can be updated with the others."""
        numel, (parameter, gradient, *_) = self.numel + parts[0].numel(), self.parts[-1]
        if (
            numel > _RUN_NUMEL
            or not isinstance(row[0], DTensor)
            or not _are_adjacent(parameter, parts[0])
            or not _are_adjacent(gradient, parts[1])
            or not all(map(_are_alike, self.rows[-1][2:], row[2:]))
        ):
            return False
        self.rows.append(row)
        self.parts.append(parts)
        self.numel = numel
        return True

    def join(self) -> list[Any]:
        """What the optimizer gets: a parameter, its gradient, and its states; states are moved next to each other."""
        if len(self.rows) == 1:
            return list(self.parts[0])
        joined: list[Any] = [part.as_strided((self.numel,), (1,)) for part in self.parts[0][:2]]
        for index, state in enumerate(self.rows[0][2:], start=2):
            if isinstance(state, DTensor):
                states = [parts[index] for parts in self.parts]
                if not self.is_joined and not _are_adjacent(*states):
                    states = self._move(index, states)
                state = states[0].as_strided((self.numel,), (1,))
            joined.append(state)  # what is no DTensor is equal for all
        self.parameter = joined[0]
        return joined

    def _move(self, index: int, states: list[Tensor]) -> list[Tensor]:
        moved = self._split(torch.cat([state.reshape(-1) for state in states]))
        for at, (row, state) in enumerate(zip(self.rows, moved, strict=True)):
            row[index]._local_tensor = state
            self.parts[at] = (*self.parts[at][:index], state, *self.parts[at][index + 1 :])
        return moved

    def _split(self, joined: Tensor) -> list[Tensor]:
        if len(self.rows) == 1:
            return [joined]
        parameters = [parts[0] for parts in self.parts]
        views = joined.split([parameter.numel() for parameter in parameters])
        return [view.view(parameter.shape) for view, parameter in zip(views, parameters, strict=True)]

    def numbers(self) -> list[tuple[Tensor, Tensor]]:
        """States that are numbers: that of the first parameter, which a step counts on, and that of each other."""
        first, *others = self.rows
        numbers = [index for index, state in enumerate(first[2:], start=2) if _is_number(state)]
        return [(first[index], other[index]) for index in numbers for other in others]

    def end(self, states: dict[Any, dict[str, Any]]) -> None:
        """After a step: states that are new are split.

        Args:
            states: the optimizer's, of each parameter.
        """
        if not self.is_sharded:
            return
        # SGD notes momentum as the state of what it was given.
        for name, state in states.pop(self.parameter, {}).items():
            if state is not None and any(states[row[0]].get(name) is None for row in self.rows):
                for (parameter, *_), local in zip(self.rows, self._split(state), strict=True):
                    if states[parameter].get(name) is None:
                        placed: Any = laid_out_as(parameter, local)
                        states[parameter][name] = without_offset(placed)


def _part(value: Any) -> Any:
    return local_tensor(value) if isinstance(value, DTensor) else value


def is_sharded_alike(parameter: Tensor, *others: Tensor | None) -> bool:
    """Whether this rank's part of each of the others belongs to its part of the parameter; that of a number does."""
    if not isinstance(parameter, DTensor):
        return not any(isinstance(other, DTensor) for other in others)
    spec, shape = parameter._spec, parameter.shape
    for other in others:
        if isinstance(other, DTensor):
            if other._spec is spec:
                continue
            if other.placements != spec.placements or other.device_mesh != spec.mesh or other.shape != shape:
                return False
        elif other is not None and other.dim():
            return False
    return True


def _are_adjacent(first: Tensor, *others: Tensor) -> bool:
    """Whether the memory of each begins where that of the one before it ends."""
    if not first.is_contiguous():
        return False
    dtype, storage, end = first.dtype, first.untyped_storage().data_ptr(), first.data_ptr() + first.nbytes
    for other in others:
        if other.data_ptr() != end or other.dtype != dtype or not other.is_contiguous():
            return False
        if other.untyped_storage().data_ptr() != storage:
            return False
        end += other.nbytes
    return True


def _are_alike(first: Tensor | None, second: Tensor | None) -> bool:
    """Whether states of one kind can be one state: those of a parameter's shape, and equal numbers."""
    if first is None or second is None:
        return first is second
    if isinstance(first, DTensor) or isinstance(second, DTensor):
        return isinstance(first, DTensor) and isinstance(second, DTensor)
    return first.is_cpu and second.is_cpu and first.item() == second.item()  # a GPU would have to be waited for
