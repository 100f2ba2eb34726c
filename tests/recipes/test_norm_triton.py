"""The Triton kernels of add_rms_norm and add_layer_norm, interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from gradscope.kernels.norm import triton_launch

from .accuracy import dirty_memory
from .test_norm import CENTRED, COMPILES, assert_accurate, eager, gradients, operands, ours

# numpy, which the interpreter computes with, warns of products that are to wrap.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@CENTRED
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (5, 33), (2, 3, 300)])
def test_against_float64(
    triton_device: torch.device, centred: bool, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    upstream = [torch.randn(shape, device=triton_device).to(dtype) for _ in range(2)]
    with dirty_memory():
        assert_accurate(
            ours(centred, "triton"), (upstream[0], upstream[1]), operands(centred, shape, dtype, triton_device)
        )


@CENTRED
def test_groups_of_several_rows(triton_device: torch.device, centred: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that walk several rows, the last one fewer."""
    monkeypatch.setattr(triton_launch, "WARPS", 3)
    upstream = [torch.randn(10, 9, device=triton_device) for _ in range(2)]
    with dirty_memory():
        inputs = operands(centred, (10, 9), torch.float32, triton_device)
        assert_accurate(ours(centred, "triton"), (upstream[0], upstream[1]), inputs)


@CENTRED
def test_dropout_is_that_of_the_cpu(triton_device: torch.device, centred: bool) -> None:
    """Edge case 14: the same seed drops the same elements, forward and backward."""
    inputs = operands(centred, (6, 33), torch.float32, triton_device)
    upstream = (torch.randn(6, 33, device=triton_device), torch.randn(6, 33, device=triton_device))
    results = []
    for backend, device in (("triton", triton_device), ("cpu", torch.device("cpu"))):
        torch.manual_seed(5)
        moved = [tensor.to(device) for tensor in inputs]
        both = (upstream[0].to(device), upstream[1].to(device))
        results.append([tensor.cpu() for tensor in gradients(ours(centred, backend, p=0.4), both, moved)])
    if triton_device.type == "cpu":  # else the generators differ
        torch.testing.assert_close(*results)
    found = results[0]
    dropped = found[1] == inputs[1].cpu()
    assert 0.2 < dropped.float().mean() < 0.6  # 0.4, with 5 standard deviations
    assert torch.equal(found[2] == 0, dropped)


@CENTRED
def test_one_result_used(triton_device: torch.device, centred: bool) -> None:
    inputs = [tensor.requires_grad_() for tensor in operands(centred, (3, 5), torch.float32, triton_device)]
    for used in (0, 1):
        found = torch.autograd.grad(ours(centred, "triton")(*inputs)[used].sum(), inputs[:2])
        torch.testing.assert_close(found, torch.autograd.grad(eager(*inputs)[used].sum(), inputs[:2]))


@CENTRED
def test_without_parameters_and_strided(triton_device: torch.device, centred: bool) -> None:
    """Edge case 11."""
    x, residual = (torch.randn(9, 5, device=triton_device).t().requires_grad_() for _ in range(2))
    found = torch.autograd.grad(ours(centred, "triton")(x, residual)[0].square().sum(), (x, residual))
    torch.testing.assert_close(
        found, torch.autograd.grad(ours(centred, "torch")(x, residual)[0].square().sum(), (x, residual))
    )


@CENTRED
@COMPILES
def test_compiles_in_one_graph(triton_device: torch.device, centred: bool) -> None:
    """Edge case 9."""
    inputs = [tensor.requires_grad_() for tensor in operands(centred, (4, 6), torch.float32, triton_device)]
    compiled = torch.compile(ours(centred, "triton"), fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(sum(tensor.square().sum() for tensor in compiled(*inputs)), inputs)
    torch.testing.assert_close(
        found, torch.autograd.grad(sum(tensor.square().sum() for tensor in eager(*inputs)), inputs)
    )


@pytest.mark.parametrize("columns", [1, 5, 33, 48, 64, 300, 768, 1280, 1537, 4096, 5120, 11008, 14336, 16384])
def test_little_padding_and_several_short_rows(columns: int) -> None:
    """At most a quarter of what a program computes is padding; short rows share one."""
    for rows in (1, 3, 8192):
        cut = triton_launch.cut_of(rows, columns)
        padded = cut.first + cut.second
        assert columns <= padded and (padded - columns) * 4 <= padded
        assert cut.first > cut.second
        assert all(side & (side - 1) == 0 for side in cut)
        assert cut.rows < 2 * rows
        if rows == 8192:
            assert cut.rows == 16 or cut.rows == 1 or 512 < cut.rows * padded <= 1024
        assert cut.warps() in (1, 2, 4, 8, 16)


@CENTRED
@pytest.mark.parametrize("shape", [(37, 48), (21, 96), (3, 1280), (1, 768)])
def test_several_rows_and_pieces(
    triton_device: torch.device, centred: bool, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pieces of a row, several rows a program, the last of them none; several programs in backward."""
    monkeypatch.setattr(triton_launch, "WARPS", 8)
    test_against_float64(triton_device, centred, torch.float32, shape)
