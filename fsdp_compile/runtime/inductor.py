"""What Inductor has to be told, so that the code it generates runs as scheduled.

Its scheduler and its lowerings are private; what is used of them here is as of torch 2.11 to 2.15.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import sympy
import torch
from torch._inductor import config, custom_graph_pass, ir
from torch._inductor.codegen.common import BackendFeature
from torch._inductor.dependencies import WeakDep
from torch._inductor.lowering import fallback_handler, lowerings, register_lowering
from torch._inductor.scheduler import refresh_group_node_dependencies
from torch._inductor.utils import is_collective, is_wait
from torch._inductor.virtualized import V
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols
from torch.utils._ordered_set import OrderedSet

from ..passes import metadata, ops

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional


# With torch 2.11 it is a pass over fx graphs that Inductor's cache of generated code takes for this, too.
_SchedulerPass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass)


class Fences(_SchedulerPass):  # type: ignore[misc]  # one of two
    """Kernels are fused between two neighbouring collectives, copies or waits, and never across one.

    Fusing across would start a gather later, or wait for it earlier, than the schedule says. This is Inductor's
    `_pre_fusion_custom_pass`: it takes the scheduler's nodes in order and adds dependencies. Those marked as fake order
    the nodes without keeping buffers alive.
    """

    def __call__(self, nodes: list[Any]) -> list[Any]:
        fence: Any = None
        since: set[str] = set()  # buffers written since the fence, its own included
        ends: dict[str, Any] = {}  # those of them that nothing since reads, and what writes them
        for node in nodes:
            read = {dependency.name for dependency in node.unmet_dependencies}
            written = node.get_buffer_names()
            for name in read:
                ends.pop(name, None)
            if is_collective(node.node) or is_wait(node.node) or _is_copy(node.node):
                later = {name: end for name, end in ends.items() if _may_follow(end, node)}
                for earlier in dict.fromkeys(end for name, end in ends.items() if name not in later):
                    _order(earlier, node)
                fence, since, ends = node, set(), later
            elif fence is not None and not read & since:
                _order(fence, node)
            since.update(written)
            ends.update(dict.fromkeys(written, node))
        if fence is not None:
            _note_ancestors(nodes)
        return nodes

    def uuid(self) -> bytes:
        """For the key of Inductor's cache of generated code."""
        return generator_digest()


class InOrder(_SchedulerPass):  # type: ignore[misc]  # one of two
    """Kernels run in the order of the schedule, as far as what they read allows.

    Inductor runs a fused kernel where the first of its parts stood, and just before it what it reads: matmuls that the
    schedule has later. This is its `_post_fusion_custom_pass`.
    """

    def __call__(self, nodes: list[Any]) -> list[Any]:
        node_of_buffer = {name: node for node in nodes for name in node.get_buffer_names()}
        readers: dict[Any, list[Any]] = {node: [] for node in nodes}
        num_missing: dict[Any, int] = {}
        for node in nodes:
            found = [node_of_buffer.get(dependency.name) for dependency in node.unmet_dependencies]
            sources = dict.fromkeys(source for source in found if source is not None and source is not node)
            num_missing[node] = len(sources)
            for source in sources:
                readers[source].append(node)
        place = {node: (node.min_order, index) for index, node in enumerate(nodes)}
        ready = [(*place[node], node) for node in nodes if not num_missing[node]]
        heapq.heapify(ready)
        ordered = []
        while ready:
            *_, node = heapq.heappop(ready)
            ordered.append(node)
            for reader in readers[node]:
                num_missing[reader] -= 1
                if not num_missing[reader]:
                    heapq.heappush(ready, (*place[reader], reader))
        return ordered

    def uuid(self) -> bytes:
        """For the key of Inductor's cache of generated code."""
        return generator_digest()


@functools.cache
def generator_digest() -> bytes:
    """Of what we do to generated code besides the graphs, and how on this machine: another for other sources of ours.

    All modules count: what a pass notes on a node has a say in how that is lowered, and is not in the key of Inductor's
    cache.
    """
    package = Path(__file__).parents[1]
    paths = tuple(map(str, sorted([*package.glob("*.py"), *package.glob("*/*.py")])))
    return custom_graph_pass.get_hash_for_files(paths, "onednn" if onednn_is_faster() else "")


def _note_ancestors(nodes: list[Any]) -> None:
    """Tell each node its place and what runs before it; Inductor's own function knows no horizontal kernels."""
    ancestors_of_name: dict[str, OrderedSet[str]] = {}
    for order, node in enumerate(nodes):
        node.min_order = node.max_order = order
        ancestors: OrderedSet[str] = OrderedSet()
        for dependency in node.unmet_dependencies:
            name = node.scheduler.name_to_buf[dependency.name].defining_op_name()
            ancestors |= {name, *ancestors_of_name[name]}
        for each in {node, *node.get_nodes()}:
            each.ancestors = ancestors
            ancestors_of_name[each.get_name()] = ancestors


