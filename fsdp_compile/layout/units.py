"""Units: which parameters are gathered together.

A policy selects modules; each selected module is a unit that holds the parameters below it that no selected module
further down holds. What no module claims is split into runs between the units, in order of definition, embeddings apart
from the rest, so that an embedding and a head do not share a unit that would stay gathered throughout.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch.nn as nn
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

from ..checks import check_call, is_auto, listed
from ..errors import ConfigError
from .globs import innermost, is_named
from .policies import run_policy

_SMALL = 64  # a run with less than this fraction of the largest unit's elements is not gathered by itself
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclasses.dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together.

    Attributes:
        parameters: (name in the model, parameter), tied ones once.
        is_run: whether no selected module claims them.
    """

    name: str
    parameters: Sequence[tuple[str, nn.Parameter]]
    is_run: bool = False

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for _, parameter in self.parameters)


def find_units(model: nn.Module, policy: Any, ignored: Collection[nn.Parameter] = ()) -> list[Unit]:
    """The units of `model` in order of definition.

    Args:
        policy: "auto", a policy of torch.distributed.fsdp.wrap, a callable (module, recurse, nonwrapped_numel) -> bool,
            module classes, module instances, or globs over module names (one, or an iterable).
        ignored: parameters that belong to no unit.

    Raises:
        ConfigError: the policy is none of these, returns something else than bool, or names no module of the model.
    """
    selected = selected_modules(model, policy)
    name_of_selected = {name: module for name, module in model.named_modules() if module in selected}
    units: list[Unit] = []
    claimed: dict[str, list[tuple[str, nn.Parameter]]] = {}
    run: list[tuple[str, nn.Parameter]] = []

    def end_run() -> None:
        if run:
            units.append(Unit(_run_name(run), tuple(run), is_run=True))
            run.clear()

    for name, parameter in model.named_parameters():  # yields tied parameters once
        if parameter in ignored:
            continue
        owner = innermost(name, name_of_selected)
        if owner is None:
            if run and _is_embedding(name, model) != _is_embedding(run[-1][0], model):
                end_run()
            run.append((name, parameter))
            continue
        end_run()
        if owner not in claimed:
            claimed[owner] = []
            units.append(Unit(owner or "root", claimed[owner]))
        claimed[owner].append((name, parameter))
    end_run()
    if is_auto(policy):
        units = _without_small_runs(units)
    return [dataclasses.replace(units[0], name="root")] if len(units) == 1 else _with_names_of_their_own(units)


def _with_names_of_their_own(units: list[Unit]) -> list[Unit]:
    """Number those that have the name of one before: a module may be called `root`, or as the sum of two others."""
    taken: set[str] = set()
    named = []
    for unit in units:
        candidates = itertools.chain([unit.name], (f"{unit.name}#{number}" for number in itertools.count(2)))
        name = next(candidate for candidate in candidates if candidate not in taken)
        taken.add(name)
        named.append(dataclasses.replace(unit, name=name))
    return named


def _run_name(run: Sequence[tuple[str, nn.Parameter]]) -> str:
    """The modules of a run, by the names of the first and the last."""
    modules = list(dict.fromkeys(name.rpartition(".")[0] or name for name, _ in run))
    return modules[0] if len(modules) == 1 else f"{modules[0]}+{modules[-1]}"


def _is_embedding(parameter: str, model: nn.Module) -> bool:
    return isinstance(model.get_submodule(parameter.rpartition(".")[0]), nn.Embedding)


def _without_small_runs(units: list[Unit]) -> list[Unit]:
    """Let a run too small to be worth a collective (a final norm, say) join the unit before it, or the first."""
    largest = max((unit.numel for unit in units), default=0)
    small = [unit.is_run and unit.numel * _SMALL < largest for unit in units]
    kept = [index for index, is_small in enumerate(small) if not is_small]
    joined: dict[int, list[tuple[str, nn.Parameter]]] = {index: [] for index in kept}
    for index, unit in enumerate(units):
        home = max((other for other in kept if other <= index), default=kept[0])
        joined[home] += unit.parameters
    return [dataclasses.replace(units[index], parameters=tuple(joined[index])) for index in kept]


