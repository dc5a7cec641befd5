"""Pages: schedules as one HTML file that needs nothing else, to be opened in a browser."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

from .schedule import Schedule


def page(schedules: Sequence[Schedule]) -> str:
    """Lanes, memory and graphs of each schedule, one at a time; `page.html` draws them."""
    template = resources.files(__package__).joinpath("page.html").read_text()
    listed = ",".join(schedule.to_json() for schedule in schedules)
    return template.replace("SCHEDULES", f"[{listed}]".replace("</", "<\\/"))
