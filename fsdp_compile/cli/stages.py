"""The stages of a model that `fsdp-compile plan --mesh dp=8,pp=4` cuts into a pipeline, on the meta device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn as nn

from ..costs.stages import orders
from ..errors import ConfigError
from ..module.equal_layers import EqualLayers, are_equal, calls_counted
from .models import naming


@dataclasses.dataclass(frozen=True)
class CutStage:
    """A module of a pipeline.

    Attributes:
        values: what a micro-batch calls it with: the first stage as the model is called, the others with what the stage
            before returns.
        layers: the equal ones in it; None where there are none.
    """

    module: nn.Module
    values: Sequence[Any]
    layers: EqualLayers | None

    @property
    def received(self) -> int:
        """Bytes that come from the stage before. Whole numbers do not: every stage may have the tokens of its rows."""
        tensors = [value for value in self.values if isinstance(value, torch.Tensor) and value.requires_grad]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def is_equal_to(self, other: CutStage) -> bool:
        return are_equal([self.module, *self.values], [other.module, *other.values])


def cut(
    stages: Callable[[nn.Module, int], Any], name: str, model: nn.Module, inputs: Sequence[Any], number: int
) -> Iterator[CutStage]:
    """The stages of a model that is called with `inputs`.

    Args:
        stages: a function of the user's that cuts the model into so many modules.
        name: of that function.

    Raises:
        ConfigError: it raises an error, does not return so many modules, or one of them cannot be called.
    """
    with naming(f"{name}(), which cuts the model into {number} stages,"), torch.device("meta"):
        modules = list(stages(model, number))
    if len(modules) != number or not all(isinstance(module, nn.Module) for module in modules):
        raise ConfigError(f"{name}() returns {number} modules, as many as there are stages, not {len(modules)}")
    values: tuple[Any, ...] = tuple(inputs)
    for index, module in enumerate(modules):
        with_what = "with what the one before returned" if index else "as the model is"
        with (
            naming(f"stage {index} of {name}(), called {with_what},"),
            torch.no_grad(),
            torch.device("meta"),
            calls_counted(module) as num_calls,
        ):
            results = module(*values)
        yield CutStage(module, values, EqualLayers.of(module, num_calls))
        results = results if isinstance(results, tuple) else (results,)
        values = tuple(result.detach().requires_grad_() if _has_gradient(result) else result for result in results)


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def micro_batches(batch: int, rows: int, pp_size: int, stages_of_rank: int) -> int:
    """How many micro-batches of so many rows a rank's batch is; ConfigError where a pipeline has no order for them."""
    if rows < 1 or batch % rows:
        raise ConfigError(f"--micro-batch {rows}: the {batch} rows of a rank are no multiple of it")
    try:
        orders(pp_size, stages_of_rank, batch // rows)
    except ConfigError as e:
        raise ConfigError(f"{e}: a rank has {batch} rows, so change --batch or --micro-batch") from e
    return batch // rows
