"""The devices and the memory that a run finds: which kind, how many, how much a plan may use, why none is found."""

import logging
import re

import pytest
import torch

from torchround.accelerators import PLANNED_KIND, AcceleratorKind
from torchround.config import EngineTable
from torchround.engine.errors import EngineUsageError
from torchround.machines.group import HostShare
from torchround.planning.memory import GIB
from torchround.run import hardware
from torchround.run.hardware import USABLE_DEVICE_FRACTION, Absence, find_hardware, planned_kind, why_no_accelerator


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
    """Return a function that finds the hardware of a machine with these cards, as each process that shares it."""

    def found(cards, num_processes=1, has_card=False, **keys):
        absence = Absence("its driver is not loaded", has_card)
        seen = {"present_kind": cards, "available_host_bytes": 100 * GIB, "why_no_accelerator": absence}
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


@pytest.mark.parametrize("has_card", [False, True])
def test_auto_says_why_it_uses_the_cpu_and_warns_if_there_is_a_card(found, caplog, has_card):
    auto = found(None, has_card=has_card, devices="auto", cpu_threads=1)
    assert (auto.kind, auto.num_devices) == ("cpu", 1)
    assert auto.note == ": no accelerator found (its driver is not loaded)"
    warnings = [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]
    assert len(warnings) == has_card and all("its driver is not loaded" in line for line in warnings)
    caplog.clear()
    assert found(None, has_card=has_card, devices="cpu").note == "" and not caplog.records


@pytest.mark.parametrize(
    ("cards", "asked", "message"),
    [
        (None, PLANNED_KIND, 'none here .*its driver is not loaded.*"cpu"$'),
        (Cards([23.5]), PLANNED_KIND, 'none here.*"cpu", "xpu"$'),
        (Cards([23.5]), "cdua", 'nearest: cuda; .*"xpu"$'),
    ],
)
def test_a_kind_that_is_not_here_is_refused_with_the_kinds_that_are(found, cards, asked, message):
    with pytest.raises(EngineUsageError, match=message):
        found(cards, has_card=True, devices=asked)


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


def test_processes_of_one_host_divide_its_cards_and_free_memory_and_limits_of_the_table_are_each_one_s_own(found):
    first, second = found(Cards([20.0, 21.0, 22.0]), 2)
    assert (first.cards, first.num_devices, second.cards, second.num_devices) == ((0, 1), 2, (2,), 1)
    assert second.device_bytes == int(USABLE_DEVICE_FRACTION * 22 * GIB)
    assert first.host_bytes == second.host_bytes == found(Cards([20.0, 21.0, 22.0])).host_bytes // 2
    three = found(Cards([20.0, 20.0]), 3)
    assert [each.cards for each in three] == [(0,), (1,), (0,)]
    assert {each.device_bytes for each in three} == {int(USABLE_DEVICE_FRACTION * 20 * GIB) // 2}
    both = found(None, 2, devices="cpu", num_devices=2, host_memory_gib=8, device_memory_gib=1)
    assert {(each.num_devices, each.host_bytes, each.device_bytes) for each in both} == {(2, 8 * GIB, GIB)}


# Machines described by the files of the system, on which no accelerator is found.

DRIVER, NODE, WSL = "proc/driver/nvidia/version", "dev/nvidia0", "usr/lib/wsl/lib/libcuda.so.1"
AMD = "sys/class/drm/card1/device/mem_info_vram_total"


def machine(root, *files, memory=24 << 30):
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{memory}\n")
    return root


@pytest.mark.parametrize(
    ("files", "build", "environment", "reason"),
    [
        ((DRIVER, NODE), None, {}, "has an NVIDIA card, and torch .* is built without CUDA; install"),
        ((AMD,), None, {}, "has an AMD card, and torch .* is built without ROCm"),
        ((WSL,), None, {}, "has an NVIDIA card, and torch .* is built without CUDA"),
        ((NODE, AMD), "AMD", {}, "the AMD card cannot be used by torch"),
        ((DRIVER,), "NVIDIA", {}, r"the NVIDIA card cannot be used by torch .*: [^\n]+ \(a container[^\n]+$"),
        ((DRIVER, NODE), "NVIDIA", {"CUDA_VISIBLE_DEVICES": "-1"}, "is set to -1, which hides"),
    ],
)
def test_a_card_that_cannot_be_used_is_explained(tmp_path, files, build, environment, reason):
    absence = why_no_accelerator(build, machine(tmp_path, *files), environment)
    assert absence.has_card
    assert re.search(reason, absence.reason), absence.reason


@pytest.mark.parametrize("files", [(), (AMD,)])
def test_a_machine_without_a_card_or_with_a_small_one_in_its_processor_has_nothing_to_mend(tmp_path, files):
    absence = why_no_accelerator(None, machine(tmp_path, *files, memory=512 << 20), {"CUDA_VISIBLE_DEVICES": ""})
    assert not absence.has_card and f"torch {torch.__version__} sees none" in absence.reason
