"""The table that `fsdp-compile plan` prints of its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from ..costs.hardware import Hardware
from .meshes import mesh_text

_GIB = 2**30
_LEFT = ("mesh", "strategy", "by")


def table_of(rows: Sequence[Mapping[str, Any]], hardware: Hardware) -> Table:
    table = Table(
        title=f"A step on {hardware.name}; ms, tokens/s of a GPU; '!' is more than its {hardware.memory / _GIB:.0f} GiB"
    )
    for heading in _headings(rows):
        table.add_column(heading, justify="left" if heading in _LEFT else "right", no_wrap=True)
    for row in rows:
        cells = _cells(row)
        table.add_row(*(cells[heading] for heading in _headings(rows)))
    return table


def _headings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    has_meshes = any(row["mesh"] for row in rows)
    has_stages = has_meshes and any("pp" in row["mesh"] for row in rows)
    on_mesh, of_model, of_pipeline = ["mesh"] * has_meshes, ["of model"] * has_meshes, ["idle"] * has_stages
    speed = ["batch", "strategy", "ms", "tokens/s", "MFU", "exposed"]
    return ["GPUs", *on_mesh, *speed, *of_pipeline, *of_model, "bound", "by", "GiB"]


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    gib = row["peak_bytes"] / _GIB
    peak = f"{gib:.1f}" if gib >= 1 else f"{gib:.2g}"
    return {
        "GPUs": str(row["gpus"]),
        "mesh": mesh_text(row["mesh"], row["stages_of_rank"]) if row["mesh"] else "",
        "batch": str(row["batch"]),
        "strategy": row["strategy"],
        "ms": f"{row['seconds'] * 1e3:.1f}",
        "tokens/s": f"{row['tokens_per_second_per_gpu']:.0f}",
        "MFU": f"{row['model_flops_utilisation']:.1%}",
        "exposed": f"{row['exposed_seconds'] * 1e3:.1f}",
        "idle": f"{row['idle_seconds'] * 1e3:.1f}",
        "of model": f"{row['model_collectives_seconds'] * 1e3:.1f}",
        "bound": f"{row['lower_bound_seconds'] * 1e3:.1f}",
        "by": row["binds"],
        "GiB": peak if row["fits"] else f"[bold red]{peak}![/]",
    }
