"""The simulated accelerator computes what the CPU computes, and a fault is one of its device alone."""

import pytest
import torch
from torch.nn import functional as F

DEVICE = "simulated:0"


def test_operations_give_the_results_of_the_cpu(simulator):
    x, w = torch.randn(6, 5), torch.randn(5, 5, requires_grad=True)
    own = w.detach().to(DEVICE).requires_grad_()
    for leaf, rows in ((w, x), (own, x.to(DEVICE))):
        F.cross_entropy(F.gelu(rows @ leaf), torch.arange(6, device=rows.device) % 5).backward()
    assert torch.equal(own.grad.cpu(), w.grad)


def test_what_needs_its_data_is_synchronous_and_counted(simulator):
    x = torch.arange(5.0, device=DEVICE)
    assert simulator.synchronous_operations() == {}
    x.sum().item()
    assert x.nonzero().shape == (4, 1)
    counted = simulator.synchronous_operations()
    assert counted["aten::_local_scalar_dense"] == 1 and counted["aten::nonzero"] == 1


def test_a_kernel_that_fails_is_a_fault_of_its_device_alone(simulator):
    scores, wrong = torch.zeros(2, 3, device=DEVICE), torch.tensor([1, 700]).to(DEVICE)
    F.nll_loss(scores, wrong)
    with pytest.raises(RuntimeError, match="simulated:0 failed: aten::nll_loss"):
        torch.accelerator.synchronize(0)
    with pytest.raises(RuntimeError, match="simulated:0 failed"):
        torch.ones(3, device=DEVICE)
    assert torch.ones(3, device="simulated:1").sum().item() == 3
    simulator.reset()
    assert torch.ones(3, device=DEVICE).sum().item() == 3
