"""Tolerances with a reason that holds on any processor.

A sum of n terms, added up in any order and with any grouping, differs from the exact sum by at most n u times the sum
of the terms' magnitudes, where u is half the gap between 1 and the next number of the format (Higham, Accuracy and
Stability of Numerical Algorithms, section 4.2). So two correct computations of one thing may differ by that much,
and how much they do differ depends on the processor's vector width. `terms` counts the terms of all sums on the
longest path from inputs to the result.

AdamW divides a gradient by its own size. With an eps below the gradient's rounding, an element whose gradient vanishes
takes a full step in a direction that rounding decides. Tests that compare weights after updates therefore use an
eps well above the rounding of a gradient (`toy.OPTIMIZER`): the update then changes by at most lr / eps per unit of
gradient.
"""

import torch

FP32 = 2.0**-24
BF16 = 2.0**-8
FP16 = 2.0**-11


def ties_up(values, dtype):
    """Round fp32 values as device weights are rounded: in bfloat16 with ties up in magnitude, otherwise as PyTorch does.

    So are the device weights of split weights, which a store keeps in `sync` and in `async` without prediction.
    """
    if dtype != torch.bfloat16:
        return values.to(dtype)
    return ((values.view(torch.int32) + 0x8000) & -0x10000).view(torch.float32).to(dtype)


def assert_close_in_sums(found, expected, terms, what="", unit=FP32, scale=None):
    """Check that no element differs by more than `terms * unit * scale`.

    `scale` is the size of the largest terms: by default that of the largest element of `expected`. Give it when terms
    cancel, so that the result is much smaller than they are.
    """
    bound = terms * unit * (expected.abs().max().item() if scale is None else scale)
    error = (found - expected).abs().max().item()
    assert error <= bound, f"{what}: differs by {error:.3g}, {terms} terms explain {bound:.3g}"


def assert_states_close(found, expected, terms):
    """Check all tensors of a store's state with `assert_close_in_sums`; second moments are squares, so twice that."""
    assert found.keys() >= expected.keys(), "a tensor is missing"
    for name, value in expected.items():
        assert_close_in_sums(found[name], value, 2 * terms if "exp_avg_sq" in name else terms, name)
