"""What `doctor` says of accelerators: each card and its memory."""

import re

from torchround.commands import doctor
from torchround.config import EngineTable
from torchround.run.hardware import find_hardware


def test_each_card_is_named_with_its_memory(kind):
    hardware = find_hardware(EngineTable(devices=kind))
    found = dict(doctor.machine_facts())
    for index in range(hardware.num_devices):
        assert re.search(r": .+iB free of .+iB", found[f"device {index}"])
