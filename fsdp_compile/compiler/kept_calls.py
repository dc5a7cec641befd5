"""Kept calls: what a start needs of a call that an earlier one has compiled, besides the compiled code.

`runtime.autograd_cache` keeps the code, and these in files.
"""

from __future__ import annotations

import dataclasses
import functools
import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ..dependence import Dependence
from ..graphs import LoweredGraphs, RewrittenGraphs
from ..runtime.autograd_cache import keep_beside
from ..runtime.backward import BucketGradient
from ..runtime.pickled_graphs import dumps, loads


@dataclasses.dataclass(frozen=True)
class KeptCall:
    """What was made of a call.

    Attributes:
        program: see `traces.program`.
        gradients: what its backward does with the gradients of each bucket.
        arguments: the names of what its backward takes.
        facts: what `Keep.facts` says of it.
        scheduled: the rewritten graphs and their plan, as bytes: few look at them.
        lowered_as_bytes: what the compiler received.
    """

    program: str
    gradients: Sequence[BucketGradient]
    arguments: Sequence[str]
    dependence: Dependence | None
    facts: Any
    scheduled: bytes
    lowered_as_bytes: bytes

    @functools.cached_property
    def graphs(self) -> RewrittenGraphs:
        forward, backward, plan = loads(self.scheduled)
        return RewrittenGraphs(forward, backward, self.lowered, plan, self.dependence)

    @functools.cached_property
    def lowered(self) -> LoweredGraphs:
        found: LoweredGraphs = loads(self.lowered_as_bytes)
        return found

    @classmethod
    def of(cls, data: bytes) -> KeptCall:
        found: KeptCall = loads(data)
        return found


@dataclasses.dataclass(frozen=True)
class Keep:
    """How a call is kept.

    Attributes:
        conditions: what its graphs follow from besides the trace: options, and what is planned for.
        facts: of its graphs, and its program: what is to be known of them when they are found again.
        takes: whether the ranks run such a call now; called on all of them that find one.
        on_found: is called with what was found, before that runs.
        compiling: while this process may have to compile a call of this name, and others wait for it; whether another
            one has just done so.
    """

    conditions: str
    facts: Callable[[RewrittenGraphs, str], Any]
    takes: Callable[[KeptCall], bool]
    on_found: Callable[[KeptCall], None]
    compiling: Callable[[str], AbstractContextManager[bool]]

    def write(
        self, graphs: RewrittenGraphs, program: str, gradients: Sequence[BucketGradient], arguments: Sequence[str]
    ) -> str | None:
        """Write the file of a call; its name. None where something in its graphs cannot be written."""
        try:
            call = KeptCall(
                program,
                gradients,
                arguments,
                graphs.dependence,
                self.facts(graphs, program),
                dumps((graphs.forward, graphs.backward, graphs.plan)),
                dumps(graphs.lowered),
            )
            return keep_beside(dumps(call))
        except (pickle.PicklingError, TypeError, AttributeError):
            return None
