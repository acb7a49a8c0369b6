"""Rates over the right interval and the right tokens; memory against the operating system's own figure."""

import math
import mmap
import resource
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.step_records import Clock
from torchround.engine.device import CpuDevice
from torchround.engine.reports import IdleSeconds
from torchround.layer import LayerWork, Products
from torchround.observe.record import host_gib, host_peak_gib
from torchround.run.step_meter import StepMeter, flops_per_token, mfu


class FinishedStep:
    pool = SimpleNamespace(num_allocations=3, allocated_bytes=2**30)

    def __init__(self, busy_s=0.0, skipped=False, loss=2.5, num_labels=10):
        self.busy_s, self.skipped, self._loss, self.num_labels = busy_s, skipped, loss, num_labels

    def loss(self):
        return self._loss

    def update(self):
        return SimpleNamespace(grad_norm=0.5, skipped=self.skipped, seconds=0.25, peers_wait_s=0.5)

    def by_device(self, figure, num_devices):
        idle_s = IdleSeconds(0.0, 0.0, 0.0)
        slot = SimpleNamespace(busy_s=self.busy_s, uploaded_bytes=2**30, downloaded_bytes=0, idle_s=idle_s)
        return [figure(slot)] * num_devices


def started(clock=None, **options):
    meter = StepMeter([CpuDevice(0), CpuDevice(1)], 6e6, None, **({"clock": clock} if clock else {}), **options)
    meter.start()
    return meter


def record(meter):
    return meter.record(step=1, tokens=10, lr=0.1, validation_loss=None)


def test_rates_are_over_the_steps_since_the_last_record():
    clock = Clock()
    meter = started(clock)
    for step_s, tokens in ((2.0, 1000), (5.0, 500)):
        for _ in range(4):  # two for each device, the least that a rate is over
            clock.now_s += step_s
            meter.add(FinishedStep(), tokens)
        found = record(meter)
        assert (found.tokens_per_s, found.step_s) == (tokens / step_s, step_s)
    assert (found.elapsed_s, meter.mean_tokens_per_s()) == (28.0, 6000 / 28)


def test_steps_of_several_devices_that_end_together_have_one_rate_and_no_share_below_zero():
    clock, found = Clock(), []
    meter = started(clock)
    for _ in range(4):
        clock.now_s += 2.0
        for _ in range(2):  # each device has computed one step for 1.9 s
            meter.add(FinishedStep(0.95), 100)
            found.append(record(meter))
    assert [(line.tokens_per_s, line.step_s) for line in found[3::2]] == [(100.0, 1.0)] * 3
    assert all(0.0 <= line.bubble <= 1.0 for line in found)
    assert [line.bubble for line in found[3::2]] == pytest.approx([0.05] * 3)


def test_figures_of_devices_and_optimizer_are_means_per_step():
    clock = Clock()
    meter = started(clock, skipped_steps=4)
    for busy_s in (1.0, 2.0):
        clock.now_s += 2.0
        meter.add(FinishedStep(busy_s, skipped=busy_s == 1.0), 10)
    found = record(meter)
    assert found.busy_s == (1.5, 1.5) and found.uploaded_gib == (1.0, 1.0) and found.optimizer_s == 0.25
    assert found.bubble == 1 - 3.0 / 4.0
    assert found.skipped_steps == 5 and (found.host_allocations, found.host_pool_gib) == (3, 1.0)


def test_the_loss_is_the_mean_per_label_over_the_steps_whose_loss_is_finite():
    meter = started()
    for loss, num_labels in ((4.0, 1), (1.0, 3), (math.inf, 5)):
        meter.add(FinishedStep(loss=loss, num_labels=num_labels), 10)
    assert (found := record(meter)).loss == 7 / 4 and found.loss_steps == 2
    meter.add(FinishedStep(loss=0.1, num_labels=3), 10)
    assert (found := record(meter)).loss == 0.1 and found.loss_steps == 1  # to the bit, also without a division
    meter.add(FinishedStep(loss=math.nan), 10)
    assert math.isnan(record(meter).loss)


def test_host_memory_is_the_kernels_figure_also_while_no_further_file_may_be_opened():
    status = Path("/proc/self/status").read_text()
    before_gib = host_gib()
    assert before_gib == pytest.approx(int(status.split("VmRSS:")[1].split()[0]) / 2**20, rel=0.05)
    # A mapping of its own: memory from the allocator may be resident already.
    with mmap.mmap(-1, 256 * 2**20) as used:
        for start in range(0, len(used), mmap.PAGESIZE):
            used[start] = 1
        assert 0.2 < host_gib() - before_gib < 0.3
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        found_gib = host_gib()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found_gib == host_peak_gib()


def test_validation_and_checkpoints_do_not_slow_the_reported_rate_and_data_does():
    clock = Clock()
    meter = StepMeter([CpuDevice(0), CpuDevice(1)], 6e6, None, clock=clock)
    clock.now_s += 60.0  # before the start
    meter.start()
    for excluded_s in (0.0, 60.0, 0.0, 30.0):
        with meter.timed("data"):
            clock.now_s += 0.5
        clock.now_s += 1.5
        with suppress(RuntimeError), meter.timed("excluded"):
            clock.now_s += excluded_s
            raise RuntimeError("the disk is full")
        meter.add(FinishedStep(), 100)
    with meter.timed("excluded"):
        clock.now_s += 30.0  # before the record
    found = record(meter)
    assert (found.tokens_per_s, found.step_s, found.data_s) == (50.0, 2.0, 0.5)
    with pytest.raises(ValueError, match="no step was counted"):
        record(meter)


def model_of(*works):
    return SimpleNamespace(layers=[SimpleNamespace(work=lambda *_, work=work: work) for work in works])


def test_mfu_is_model_flops_over_the_peak_of_all_devices():
    # A dense model of P weights: 2 P FLOPs per token forward, 6 P trained; 1 M tokens/s over 2 devices.
    num_weights = 1_000_000
    counted = flops_per_token(model_of(LayerWork((Products(2.0 * num_weights * 512),))), 512, 2)
    assert counted == 6.0 * num_weights
    assert mfu(1e6, counted, peak_flops_per_s=20e12) == pytest.approx(0.3)
    assert mfu(1e6, 6e6, peak_flops_per_s=None) is None
    # A frozen weight costs four FLOPs per token.
    works = [LayerWork(), LayerWork((Products(2.0 * 1_000_000, 2.0 * 700_000),))]
    assert flops_per_token(model_of(*works), 1, 2) == 6.0 * 300_000 + 4.0 * 700_000
