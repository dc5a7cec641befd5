"""Communication in a narrower form than values have: which units it is asked for, and what can be asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from ..checks import check_bool, is_auto
from ..errors import ConfigError
from ..passes import forms
from .globs import is_named

_INTEGERS = {"int8": forms.INT8_BLOCKS, "int4": forms.INT4_BLOCKS}
_REDUCED = (torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class CommunicationDtype:
    """In which form gathers and reductions send what they send. Values, gradients and states keep their dtype.

    Attributes:
        gather: "int8" or "int4" sends each row of a parameter in blocks of at most 256 integers, with a float32 scale
            for each; what the forward and the backward read is these integers times their scale. Gradients are taken
            as if nothing had been rounded. None sends the dtype that is computed with.
        reduce: "int8" or "int4" likewise for the rows of gradients; torch.bfloat16 or torch.float16 casts them. Each
            rank sends the others their part, and sums up in float32 what it receives: each gradient is rounded once.
            None reduces in the dtype that it has, or in the `reduce_dtype` of `mp_policy`.
        error_feedback: with integers as `reduce`, whether what the messages of a rank lose of its gradients is added
            to those of the next step. Each rank keeps that for whole parameters, in bfloat16: 2 bytes for each element
            of the unit. `CommunicationState` saves and loads it. (Seide et al., Interspeech 2014; where parameters
            are sharded: Xie et al., LoCo, arXiv 2407.04480)

        all_reduce: like `reduce`, for what replicas send each other (HYBRID_SHARD, and parameters that every rank keeps
            whole): each sends the others what its ranks have summed up, and sums up in float32 what it receives. R
            replicas receive R - 1 messages, where an all-reduce moves 2 (R - 1) / R times the float32 of a shard: that
            is less for integers of 8 bits up to 7 replicas, of 4 bits up to 15, for two bytes up to 3.

    Parameters of one dimension, and those with rows of less than 16 elements, are never sent as integers.

    Raises:
        ConfigError: for any other value.
    """

    gather: str | None = None
    reduce: str | torch.dtype | None = None
    error_feedback: bool = False
    all_reduce: str | torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.gather not in (None, *_INTEGERS):
            raise ConfigError(f"CommunicationDtype: gather is None, 'int8' or 'int4', not {self.gather!r}")
        for name in ("reduce", "all_reduce"):
            if (asked := getattr(self, name)) not in (None, *_INTEGERS, *_REDUCED):
                raise ConfigError(
                    f"CommunicationDtype: {name} is None, 'int8', 'int4', torch.bfloat16 or torch.float16, not "
                    f"{asked!r}"
                )
        check_bool("CommunicationDtype: error_feedback", self.error_feedback)
        if self.error_feedback and self.reduce not in _INTEGERS:
            raise ConfigError(
                "CommunicationDtype: error_feedback is for reduce='int8' and 'int4', not "
                f"{self.reduce!r}, of which messages lose nothing, or next to nothing"
            )

    @property
    def gather_form(self) -> str:
        """As operators take it: "" for the dtype that is computed with."""
        return "" if self.gather is None else _INTEGERS[self.gather]

    @property
    def reduce_form(self) -> str:
        """As operators take it: "" for a reduction by the collective itself."""
        return _reduced_form(self.reduce)

    @property
    def all_reduce_form(self) -> str:
        """As operators take it: "" for a reduction by the collective itself."""
        return _reduced_form(self.all_reduce)


def _reduced_form(asked: str | torch.dtype | None) -> str:
    if isinstance(asked, torch.dtype):
        return forms.name_of_dtype(asked)
    return "" if asked is None else _INTEGERS[asked]


UNCHANGED = CommunicationDtype()


def check_communication(communication_dtype: object) -> Mapping[str, CommunicationDtype]:
    """What is asked for, by glob over the names of units; raises ConfigError for what cannot be meant."""
    if is_auto(communication_dtype):
        return {}
    if isinstance(communication_dtype, CommunicationDtype):
        return {"*": communication_dtype}
    if isinstance(communication_dtype, Mapping) and all(
        isinstance(glob, str) and isinstance(value, CommunicationDtype) for glob, value in communication_dtype.items()
    ):
        return dict(communication_dtype)
    raise ConfigError(
        "communication_dtype is 'auto', a CommunicationDtype, or a map to those from globs over unit names, not "
        f"{communication_dtype!r}"
    )


def find_communication(asked: Mapping[str, CommunicationDtype], units: Sequence[str]) -> dict[str, CommunicationDtype]:
    """What is asked for, by unit: by the last glob that matches its name.

    Raises:
        ConfigError: a glob matches no unit: it would be ignored in silence.
    """
    for glob in asked:
        if not any(is_named(unit, glob) for unit in units):
            raise ConfigError(f"communication_dtype: {glob!r} matches none of the units {list(units)}")
    return {unit: value for unit in units for glob, value in asked.items() if is_named(unit, glob)}
