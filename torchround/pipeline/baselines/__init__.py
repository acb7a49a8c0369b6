"""The schedules that others use, and RoundPipe, as tasks for the simulator.

`SCHEDULES` has each by its name; `simulate_schedule` runs one and measures it.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from torchround.pipeline.baselines.device_bound import ScheduleError, SimulationSetup
from torchround.pipeline.baselines.host_weights import mobius, roundpipe_async, roundpipe_sync
from torchround.pipeline.baselines.schedule_report import Schedule, ScheduleReport, measure_schedule
from torchround.pipeline.baselines.split_backward import gis, gis_h, po_f, po_h, zb_h1, zb_h2
from torchround.pipeline.baselines.whole_backward import (
    async_1f1b,
    gpipe,
    interleaved_1f1b,
    looped_bfs,
    one_f_one_b,
    paci,
)

SCHEDULES: Mapping[str, Callable[[SimulationSetup], Schedule]] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "interleaved_1f1b": interleaved_1f1b,
        "looped_bfs": looped_bfs,
        "zb_h1": zb_h1,
        "zb_h2": zb_h2,
        "gis": gis,
        "gis_h": gis_h,
        "po_h": po_h,
        "po_f": po_f,
        "mobius": mobius,
        "async_1f1b": async_1f1b,
        "paci": paci,
        "roundpipe_sync": roundpipe_sync,
        "roundpipe_async": roundpipe_async,
    }
)
LOOPED = frozenset({"interleaved_1f1b", "looped_bfs", "gis", "gis_h", "po_h", "po_f", "mobius"})

__all__ = [
    "LOOPED",
    "SCHEDULES",
    "Schedule",
    "ScheduleError",
    "ScheduleReport",
    "SimulationSetup",
    "measure_schedule",
    "simulate_schedule",
]


def simulate_schedule(name: str, setup: SimulationSetup) -> ScheduleReport:
    """Simulate one schedule and measure it.

    If the chunks of a looped schedule are not given, it gets one layer per stage if possible: as many chunks
    as layers allow, or one more with empty stages in front, whichever is faster.
    """
    if name not in LOOPED or setup.chunks is not None or setup.stages is not None:
        return measure_schedule(SCHEDULES[name](setup))
    # Layers that do not divide among the devices leave a choice: some stages of two layers, or some empty ones.
    fewer = max(1, setup.costs.num_layers // setup.num_devices)
    choices = {fewer, -(-setup.costs.num_layers // setup.num_devices)}
    reports = [measure_schedule(SCHEDULES[name](replace(setup, chunks=chunks))) for chunks in sorted(choices)]
    return min(reports, key=lambda result: result.makespan_s)
