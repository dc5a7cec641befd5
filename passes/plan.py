"""Plans: what was decided for a step, as values. The passes follow them; where they come from is not their concern."""

from __future__ import annotations

import dataclasses
import json


@dataclasses.dataclass(frozen=True)
class Gather:
    """One all-gather of a plan.

    Attributes:
        buckets: what it gathers, in the order of first use; more than one are sent together.
        is_grouped: whether every parameter is a message of its own, rather than all of them one that is copied out of.
        start: the parameter before whose first use it starts; None for the beginning of the graph.
    """

    buckets: tuple[str, ...]
    is_grouped: bool
    start: str | None


@dataclasses.dataclass(frozen=True)
class PrefetchList:
    """Units that are gathered where others are used: `ahead` start no later than the first wait for one of `units`."""

    units: tuple[str, ...]
    ahead: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """What was decided for one forward and its backward.

    Attributes:
        kept: units whose parameters stay gathered from forward to backward; None leaves that to the options.
        forward, backward: the gathers in order. What they do not name is gathered as without a plan.
        reductions: how many reductions may be under way at once (see `DelayReduceScatterWait`); None leaves that to the
            options.
        activations: the activation memory budget of torch's partitioner: 1 saves all that is not cheap to compute
            again. None leaves it as it is set.
        pieces: into how many the model's own collectives are decomposed; see `DecomposeCollectives`.
    """

    kept: tuple[str, ...] | None
    forward: tuple[Gather, ...]
    backward: tuple[Gather, ...]
    reductions: int | None
    activations: float | None = None
    pieces: int = 1

    @classmethod
    def as_asked(cls, pieces: int) -> StepPlan:
        """What the options say, but for the pieces."""
        return cls(None, (), (), None, pieces=pieces)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> StepPlan:
        fields = json.loads(text)
        sides = [
            tuple(Gather(tuple(each["buckets"]), each["is_grouped"], each["start"]) for each in fields[side])
            for side in ("forward", "backward")
        ]
        kept = None if fields["kept"] is None else tuple(fields["kept"])
        return cls(kept, sides[0], sides[1], fields["reductions"], fields["activations"], fields["pieces"])
