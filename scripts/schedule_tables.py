"""The tables of docs/schedules.md, from simulation.

    python scripts/schedule_tables.py            print them
    python scripts/schedule_tables.py --write    put them between their markers in the page

A table stands between `<!-- table NAME -->` and `<!-- end -->`.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

sys.path.insert(0, str(Path(__file__).parents[1]))

from torchround.pipeline.baselines import (
    SCHEDULES,
    ScheduleReport,
    SimulationSetup,
    measure_schedule,
    simulate_schedule,
)
from torchround.pipeline.costs import Costs, LayerCost
from torchround.pipeline.memory import GIB, MemoryLimits
from torchround.pipeline.partition import Partition

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "schedules.md"
MODELS = {
    "Qwen3-1.7B": "qwen3_1.7b",
    "Llama-3.1-8B": "llama3_8b",
    "GPT-OSS-20B": "gpt_oss_20b",
    "Qwen3-32B": "qwen3_32b",
    "Qwen3-235B LoRA": "qwen3_235b_lora",
}
DEVICES, MICRO_BATCHES, DEVICE_GIB = 8, 16, 24
BOUND = [name for name in SCHEDULES if not name.startswith("roundpipe")]
ROUNDPIPE = ["roundpipe_sync", "roundpipe_async"]

# RoundPipe's artifact: layers per virtual stage of the bound schedules, the head one more in the last; then
# RoundPipe's forward and backward stages, its fused stage the head alone. Bubbles: its figure 15, in %.
FLAT = ([3, 3, 4, 4, 4, 4, 4, 2], [4] * 8, [3] * 8, [8] * 8, [11, *[12] * 6, 11])
LOOPED = ([1] * 18 + [2] * 5 + [0], [1] * 32, [1] * 24, [1] * 64, [0, *[1] * 94, 0])
DISPATCHED = (
    ([7] * 4, [3] * 8 + [2, 2]),
    ([5] * 4 + [6, 6], [2] * 16),
    ([4] + [5] * 4, [1] * 24),
    ([2, 2] + [3] * 20, [1] * 64),
    ([2] * 47, [1] * 94),
)
PUBLISHED = {
    "gpipe": (36.13, 42.08, 41.73, 34.88, 31.18),
    "1f1b": (35.19, 42.08, 41.73, 34.88, 31.21),
    "interleaved_1f1b": (27.75, 30.64, 30.94, 15.15, 5.96),
    "looped_bfs": (25.01, 29.20, 30.39, 13.68, 4.39),
    "roundpipe_sync": (19.07, 14.28, 13.98, 6.67, 3.29),
    "roundpipe_async": (4.05, 1.29, 3.30, 2.65, 0.98),
}


def main() -> None:
    """Print the tables, or write them into the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="into docs/schedules.md")
    if parser.parse_args().write:
        page = PAGE.read_text(encoding="utf-8")
        for name, table in TABLES.items():
            page = with_table(page, name, table())
        PAGE.write_text(page, encoding="utf-8")
    else:
        print("\n\n".join(table() for table in TABLES.values()))