def _may_follow(earlier: Any, fence: Any) -> bool:
    """Whether `earlier` may be a part of a kernel behind this fence: it starts something, and reads nothing of it."""
    return (
        not is_wait(fence.node) and not _is_copy(fence.node) and not earlier.is_reduction() and not earlier.is_extern()
    )


def _is_copy(node: Any) -> bool:
    return getattr(node, "op_overload", None) in (ops.COPY_START, ops.COPY_WAIT, ops.COPIES_DONE)


def _order(earlier: Any, later: Any) -> None:
    """Make `later` run after `earlier`."""
    first = later.get_nodes()[0]  # of a horizontal kernel's; a node of one kernel is its own
    for buffer in earlier.get_buffer_names():
        first.add_fake_dep(WeakDep(buffer, mutating_buf=first.get_name(), is_fake=True))
    if first is not later:
        refresh_group_node_dependencies(later)


@register_lowering(ops.STORE, type_promotion_kind=None)
def _store(value: Any) -> Any:
    """In memory of its own: a part of a buffer, which Inductor makes of copies too, would keep all of it alive."""
    is_part = isinstance(value.data, ir.BaseView) and not V.graph.sizevars.statically_known_equals(
        value.get_numel(), value.data.unwrap_view().get_numel()
    )
    if is_part:
        value = lowerings[_aten.clone.default](value)
    value.realize()
    return value


@register_lowering(ops.POISON, type_promotion_kind=None)
def _poison(full: Any) -> None:
    """What reads the buffer in the graph before this, and is yet to be computed, is computed first."""
    full.realize()
    V.graph.mark_buffer_mutated(full.get_name())
    ir.FallbackKernel.create(ops.POISON, full)


@contextlib.contextmanager
def whole_copies() -> Iterator[None]:
    """Inside, what only copies a buffer is a call of ATen: to generate and compile a kernel for each takes longer."""
    by_kernel, by_aten = lowerings[_aten.cat.default], fallback_handler(_aten.cat.default, add_to_fallback_set=False)

    @functools.wraps(by_kernel)
    def cat(*args: Any, **kwargs: Any) -> Any:
        if metadata.is_whole_copy(V.graph.current_node):
            return by_aten(*args, **kwargs)
        num_before = len(V.graph.operations)
        joined = by_kernel(*args, **kwargs)
        if metadata.is_pack(V.graph.current_node):
            _compute_together(V.graph.operations[num_before:])
        return joined

    with patch.dict(lowerings, {_aten.cat.default: cat, _aten.slice_copy.Tensor: _slice_copy}):
        yield


@contextlib.contextmanager
def few_casts() -> Iterator[None]:
    """Inside, what a grouped reduction sends is cast and padded by one kernel where a GPU runs it.

    A collective is opaque: by itself, Inductor computes each of its arguments in a kernel of its own.
    """
    by_itself = lowerings[_c10d.reduce_scatter_tensor_coalesced.default]

    @functools.wraps(by_itself)
    def reduce_scatter(values: Any, *args: Any) -> Any:
        nodes: Any = V.graph.current_node.args[0]
        made = [
            value.data.data
            for node, value in zip(nodes, values, strict=True)
            if node.target in _FORMS and len(node.users) == 1
        ]
        _compute_together([part for each in made for part in _parts(each)])
        return by_itself(values, *args)

    with patch.dict(lowerings, {_c10d.reduce_scatter_tensor_coalesced.default: reduce_scatter}):
        yield


_FORMS = (torch.ops.prims.convert_element_type.default, _aten.constant_pad_nd.default)


def _parts(operation: Any) -> list[Any]:
    """What computes the parts of a buffer that is put together, as Inductor pads some; itself otherwise."""
    if not isinstance(operation, ir.ConcatKernel):
        return [operation]
    inputs: Any = operation.inputs
    return [V.graph.name_to_buffer[each.get_name()] for each in inputs]


def _compute_together(operations: Sequence[Any]) -> None:
    """Have one horizontal kernel compute what is elementwise of these operations of Inductor's, on GPUs."""
    elementwise = [each for each in operations if isinstance(getattr(each, "data", None), ir.Pointwise)]
    if len(elementwise) < 2 or not all(
        isinstance(n, (int, sympy.Integer)) for each in elementwise for n in each.get_size()
    ):
        return
    if V.graph.has_feature(elementwise[0].get_device(), BackendFeature.FOREACH):
        V.graph.register_operation_list([each.get_operation_name() for each in elementwise])


