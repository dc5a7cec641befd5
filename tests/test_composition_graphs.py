"""The communication of one layer with tensor parallelism, or with experts, as one schedule with that of sharding."""

import dataclasses
import re
import sys
from pathlib import Path

import expecttest
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from fsdp_compile import ConfigError, rewrite
from tests.distributed.test_tensor_parallel import WIDTH, Block

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import mixture

SHOWN = re.compile(r"= (fsdp\.|_c10d_functional\.|mm\(|addmm\(|bmm\()|^  fsdp\.")

pytestmark = pytest.mark.usefixtures("four_ranks")


def communication(graphs):
    """Collectives, what is freed, and matmuls."""
    texts = []
    for side in graphs.sides:
        texts += [side.title, *(line for line in str(side).splitlines() if SHOWN.search(line))]
    return "\n".join(texts)


def test_a_layer_with_sequence_parallelism():
    """The unit's only gather and only reduction are on dp; on tp is what torch's plan says, and one all-reduce."""
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    model = nn.Sequential(*[parallelize_module(Block(12), root["tp"], plan) for _ in range(2)])
    x = torch.randn(2, 2, WIDTH, requires_grad=True)
    graphs = rewrite(model, x, world_size=root["dp"], auto_wrap_policy=ModuleWrapPolicy({Block}))
    expecttest.assert_expected_inline(
        communication(graphs),
        """\
forward
  0.pending: f32[128] = fsdp.all_gather(0)
  1.pending: f32[128] = fsdp.all_gather(1)
  0.gathered: f32[128] = fsdp.wait(0.pending)
  0.norm.weight: f32[8] = fsdp.copy_out(0.gathered, 0)
  fsdp.free(0.norm.weight)
  0.norm.bias: f32[8] = fsdp.copy_out(0.gathered, 4)
  fsdp.free(0.norm.bias)
  all_gather_into_tensor: f32[4,2,8] = _c10d_functional.all_gather_into_tensor(add_1, 2, 3)
  wait_tensor: f32[4,2,8] = _c10d_functional.wait_tensor(all_gather_into_tensor)
  0.up.weight: f32[6,8] = fsdp.copy_out(0.gathered, 8)
  0.up.bias: f32[6] = fsdp.copy_out(0.gathered, 32)
  addmm: f32[8,6] = addmm(0.up.bias, view_5, permute)
  fsdp.free(0.up.bias)
  fsdp.free(0.up.weight)
  0.down.weight: f32[8,6] = fsdp.copy_out(0.gathered, 36)
  0.down.bias: f32[8] = fsdp.copy_out(0.gathered, 60)
  fsdp.free(0.gathered)
  fsdp.free(0.down.bias)
  addmm_1: f32[8,8] = addmm(div, view_11, permute_1)
  fsdp.free(0.down.weight)
  reduce_scatter_tensor: f32[2,2,8] = _c10d_functional.reduce_scatter_tensor(cat_1, sum, 2, 3)
  wait_tensor_1: f32[2,2,8] = _c10d_functional.wait_tensor(reduce_scatter_tensor)
  1.gathered: f32[128] = fsdp.wait(1.pending)
  1.norm.weight: f32[8] = fsdp.copy_out(1.gathered, 0)
  1.norm.weight.stored: f32[8] = fsdp.store(1.norm.weight)
  1.norm.bias: f32[8] = fsdp.copy_out(1.gathered, 4)
  fsdp.free(1.norm.bias)
  all_gather_into_tensor_1: f32[4,2,8] = _c10d_functional.all_gather_into_tensor(add_4, 2, 3)
  wait_tensor_2: f32[4,2,8] = _c10d_functional.wait_tensor(all_gather_into_tensor_1)
  1.up.weight: f32[6,8] = fsdp.copy_out(1.gathered, 8)
  1.up.weight.stored: f32[6,8] = fsdp.store(1.up.weight)
  1.up.bias: f32[6] = fsdp.copy_out(1.gathered, 32)
  addmm_2: f32[8,6] = addmm(1.up.bias, view_19, permute_2)
  fsdp.free(1.up.bias)
  1.down.weight: f32[8,6] = fsdp.copy_out(1.gathered, 36)
  1.down.weight.stored: f32[8,6] = fsdp.store(1.down.weight)
  1.down.bias: f32[8] = fsdp.copy_out(1.gathered, 60)
  fsdp.free(1.gathered)
  fsdp.free(1.down.bias)
  addmm_3: f32[8,8] = addmm(div_1, view_25, permute_3)
  reduce_scatter_tensor_1: f32[2,2,8] = _c10d_functional.reduce_scatter_tensor(cat_3, sum, 2, 3)
  wait_tensor_3: f32[2,2,8] = _c10d_functional.wait_tensor(reduce_scatter_tensor_1)
backward
  0.pending: f32[128] = fsdp.all_gather(0)
  all_gather_into_tensor_2: f32[4,2,8] = _c10d_functional.all_gather_into_tensor(tangents_1, 2, 3)
  wait_tensor_4: f32[4,2,8] = _c10d_functional.wait_tensor(all_gather_into_tensor_2)
  mm: f32[8,6] = mm(view_29, permute_4)
  fsdp.free(1.down.weight)
  mm_2: f32[8,8] = mm(view_33, permute_8)
  fsdp.free(1.up.weight)
  reduce_scatter_tensor_2: f32[2,2,8] = _c10d_functional.reduce_scatter_tensor(cat_5, sum, 2, 3)
  mm_1: f32[8,6] = mm(permute_5, view_25)
  mm_3: f32[6,8] = mm(permute_9, view_19)
  wait_tensor_5: f32[2,2,8] = _c10d_functional.wait_tensor(reduce_scatter_tensor_2)
  fsdp.free(1.norm.weight)
  mul_9.stored: f32[2,2,8] = fsdp.store(mul_9)
  all_reduce_default: f32[16] = _c10d_functional.all_reduce(cat_default, sum, 3)
  wait_tensor_default: f32[16] = _c10d_functional.wait_tensor(all_reduce_default)
  1.packed: f32[128] = fsdp.pack([view_default_1, view_default, mm_3, view_34, mm_1, view_30], [0, 4, 8, 32, 36, 60])
  1.grad.pending: f32[64] = fsdp.reduce_scatter(1.packed)
  all_gather_into_tensor_3: f32[4,2,8] = _c10d_functional.all_gather_into_tensor(add_11, 2, 3)
  wait_tensor_8: f32[4,2,8] = _c10d_functional.wait_tensor(all_gather_into_tensor_3)
  0.gathered: f32[128] = fsdp.wait(0.pending)
  0.down.weight: f32[8,6] = fsdp.copy_out(0.gathered, 36)
  mm_4: f32[8,6] = mm(view_37, permute_12)
  fsdp.free(0.down.weight)
  0.up.weight: f32[6,8] = fsdp.copy_out(0.gathered, 8)
  mm_6: f32[8,8] = mm(view_41, permute_16)
  fsdp.free(0.up.weight)
  reduce_scatter_tensor_3: f32[2,2,8] = _c10d_functional.reduce_scatter_tensor(cat_7, sum, 2, 3)
  mm_5: f32[8,6] = mm(permute_13, view_11)
  mm_7: f32[6,8] = mm(permute_17, view_5)
  wait_tensor_9: f32[2,2,8] = _c10d_functional.wait_tensor(reduce_scatter_tensor_3)
  0.norm.weight: f32[8] = fsdp.copy_out(0.gathered, 0)
  fsdp.free(0.gathered)
  fsdp.free(0.norm.weight)
  mul_16.stored: f32[2,2,8] = fsdp.store(mul_16)
  all_reduce_default_1: f32[16] = _c10d_functional.all_reduce(cat_default_1, sum, 3)
  wait_tensor_default_1: f32[16] = _c10d_functional.wait_tensor(all_reduce_default_1)
  1.grad: f32[64] = fsdp.wait(1.grad.pending)
  0.packed: f32[128] = fsdp.pack([view_default_3, view_default_2, mm_7, view_42, mm_5, view_38], [0, 4, 8, 32, 36, 60])
  0.grad.pending: f32[64] = fsdp.reduce_scatter(0.packed)
  0.grad: f32[64] = fsdp.wait(0.grad.pending)""",
    )


