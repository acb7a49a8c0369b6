"""Simulate pipeline schedules side by side: step time, bubble, memory, drift, transfers.

    torchround simulate --costs docs/costs/rtx4090_qwen3_1_7b.json --devices 8 --microbatches 16
    torchround simulate --model llama3/3.1-8B --device rtx4090 --devices 8 --microbatches 16 \\
        --schedules 1f1b,looped_bfs,roundpipe_sync --plot timeline.png

Costs come from a file (docs/schedules.md describes it) or are counted for a model and a known card.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

from torchround.commands import CommandError
from torchround.planning.cards import DEVICES, DeviceSpec, UnknownPeakError, find_device
from torchround.planning.costs import Costs, CostsError
from torchround.planning.memory import GIB, MemoryLimits
from torchround.planning.partition import PlanError
from torchround.planning.plan import read_partition
from torchround.planning.planner import InfeasiblePlanError
from torchround.planning.rates import CardRates, costs_from_work
from torchround.simulate.bound import ScheduleError, SimulationSetup
from torchround.simulate.schedules import SCHEDULES, ScheduleReport, simulate_schedule
from torchround.simulate.timeline import trace_events
from torchround.untrusted.regular_file import write_whole

Read = TypeVar("Read")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 2 for a mistake in the arguments, with one message."""
    options = parser().parse_args(arguments)
    try:
        setting = setting_from(options)
        reports = simulate_all(options.schedules, setting)
        show(reports, setting)
        write_files(reports, setting, options)
    except (CommandError, PlanError, ScheduleError, OSError) as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = result.add_argument
    source = result.add_mutually_exclusive_group(required=True)
    source.add_argument("--costs", type=Path, help="JSON file with seconds and bytes per layer")
    source.add_argument("--model", help="family/flavor, such as llama3/3.1-8B; needs --device")
    add("--device", help="card: its memory limits RoundPipe's plan, its PCIe rate times transfers")
    add("--device-memory-gib", type=float, help="instead of the card's memory")
    add("--micro-batch-size", type=int, default=4, help="sequences, with --model (default 4)")
    add("--seq-len", type=int, default=2048, help="tokens, with --model (default 2048)")
    add("--dtype", default="bfloat16", help="with --model (default bfloat16)")
    add("--devices", type=int, required=True, help="number of devices")
    add("--microbatches", type=int, required=True, help="micro-batches per step")
    add("--schedules", default="all", help=f"comma-separated: {', '.join(SCHEDULES)}")
    add("--no-recompute", action="store_true", help="bound schedules keep their activations")
    add("--chunks", type=int, help="virtual stages per device of looped schedules")
    add("--group", type=int, help="GIS: micro-batches per group")
    add("--offload-ratio", type=float, default=1.0, help="PipeOffload's k where no PCIe rate is known (1)")
    add("--offload-chunks", type=int, help="PipeOffload: chunks of a device on the host (half or all)")
    add("--accumulate", type=int, help="PACI: backwards per update (default: all of a step)")
    add("--partition", type=Path, help="JSON file with RoundPipe's forward, fused, backward and rounds")
    add("--rounds", type=int, help="RoundPipe's rounds")
    add("--json", type=Path, help="write the figures to this file")
    add("--plot", type=Path, help="write a picture of the timelines to this file")
    add("--trace", type=Path, help="write a trace for ui.perfetto.dev to this file")
    return result


def setting_from(options: argparse.Namespace) -> SimulationSetup:
    """Collect the numbers that the schedules are built from. Raises `CommandError` for a mistake."""
    card = find_device(options.device) if options.device is not None else None
    if card is None and options.device is not None:
        known = ", ".join(device.name for device in DEVICES)
        raise CommandError(f"--device: {options.device!r} is not a known card; known: {known}")
    if options.costs is not None:
        costs = _read(options.costs, Costs.from_json)
    elif card is None:
        raise CommandError("--model needs --device: seconds are counted for a card")
    else:
        costs = model_costs(options.model, card, options.micro_batch_size, options.seq_len, options.dtype)
    memory_gib = options.device_memory_gib
    if memory_gib is None and card is not None:
        memory_gib = card.memory_gib
    if memory_gib is not None and memory_gib <= 0:
        raise CommandError(f"--device-memory-gib {memory_gib} must be above 0")
    given = _read(options.partition, read_partition) if options.partition is not None else (None, None)
    same = ("chunks", "group", "offload_ratio", "offload_chunks", "accumulate")
    return SimulationSetup(
        *(costs, options.devices, options.microbatches, not options.no_recompute),
        **{name: getattr(options, name) for name in same},
        pcie_bytes_per_s=card.pcie_gb_per_s * 1e9 if card else None,
        partition=given[0],
        rounds=options.rounds or given[1],
        limits=MemoryLimits(device_bytes=None if memory_gib is None else int(memory_gib * GIB)),
    )