def selected_modules(model: nn.Module, policy: Any) -> set[nn.Module]:
    """The modules that `policy` makes units."""
    if is_auto(policy):
        return _repeated_blocks(model)
    if isinstance(policy, (ModuleWrapPolicy, CustomPolicy)):
        return run_policy(policy, model)
    if isinstance(policy, (type, nn.Module, str)):
        return _listed(model, [policy])
    if callable(policy):
        check_call("auto_wrap_policy", policy, module="", recurse="", nonwrapped_numel="")
        return _called(model, policy)
    kinds = "classes, modules or globs (or 'auto', a policy of torch.distributed.fsdp.wrap, or a callable)"
    return _listed(model, listed("auto_wrap_policy", policy, kinds))


def _repeated_blocks(model: nn.Module) -> set[nn.Module]:
    """The outermost repeated blocks; without any, the children that hold parameters."""
    total = sum(parameter.numel() for parameter in model.parameters())
    blocks = set(_blocks_below(model, total))
    if blocks:
        return blocks
    children = [child for child in model.children() if any(True for _ in child.parameters())]
    if len(children) == 1 and not list(model.parameters(recurse=False)):
        return _repeated_blocks(children[0])
    return {child for child in children if not isinstance(child, nn.Embedding)}


def _blocks_below(module: nn.Module, total: int) -> Iterator[nn.Module]:
    """Members of containers whose class repeats there; one with over half of all parameters is looked into instead."""
    repeats = Counter(type(child) for child in module.children() if isinstance(module, _CONTAINERS))
    for child in module.children():
        numel = sum(parameter.numel() for parameter in child.parameters())
        if numel and repeats[type(child)] > 1 and 2 * numel <= total:
            yield child
        else:
            yield from _blocks_below(child, total)


def _listed(model: nn.Module, wanted: list[Any]) -> set[nn.Module]:
    selected: set[nn.Module] = set()
    for item in wanted:
        if isinstance(item, type) and issubclass(item, nn.Module):
            found = {module for module in model.modules() if isinstance(module, item)}
        elif isinstance(item, nn.Module):
            found = {item} & set(model.modules())
        elif isinstance(item, str):
            found = {module for name, module in model.named_modules() if is_named(name, item)}
        else:
            raise ConfigError(f"auto_wrap_policy: {item!r} is no module class, module or glob over module names")
        if not found:
            hint = (
                " (text is a glob over names of modules; a class is given as itself)" if isinstance(item, str) else ""
            )
            raise ConfigError(f"auto_wrap_policy: no module of the model matches {_short(item)}{hint}")
        selected |= found
    return selected


def _short(item: object) -> str:
    return type(item).__name__ + "(...)" if isinstance(item, nn.Module) else repr(item)


def _called(model: nn.Module, policy: Callable[..., Any]) -> set[nn.Module]:
    """Ask `policy` as FSDP1 does: about every module on the way down, and on the way up about what is left of it."""
    selected: set[nn.Module] = set()

    def ask(module: nn.Module, recurse: bool, numel: int) -> bool:
        answer = policy(module=module, recurse=recurse, nonwrapped_numel=numel)
        if not isinstance(answer, bool):
            raise ConfigError(
                f"auto_wrap_policy returned {answer!r} for {type(module).__name__} (recurse={recurse}), not a bool"
            )
        return answer

    def visit(module: nn.Module) -> int:
        """How many elements below `module` the selected modules hold."""
        numel = sum(parameter.numel() for parameter in module.parameters())
        if not ask(module, True, numel):
            return 0
        claimed = sum(visit(child) for child in module.children())
        if module is not model and ask(module, False, numel - claimed):
            selected.add(module)
            return numel
        return claimed

    visit(model)
    return selected