def _slice_copy(value: Any, dim: int, begin: Any, end: Any) -> Any:
    """A copy of a strided view: torch.clone, which Python calls in half the time of an operator of torch.ops."""
    size = list(value.get_size())
    size[dim] = end - begin
    if V.graph.cpp_wrapper:
        return _call(_aten.slice_copy.Tensor, size, value, constants=(dim, begin, end))
    storage, whole = ir.as_storage_and_layout(ir.ExternKernel.realize_input(value), freeze=True)
    where = whole.device, whole.dtype, size
    view = ir.FixedLayout(*where, whole.stride, whole.offset + whole.stride[dim] * begin)
    inputs, options = [ir.ReinterpretView(data=storage, layout=view)], {"memory_format": torch.contiguous_format}
    layout = ir.FixedLayout(*where)
    return ir.TensorBox.create(ir.ExternKernelAlloc(layout, inputs, (), options, python_kernel_name="torch.clone"))


def _call(kernel: Any, size: list[Any], *values: Any, constants: tuple[Any, ...]) -> Any:
    """A call of `kernel(*values, *constants)`, which allocates its result: contiguous, in the dtype of the first value.

    Inductor's own call of what it has no lowering for is two nodes of its schedule, and traced once more.
    """
    if V.graph.cpp_wrapper:
        return ir.TensorBox.create(ir.FallbackKernel.create(kernel, *values, *constants))
    first, *_ = inputs = [ir.ExternKernel.realize_input(value) for value in values]
    for value in inputs:
        ir.as_storage_and_layout(value, freeze=True)
    layout = ir.FixedLayout(first.get_device_or_error(), first.get_dtype(), size)
    return ir.TensorBox.create(ir.ExternKernelAlloc(layout, inputs, constants, op_overload=kernel))


# ----------------------------------------------------------------------------------------------------------
# Matmuls by oneDNN
# ----------------------------------------------------------------------------------------------------------

_SMALL = 1 << 22  # FLOPs of a matmul below which what oneDNN takes to begin outweighs what it gains


@functools.cache
def onednn_is_faster() -> bool:
    """Whether f32 matmuls of this machine are to be oneDNN's: MKL uses AVX-512 on the processors of Intel only.

    Measured on one core of an AMD EPYC: 90 to 98 GFLOP/s with MKL and 150 to 219 with oneDNN (Zen 5); 64 to 95 and 87
    to 105 (family 25), but for small matrices.
    """
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    found = torch.cpu.get_capabilities()
    return "AMD" in found.get("cpu_name", "") and bool(found.get("avx512_f"))


def onednn_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b` of f32 matrices, as the generated code computes it where oneDNN is faster."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return product


def is_onednn_called(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether generated code calls oneDNN for `a @ b`."""
    is_large = 2 * a.numel() * b.shape[1] >= _SMALL
    return onednn_is_faster() and a.device.type == "cpu" and a.dtype == torch.float32 and is_large


def onednn_workspace(a: torch.Tensor, b: torch.Tensor) -> int:
    """Bytes of the copy that oneDNN makes of a matrix `a` that is not contiguous, where it is called for `a @ b`."""
    return a.nbytes if is_onednn_called(a, b) and not a.is_contiguous() else 0


@contextlib.contextmanager
def fast_matmuls() -> Iterator[None]:
    """Inside, Inductor generates calls of oneDNN for the matmuls that it is faster for."""
    if not onednn_is_faster() or config.max_autotune or config.max_autotune_gemm:
        yield
        return
    with patch.dict(lowerings, {_aten.mm.default: _mm, _aten.addmm.default: _addmm}):
        yield


_torch_mm, _torch_addmm = lowerings[_aten.mm.default], lowerings[_aten.addmm.default]


def _mm(a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs or not _is_for_onednn(a, b):
        return _torch_mm(a, b, *args, **kwargs)
    return _linear(a, b, None)


def _addmm(term: Any, a: Any, b: Any, **kwargs: Any) -> Any:
    if kwargs or not _is_for_onednn(a, b):
        return _torch_addmm(term, a, b, **kwargs)
    if len(term.get_size()) == 1 and term.get_size() == b.get_size()[1:]:
        return _linear(a, b, term)
    return lowerings[_aten.add.Tensor](_linear(a, b, None), term)


def _is_for_onednn(a: Any, b: Any) -> bool:
    """Not for what may be small. A size that depends on data may be 0, too, and oneDNN refuses matrices of that."""
    sizes = [*a.get_size(), b.get_size()[1]]
    flops = 2 * functools.reduce(lambda one, other: one * other, sizes)
    may_be_small = V.graph.sizevars.statically_known_lt(flops, _SMALL) or has_free_unbacked_symbols(flops)
    return a.get_device().type == "cpu" and a.get_dtype() == torch.float32 and not may_be_small


def _linear(a: Any, b: Any, bias: Any) -> Any:
    transposed = lowerings[_aten.permute.default](b, [1, 0])
    size = [a.get_size()[0], b.get_size()[1]]
    attributes: tuple[Any, ...] = ("none", [], "")
    kernel = torch.ops.mkldnn._linear_pointwise.default
    if bias is None:
        return _call(kernel, size, a, transposed, constants=(None, *attributes))
    return _call(kernel, size, a, transposed, bias, constants=attributes)