def simulate_all(given: str, setting: SimulationSetup) -> list[ScheduleReport]:
    """Simulate the schedules of `--schedules`. One that cannot be built here is left out, with a line that says why."""
    names = list(SCHEDULES) if given == "all" else [name.strip() for name in given.split(",")]
    for name in names:
        if name not in SCHEDULES:
            near = get_close_matches(name, SCHEDULES, n=1)
            hint = f"; nearest: {near[0]}" if near else ""
            raise CommandError(f"--schedules: {name!r} is not one of {', '.join(SCHEDULES)}{hint}")
    reports = []
    for name in names:
        try:
            reports.append(simulate_schedule(name, setting))
        except (ScheduleError, InfeasiblePlanError) as error:
            # The other schedules are still worth comparing.
            print(f"simulate: {name} left out: {error}", file=sys.stderr)
    if not reports:
        raise CommandError("no schedule is left to show")
    return reports


def show(reports: Sequence[ScheduleReport], setting: SimulationSetup) -> None:
    print(f"{setting.num_devices} devices, {setting.num_micro_batches} micro-batches\n")
    rows = [["schedule", "ms/step", "bubble", "GiB", "drift", "GB/step"]]
    fastest_s = min(result.makespan_s for result in reports)
    for result in reports:
        mark = " *" if result.makespan_s == fastest_s else ""
        cells = [f"{result.makespan_s * 1e3:.1f}", f"{100 * result.bubble:.2f}"]
        cells += [f"{max(result.peak_activation_bytes) / GIB:.2f}", f"{result.drift}"]
        rows.append([result.name + mark, *cells, f"{result.moved_bytes / 1e9:.1f}"])
    for name, *cells in rows:
        print(f"{name:18}" + "".join(f"{cell:>10}" for cell in cells))
    print(
        "\nBubble in % of device time; GiB: most activations on any device; drift: most updates between a"
        "\nmicro-batch's forward and its backward; GB over all links; * the fastest."
    )


def write_files(
    reports: Sequence[ScheduleReport], setting: SimulationSetup, options: argparse.Namespace
) -> None:
    if options.json:
        shown = ("makespan_s", "bubble", "peak_activation_bytes", "drift", "partition")
        data = {"schedules": {one.name: {key: getattr(one, key) for key in shown} for one in reports}}
        write_whole(options.json, json.dumps(data, indent=1) + "\n")
    if options.trace:
        trace = trace_events((result.name, result.timeline) for result in reports)
        write_whole(options.trace, json.dumps(trace))
    if options.plot:
        from torchround.simulate.picture import plot_reports  # matplotlib takes a second to import

        source = options.model or options.costs.stem
        card = f" on {options.device}" if options.device else ""
        sizes = f"{setting.num_devices} devices, {setting.num_micro_batches} micro-batches per step"
        plot_reports(reports, setting.costs.num_layers, options.plot, f"{source}{card}: {sizes}")


def model_costs(name: str, card: DeviceSpec, batch: int, tokens: int, dtype: str) -> Costs:
    """Count the costs of a model from its shapes, with every parameter trained."""
    from torchround.models import OWN_FAMILIES, ModelConfigError

    family, _, flavor = name.partition("/")
    if family not in OWN_FAMILIES:
        raise CommandError(f"--model: {family!r} is not one of {', '.join(OWN_FAMILIES)}")
    try:
        model = OWN_FAMILIES[family].build(OWN_FAMILIES[family].config_from_flavor(flavor))
    except ModelConfigError as error:
        raise CommandError(f"--model: {error}") from None
    # Building takes no memory for weights: parameters are on `meta`.
    element_bytes = 4 if dtype == "float32" else 2
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in model.layers]
    try:
        return costs_from_work(
            model.names,
            [layer.work(batch, tokens, element_bytes) for layer in model.layers],  # type: ignore[operator]
            [(size, 0) for size in sizes],
            CardRates.of(card, dtype),
            element_bytes,
        )
    except UnknownPeakError as error:
        raise CommandError(f"--dtype: {error}") from None


def _read(path: Path, parse: Callable[[str], Read]) -> Read:
    """Read and parse a file. A message starts with the file's name."""
    try:
        return parse(path.read_text())
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, CostsError, PlanError) as error:
        raise CommandError(f"{path}: {error}") from None
