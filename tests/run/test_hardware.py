"""The devices and the memory that a run finds: which kind, how many, and how much of their memory a plan may use."""

import pytest

from torchround.accelerators import PLANNED_KIND, AcceleratorKind
from torchround.config import EngineTable
from torchround.engine.errors import EngineUsageError
from torchround.machines.group import HostShare
from torchround.pipeline.memory import GIB
from torchround.run import hardware
from torchround.run.hardware import USABLE_DEVICE_FRACTION, find_hardware, planned_kind


class Cards(AcceleratorKind):
    """Cards of 24 GiB. Each of `free` is a card with that many GiB that no process holds, `cached` are PyTorch's."""

    def __init__(self, free, cached=0.0):
        super().__init__("xpu")
        self.free, self.cached = free, cached

    def count(self):
        return len(self.free)

    def card_name(self, index):
        return "NVIDIA GeForce RTX 4090"

    def free_and_total_bytes(self, index):
        return int(self.free[index] * GIB), 24 * GIB

    def cached_bytes(self, index):
        return int(self.cached * GIB)


def found(monkeypatch, cards, **keys):
    monkeypatch.setattr(hardware, "present_kind", lambda: cards)
    return find_hardware(EngineTable(**keys))


def test_memory_that_other_processes_hold_is_not_planned(monkeypatch):
    alone, shared = (found(monkeypatch, Cards([free])) for free in (23.5, 13.5))
    assert alone.device_bytes is not None and shared.device_bytes is not None
    assert alone.device_bytes == int(USABLE_DEVICE_FRACTION * 23.5 * GIB)
    assert alone.device_bytes - shared.device_bytes == pytest.approx(USABLE_DEVICE_FRACTION * 10 * GIB, abs=2)


def test_memory_that_an_earlier_engine_gave_back_to_pytorch_is_planned_again(monkeypatch):
    first = found(monkeypatch, Cards([23.5]))
    assert found(monkeypatch, Cards([4.5], cached=19.0)) == first


def test_every_device_gets_the_share_of_the_fullest_card(monkeypatch):
    one_each = found(monkeypatch, Cards([23.5, 12.0, 20.0]))
    assert (one_each.kind, one_each.num_devices) == ("xpu", 3)
    assert one_each.device_bytes == int(USABLE_DEVICE_FRACTION * 12 * GIB)
    shared = found(monkeypatch, Cards([23.5, 12.0, 20.0]), num_devices=4)
    assert shared.num_devices == 4 and shared.device_bytes == one_each.device_bytes // 2
    some = found(monkeypatch, Cards([23.5, 20.0, 1.0]), num_devices=2)
    assert some.device_bytes == int(USABLE_DEVICE_FRACTION * 20 * GIB), "the third card is not used"
    given = found(monkeypatch, Cards([23.5]), device_memory_gib=3.0)
    assert given.device_bytes == 3 * GIB


@pytest.mark.parametrize(
    ("cards", "asked", "kind"),
    [
        (Cards([23.5]), "auto", "xpu"),
        (Cards([23.5]), "xpu", "xpu"),
        (Cards([23.5]), "cpu", "cpu"),
        (None, "auto", "cpu"),
    ],
)
def test_auto_takes_the_accelerators_and_the_cpu_if_there_are_none(monkeypatch, cards, asked, kind):
    assert found(monkeypatch, cards, devices=asked).kind == kind


@pytest.mark.parametrize(
    ("cards", "asked", "message"),
    [
        (None, PLANNED_KIND, 'none here .*"cpu"$'),
        (Cards([23.5]), PLANNED_KIND, 'none here.*"cpu", "xpu"$'),
        (Cards([23.5]), "cdua", 'nearest: cuda; .*"xpu"$'),
    ],
)
def test_a_kind_that_is_not_here_is_refused_with_the_kinds_that_are(monkeypatch, cards, asked, message):
    with pytest.raises(EngineUsageError, match=message):
        found(monkeypatch, cards, devices=asked)


def test_a_plan_for_a_machine_elsewhere_is_for_the_kind_of_the_known_cards_unless_another_is_named():
    assert [planned_kind(EngineTable(devices=name)) for name in ("auto", "cpu", "npu")] == [
        *(PLANNED_KIND, PLANNED_KIND, "npu")
    ]
    with pytest.raises(EngineUsageError, match="no such kind is known"):
        planned_kind(EngineTable(devices="gpu"))


def test_devices_share_the_cards_in_turn(monkeypatch):
    made = []
    monkeypatch.setattr(hardware, "kind_of", lambda name: Cards([23.5, 23.5]))
    monkeypatch.setattr(hardware, "AcceleratorDevice", lambda *named: made.append(named))
    for num_devices in (2, 3):
        hardware.Hardware("xpu", num_devices, GIB).make_devices()
    assert made == [("xpu:0", None), ("xpu:1", None), ("xpu:0", 0), ("xpu:1", 1), ("xpu:0", 2)]


def test_a_kind_that_cannot_lock_pages_costs_one_warning(monkeypatch, caplog):
    monkeypatch.setattr(hardware, "AcceleratorDevice", lambda *named: named)
    for locks in (True, False):
        cards = Cards([23.5, 23.5])
        cards.locks_pages = locks
        monkeypatch.setattr(hardware, "kind_of", lambda name, cards=cards: cards)
        hardware.Hardware("xpu", 2, GIB).make_devices()
    [warning] = caplog.messages
    assert "xpu devices cannot page-lock" in warning


def shares(monkeypatch, cards, num_processes, **keys):
    """Return what each process finds of a host that so many share."""
    monkeypatch.setattr(hardware, "present_kind", lambda: cards)
    monkeypatch.setattr(hardware, "available_host_bytes", lambda: 100 * GIB)
    table = EngineTable(**keys)
    return [find_hardware(table, HostShare(index, num_processes)) for index in range(num_processes)]


def test_processes_of_one_host_divide_its_cards_and_free_memory(monkeypatch):
    first, second = shares(monkeypatch, Cards([20.0, 21.0, 22.0]), 2)
    assert (first.cards, first.num_devices, second.cards, second.num_devices) == ((0, 1), 2, (2,), 1)
    assert second.device_bytes == int(USABLE_DEVICE_FRACTION * 22 * GIB)
    whole = find_hardware(EngineTable()).host_bytes
    assert first.host_bytes == second.host_bytes and first.host_bytes == (whole or 0) // 2


def test_more_processes_than_cards_divide_the_memory_of_a_card(monkeypatch):
    three = shares(monkeypatch, Cards([20.0, 20.0]), 3)
    assert [found.cards for found in three] == [(0,), (1,), (0,)]
    assert {found.device_bytes for found in three} == {int(USABLE_DEVICE_FRACTION * 20 * GIB) // 2}


def test_limits_of_the_table_are_each_process_s_own(monkeypatch):
    both = shares(monkeypatch, None, 2, devices="cpu", num_devices=2, host_memory_gib=8, device_memory_gib=1)
    assert {(found.num_devices, found.host_bytes, found.device_bytes) for found in both} == {(2, 8 * GIB, GIB)}
