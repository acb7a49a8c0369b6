"""Batches are cut into micro-batches of any structure, and outputs joined again; mistakes name the tensor."""

from typing import NamedTuple

import pytest
import torch

from torchround.library.refusals import PipelineUsageError
from torchround.library.sample_batch import cut, joined


def pieces(inputs, labels=None, num_micro_batches=3):
    batches = cut(inputs, labels, num_micro_batches, None, is_training=False, seed=0, call=0)
    return [batch.inputs_and_labels() for batch in batches]


def test_tensors_are_cut_along_dimension_0_and_plain_values_go_to_all():
    image, mask, scale = torch.arange(14).reshape(7, 2), torch.arange(7) > 3, torch.tensor(2.0)
    assert len(pieces(torch.zeros(2, 5), num_micro_batches=4)) == 2
    found = pieces({"image": image, "rest": (mask, [scale, "text", None])}, torch.arange(7))
    assert [len(labels) for _, labels in found] == [3, 2, 2]
    assert torch.equal(torch.cat([inputs["image"] for inputs, _ in found]), image)
    assert torch.equal(torch.cat([inputs["rest"][0] for inputs, _ in found]), mask)
    assert all(inputs["rest"][1] == [scale, "text", None] for inputs, _ in found)


class Pair(NamedTuple):
    one: torch.Tensor
    other: torch.Tensor


def test_rebuilt_on_a_device_a_batch_keeps_its_structure_and_none_of_its_tensors():
    inputs = Pair(torch.randn(4, 2), torch.randn(4))
    [batch] = cut(inputs, [torch.ones(4)], 1, None, is_training=True, seed=0, call=0)
    again = batch.rebuild()([tensor * 2 for tensor in batch.tensors()])
    found, labels = again.inputs_and_labels()
    assert isinstance(found, Pair) and torch.equal(found.other, 2 * inputs.other)
    assert torch.equal(labels[0], torch.full((4,), 2.0))


@pytest.mark.parametrize(
    ("inputs", "labels", "count", "message"),
    [
        (torch.zeros(4, 2), torch.zeros(5), 2, "labels has 5"),
        ({"a": torch.zeros(4), "b": [torch.zeros(3)]}, None, 2, r"inputs\['b'\]\[0\] has 3"),
        (torch.zeros(0, 2), None, 2, "inputs has no samples"),
        (3.0, torch.zeros(4), 2, "inputs hold no tensor"),
        (torch.tensor(3.0), None, 2, "inputs hold no tensor"),
        (torch.zeros(4, requires_grad=True), None, 2, "inputs requires a gradient"),
        (torch.zeros(4, 4).to_sparse(), None, 2, "inputs is sparse"),
        (torch.zeros(4, device="meta"), None, 2, "inputs is on meta"),
        (torch.zeros(4), None, 0, "num_micro_batches = 0"),
        (torch.zeros(4), None, 2.0, "num_micro_batches = 2.0"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_by_the_name_of_its_tensor(inputs, labels, count, message):
    with pytest.raises(PipelineUsageError, match=message):
        pieces(inputs, labels, count)


def test_outputs_are_joined_leaf_by_leaf():
    first = {"x": torch.zeros(2, 3), "mean": torch.tensor(1.0), "seq": torch.zeros(5, 2), "kind": "a"}
    second = {"x": torch.ones(1, 3), "mean": torch.tensor(2.0), "seq": torch.ones(5, 1), "kind": "a"}
    found = joined([first, second], [2, 1])
    assert torch.equal(found["x"], torch.cat([first["x"], second["x"]]))
    assert found["mean"] == [torch.tensor(1.0), torch.tensor(2.0)]
    assert [part.shape for part in found["seq"]] == [(5, 2), (5, 1)]
    assert found["kind"] == "a"
    outputs = [torch.zeros(2), (torch.zeros(1), None)]  # of different structures
    assert joined(outputs, [2, 1])[1][1] is None
