"""What Inductor has to be told, so that the code it generates runs as scheduled.

Its scheduler and its lowerings are private; what is used of them here is as of torch 2.11 to 2.13.
"""

from __future__ import annotations

from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.dependencies import WeakDep
from torch._inductor.lowering import register_lowering
from torch._inductor.utils import is_collective, is_wait

from ..passes import ops


class Fences(CustomGraphPass):
    """Kernels are fused between two neighbouring collectives or waits, and never across one.

    Fusing across would start a gather later, or wait for it earlier, than the schedule says. This is Inductor's
    `_pre_fusion_custom_pass`: it takes the scheduler's nodes in order and adds dependencies. Those marked as fake order
    the nodes without keeping buffers alive.
    """

    def __call__(self, nodes: list[Any]) -> list[Any]:  # type: ignore[override]  # declared for passes over fx graphs
        fence: Any = None
        between: list[Any] = []
        for node in nodes:
            if is_collective(node.node) or is_wait(node.node):
                for earlier in between:
                    _order(earlier, node)
                fence, between = node, []
            elif fence is not None:
                _order(fence, node)
            between.append(node)
        if fence is not None:
            nodes[0].scheduler.compute_ancestors()
        return nodes

    def uuid(self) -> str:
        """For Inductor's cache of generated code."""
        return "fsdp_compile.fences"


def _order(earlier: Any, later: Any) -> None:
    """Make `later` run after `earlier`."""
    for buffer in earlier.get_buffer_names():
        later.add_fake_dep(WeakDep(buffer, mutating_buf=later.get_name(), is_fake=True))


@register_lowering(ops.STORE, type_promotion_kind=None)
def _store(value: Any) -> Any:
    value.realize()
    return value
