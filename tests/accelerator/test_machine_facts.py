"""What `doctor` says of accelerators: each card and its memory, and the rates of its link as they were measured."""

import re

import pytest

from torchround.commands import doctor
from torchround.config import EngineTable
from torchround.run.hardware import find_hardware


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(doctor, "LINK_BYTES", 2**22)


def test_each_card_is_named_with_its_memory_and_the_measured_rates_of_its_link(kind, tmp_path):
    hardware = find_hardware(EngineTable(devices=kind))
    found = dict(doctor.machine_facts(tmp_path))
    for index in range(hardware.num_devices):
        assert re.search(r": .+iB free of .+iB", found[f"device {index}"])
        assert re.fullmatch(
            r"\d+\.\d\d GB/s up, \d+\.\d\d GB/s down, from and to page-locked host memory", found[f"link {index}"]
        )
    assert found["compiled layers"]


def test_a_link_that_cannot_be_measured_has_no_rate(simulator, kind):
    [device] = find_hardware(EngineTable(devices=kind, num_devices=1)).make_devices()
    simulator.set_memory_limit(0, 2**20)
    assert doctor.link_text(device).startswith(f"not measured: {kind}:0 cannot allocate")
