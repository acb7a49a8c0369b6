"""Why no accelerator is found, for machines described by the files of the system."""

import re

import pytest
import torch

from torchround.run.missing_cards import why_no_accelerator

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
        ([NVIDIA], (DRIVER, NODE), "NVIDIA", {}, r"the NVIDIA card cannot be used by torch .*: [^\n]+$"),
        ([NVIDIA], (DRIVER, NODE), "NVIDIA", {"CUDA_VISIBLE_DEVICES": "-1"}, "is set to -1, which hides"),
    ],
)
def test_a_card_that_cannot_be_used_is_explained(tmp_path, devices, files, build, environment, reason):
    absence = why_no_accelerator(machine(tmp_path, *devices, files=files), environment, build)
    assert absence.has_card
    assert re.search(reason, absence.reason), absence.reason


@pytest.mark.parametrize("devices", [[], [SOUND], [INTEL], [INSIDE_PROCESSOR]])
def test_a_machine_without_a_card_has_nothing_to_mend(tmp_path, devices):
    absence = why_no_accelerator(machine(tmp_path, *devices), {"CUDA_VISIBLE_DEVICES": ""})
    assert not absence.has_card and f"torch {torch.__version__} sees none" in absence.reason
