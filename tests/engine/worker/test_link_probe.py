"""The probe finds which devices share a link. The devices are virtual, and the times of their links are computed."""

import pytest
import torch

from tests.support.toy import toy_model, toy_store
from torchround.engine.device import CpuDevice, Stream
from torchround.engine.worker import link_turns as link_probe
from torchround.engine.worker.link_turns import LEAST_BYTES, PROBE_BYTES, find_link_use, measure_rates

RATE = 20e9  # bytes per second of a device's own link, and of a switch that one device uses
CARRIES = 0.7  # the fraction of that rate that a switch carries for several devices together


@pytest.fixture(autouse=True)
def all_the_time_it_takes(monkeypatch):
    monkeypatch.setattr(link_probe, "BUDGET_S", float("inf"))


class Switch:
    """A switch that shares its rate equally among the devices below it that copy."""

    def __init__(self):
        self.queued = {}
        self.finished = {}
        self.now_s = 0.0

    def settle(self):
        """Let everything queued so far arrive: between two arrivals, all rates are constant."""
        left, self.queued = self.queued, {}
        while left:
            rate = RATE if len(left) == 1 else CARRIES * RATE / len(left)
            device, nbytes = min(left.items(), key=lambda item: item[1])
            self.now_s += nbytes / rate
            left = {other: rest - nbytes for other, rest in left.items() if other != device}
            self.finished[device] = self.now_s


class LinkMark:
    """A mark before or after a device's copies. Its time is known once the switch has settled."""

    def __init__(self, device):
        self.device = device
        self.after = device in device.switch.queued
        self.start_s = device.switch.now_s

    def seconds_since(self, earlier):
        assert self.after and not earlier.after, "not the marks around one device's copies"
        self.device.switch.settle()
        return self.device.switch.finished[self.device] - earlier.start_s


class LinkedDevice(CpuDevice):
    """A device whose copies take only computed time and move no bytes."""

    has_link = True

    def __init__(self, index, switch, memory_limit_bytes=2 * PROBE_BYTES - 1):
        super().__init__(index, memory_limit_bytes)
        self.switch = switch

    def _copy(self, stream, destination, source):
        assert stream is Stream.WEIGHT_UPLOAD and destination.numel() == source.numel()
        self.switch.queued[self] = self.switch.queued.get(self, 0) + source.nbytes

    def mark(self, stream):
        return LinkMark(self)


def linked(*switches):
    made = {number: Switch() for number in switches}
    return [LinkedDevice(index, made[number]) for index, number in enumerate(switches)]


class Store:
    """The part of a host store that the probe uses."""

    def __init__(self, nbytes):
        self.bundles = [type("Bundle", (), {"device_weights": [torch.zeros(nbytes // 2, dtype=torch.bfloat16)]})]


@pytest.mark.parametrize(
    ("switches", "turns"), [((0, 1, 0, 1), ((0, 2), (1, 3))), ((0, 1, 2), ())], ids=["two switches", "no switch"]
)
def test_devices_below_one_switch_are_found(switches, turns):
    use = find_link_use("auto", linked(*switches), Store(2 * PROBE_BYTES))
    assert use.turns == turns
    assert "20.0 to 20.0 GB/s" in use.text


def test_measured_rates_equal_the_rates_of_the_links():
    rates = measure_rates(linked(0, 0, 1), torch.zeros(LEAST_BYTES, dtype=torch.uint8))
    assert rates.alone == pytest.approx([RATE] * 3)
    assert rates.together[0, 1] == pytest.approx([CARRIES * RATE / 2] * 2)
    assert [*rates.together[0, 2], *rates.together[1, 2]] == pytest.approx([RATE] * 4)


def test_a_device_is_as_empty_after_the_probe_as_before():
    """Each has room for one probe's buffer, not for two."""
    devices = linked(0, 0)
    for _ in range(2):
        find_link_use("auto", devices, Store(2 * PROBE_BYTES))
    for device in devices:
        device.allocate(PROBE_BYTES)


class Untouchable(CpuDevice):
    """A device that fails at every call."""

    def _copy(self, *_):
        raise AssertionError("a device was probed")

    _allocate = mark = _copy


def test_nothing_is_measured_on_virtual_devices_a_single_device_or_a_tiny_model_or_if_the_config_decides():
    one, three = [LinkedDevice(0, Switch(), 0)], [LinkedDevice(index, Switch(), 0) for index in range(3)]
    for setting, devices in (("auto", [Untouchable(0), Untouchable(1)]), ("auto", one), (False, three)):
        assert find_link_use(setting, devices, toy_store(toy_model())).turns == ()
    assert find_link_use(True, three, Store(PROBE_BYTES)).turns == ((0, 1, 2),)
    use = find_link_use("auto", three, Store(LEAST_BYTES - 2))
    assert use.turns == () and str(LEAST_BYTES - 2) in use.text
