"""The modelled link: the engine's step is the simulated one, and keeping shortens it."""

import threading
from argparse import Namespace

import pytest

from benchmarks.kept_schedule import IDLE_LINK, block_costs, compare, missed_bounds, rate_of
from benchmarks.modelled_link import LinkedDevice, ModelledTime
from torchround.engine.device import Stream

SHAPE = Namespace(devices=2, microbatches=4, stage_blocks=4, steps=2, pace=0.0)


# With 3 the copies take a third of the time that computation takes.
@pytest.mark.parametrize("link", [IDLE_LINK, 3.0])
def test_a_step_that_keeps_is_as_simulated_and_shorter_than_recomputation(link):
    costs = block_costs(6)
    found = compare(costs, SHAPE, link * rate_of(costs), None)
    assert found["kept_parts"] > 0
    # The simulation takes the copies of a stage's first micro-batch as hidden: 0.1 % of these steps.
    assert found["difference"] == pytest.approx(0.0, abs=0.01)
    assert found["gain"] == pytest.approx(found["simulated_gain"], abs=0.01) and found["gain"] > 0.12
    up_s, down_s = found["link_s"]
    assert up_s == pytest.approx(down_s, rel=0.05) and up_s > 0


def test_a_copy_takes_time_beside_a_computation_and_what_waits_for_it_begins_after_it():
    clock = ModelledTime()
    device = LinkedDevice(0, clock, bytes_per_s=1024)
    buffer = device.allocate(2048)
    device.run(Stream.COMPUTE, lambda: clock.sleep(3.0))
    device.copy(Stream.ACTIVATION_UPLOAD, buffer, buffer.clone())
    assert device.mark(Stream.ACTIVATION_UPLOAD).seconds_since(device.mark(Stream.COMPUTE)) == -1.0
    device.wait(Stream.ACTIVATION_UPLOAD, device.record(Stream.COMPUTE))
    device.copy(Stream.ACTIVATION_UPLOAD, buffer, buffer.clone())
    device.finish()
    assert clock.now() == 5.0


def test_a_thread_that_drives_a_device_does_not_wait_when_it_asks_whether_an_event_has_passed():
    clock = ModelledTime()
    device = LinkedDevice(0, clock, bytes_per_s=1024)
    device.run(Stream.COMPUTE, lambda: clock.sleep(3.0))
    done = device.record(Stream.COMPUTE)
    times = []

    def drive():
        device.enter_thread()
        times.append((done.query(), clock.now()))

    driver = threading.Thread(target=drive)
    driver.start()
    driver.join()
    assert times == [(True, 0.0)]
    assert done.query() and clock.now() == 3.0


def test_bounds_are_checked_on_the_idle_link_and_in_each_setting():
    good = {"difference": 0.03, "gain": 0.12}
    assert missed_bounds({"idle_link": good, "settings": [{"gain": 0.0}]}) == []
    missed = missed_bounds({"idle_link": {"difference": 0.031, "gain": 0.11}, "settings": [{"gain": -0.02}]})
    assert [line.split(":")[0] for line in missed] == ["idle link", "idle link", "setting 0"]
