"""Why this machine's cards cannot be used, read from files of the system: no program is started, nothing is installed.

It looks for NVIDIA's and AMD's cards. Other makers' cards are not looked for, so they are never said to be absent.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from torchround.accelerators import NO_ACCELERATORS, PLANNED_KIND
from torchround.planning.memory import GIB

_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
_DISPLAY_CLASS = "0x03"
# Processors of AMD hold a small GPU that nobody trains on. It has a small share of the host's memory.
_SMALLEST_AMD_BYTES = 4 * GIB

_DRIVER = {"NVIDIA": "proc/driver/nvidia/version", "AMD": "sys/module/amdgpu"}
_NODES = {"NVIDIA": "nvidia[0-9]*", "AMD": "kfd"}
_PLATFORM = {"NVIDIA": PLANNED_KIND.upper(), "AMD": "ROCm"}
# Windows' driver, as WSL shows it to Linux.
_WSL_NODE, _WSL_LIBRARY = "dev/dxg", "usr/lib/wsl/lib/libcuda.so.1"


@dataclass(frozen=True)
class Absence:
    """Why PyTorch sees no accelerator. `has_card` is True if the machine has a card, so that the reason can be mended."""

    reason: str
    has_card: bool


def why_no_accelerator(
    target: str | None, root: Path = Path("/"), environment: Mapping[str, str] = os.environ
) -> Absence:
    """Find the reason on a machine on which PyTorch, built for cards of the maker `target`, sees no accelerator.

    `root` holds `dev`, `proc` and `sys`.
    """
    build = f"torch {torch.__version__}"
    maker = _maker_of_card(root, target)
    if maker is None:
        return Absence(f"{build} sees none, and this machine shows no NVIDIA or AMD card", has_card=False)
    is_wsl = (root / _WSL_NODE).exists()
    hidden = [name for name in NO_ACCELERATORS if environment.get(name) in ("", "-1")]
    if hidden:
        reason = f"{hidden[0]} is set to {environment[hidden[0]] or 'nothing'}, which hides the {maker} card"
    elif target != maker:
        reason = (
            f"this machine has an {maker} card, and {build} is built without {_PLATFORM[maker]}; install a build "
            f"for {_PLATFORM[maker]} (pytorch.org shows the command)"
        )
    elif not is_wsl and not (root / _DRIVER[maker]).exists():
        reason = f"this machine has an {maker} card, and its driver is not loaded"
    elif not is_wsl and not list((root / "dev").glob(_NODES[maker])):
        reason = (
            f"the driver of the {maker} card is loaded, and the card is not shown to this process; a container needs "
            "an option for that, such as Docker's --gpus all"
        )
    else:
        reason = f"the {maker} card cannot be used by {build}: {_refusal()}"
    return Absence(reason, has_card=True)


def _maker_of_card(root: Path, target: str | None) -> str | None:
    """Return the maker of a card in the machine, by the list of PCI devices, which needs no driver."""
    found = set()
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        maker = _VENDORS.get(_read(device / "vendor"))
        if maker is None or not _read(device / "class").startswith(_DISPLAY_CLASS):
            continue
        memory = _read(device / "mem_info_vram_total")
        if maker == "NVIDIA" or (memory.isdigit() and int(memory) >= _SMALLEST_AMD_BYTES):
            found.add(maker)
    wsl = (root / _WSL_NODE).exists() and (root / _WSL_LIBRARY).exists()
    if wsl or list((root / "dev").glob(_NODES["NVIDIA"])):
        found.add("NVIDIA")
    # With cards of both makers, the one that this build can use is the one that is missed.
    return target if target in found else min(found, default=None)


def _refusal() -> str:
    """Ask PyTorch to use a card, and return the first line of why it does not."""
    try:
        torch.get_device_module(PLANNED_KIND).init()
    except Exception as error:  # noqa: BLE001  (whatever it is, it is the reason)
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return "PyTorch names no reason"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
