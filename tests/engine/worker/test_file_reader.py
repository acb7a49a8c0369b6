"""Frozen weights in files reach devices that need page-locked memory by a reader's ring, and by nothing else."""

import os
import re
import threading
import time
from pathlib import Path

import pytest

from tests.support.faults import LANDED, kind_of
from tests.support.frozen_base import frozen_model, mapped_store, shrink_ring, write_base
from tests.support.race_checker import AccessLog, find_races
from tests.support.toy import PARTITIONS, assert_same_state, toy_batches, toy_engine, toy_store, train, watched
from torchround.engine.board import Observer
from torchround.engine.device import CpuDevice, Stream
from torchround.engine.errors import PipelineError
from torchround.engine.store import host_memory
from torchround.engine.worker.transfers import FileReader, GradientDownload, WeightUpload
from torchround.planning.update_modes import ASYNC, SYNC

BATCHES = toy_batches(3, micro_batches=3)


class LockingDevice(CpuDevice, Observer):
    pins_host_memory = True

    def __init__(self, index):
        super().__init__(index)
        self.copiers = set()
        self.watchers.append(self)

    def begins(self, device, stream, reads, writes, copied_bytes):
        if stream is Stream.WEIGHT_UPLOAD:
            self.copiers.add(threading.current_thread().name)


class AcceptingLocker:
    def lock_pages(self, address, nbytes):
        return 0

    def unlock_pages(self, address):
        return 0


@pytest.fixture(autouse=True)
def small_ring(monkeypatch):
    monkeypatch.setattr(host_memory, "present_kind", AcceptingLocker)
    shrink_ring(monkeypatch)


@pytest.fixture
def base(tmp_path):
    return write_base(tmp_path / "base.safetensors")


def mapped_engine(base, num_devices=2, partition="forward coarser", mode=SYNC, log=None, **settings):
    model, devices = frozen_model(), []

    def locking(device):
        devices.append(LockingDevice(len(devices)))
        return watched(devices[-1], log) if isinstance(log, Observer) else devices[-1]

    store = mapped_store(model, base, mode=mode)
    partition = PARTITIONS[partition]
    return toy_engine(partition, num_devices, model=model, store=store, observer=log, wrap=locking, **settings)


def resident_bytes(path):
    blocks = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    sizes = [re.search(r"^Rss: +(\d+) kB", block, re.MULTILINE) for block in blocks if str(path) in block]
    assert sizes, "the file is not mapped"
    return sum(int(size[1]) * 1024 for size in sizes)


@pytest.mark.parametrize(
    ("num_devices", "partition", "mode"),
    [
        (1, "one stage", SYNC),
        (3, "one layer a stage", ASYNC),
        (3, "forward coarser", SYNC),
        (1, "backward coarser", ASYNC),
    ],
)
def test_losses_and_weights_are_bitwise_those_of_a_base_in_memory(base, num_devices, partition, mode):
    model = frozen_model()
    store = toy_store(model, mode=mode)
    with toy_engine(PARTITIONS[partition], num_devices, model=model, store=store) as engine:
        losses = train(engine, BATCHES)
    with mapped_engine(base, num_devices, partition, mode) as engine:
        assert train(engine, BATCHES) == losses
        found = engine.store.named_views()
    assert_same_state(found, {name: view for name, view in store.named_views().items() if name in found})


def test_a_reader_of_its_own_reads_for_each_device_whose_thread_uploads_and_nothing_touches_the_map(base):
    with mapped_engine(base) as engine:
        train(engine, BATCHES)
        engine.evaluate(BATCHES[0]).loss()
        assert resident_bytes(base) == 0
        assert [device.copiers for device in engine.devices] == [{"torchround cpu:0"}, {"torchround cpu:1"}]
        assert len([thread for thread in threading.enumerate() if "reads for" in thread.name]) == 2
        assert 0 < engine.pool.reserved_bytes == engine.pool.allocated_bytes, "the ring is reserved at first"
    assert not [thread for thread in threading.enumerate() if "reads for" in thread.name]


