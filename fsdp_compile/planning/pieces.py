"""Pieces: into how many a model's own collectives are decomposed (`passes/decompose_collectives.py`).

More pieces leave less that no matmul runs beside, and start more messages. Their number is found first, in the program
as it is without a plan, and all else for that number. Products are in memory twice while they are put together: where
there is no room for that, they stay whole.
"""

from __future__ import annotations

from collections.abc import Callable

from ..costs.predict import Prediction

PIECES = (2, 4, 8)
"""Numbers of pieces that are tried, one after another, for as long as a number is faster than the one before."""

_WORTH_IT = 1.02  # what more pieces have to win: smaller matmuls may take longer than they are predicted to


def may_pay(plain: Prediction) -> bool:
    """Whether there is enough to win: if nothing of what the model itself sends was waited for."""
    return plain.seconds > _WORTH_IT * (plain.seconds - plain.model_collectives)


def best_pieces(predicted: Callable[[int], Prediction]) -> int:
    """The number of pieces with which a step is fastest.

    Args:
        predicted: what a step takes in so many pieces, without a plan for anything else.
    """
    before, best = predicted(1), 1
    for pieces in PIECES:
        found = predicted(pieces)
        if found.seconds * _WORTH_IT > before.seconds:
            break
        before, best = found, pieces
    return best
