"""What `doctor` says of accelerators: each card and its memory, and the rates of its link as they were measured."""

import re

import pytest

from torchround.config import EngineTable
from torchround.engine.device import AcceleratorDevice
from torchround.engine.errors import DeviceMemoryError
from torchround.run import machine
from torchround.run.hardware import find_hardware


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "LINK_BYTES", 2**22)


def test_each_card_is_named_with_its_memory_and_the_measured_rates_of_its_link(kind: str) -> None:
    hardware = find_hardware(EngineTable(devices=kind))
    found = dict(machine.device_facts(hardware))
    for index in range(hardware.num_devices):
        assert re.search(r": .+iB free of .+iB", found[f"device {index}"])
        assert re.fullmatch(
            r"\d+\.\d\d GB/s up, \d+\.\d\d GB/s down, from and to page-locked host memory", found[f"link {index}"]
        )
    assert found["compiled layers"]


def test_a_link_that_cannot_be_measured_has_no_rate(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: AcceleratorDevice, nbytes: int) -> None:
        raise DeviceMemoryError("the card is full")

    monkeypatch.setattr(AcceleratorDevice, "allocate", full)
    (hardware,) = [find_hardware(EngineTable(devices=kind, num_devices=1))]
    assert machine.link_text(hardware.make_devices()[0]) == "not measured: the card is full"
