"""Parts of the benchmark `gpu`: the cards, copy rates, the outcome of the tests, and the table of all figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from torch import Tensor

from benchmarks.frame import table
from torchround.accelerators import kind_of
from torchround.engine.device import Device, Stream
from torchround.engine.store.host_memory import HostAllocator
from torchround.planning.memory import GIB
from torchround.run.hardware import Hardware

REPEATS = 4
UP, DOWN = Stream.WEIGHT_UPLOAD, Stream.GRADIENT_DOWNLOAD
Lane = tuple[Device, dict[Stream, tuple[Tensor, Tensor]]]


def cards(hardware: Hardware) -> dict[str, Any]:
    """Describe the devices that the figures were measured on."""
    kind = kind_of(hardware.kind)
    virtual = hardware.kind == "cpu"
    return {
        "kind": hardware.kind,
        "names": ["cpu"] if virtual else [kind.card_name(index) for index in range(kind.count())],
        "device_gib": None if virtual else kind.free_and_total_bytes(0)[1] / GIB,
        "known_card": None if hardware.spec is None else hardware.spec.name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def copy_rates(devices: Sequence[Device], nbytes: int) -> dict[str, Any]:
    """Measure GB/s (1e9 bytes) per card from and to pinned memory: each way alone, both ways, all cards both ways.

    The last one shows whether cards disturb each other, behind a shared PCIe switch for example.
    """
    memory = HostAllocator(devices[0].pins_host_memory)
    # For each device: the destination and the source of each way.
    lanes: list[Lane] = []
    try:
        for device in devices:
            up, down = (
                (device.allocate(nbytes), memory.allocate(nbytes, for_devices=True)) for _ in range(2)
            )
            lanes.append((device, {UP: up, DOWN: down[::-1]}))
        _rates(lanes, [UP, DOWN])  # warm up
        return {
            "pinned": devices[0].pins_host_memory,
            "upload_gb_per_s": [_rates([lane], [UP])[0][0] for lane in lanes],
            "download_gb_per_s": [_rates([lane], [DOWN])[0][0] for lane in lanes],
            "both_ways_gb_per_s": [_rates([lane], [UP, DOWN])[0] for lane in lanes],
            "all_cards_both_ways_gb_per_s": _rates(lanes, [UP, DOWN]),
        }
    finally:
        for device, _ in lanes:
            device.finish()
        memory.close()


def _rates(lanes: Sequence[Lane], ways: Sequence[Stream]) -> list[list[float]]:
    """Measure GB/s of each device and way while all of them copy."""
    marks = []
    for device, _ in lanes:
        device.finish()
    for device, pairs in lanes:
        starts = [device.mark(way) for way in ways]
        for _ in range(REPEATS):
            for way in ways:
                device.copy(way, *pairs[way])
        marks.append([(start, device.mark(way)) for start, way in zip(starts, ways, strict=True)])
    nbytes = REPEATS * lanes[0][1][UP][0].numel()
    return [[nbytes / end.seconds_since(start) / 1e9 for start, end in of_device] for of_device in marks]


def num_cards(devices: Sequence[Device]) -> int:
    """Count the GPUs behind the devices; each virtual device counts as one."""
    return len(accelerators(devices)) or len(devices)


def accelerators(devices: Sequence[Device]) -> set[torch.device]:
    """List the GPUs behind the devices, each once."""
    return {device.torch_device for device in devices if device.torch_device.type != "cpu"}


def start_peak(devices: Sequence[Device]) -> int:
    """Forget earlier peaks, and return the bytes that the fullest card holds already."""
    cards = accelerators(devices)
    for card in cards:
        torch.accelerator.synchronize(card)
        torch.accelerator.reset_peak_memory_stats(card)
    return max((torch.accelerator.memory_allocated(card) for card in cards), default=0)


def peak(devices: Sequence[Device]) -> int:
    """Find the fullest card's peak in bytes."""
    return max(device.peak_bytes() for device in devices)


def num_allocations(devices: Sequence[Device]) -> int:
    """Count the engine's own allocations and, on GPUs, every block that PyTorch asked the driver for."""
    stats = (torch.accelerator.memory_stats(card) for card in accelerators(devices))
    driver = sum(int(found.get("num_device_alloc", 0)) for found in stats)
    return sum(device.num_allocations for device in devices) + driver


def test_results(path: Path) -> dict[str, Any]:
    """Count the tests in pytest's JUnit file, and name those that failed."""
    cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    failed = [
        case.get("name")
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {"passed": len(cases) - len(failed), "failures": failed}


def figures_table(report: dict[str, Any]) -> str:
    """Format the figures that matter, one line each."""
    copies, tests, found = report["copies"], report.get("tests"), report["cards"]
    lines = [f"{found['names'][0]} x {len(found['names'])}, torch {found['torch']}"]
    size = f"{report['parameters'] / 1e9:.3f} G parameters"
    lines.append(f"{report['model']}, {size}, {report['dtype']}, {report['tokens_per_step']} tokens a step")
    if tests is not None:
        lines.append(f"tests: {tests['passed']} passed, failed: {', '.join(tests['failures']) or 'none'}")
    lines.append(
        f"copies, GB/s: up {copies['upload_gb_per_s'][0]:.1f}, down {copies['download_gb_per_s'][0]:.1f}, both ways "
        + " + ".join(f"{rate:.1f}" for rate in copies["both_ways_gb_per_s"][0])
    )
    runs = {
        f"{run['update']}, {run['workers']} worker(s), compile {run['compile']}": run
        for run in report["runs"]
    } | {"plain, all on device": report["resident"]}
    head = ["run", "tokens/s", "MFU", "step s", "pred. s", "GiB", "pred.", "exposed upload s", "left out"]
    rows = [
        [
            name,
            _number(run.get("tokens_per_s"), ".0f"),
            _number(run.get("mfu"), ".1%"),
            _number(run.get("step_s"), ".3f"),
            _number(run.get("predicted_from_measured_layers_s"), ".3f"),
            _number(run.get("device_peak_gib"), ".2f"),
            _number(run.get("predicted_device_gib"), ".2f"),
            _number(run.get("per_device_and_step", {}).get("weights_wait_s"), ".4f"),
            run.get("left_out", ""),
        ]
        for name, run in runs.items()
    ]
    return "\n".join([*lines, table(head, rows)])


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"
