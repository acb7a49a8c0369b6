"""The stages of passes whose layers must stay with their devices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchround.pipeline.forward_stages import forward_stages
from torchround.pipeline.memory import weight_space
from torchround.pipeline.partition import Partition, evaluation_stages


@st.composite
def cases(draw):
    forward = tuple(draw(st.lists(st.integers(1, 4), min_size=0, max_size=5)))
    backward = forward[::-1]
    partition = Partition(forward, draw(st.integers(1, 4)), backward)
    sizes = draw(st.lists(st.integers(1, 100), min_size=partition.num_layers, max_size=partition.num_layers))
    return partition, sizes, draw(st.integers(1, 5))


@given(cases())
def test_a_layer_stays_with_its_device_in_the_space_that_there_is(case):
    partition, sizes, num_devices = case

    def bytes_of(stage):
        return sum(sizes[stage.start : stage.stop])

    stages = forward_stages(partition, num_devices, bytes_of)
    assert [stage.start for stage in stages] == [0, *(stage.stop for stage in stages[:-1])]
    assert stages[-1].stop == partition.num_layers
    cuts = {stage.start for stage in evaluation_stages(partition)}
    assert cuts <= {stage.start for stage in stages}
    if stages == evaluation_stages(partition):
        return
    assert len(stages) % num_devices == 0
    space = weight_space(partition, num_devices, bytes_of)
    twice = [*stages, *stages]
    for index in range(len(stages)):
        assert bytes_of(twice[index]) + bytes_of(twice[index + num_devices]) <= space


@pytest.mark.parametrize("num_devices", [1, 2, 3, 5])
def test_equal_layers_are_cut_as_far_as_needed(num_devices):
    stages = forward_stages(Partition((3, 3), 2, (3, 3)), num_devices, lambda stage: stage.stop - stage.start)
    assert len(stages) == -(-3 // num_devices) * num_devices


def test_too_few_layers_leave_the_stages_as_they_are():
    partition = Partition((1,), 1, (1,))
    assert forward_stages(partition, 3, lambda stage: 1) == evaluation_stages(partition)
