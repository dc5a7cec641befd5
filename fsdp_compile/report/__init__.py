"""Reports: a predicted or a measured step as a value, a page to look at, and a trace to lay over another.

`Schedule.of` makes the value of a prediction, `measured_schedule` of what torch.profiler saw of the same graphs.
"""

from .measured import Comparison, measured_schedule
from .page import page
from .schedule import Block, Schedule
from .trace import trace

__all__ = ["Block", "Comparison", "Schedule", "measured_schedule", "page", "trace"]