def with_table(page: str, name: str, table: str) -> str:
    """The page with what stands between the table's markers replaced."""
    before, marker, rest = page.partition(f"<!-- table {name} -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not marker or not end:
        raise ValueError(f"the page has no place for the table {name}")
    return before + marker + table + "\n" + end + after


def published_table() -> str:
    """Bubble in % with the published partitions: published, then ours."""
    rows = []
    for name, figures in PUBLISHED.items():
        cells = [
            f"{figure:.2f} / {100 * published(name, model).bubble:.2f}"
            for model, figure in enumerate(figures)
        ]
        rows.append([name, *cells])
    return markdown(["published / ours", *MODELS], rows)


def published(name: str, model: int) -> ScheduleReport:
    """One schedule with the partition it was published with."""
    costs = published_costs(list(MODELS.values())[model])
    if name in ROUNDPIPE:
        forward, backward = DISPATCHED[model]
        partition = Partition.from_lists(forward, 1, backward)
        return measure_schedule(
            SCHEDULES[name](SimulationSetup(costs, DEVICES, MICRO_BATCHES, partition=partition))
        )
    stages = list((LOOPED if name in ("interleaved_1f1b", "looped_bfs") else FLAT)[model])
    stages[-1] += 1
    return measure_schedule(
        SCHEDULES[name](SimulationSetup(costs, DEVICES, MICRO_BATCHES, stages=tuple(stages)))
    )


def bound_table() -> str:
    """Every schedule with bound stages on the published layer times, partitioned by us."""
    return compared_table(BOUND)


def roundpipe_table() -> str:
    """RoundPipe's plans on the same, within a card's memory."""
    return compared_table(ROUNDPIPE)


def compared_table(names: Sequence[str]) -> str:
    """Bubble in % per model; for the 8B model also step time, activations, drift and transfers."""
    rows = []
    for name in names:
        reports = {model: compared(name, model) for model in MODELS}
        bubbles = [f"{100 * result.bubble:.1f}" for result in reports.values()]
        rows.append([name, *bubbles, *other_cells(reports["Llama-3.1-8B"])])
    return markdown(["bubble, %", *MODELS, "8B: ms / step", "GiB", "drift", "GB / step"], rows)


def other_cells(result: ScheduleReport) -> list[str]:
    """Step time, most activations on a device, drift, and bytes moved per step."""
    memory = max(result.peak_activation_bytes) / GIB
    step_ms, moved_gb = result.makespan_s * 1e3, result.moved_bytes / 1e9
    return [f"{step_ms:.0f}", f"{memory:.1f}", f"{result.drift}", f"{moved_gb:.0f}"]


def compared(name: str, model: str) -> ScheduleReport:
    """A schedule on a model's published costs, partitioned by us, with 24 GiB for RoundPipe's plan."""
    return simulate_schedule(name, fair_setting(MODELS[model]))


def fair_setting(file: str) -> SimulationSetup:
    """The published costs within 24 GiB."""
    limits = MemoryLimits(device_bytes=DEVICE_GIB * GIB)
    return SimulationSetup(published_costs(file), DEVICES, MICRO_BATCHES, limits=limits)


def pipeoffload_table(devices: int = 8, chunks: int = 4, micro_batches: int = 32) -> str:
    """PipeOffload's Table 1 for equal chunks with T_F = T_B = T_W = 1: formula, then simulated."""
    d, v = devices, chunks
    model = d * v
    formulas = {
        "1f1b": (f"{model}", f"{v * (d - 1) * 3}"),
        "interleaved_1f1b": (f"{model + d - 1}", f"{(d - 1) * 3}"),
        "gis": (f"{model}", f"{(d - 1) * 2}"),
        "gis_h": (f"{(v + 1) * d // 2}", f"{(d - 1) * 2 + (v - 1) * d // 2}"),
        "po_h": (f"about {(v + 2) * d / 8:.0f}", f"< {v * (d - 1) * 3}"),
        "po_f": ("constant", f"< {v * (d - 1) * 3}"),
    }
    rows = []
    for name, (memory, bubble) in formulas.items():
        result = equal_chunks(name, devices, chunks, micro_batches)
        lost = result.makespan_s - 3 * micro_batches * chunks
        rows.append([name, memory, f"{max(result.peak_activation_bytes)}", bubble, f"{lost:g}"])
    return markdown(["", "chunks kept: formula", "simulated", "bubble: formula", "simulated"], rows)


def paci_table(devices: int = 8, micro_batches: int = 8) -> str:
    """Drift of PACI over its accumulation factor, and of asynchronous 1F1B, with equal stages."""
    rows = []
    for accumulate in (1, 2, 4, 8):
        result = equal_chunks("paci", devices, 1, micro_batches, accumulate=accumulate)
        bound = -(-(devices - 1) // accumulate)
        rows.append([f"paci, a = {accumulate}", f"{bound}", f"{result.drift}", f"{100 * result.bubble:.1f}"])
    result = equal_chunks("async_1f1b", devices, 1, micro_batches)
    rows.append(["async_1f1b", f"{devices - 1}", f"{result.drift}", f"{100 * result.bubble:.1f}"])
    flush = equal_chunks("1f1b", devices, 1, micro_batches)
    rows.append(["1f1b (flush)", "0", f"{flush.drift}", f"{100 * flush.bubble:.1f}"])
    return markdown(["8 equal stages, 8 micro-batches", "drift: bound", "measured", "bubble, %"], rows)


def equal_chunks(name: str, devices: int, chunks: int, micro_batches: int, **fields: int) -> ScheduleReport:
    """Chunks of one layer: forward 1 s, backward 2 s, one byte kept, nothing recomputed."""
    layers = tuple(LayerCost(f"{i}", 1.0, 2.0, activation_bytes=1) for i in range(devices * chunks))
    setting = SimulationSetup(Costs(layers), devices, micro_batches, recompute=False, chunks=chunks, **fields)
    return measure_schedule(SCHEDULES[name](setting))


def published_costs(file: str) -> Costs:
    """Layer times measured by RoundPipe's authors, with bytes counted from the model's shapes."""
    return Costs.from_json((ROOT / "docs" / "costs" / f"rtx4090_{file}.json").read_text(encoding="utf-8"))


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, numbers to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *([f"`{row[0]}`", *row[1:]] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


TABLES: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "published": published_table,
        "bound": bound_table,
        "roundpipe": roundpipe_table,
        "pipeoffload": pipeoffload_table,
        "paci": paci_table,
    }
)


if __name__ == "__main__":
    main()
