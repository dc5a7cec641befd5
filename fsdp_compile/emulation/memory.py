"""The memory of a generated wrapper: what its buffers take at every step, as its allocations and frees have it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from .wrapper import Step, inputs_of, num_bytes, steps_of


@dataclasses.dataclass
class _Held:
    """Memory that some names stand for; it ends with the last of them."""

    num_bytes: int
    names: set[str]


def bytes_at_steps(wrapper: str, bytes_of_buffer: Mapping[str, int]) -> list[tuple[Step, int]]:
    """Every step of the wrapper with the bytes that are held after it, inputs included."""
    held_of_name = {name: _Held(num_bytes(name, bytes_of_buffer), {name}) for name in inputs_of(wrapper)}
    total = sum(held.num_bytes for held in held_of_name.values())
    found = []
    for step in steps_of(wrapper):
        if step.is_renaming:
            held = held_of_name.get(step.reads[0])
            own = num_bytes(step.result, bytes_of_buffer) if _is_part_of_list(step, held) else 0
            if held is None or own:
                held = _Held(own, set())
                total += own
            held.names.add(step.result)
            held_of_name[step.result] = held
        elif step.kind == "free":
            for name in step.reads:
                total -= _end(held_of_name, name)
        elif step.result:
            held_of_name[step.result] = _Held(num_bytes(step.result, bytes_of_buffer), {step.result})
            total += held_of_name[step.result].num_bytes
        found.append((step, total))
    return found


def peak_bytes(wrapper: str, bytes_of_buffer: Mapping[str, int]) -> int:
    """The most bytes that are held at once, inputs included."""
    return max(total for _, total in bytes_at_steps(wrapper, bytes_of_buffer))


def _is_part_of_list(step: Step, held: _Held | None) -> bool:
    """Whether the name is taken out of the list that a call returned, which has no memory of its own."""
    return held is not None and held.num_bytes == 0 and step.name == ""


def _end(held_of_name: dict[str, _Held], name: str) -> int:
    held = held_of_name.pop(name, None)
    if held is None:
        return 0
    held.names.discard(name)
    return 0 if held.names else held.num_bytes