def split_experts():
    """Mixtures of four experts, which two ranks split, and the mesh of these four ranks."""
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    torch.manual_seed(0)
    config = dataclasses.replace(mixture.SMALL, dim=4, experts=4, active=1, expert_dim=2, shared_dim=2, capacity=1.0)
    model = nn.Sequential(*[mixture.Mixture(config) for _ in range(2)])
    for layer in model:
        layer.experts.split(root["ep"])
    return model, root


def test_a_layer_with_experts():
    """Experts are gathered by the two ranks that have the same of them, the rest by all four, who exchange tokens."""
    model, root = split_experts()
    meshes = {"": root._flatten("dp"), "*.experts": root["efsdp"]}
    x = torch.randn(1, 8, 4, requires_grad=True)
    graphs = rewrite(model, x, world_size=meshes, auto_wrap_policy=ModuleWrapPolicy({mixture.Mixture}))
    expecttest.assert_expected_inline(
        communication(graphs),
        """\
forward
  0/float32.pending: f32[64] = fsdp.all_gather(0/float32)
  0/float32.on_efsdp.pending: f32[48] = fsdp.all_gather(0/float32.on_efsdp)
  1/float32.pending: f32[64] = fsdp.all_gather(1/float32)
  1/float32.on_efsdp.pending: f32[48] = fsdp.all_gather(1/float32.on_efsdp)
  0/float32.gathered: f32[64] = fsdp.wait(0/float32.pending)
  0.router.weight: f32[4,4] = fsdp.copy_out(0/float32.gathered, 0)
  mm: f32[8,4] = mm(view, permute)
  fsdp.free(0.router.weight)
  div.stored: f32[8,4] = fsdp.store(div)
  lt.stored: b8[8] = fsdp.store(lt)
  where.stored: i64[8] = fsdp.store(where)
  all_to_all_single: f32[32] = _c10d_functional.all_to_all_single(view_3, [16, 16], [16, 16], 3)
  wait_tensor: f32[32] = _c10d_functional.wait_tensor(all_to_all_single)
  0/float32.on_efsdp.gathered: f32[48] = fsdp.wait(0/float32.on_efsdp.pending)
  0.experts.gate: f32[2,4,2] = fsdp.copy_out(0/float32.on_efsdp.gathered, 0)
  bmm: f32[2,4,2] = bmm(view_5, 0.experts.gate)
  fsdp.free(0.experts.gate)
  0.experts.up: f32[2,4,2] = fsdp.copy_out(0/float32.on_efsdp.gathered, 8)
  bmm_1: f32[2,4,2] = bmm(view_5, 0.experts.up)
  fsdp.free(0.experts.up)
  0.experts.down: f32[2,2,4] = fsdp.copy_out(0/float32.on_efsdp.gathered, 16)
  fsdp.free(0/float32.on_efsdp.gathered)
  bmm_2: f32[2,4,4] = bmm(mul_1, 0.experts.down)
  fsdp.free(0.experts.down)
  all_to_all_single_1: f32[32] = _c10d_functional.all_to_all_single(view_13, [16, 16], [16, 16], 3)
  mul_2.stored: f32[8] = fsdp.store(mul_2)
  0.shared.gate.weight: f32[2,4] = fsdp.copy_out(0/float32.gathered, 4)
  mm_1: f32[8,2] = mm(view, permute_3)
  fsdp.free(0.shared.gate.weight)
  0.shared.up.weight: f32[2,4] = fsdp.copy_out(0/float32.gathered, 8)
  mm_2: f32[8,2] = mm(view, permute_4)
  fsdp.free(0.shared.up.weight)
  0.shared.down.weight: f32[4,2] = fsdp.copy_out(0/float32.gathered, 12)
  fsdp.free(0/float32.gathered)
  mm_3: f32[8,4] = mm(mul_4, permute_5)
  fsdp.free(0.shared.down.weight)
  wait_tensor_1: f32[32] = _c10d_functional.wait_tensor(all_to_all_single_1)
  1/float32.gathered: f32[64] = fsdp.wait(1/float32.pending)
  1.router.weight: f32[4,4] = fsdp.copy_out(1/float32.gathered, 0)
  1.router.weight.stored: f32[4,4] = fsdp.store(1.router.weight)
  mm_4: f32[8,4] = mm(add_3, permute_6)
  div_4.stored: f32[8,4] = fsdp.store(div_4)
  lt_2.stored: b8[8] = fsdp.store(lt_2)
  where_1.stored: i64[8] = fsdp.store(where_1)
  all_to_all_single_2: f32[32] = _c10d_functional.all_to_all_single(view_21, [16, 16], [16, 16], 3)
  wait_tensor_2: f32[32] = _c10d_functional.wait_tensor(all_to_all_single_2)
  1/float32.on_efsdp.gathered: f32[48] = fsdp.wait(1/float32.on_efsdp.pending)
  1.experts.gate: f32[2,4,2] = fsdp.copy_out(1/float32.on_efsdp.gathered, 0)
  1.experts.gate.stored: f32[2,4,2] = fsdp.store(1.experts.gate)
  bmm_3: f32[2,4,2] = bmm(view_23, 1.experts.gate.stored)
  1.experts.up: f32[2,4,2] = fsdp.copy_out(1/float32.on_efsdp.gathered, 8)
  1.experts.up.stored: f32[2,4,2] = fsdp.store(1.experts.up)
  bmm_4: f32[2,4,2] = bmm(view_23, 1.experts.up.stored)
  1.experts.down: f32[2,2,4] = fsdp.copy_out(1/float32.on_efsdp.gathered, 16)
  1.experts.down.stored: f32[2,2,4] = fsdp.store(1.experts.down)
  fsdp.free(1/float32.on_efsdp.gathered)
  bmm_5: f32[2,4,4] = bmm(mul_6, 1.experts.down.stored)
  all_to_all_single_3: f32[32] = _c10d_functional.all_to_all_single(view_31, [16, 16], [16, 16], 3)
  1.shared.gate.weight: f32[2,4] = fsdp.copy_out(1/float32.gathered, 4)
  1.shared.gate.weight.stored: f32[2,4] = fsdp.store(1.shared.gate.weight)
  mm_5: f32[8,2] = mm(add_3, permute_9)
  1.shared.up.weight: f32[2,4] = fsdp.copy_out(1/float32.gathered, 8)
  1.shared.up.weight.stored: f32[2,4] = fsdp.store(1.shared.up.weight)
  mm_6: f32[8,2] = mm(add_3, permute_10)
  1.shared.down.weight: f32[4,2] = fsdp.copy_out(1/float32.gathered, 12)
  1.shared.down.weight.stored: f32[4,2] = fsdp.store(1.shared.down.weight)
  fsdp.free(1/float32.gathered)
  mm_7: f32[8,4] = mm(mul_9, permute_11)
  wait_tensor_3: f32[32] = _c10d_functional.wait_tensor(all_to_all_single_3)
backward
  0/float32.pending: f32[64] = fsdp.all_gather(0/float32)
  0/float32.on_efsdp.pending: f32[48] = fsdp.all_gather(0/float32.on_efsdp)
  all_to_all_single_4: f32[32] = _c10d_functional.all_to_all_single(view_39, [16, 16], [16, 16], 3)
  mm_8: f32[4,2] = mm(permute_12, mul_9)
  mm_9: f32[8,2] = mm(view_36, permute_14)
  fsdp.free(1.shared.down.weight)
  mm_10: f32[2,4] = mm(permute_16, add_3)
  mm_11: f32[8,4] = mm(mul_10, permute_18)
  fsdp.free(1.shared.up.weight)
  mm_12: f32[2,4] = mm(permute_20, add_3)
  mm_13: f32[8,4] = mm(mul_14, permute_22)
  fsdp.free(1.shared.gate.weight)
  wait_tensor_4: f32[32] = _c10d_functional.wait_tensor(all_to_all_single_4)
  bmm_7: f32[2,4,2] = bmm(view_41, permute_26)
  fsdp.free(1.experts.down)
  bmm_9: f32[2,4,4] = bmm(mul_18, permute_28)
  fsdp.free(1.experts.up)
  bmm_11: f32[2,4,4] = bmm(mul_22, permute_30)
  fsdp.free(1.experts.gate)
  all_to_all_single_5: f32[32] = _c10d_functional.all_to_all_single(view_46, [16, 16], [16, 16], 3)
  bmm_6: f32[2,2,4] = bmm(permute_25, view_41)
  bmm_8: f32[2,4,2] = bmm(permute_27, mul_18)
  bmm_10: f32[2,4,2] = bmm(permute_27, mul_22)
  1/float32.on_efsdp.packed: f32[48] = fsdp.pack([bmm_10, bmm_8, bmm_6], [0, 8, 16])
  1/float32.on_efsdp.grad.pending: f32[24] = fsdp.reduce_scatter(1/float32.on_efsdp.packed)
  fma.stored: f32[8,4] = fsdp.store(fma)
  mm_14: f32[4,4] = mm(permute_32, add_3)
  1/float32.on_efsdp.grad: f32[24] = fsdp.wait(1/float32.on_efsdp.grad.pending)
  1/float32.on_efsdp.grad.divided: f32[24] = fsdp.divide(1/float32.on_efsdp.grad, 4.0)
  1/float32.packed: f32[64] = fsdp.pack([mm_14, mm_12, mm_10, mm_8], [0, 4, 8, 12])
  1/float32.grad.pending: f32[16] = fsdp.reduce_scatter(1/float32.packed)
  mm_15: f32[8,4] = mm(fma.stored, permute_34)
  fsdp.free(1.router.weight)
  wait_tensor_5: f32[32] = _c10d_functional.wait_tensor(all_to_all_single_5)
  all_to_all_single_6: f32[32] = _c10d_functional.all_to_all_single(view_53, [16, 16], [16, 16], 3)
  mm_16: f32[4,2] = mm(permute_36, mul_4)
  0/float32.gathered: f32[64] = fsdp.wait(0/float32.pending)
  0.shared.down.weight: f32[4,2] = fsdp.copy_out(0/float32.gathered, 12)
  mm_17: f32[8,2] = mm(add_17, permute_38)
  fsdp.free(0.shared.down.weight)
  mm_18: f32[2,4] = mm(permute_40, view)
  0.shared.up.weight: f32[2,4] = fsdp.copy_out(0/float32.gathered, 8)
  mm_19: f32[8,4] = mm(mul_24, permute_42)
  fsdp.free(0.shared.up.weight)
  mm_20: f32[2,4] = mm(permute_44, view)
  0.shared.gate.weight: f32[2,4] = fsdp.copy_out(0/float32.gathered, 4)
  mm_21: f32[8,4] = mm(mul_28, permute_46)
  fsdp.free(0.shared.gate.weight)
  wait_tensor_6: f32[32] = _c10d_functional.wait_tensor(all_to_all_single_6)
  0/float32.on_efsdp.gathered: f32[48] = fsdp.wait(0/float32.on_efsdp.pending)
  0.experts.down: f32[2,2,4] = fsdp.copy_out(0/float32.on_efsdp.gathered, 16)
  bmm_13: f32[2,4,2] = bmm(view_55, permute_50)
  fsdp.free(0.experts.down)
  0.experts.up: f32[2,4,2] = fsdp.copy_out(0/float32.on_efsdp.gathered, 8)
  bmm_15: f32[2,4,4] = bmm(mul_32, permute_52)
  fsdp.free(0.experts.up)
  0.experts.gate: f32[2,4,2] = fsdp.copy_out(0/float32.on_efsdp.gathered, 0)
  fsdp.free(0/float32.on_efsdp.gathered)
  bmm_17: f32[2,4,4] = bmm(mul_36, permute_54)
  fsdp.free(0.experts.gate)
  all_to_all_single_7: f32[32] = _c10d_functional.all_to_all_single(view_60, [16, 16], [16, 16], 3)
  bmm_12: f32[2,2,4] = bmm(permute_49, view_55)
  bmm_14: f32[2,4,2] = bmm(permute_51, mul_32)
  bmm_16: f32[2,4,2] = bmm(permute_51, mul_36)
  1/float32.grad: f32[16] = fsdp.wait(1/float32.grad.pending)
  0/float32.on_efsdp.packed: f32[48] = fsdp.pack([bmm_16, bmm_14, bmm_12], [0, 8, 16])
  0/float32.on_efsdp.grad.pending: f32[24] = fsdp.reduce_scatter(0/float32.on_efsdp.packed)
  fma_1.stored: f32[8,4] = fsdp.store(fma_1)
  mm_22: f32[4,4] = mm(permute_56, view)
  0/float32.on_efsdp.grad: f32[24] = fsdp.wait(0/float32.on_efsdp.grad.pending)
  0/float32.on_efsdp.grad.divided: f32[24] = fsdp.divide(0/float32.on_efsdp.grad, 4.0)
  0/float32.packed: f32[64] = fsdp.pack([mm_22, mm_20, mm_18, mm_16], [0, 4, 8, 12])
  0/float32.grad.pending: f32[16] = fsdp.reduce_scatter(0/float32.packed)
  0.router.weight: f32[4,4] = fsdp.copy_out(0/float32.gathered, 0)
  fsdp.free(0/float32.gathered)
  mm_23: f32[8,4] = mm(fma_1.stored, permute_58)
  fsdp.free(0.router.weight)
  wait_tensor_7: f32[32] = _c10d_functional.wait_tensor(all_to_all_single_7)
  0/float32.grad: f32[16] = fsdp.wait(0/float32.grad.pending)""",
    )


def test_a_mesh_of_experts_needs_one_of_the_model():
    model, root = split_experts()
    with pytest.raises(ConfigError, match="a map to meshes has one for the model itself, too"):
        rewrite(model, torch.randn(1, 8, 4), world_size={"*.experts": root["efsdp"]})
    with pytest.raises(ConfigError, match="a map goes from globs over module names to DeviceMeshes, not '': 4"):
        rewrite(model, torch.randn(1, 8, 4), world_size={"": 4})
