"""Activations that are kept on the host instead of being recomputed: counted memory, and what travels."""

from collections import Counter
from dataclasses import replace

import pytest

from tests.support import toy
from tests.support.toy import KEPT, PARTITIONS, ToyBlock, toy_batches, toy_engine, toy_model, train, watched
from torchround.engine.board import Observer
from torchround.engine.device import Stream
from torchround.engine.errors import EngineUsageError
from torchround.planning.partition import Partition

LR = 1e-2


def trained(model, **settings):
    with toy_engine(PARTITIONS["forward coarser"], 1, model=model, **settings) as engine:
        losses = train(engine, toy_batches(2, 3), LR)
    return losses, engine.store.named_views()


class Copies(Observer):
    def __init__(self):
        self.nbytes = Counter()
        self.order = []

    def begins(self, device, stream, reads, writes, copied_bytes):
        if copied_bytes:
            self.nbytes[stream] += copied_bytes
            self.order.append((device.name, stream, copied_bytes))


def copies_of(kept, evaluates=False):
    model, copies = toy_model(), Copies()
    options = {"wrap": lambda device: watched(device, copies), "kept": kept}
    with toy_engine(PARTITIONS["backward coarser"], 1, model=model, **options) as engine:
        [batch] = toy_batches(1, 4)
        if evaluates:
            assert engine.evaluate(batch).loss() > 0
        else:
            train(engine, [batch])
        assert engine.pool.reserved_bytes == engine.pool.allocated_bytes
    return copies


def kept_bytes(kept, layers, micro_batches=4):
    model = toy_model()
    [batch] = toy_batches(1, micro_batches)
    works = [model.layers[layer].work(*part.tokens.shape, 4) for layer in layers for part in batch]
    names = [kept[layer] for layer in layers for _ in batch]
    return sum(
        part.nbytes for work, chosen in zip(works, names, strict=True) for part in work.keepable if part.name in chosen
    )


@pytest.mark.parametrize("kept", ["all", "mixed"])
def test_what_is_kept_goes_down_once_and_up_once(kept):
    """The fused stage of this partition, layers 5 and 6, keeps nothing on the host."""
    without, found = copies_of(()), copies_of(KEPT[kept])
    expected = kept_bytes(KEPT[kept], range(5))
    assert expected > 0
    for stream in (Stream.ACTIVATION_DOWNLOAD, Stream.ACTIVATION_UPLOAD):
        assert found.nbytes[stream] - without.nbytes[stream] == expected


def test_an_evaluation_keeps_nothing():
    assert copies_of(KEPT["all"], evaluates=True).order == copies_of((), evaluates=True).order


def peak_bytes(partition, num_devices, micro_batches, kept):
    [batch] = toy_batches(1, micro_batches)
    with toy_engine(partition, num_devices, kept=kept) as engine:
        engine.forward_backward(batch)
        engine.step(LR)
        engine.drain()
        return max(device.peak_bytes() for device in engine.devices)


@pytest.mark.parametrize(("num_devices", "micro_batches"), [(1, 2), (2, 8)])
def test_keeping_everything_takes_device_memory_of_one_stage_whatever_the_model_has(num_devices, micro_batches):
    """PipeOffload's full offload: a device holds O(M / stages) of the model's activations M, not those of its stages."""
    one_block = None
    for blocks, backward in ((1, (1,) * 6), (2, (2, 2, 2)), (5, (5, 1))):
        partition = Partition((1,) * 6, 1, backward)
        with_kept, without = (peak_bytes(partition, num_devices, micro_batches, kept) for kept in (KEPT["all"], ()))
        # Two slots on the way down for a block, and two on the way up for a backward stage.
        one_block = one_block or (with_kept - without) // 4
        assert with_kept - without == 2 * (1 + blocks) * one_block


class DeclaresLess(ToyBlock):
    keepable = {"gate_up": 1, "down": toy.WIDTH}  # noqa: RUF012


class KeepsNothing(ToyBlock):
    def forward(self, hidden, micro_batch):
        return hidden + self.down(self.up(hidden * self.norm).sin())


@pytest.mark.parametrize(
    ("block", "says"),
    [
        (DeclaresLess, "recorded 4608 bytes to keep of a micro-batch, but 256 were counted"),
        (KeepsNothing, "recorded 0 bytes to keep of a micro-batch, but 4608 were counted"),
    ],
)
def test_a_layer_that_does_not_record_what_it_declared_is_recomputed_with_one_warning(caplog, block, says):
    model = toy_model()
    model = replace(model, layers=(model.layers[0], *(block() for _ in range(toy.BLOCKS)), model.layers[-1]))
    expected, found = trained(model), trained(model, kept=KEPT["mixed"])
    assert found[0] == expected[0]
    toy.assert_same_state(found[1], expected[1])
    # Layer 3 records too much too; layer 4 keeps only the part that is declared as it is.
    [warning] = caplog.records
    assert f"layer block.0 {says}" in warning.message


def test_names_for_another_number_of_layers_are_refused():
    with pytest.raises(EngineUsageError, match="kept names parts of 2 layers; the partition covers 7"):
        toy_engine(PARTITIONS["one stage"], 1, kept=((), ("down",)))
