"""Names that the manuals list without the second that it takes to import what has them; tests compare them."""

from __future__ import annotations

HARDWARE = ("a100-40", "a100-80", "h100", "h200", "b200")
OPTIMIZERS = ("sgd", "momentum", "adam")
