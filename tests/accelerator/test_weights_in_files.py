"""Weights in files reach a device by page-locked memory alone, and bit for bit."""

import pytest
import torch

from tests.support.faults import Unordered
from tests.support.frozen_base import FROZEN, frozen_model, mapped_store, shrink_ring, write_base
from tests.support.scheduled_run import scheduled, starved
from tests.support.toy import PARTITIONS, toy_batches, toy_engine, train, watched
from torchround.engine.device import AcceleratorDevice, Stream
from torchround.engine.worker import device_worker

BATCHES = toy_batches(3, micro_batches=4)


@pytest.fixture(autouse=True)
def small_ring(monkeypatch):
    shrink_ring(monkeypatch)


def trained(kind, partition, base=None, make=AcceleratorDevice):
    model = frozen_model()
    store = mapped_store(model, None if base is None else write_base(base), pinned=True)
    workers = iter(range(2))
    with toy_engine(
        partition, 2, model=model, store=store, wrap=lambda _: make(torch.device(kind, 0), next(workers))
    ) as engine:
        losses = train(engine, BATCHES)
    weights = {parameter.name: parameter.view(b.weight).clone() for b in store.trained for parameter in b.parameters}
    store.close()
    return losses, weights


@pytest.mark.parametrize(("partition", "seed"), [("one stage", 0), ("one layer a stage", 1), ("forward coarser", 2)])
def test_they_are_uploaded_bit_for_bit_and_never_from_pageable_memory(simulator, tmp_path, partition, seed):
    losses, weights = trained("simulated", PARTITIONS["one stage"])
    before = simulator.pageable_copies()
    simulator.run_adversarially(seed)
    found = trained("simulated", PARTITIONS[partition], tmp_path / "base.safetensors")
    assert found[0] == losses and all(torch.equal(found[1][name], weights[name]) for name in weights)
    assert simulator.pageable_copies() == before


def test_from_their_map_each_copy_is_a_pageable_one(simulator, tmp_path, monkeypatch):
    """What the reader is there to avoid, and what the count above would show."""
    monkeypatch.setattr(device_worker, "FileReader", lambda *_: None)
    trained("simulated", PARTITIONS["one stage"], tmp_path / "base.safetensors")
    # Two workers bring parts of the four frozen layers in each of three steps.
    assert simulator.pageable_copies() >= len(FROZEN) * len(BATCHES)


@pytest.mark.parametrize("is_planted", [True, False])
def test_a_chunk_that_is_read_into_before_it_is_uploaded_is_found(simulator, tmp_path, is_planted):
    losses, weights = trained("simulated", PARTITIONS["one stage"])
    planted = Unordered("an uploaded piece of a file" if is_planted else None, "empty event")
    with scheduled(simulator, starved(Stream.WEIGHT_UPLOAD)) as make:
        path = tmp_path / "base.safetensors"
        found = trained("simulated", PARTITIONS["forward coarser"], path, lambda *which: watched(make(*which), planted))
    same = found[0] == losses and all(torch.equal(found[1][name], weights[name]) for name in weights)
    assert same is not is_planted
    assert not is_planted or planted.times > 0
