"""Matmuls of generated code where oneDNN is faster than MKL: the same values, one process."""

import copy

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_fw_bw_and_get_code

from fsdp_compile import fsdp_compile
from fsdp_compile.runtime import inductor
from tests.ranks import join_fake_group

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    torch._dynamo.reset()
    torch.manual_seed(0)
    monkeypatch.setattr(inductor, "onednn_is_faster", lambda: True)
    join_fake_group(1)
    yield
    join_fake_group(0)


class Linears(nn.Module):
    """With a bias, with a matrix added, without either, and too small for oneDNN."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(128, 256), nn.Linear(256, 128, bias=False)
        self.head = nn.Linear(128, 2)

    def forward(self, x):
        return self.head(x + self.second(self.first(x).relu()))


def trained(model, x):
    loss = model(x).sum()  # its gradient is one element, expanded
    loss.backward()
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}


@needs_onednn
@pytest.mark.parametrize("shape", [(96, 128), (4, 32, 128)])
def test_matmuls_of_onednn_have_the_values_of_torch(shape):
    model, x = Linears(), torch.randn(shape)
    expected_loss, expected = trained(copy.deepcopy(model), x)
    sharded = fsdp_compile(model)
    found, codes = run_fw_bw_and_get_code(lambda: sharded(x).sum())
    forward, backward = (code.count("mkldnn._linear_pointwise") for code in codes)
    assert (forward, backward) == (2, 3)  # the gradient of x is not asked for
    assert "extern_kernels." in codes[0]
    torch.testing.assert_close(found, expected_loss)
    for name, parameter in sharded.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-4, rtol=1e-5)


@needs_onednn
def test_sizes_that_change_have_the_values_of_torch():
    model = Linears()
    unsharded, sharded = copy.deepcopy(model), fsdp_compile(model, dynamic=True)
    for rows in (96, 130, 256):
        x = torch.randn(rows, 128)
        torch.testing.assert_close(sharded(x), unsharded(x), atol=1e-5, rtol=1e-5)


class Picked(nn.Module):
    """A linear layer of the rows that are positive: how many these are, and whether there are any, the data say."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(128, 256)

    def forward(self, x):
        return self.linear(x[x[:, 0] > 0])


@needs_onednn
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_no_rows_at_all_are_multiplied_as_by_torch():
    model = Picked()
    unsharded, sharded = copy.deepcopy(model), fsdp_compile(model, fullgraph=True)
    for x in (torch.randn(96, 128).abs(), -torch.randn(96, 128).abs()):
        torch.testing.assert_close(trained(sharded, x), trained(unsharded, x), atol=1e-4, rtol=1e-5)


@needs_onednn
def test_max_autotune_keeps_the_choice():
    sharded = fsdp_compile(Linears(), options={"max_autotune": True, "max_autotune_gemm_backends": "ATEN"})
    _, codes = run_fw_bw_and_get_code(lambda: sharded(torch.randn(96, 128)).sum())
    assert not any("mkldnn._linear_pointwise" in code for code in codes)


def test_mkl_is_kept_on_processors_of_intel(monkeypatch):
    monkeypatch.undo()
    inductor.onednn_is_faster.cache_clear()
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": "Intel(R) Xeon(R)", "avx512_f": True})
    assert not inductor.onednn_is_faster()
    inductor.onednn_is_faster.cache_clear()
