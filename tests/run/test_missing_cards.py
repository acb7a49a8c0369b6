"""Why no accelerator is found, for machines described by the files of the system."""

import logging
import re
from types import SimpleNamespace

import pytest
import torch

from torchround.accelerators import PLANNED_KIND
from torchround.config import EngineTable
from torchround.engine.errors import EngineUsageError
from torchround.run import hardware, missing_cards
from torchround.run.hardware import find_hardware
from torchround.run.missing_cards import Absence, why_no_accelerator

NVIDIA = {"vendor": "0x10de", "class": "0x030200"}
AMD = {"vendor": "0x1002", "class": "0x038000", "mem_info_vram_total": str(24 << 30)}
INSIDE_PROCESSOR = {**AMD, "mem_info_vram_total": str(512 << 20)}
SOUND = {"vendor": "0x10de", "class": "0x040300"}
INTEL = {"vendor": "0x8086", "class": "0x030000"}

DRIVER, NODE = "proc/driver/nvidia/version", "dev/nvidia0"
WSL = ("dev/dxg", "usr/lib/wsl/lib/libcuda.so.1")


def machine(root, *devices, files=()):
    for number, device in enumerate(devices):
        folder = root / f"sys/bus/pci/devices/0000:0{number}:00.0"
        folder.mkdir(parents=True)
        for name, content in device.items():
            (folder / name).write_text(content + "\n")
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    return root


@pytest.mark.parametrize(
    ("devices", "files", "build", "environment", "reason"),
    [
        ([NVIDIA], (), None, {}, "has an NVIDIA card, and torch .* is built without CUDA; install"),
        ([INTEL, AMD], (), None, {}, "has an AMD card, and torch .* is built without ROCm"),
        ([], WSL, None, {}, "has an NVIDIA card, and torch .* is built without CUDA"),
        ([NVIDIA, AMD], (), "AMD", {}, "AMD card, and its driver is not loaded"),
        ([NVIDIA], (), "NVIDIA", {}, "has an NVIDIA card, and its driver is not loaded"),
        ([NVIDIA], (DRIVER,), "NVIDIA", {}, "not shown to this process; a container"),
        ([NVIDIA], (DRIVER, NODE), "NVIDIA", {}, "the NVIDIA card cannot be used by torch .*: too old"),
        ([NVIDIA], (DRIVER, NODE), "NVIDIA", {"CUDA_VISIBLE_DEVICES": "-1"}, "is set to -1, which hides"),
    ],
)
def test_a_card_that_cannot_be_used_is_explained(tmp_path, monkeypatch, devices, files, build, environment, reason):
    monkeypatch.setattr(missing_cards, "maker_of_build", lambda: build)
    monkeypatch.setattr(missing_cards, "_refusal", lambda: "too old")
    absence = why_no_accelerator(machine(tmp_path, *devices, files=files), environment)
    assert absence.has_card
    assert re.search(reason, absence.reason), absence.reason


@pytest.mark.parametrize("devices", [[], [SOUND], [INTEL], [INSIDE_PROCESSOR]])
def test_a_machine_without_a_card_has_nothing_to_mend(tmp_path, devices):
    absence = why_no_accelerator(machine(tmp_path, *devices), {"CUDA_VISIBLE_DEVICES": ""})
    assert not absence.has_card and f"torch {torch.__version__} sees none" in absence.reason


def test_what_pytorch_says_of_a_card_that_it_refuses_is_quoted_without_its_other_lines(monkeypatch):
    def refuse():
        raise RuntimeError("The driver on your system is too old\n(found version 11040)")

    monkeypatch.setattr(torch, "get_device_module", lambda kind: SimpleNamespace(init=refuse))
    assert missing_cards._refusal() == "The driver on your system is too old"


@pytest.mark.parametrize("has_card", [False, True])
def test_auto_says_why_it_uses_the_cpu_and_warns_if_there_is_a_card(monkeypatch, caplog, has_card):
    monkeypatch.setattr(hardware, "present_kind", lambda: None)
    monkeypatch.setattr(hardware, "why_no_accelerator", lambda: Absence("its driver is not loaded", has_card))
    found = find_hardware(EngineTable(devices="auto"))
    assert (found.kind, found.num_devices) == ("cpu", 1)
    assert found.note == ": no accelerator found (its driver is not loaded)"
    warnings = [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]
    assert len(warnings) == has_card and all("its driver is not loaded" in line for line in warnings)
    caplog.clear()
    assert find_hardware(EngineTable(devices="cpu")).note == "" and not caplog.records
    if has_card:
        with pytest.raises(EngineUsageError, match="its driver is not loaded"):
            find_hardware(EngineTable(devices=PLANNED_KIND))
