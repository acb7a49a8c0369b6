"""The devices and the memory that a run finds: which kind, how many, how much a plan may use, why none is found."""

from types import SimpleNamespace

import pytest
import torch

from torchround.accelerators import PLANNED_KIND, AcceleratorKind
from torchround.config import EngineTable
from torchround.engine.errors import EngineUsageError
from torchround.machines.group import HostShare
from torchround.planning.memory import GIB
from torchround.run import hardware
from torchround.run.hardware import (
    USABLE_DEVICE_FRACTION,
    VISIBLE_CARDS,
    find_hardware,
    planned_kind,
    why_no_accelerator,
)


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


@pytest.fixture
def found(monkeypatch):
    def found(cards, num_processes=1, **keys):
        seen = {
            "present_kind": cards,
            "available_host_bytes": 100 * GIB,
            "why_no_accelerator": "its driver is not loaded",
        }
        for name, value in seen.items():
            monkeypatch.setattr(hardware, name, lambda *_, value=value: value)
        shares = [HostShare(index, num_processes) for index in range(num_processes)]
        all_found = [find_hardware(EngineTable(**keys), share) for share in shares]
        return all_found if num_processes > 1 else all_found[0]

    return found


def test_memory_that_other_processes_hold_is_not_planned_and_what_an_earlier_engine_gave_back_is(found):
    alone, shared = (found(Cards([free])) for free in (23.5, 13.5))
    assert alone.device_bytes == int(USABLE_DEVICE_FRACTION * 23.5 * GIB)
    assert alone.device_bytes - shared.device_bytes == pytest.approx(USABLE_DEVICE_FRACTION * 10 * GIB, abs=2)
    assert found(Cards([4.5], cached=19.0)) == alone


def test_every_device_gets_the_share_of_the_fullest_card(found):
    one_each = found(Cards([23.5, 12.0, 20.0]))
    assert (one_each.kind, one_each.num_devices) == ("xpu", 3)
    assert one_each.device_bytes == int(USABLE_DEVICE_FRACTION * 12 * GIB)
    shared = found(Cards([23.5, 12.0, 20.0]), num_devices=4)
    assert shared.num_devices == 4 and shared.device_bytes == one_each.device_bytes // 2
    some = found(Cards([23.5, 20.0, 1.0]), num_devices=2)
    assert some.device_bytes == int(USABLE_DEVICE_FRACTION * 20 * GIB), "the third card is not used"
    assert found(Cards([23.5]), device_memory_gib=3.0).device_bytes == 3 * GIB


def test_auto_takes_the_accelerators_and_the_cpu_if_there_are_none(found):
    assert [found(Cards([23.5]), devices=asked).kind for asked in ("auto", "xpu", "cpu")] == ["xpu", "xpu", "cpu"]


def test_auto_says_why_it_uses_the_cpu(found):
    auto = found(None, devices="auto", cpu_threads=1)
    assert (auto.kind, auto.num_devices) == ("cpu", 1)
    assert auto.note == ": no accelerator found (its driver is not loaded)"
    assert found(None, devices="cpu").note == ""


@pytest.mark.parametrize(
    ("cards", "asked", "message"),
    [
        (None, PLANNED_KIND, 'none here .*its driver is not loaded.*"cpu"$'),
        (Cards([23.5]), PLANNED_KIND, 'none here.*"cpu", "xpu"$'),
        (Cards([23.5]), "cdua", 'no such kind is known; .*"xpu"$'),
    ],
)
def test_a_kind_that_is_not_here_is_refused_with_the_kinds_that_are(found, cards, asked, message):
    with pytest.raises(EngineUsageError, match=message):
        found(cards, devices=asked)


def test_a_plan_for_a_machine_elsewhere_is_for_the_kind_of_the_known_cards_unless_another_is_named():
    kinds = [planned_kind(EngineTable(devices=name)) for name in ("auto", "cpu", "npu")]
    assert kinds == [PLANNED_KIND, PLANNED_KIND, "npu"]
    with pytest.raises(EngineUsageError, match="no such kind is known"):
        planned_kind(EngineTable(devices="gpu"))


def test_devices_share_the_cards_in_turn_and_a_kind_that_cannot_lock_pages_costs_one_warning(monkeypatch, caplog):
    cards = Cards([23.5, 23.5])
    made = []
    replaced = {"kind_of": lambda name: cards, "AcceleratorDevice": lambda *named: made.append(named)}
    for name, value in replaced.items():
        monkeypatch.setattr(hardware, name, value)
    for cards.locks_pages, num_devices in ((True, 2), (False, 3)):
        assert not caplog.messages
        hardware.Hardware("xpu", num_devices, GIB).make_devices()
    assert made == [("xpu:0", None), ("xpu:1", None), ("xpu:0", 0), ("xpu:1", 1), ("xpu:0", 2)]
    [warning] = caplog.messages
    assert "xpu devices cannot page-lock" in warning


def test_processes_of_one_host_divide_its_free_memory_and_limits_of_the_table_are_each_one_s_own(found):
    alone = found(Cards([20.0, 21.0]))
    for each in found(Cards([20.0, 21.0]), 2):
        assert each.num_devices == 2 and each.device_bytes == alone.device_bytes // 2
        assert each.host_bytes == alone.host_bytes // 2
    both = found(None, 2, devices="cpu", num_devices=2, host_memory_gib=8, device_memory_gib=1)
    assert {(each.num_devices, each.host_bytes, each.device_bytes) for each in both} == {(2, 8 * GIB, GIB)}


@pytest.mark.parametrize("hidden", [None, "", "-1"])
def test_the_reason_is_pytorch_s_own_with_the_variable_that_may_hide_cards(monkeypatch, hidden):
    def init():
        raise RuntimeError("no driver\nand a line of advice")

    monkeypatch.setattr(torch, "get_device_module", lambda kind: SimpleNamespace(init=init))
    monkeypatch.delenv(VISIBLE_CARDS, raising=False)
    if hidden is not None:
        monkeypatch.setenv(VISIBLE_CARDS, hidden)
    variable = "" if hidden is None else f"; {VISIBLE_CARDS} is {hidden or 'empty'}"
    assert why_no_accelerator() == f"torch {torch.__version__}: no driver{variable}"
