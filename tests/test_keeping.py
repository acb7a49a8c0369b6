"""Kept activations of parts of a layer: collected in one run, taken in another.

`tests/models/test_kept_activations.py` has the bits and the kernels of each family's blocks.
"""

import threading

import pytest
import torch
from torch import nn
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from tests.support.kept_blocks import kernels
from torchround.keeping import KeptActivationError, joined, keep, passing, recording, replaying

PARTS = ("qkv", "output", "gate_up")


class PlainBlock(nn.Module):
    """Products in named parts: three views of one, a plain one, and one in two pieces."""

    def __init__(self):
        super().__init__()
        self.qkv, self.output, self.wide = nn.Linear(4, 12), nn.Linear(4, 4), nn.Linear(4, 8, bias=False)

    def forward(self, x):
        query, key, value = keep("qkv", lambda x: self.qkv(x).chunk(3, dim=-1), x.sin())
        x = keep("output", self.output, query.tanh() * key + value)
        return keep("gate_up", self.in_pieces, x).cos()

    def in_pieces(self, x):
        pieces = passing(lambda: [x @ weight.T for weight in self.wide.weight.chunk(2)])
        return joined(torch.cat, pieces, -1)


def made():
    torch.manual_seed(1)
    return PlainBlock(), torch.randn(5, 4)


def kept(block, x):
    with torch.no_grad(), recording(PARTS) as record:
        output = block(x)
    return output, [torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor) for tensor in record.tensors]


def test_with_all_parts_kept_no_product_runs_and_results_are_those_of_a_full_recomputation():
    block, x = made()
    x.requires_grad_()
    plain = block(x)
    wanted = torch.autograd.grad(plain.square().sum(), [x, *block.parameters()])
    output, tensors = kept(block, x)
    assert torch.equal(output, plain) and not output.requires_grad
    for _ in range(2):  # `recompute = "layer"` replays the same tensors twice
        with kernels() as computed, replaying(PARTS, tensors):
            replayed = block(x)
        assert computed == [] and torch.equal(replayed, plain)
        found = torch.autograd.grad(replayed.square().sum(), [x, *block.parameters()])
        assert all(map(torch.equal, found, wanted))
    with replaying(PARTS, [torch.zeros_like(tensor) for tensor in tensors]):  # the kept values, not its own
        assert torch.equal(block(x), torch.ones(5, 8))  # cos(0)
    with pytest.raises(ZeroDivisionError), replaying(PARTS, tensors):  # the layer's own error is not replaced
        raise ZeroDivisionError


def test_a_block_outside_of_both_keeps_nothing_and_other_threads_are_not_seen():
    block, x = made()
    with recording(PARTS) as record:
        other = threading.Thread(target=block, args=(x,))
        other.start()
        other.join()
    assert record.tensors == []


def test_parts_of_two_threads_that_overlap_leave_no_flag_of_the_process_set(monkeypatch):
    """PyTorch reads it when it compiles, so results of compiled layers would depend on timing."""
    # A mode of PyTorch's own that threads of an earlier test used may have left it set.
    monkeypatch.setattr(_python_dispatch, "_is_in_torch_dispatch_mode", False)
    x, first_has_ended = torch.ones(2, 2), threading.Event()
    is_inside = [threading.Event(), threading.Event()]

    def run(number, may_end):
        def part(x):
            is_inside[number].set()
            assert may_end.wait(60)
            return x @ x

        with torch.no_grad(), recording(("down",)):
            keep("down", part, x)

    first = threading.Thread(target=run, args=(0, is_inside[1]))
    second = threading.Thread(target=run, args=(1, first_has_ended))
    first.start()
    assert is_inside[0].wait(60)
    second.start()
    first.join()
    first_has_ended.set()
    second.join()
    assert not is_in_torch_dispatch_mode()


def test_a_replay_without_gradients_takes_the_kernels_of_training():
    """`recompute = "layer"` runs a layer without gradients first."""

    def part(x):
        return x @ x if torch.is_grad_enabled() else (x[:, :, None] * x).sum(dim=1)

    x = torch.randn(3, 3)
    with torch.no_grad():
        with recording(("down",)) as record:
            expected = keep("down", part, x)
        with replaying(("down",), record.tensors):
            found = keep("down", part, x)
    assert torch.equal(found, expected) and not found.requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [(lambda kept: kept[:-1], "number 3, and only 2"), (lambda kept: [*kept, kept[0]], "took 3 of its 4")],
)
def test_tensors_of_another_layer_are_a_named_error(change, message):
    block, x = made()
    tensors = change(kept(block, x)[1])
    with pytest.raises(KeptActivationError, match=message), replaying(PARTS, tensors):
        block(x)
    kept(block, x)  # the thread is free for another record


def test_a_layer_that_writes_into_a_kept_tensor_is_refused():
    linear = nn.Linear(4, 4)

    def layer(x):
        return keep("down", linear, x).relu_()

    def part(x):
        return keep("down", lambda rows: linear(rows).relu_(), x)

    for writes in (layer, part):
        refused = pytest.raises(KeptActivationError, match="writes into its own kept activation")
        with refused, torch.no_grad(), recording(("down",)):
            writes(torch.randn(3, 4))