def test_a_virtual_device_uploads_straight_from_the_map(base):
    model = frozen_model()
    with toy_engine(PARTITIONS["one stage"], 1, model=model, store=mapped_store(model, base)) as engine:
        train(engine, BATCHES)
        names = [thread.name for thread in threading.enumerate()]
        assert resident_bytes(base) > 0
    assert not [name for name in names if "reads for" in name]


def test_a_file_that_is_cut_short_gives_an_error_that_names_it(base):
    with mapped_engine(base) as engine:
        train(engine, BATCHES[:1])
        os.truncate(base, 2000)
        with pytest.raises(PipelineError, match=r"reader of device cpu:\d: OSError: .*base.*cut short") as caught:
            train(engine, BATCHES)
    assert caught.value.store_is_consistent


def test_a_file_that_is_replaced_or_deleted_is_read_to_the_end_of_the_run(base):
    with mapped_engine(base) as engine:
        losses = train(engine, BATCHES)
    with mapped_engine(base) as engine:
        base.rename(base.with_name("old"))
        base.write_bytes(b"another file of that name")
        base.with_name("old").unlink()
        assert train(engine, BATCHES) == losses


def test_a_disk_error_names_the_file(base, monkeypatch):
    def fails(descriptor, *_):
        raise OSError(5, "Input/output error")

    with mapped_engine(base) as engine:
        train(engine, BATCHES[:1])
        monkeypatch.setattr(os, "preadv", fails)
        with pytest.raises(PipelineError, match=r"Input/output error: .*base\.safetensors"):
            train(engine, BATCHES)


def test_a_buffer_is_filled_again_only_after_its_upload(base):
    log = AccessLog()
    with mapped_engine(base, num_devices=1, log=log) as engine:
        train(engine, BATCHES[:2])
    assert find_races(log.entries) == []


class LandedGradients(Observer):
    def __init__(self):
        self.number = 0

    def posted(self, token):
        self.number += kind_of(token) == LANDED


def test_a_device_sends_its_gradients_before_it_waits_for_its_reader(base, monkeypatch):
    """The gradients of the two deepest layers land, although the frozen layer below them is not read before."""
    landed, read, reads, of_a_pass = LandedGradients(), FileReader._read, [], 1000
    end_s = time.monotonic() + 60

    def late(*arguments):
        while len(reads) >= 2 * of_a_pass and landed.number < 2 and time.monotonic() < end_s:  # in the backward
            time.sleep(0.005)
        reads.append(landed.number)
        read(*arguments)

    monkeypatch.setattr(FileReader, "_read", late)
    with mapped_engine(base, 1, "one layer a stage", log=landed) as engine:
        engine.evaluate(BATCHES[0]).wait()
        of_a_pass = len(reads)
        train(engine, BATCHES[:1])
    assert reads[2 * of_a_pass] == 2


def test_a_device_spreads_its_gradients_over_a_stage_whose_files_do_not_keep_it_waiting(base, monkeypatch):
    """Although a stage has more weights in files than the reader's ring holds."""
    begin, finish, left = WeightUpload._begin, GradientDownload.finish, []

    def ready(upload, piece):
        end_s = time.monotonic() + 20
        while not (piece.used.bundle.trainable or piece.access.is_ready) and time.monotonic() < end_s:
            time.sleep(0.001)
        return begin(upload, piece)

    def noted(download):
        left.append(download.remaining)
        finish(download)

    with mapped_engine(base, 1, "one layer a stage") as engine:
        train(engine, BATCHES[:1])
        monkeypatch.setattr(WeightUpload, "_begin", ready)
        monkeypatch.setattr(GradientDownload, "finish", noted)
        train(engine, BATCHES[1:2])
    assert len(left) > 3 and not any(left[:-1])
