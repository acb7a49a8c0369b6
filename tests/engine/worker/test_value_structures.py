"""The structure of values between layers: what travels comes back with the same values, strides, types and identities."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from torchround.engine.worker.slots import Packing, fill, flatten, unflatten

Pair = namedtuple("Pair", ["one", "two"])


def travelled(value):
    tensors, structure = flatten(value)
    packing = Packing.of(tensors, structure)
    buffer = torch.full((packing.nbytes,), 255, dtype=torch.uint8)
    fill(packing.views(buffer), tensors)
    return unflatten(packing.views(buffer.clone()), packing.structure)


def is_size(part):
    return isinstance(part, torch.Size)


def leaves():
    numbers = torch.arange(24.0)
    tensors = [
        numbers.view(4, 6),
        numbers.view(4, 6).t(),
        numbers.view(2, 3, 4).permute(1, 2, 0),
        numbers[::2],
        numbers[3].expand(2, 5),
        numbers[:0].view(0, 3),
        torch.tensor(2.5),
        torch.tensor([True, False]),
        torch.arange(3),
        torch.ones(1, 3, 1, dtype=torch.bfloat16),
        torch.randn(2, 2, dtype=torch.complex64).conj(),
        numbers.view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    ]
    return st.sampled_from([*tensors, None, 3, 0.5, "text", torch.float32, tensors[0].shape, b"x", True])


def trees():
    return st.recursive(
        leaves(),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.sampled_from(["a", "b", 3]), inner, max_size=3),
            st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
            st.lists(st.tuples(st.sampled_from("cd"), inner), max_size=2).map(OrderedDict),
        ),
        max_leaves=8,
    )


@given(trees())
def test_any_structure_comes_back_as_it_went(value):
    found = travelled(value)
    (before, of_value), (after, of_found) = (pytree.tree_flatten(one, is_leaf=is_size) for one in (value, found))
    assert of_found == of_value
    same = {id(one): other for one, other in zip(before, after, strict=True) if isinstance(one, Tensor)}
    for one, other in zip(before, after, strict=True):
        if not isinstance(one, Tensor):
            assert one == other
            assert type(one) is type(other)
            continue
        assert other is same[id(one)], "a tensor that came twice is two"
        assert other.dtype == one.dtype
        assert torch.equal(other, one)
        if one.is_contiguous() or one.numel() == one.untyped_storage().nbytes() // one.itemsize:
            assert other.stride() == one.stride()


@dataclass
class Unknown:
    tensor: Tensor


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (Unknown(torch.ones(2)), "Unknown"),
        ({"a": [torch.nn.Linear(1, 1)]}, "Linear"),
        (torch.device("cpu"), "device"),
        ((torch.eye(2).to_sparse(),), "sparse"),
    ],
)
def test_what_cannot_follow_to_another_device_is_refused(value, says):
    with pytest.raises(TypeError, match=says):
        travelled(value)
