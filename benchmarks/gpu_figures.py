"""Parts of the benchmark `gpu`: the cards, copy rates, the outcome of the tests, and the table of all figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from torchround.accelerators import kind_of
from torchround.engine.device import Device, Stream
from torchround.engine.store.host_memory import HostAllocator
from torchround.planning.memory import GIB
from torchround.run.hardware import Hardware

REPEATS = 4


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
    lanes = [_Lane(device, memory, nbytes) for device in devices]
    try:
        alone = [
            lane.rates([way]) for lane in lanes for way in (Stream.WEIGHT_UPLOAD, Stream.GRADIENT_DOWNLOAD)
        ]
        uploads, downloads = alone[0::2], alone[1::2]  # each lane gives one of each
        both = [lane.rates([Stream.WEIGHT_UPLOAD, Stream.GRADIENT_DOWNLOAD]) for lane in lanes]
        for lane in lanes:
            lane.start([Stream.WEIGHT_UPLOAD, Stream.GRADIENT_DOWNLOAD])
        together = [lane.finish() for lane in lanes]
    finally:
        for lane in lanes:
            lane.device.finish()
        memory.close()
    return {
        "pinned": devices[0].pins_host_memory,
        "upload_gb_per_s": [rates[0] for rates in uploads],
        "download_gb_per_s": [rates[0] for rates in downloads],
        "both_ways_gb_per_s": both,
        "all_cards_both_ways_gb_per_s": together,
    }


class _Lane:
    """Buffers of one device for both ways, and the copies under way."""

    def __init__(self, device: Device, memory: HostAllocator, nbytes: int) -> None:
        self.device = device
        streams = (Stream.WEIGHT_UPLOAD, Stream.GRADIENT_DOWNLOAD)
        self._host = {stream: memory.allocate(nbytes, for_devices=True) for stream in streams}
        self._own = {stream: device.allocate(nbytes) for stream in streams}
        self._marks: list[tuple[Any, Any]] = []
        self.rates(list(streams))  # warm up

    def rates(self, streams: Sequence[Stream]) -> list[float]:
        """Measure GB/s of each stream while all of them copy."""
        self.start(streams)
        return self.finish()

    def start(self, streams: Sequence[Stream]) -> None:
        self.device.finish()
        starts = [self.device.mark(stream) for stream in streams]
        for _ in range(REPEATS):
            for stream in streams:
                pair = (self._own[stream], self._host[stream])
                if stream is Stream.GRADIENT_DOWNLOAD:  # from the device to the host
                    pair = pair[::-1]
                self.device.copy(stream, *pair)
        ends = [self.device.mark(stream) for stream in streams]
        self._marks = list(zip(starts, ends, strict=True))

    def finish(self) -> list[float]:
        nbytes = next(iter(self._own.values())).numel() * REPEATS
        return [nbytes / end.seconds_since(start) / 1e9 for start, end in self._marks]


def num_cards(devices: Sequence[Device]) -> int:
    """Count the GPUs behind the devices; each virtual device counts as one."""
    return len(accelerators(devices)) or len(devices)


def accelerators(devices: Sequence[Device]) -> set[torch.device]:
    """Return the GPUs behind the devices, each once."""
    return {device.torch_device for device in devices if device.torch_device.type != "cpu"}


def start_peak(devices: Sequence[Device]) -> int:
    """Forget earlier peaks, and return the bytes that the fullest card holds already."""
    cards = accelerators(devices)
    for card in cards:
        torch.accelerator.synchronize(card)
        torch.accelerator.reset_peak_memory_stats(card)
    return max((torch.accelerator.memory_allocated(card) for card in cards), default=0)


def peak(devices: Sequence[Device]) -> int:
    """Return the fullest card's peak in bytes."""
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
    return {"passed": len(cases) - len(failed), "failed": len(failed), "failures": failed}


def figures_table(report: dict[str, Any]) -> str:
    """Format the figures that matter, one line each."""
    copies, tests = report["copies"], report.get("tests")
    found = report["cards"]
    title = (
        f"{found['names'][0]} x {len(found['names'])}, torch {found['torch']}: {report['model']}, "
        f"{report['parameters'] / 1e9:.3f} G parameters, {report['dtype']}, {report['tokens_per_step']} tokens a step"
    )
    lines = [title]
    if tests is not None:
        failures = ": " + ", ".join(tests["failures"]) if tests["failures"] else ""
        lines.append(f"tests: {tests['passed']} passed, {tests['failed']} failed{failures}")
    lines.append(
        f"copies, GB/s: up {copies['upload_gb_per_s'][0]:.1f}, down {copies['download_gb_per_s'][0]:.1f}, both ways "
        + " + ".join(f"{rate:.1f}" for rate in copies["both_ways_gb_per_s"][0])
    )
    lines.append(
        f"{'run':36}{'tokens/s':>10}{'MFU':>8}{'step s':>9}{'pred. s':>9}{'GiB':>7}{'pred.':>7}{'exposed upload s':>18}"
    )
    lines += [
        _run_line(f"{run['update']}, {run['workers']} worker(s), compile {run['compile']}", run)
        for run in report["runs"]
    ]
    lines.append(_run_line("plain, all on device", report["resident"]))
    return "\n".join(lines)


def _run_line(name: str, run: dict[str, Any]) -> str:
    if "left_out" in run:
        return f"{name:36}left out: {run['left_out']}"
    share = "-" if run["mfu"] is None else f"{100 * run['mfu']:.1f} %"
    predicted = run.get("predicted_from_measured_layers_s")
    exposed = run.get("per_device_and_step", {}).get("weights_wait_s")
    return (
        f"{name:36}{run['tokens_per_s']:>10.0f}{share:>8}{run['step_s']:>9.3f}{_number(predicted, 3):>9}"
        f"{run['device_peak_gib']:>7.2f}{_number(run.get('predicted_device_gib'), 2):>7}{_number(exposed, 4):>18}"
    )


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
