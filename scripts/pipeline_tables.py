"""The tables of simulated figures in three pages of docs/: a tool for maintainers.

    python scripts/pipeline_tables.py            print the tables
    python scripts/pipeline_tables.py --write    put them between their markers in the pages
    python scripts/pipeline_tables.py --check    compare them with the pages; exit code 1 if one differs

A table is between `<!-- table NAME -->` and `<!-- end -->`. Nothing in them is measured on this machine.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from torchround.commands.plan_run import configured_question, planned_hardware
from torchround.config import parse_command_line
from torchround.planning import exchange_time
from torchround.planning.costs import Costs, LayerCost
from torchround.planning.memory import GIB, MemoryLimits
from torchround.planning.partition import Partition
from torchround.planning.plan import Plan
from torchround.planning.plan_report import host_memory, longest_tokens, plan_for
from torchround.planning.planner import make_plan
from torchround.planning.run_question import RunQuestion
from torchround.planning.search import AS_FAST
from torchround.planning.update_modes import MODES
from torchround.simulate.bound import SimulationSetup
from torchround.simulate.schedules import RULES, ScheduleReport, simulate_schedule

ROOT = Path(__file__).parents[1]
PAGES = tuple(ROOT / "docs" / f"{name}.md" for name in ("schedules", "simulated_results", "planning"))
MODELS = {
    "Qwen3-1.7B": "qwen3_1_7b",
    "Llama-3.1-8B": "llama3_1_8b",
    "GPT-OSS-20B": "gpt_oss_20b",
    "Qwen3-32B": "qwen3_32b",
    "Qwen3-235B LoRA": "qwen3_235b_lora",
}
CONFIGS = tuple(MODELS.values())
DEVICES, MICRO_BATCHES, DEVICE_GIB = 8, 16, 24
HOST_GIB = 745  # the paper's 800 GB
# The paper's batches per model, in sequences of 2048 tokens, in micro-batches of four.
BATCHES, SEQUENCES, TOKENS = (512, 256, 128, 128, 64), 4, 2048
# The tokens/s that RoundPipe's authors measured on RTX 4090s (fp16, everything recomputed), by update and number of cards.
MEASURED = {
    ("async", 8): (65417, 24275, 18122, 5516, 1820),
    ("sync", 8): (56489, 18888, 12549, 4164, 1592),
    ("async", 1): (8881, 3142, 3022, 740, 480),
}
LONGEST = ("73K", "49K", "39K", "28K", "31K")  # sequences that they trained on cards of 24 GB
BOUND = tuple(RULES)
# Line rates of the networks in `machines_table`.
GBIT_PER_S = (10.0, 25.0, 100.0)
MACHINE_COUNTS = (1, 2, 4, 8, 16)
ROUNDPIPE = ["roundpipe_sync", "roundpipe_async"]

# From RoundPipe's artifact, per model: the layers of each virtual stage of the bound schedules, whose last stage has the
# head besides; then RoundPipe's own forward and backward stages, whose fused stage is the head alone.
FLAT = ([3, 3, 4, 4, 4, 4, 4, 2], [4] * 8, [3] * 8, [8] * 8, [11, *[12] * 6, 11])
LOOPED = ([1] * 18 + [2] * 5 + [0], [1] * 32, [1] * 24, [1] * 64, [0, *[1] * 94, 0])
DISPATCHED = (
    ([7] * 4, [3] * 8 + [2, 2]),
    ([5] * 4 + [6, 6], [2] * 16),
    ([4] + [5] * 4, [1] * 24),
    ([2, 2] + [3] * 20, [1] * 64),
    ([2] * 47, [1] * 94),
)
# Bubbles in % from RoundPipe's figure 15.
PUBLISHED = {
    "gpipe": (36.13, 42.08, 41.73, 34.88, 31.18),
    "1f1b": (35.19, 42.08, 41.73, 34.88, 31.21),
    "interleaved_1f1b": (27.75, 30.64, 30.94, 15.15, 5.96),
    "looped_bfs": (25.01, 29.20, 30.39, 13.68, 4.39),
    "roundpipe_sync": (19.07, 14.28, 13.98, 6.67, 3.29),
    "roundpipe_async": (4.05, 1.29, 3.30, 2.65, 0.98),
}


def main(arguments: Sequence[str] | None = None, pages: Sequence[Path] = PAGES) -> int:
    """Print, write or check the tables. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="put the tables into the pages")
    action.add_argument("--check", action="store_true", help="compare the tables with the pages")
    options = parser.parse_args(arguments)
    if not (options.write or options.check):
        print("\n\n".join(table() for table in TABLES.values()))
        return 0
    stale = []
    for path in pages:
        page = path.read_text(encoding="utf-8")
        for name in tables_in(page):
            table = TABLES[name]()
            if table != table_in(page, name):
                stale.append(f"{path.name}: {name}")
            page = with_table(page, name, table)
        if options.write:
            path.write_text(page, encoding="utf-8")
    if options.check and stale:
        print("stale tables, to be renewed with --write: " + ", ".join(stale), file=sys.stderr)
        return 1
    return 0


def tables_in(page: str) -> list[str]:
    """List the names of the page's tables."""
    return re.findall(r"^<!-- table (\S+) -->$", page, flags=re.MULTILINE)


def table_in(page: str, name: str) -> str:
    return page.partition(f"<!-- table {name} -->\n")[2].partition("\n<!-- end -->")[0]


def with_table(page: str, name: str, table: str) -> str:
    """Put another table between the markers of a page."""
    before, marker, rest = page.partition(f"<!-- table {name} -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not marker or not end:
        raise ValueError(f"the page has no place for the table {name}")
    return before + marker + table + "\n" + end + after


def published_table() -> str:
    """Compare bubbles in % with the published partitions: published, then simulated here."""
    rows = []
    for name, figures in PUBLISHED.items():
        cells = [
            f"{figure:.2f} / {100 * published(name, model).bubble:.2f}"
            for model, figure in enumerate(figures)
        ]
        rows.append([f"`{name}`", *cells])
    return markdown(["published / ours", *MODELS], rows)


def published(name: str, model: int) -> ScheduleReport:
    """Simulate one schedule with the partition that it was published with."""
    costs = published_costs(CONFIGS[model])
    if name in ROUNDPIPE:
        forward, backward = DISPATCHED[model]
        partition = Partition.from_lists(forward, 1, backward)
        return simulate_schedule(name, SimulationSetup(costs, DEVICES, MICRO_BATCHES, partition=partition))
    stages = list((LOOPED if name in ("interleaved_1f1b", "looped_bfs") else FLAT)[model])
    stages[-1] += 1
    return simulate_schedule(name, SimulationSetup(costs, DEVICES, MICRO_BATCHES, stages=tuple(stages)))


def compared_table(names: Sequence[str]) -> str:
    """Compare schedules on the published layer times, partitioned by us; RoundPipe's in one round within a card's memory.

    Bubbles are in % per model. For the 8B model also step time, activations, drift and transfers are shown.
    """
    limits, rows = MemoryLimits(device_bytes=DEVICE_GIB * GIB), []
    setups = {
        model: SimulationSetup(published_costs(file), DEVICES, MICRO_BATCHES, rounds=1, limits=limits)
        for model, file in MODELS.items()
    }
    for name in names:
        reports = {model: simulate_schedule(name, setup) for model, setup in setups.items()}
        bubbles = [f"{100 * result.bubble:.1f}" for result in reports.values()]
        rows.append([f"`{name}`", *bubbles, *other_cells(reports["Llama-3.1-8B"])])
    return markdown(["bubble, %", *MODELS, "8B: ms / step", "GiB", "drift", "GB / step"], rows)


def other_cells(result: ScheduleReport) -> list[str]:
    """Format step time, most activations on a device, drift, and bytes moved per step."""
    memory = max(result.peak_activation_bytes) / GIB
    step_ms, moved_gb = result.makespan_s * 1e3, result.moved_bytes / 1e9
    return [f"{step_ms:.0f}", f"{memory:.1f}", f"{result.drift}", f"{moved_gb:.0f}"]


def pipeoffload_table(devices: int = 8, chunks: int = 4, micro_batches: int = 32) -> str:
    """Simulate PipeOffload's Table 1 for equal chunks with T_F = T_B = T_W = 1: formula, then simulation."""
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
        rows.append([f"`{name}`", memory, f"{max(result.peak_activation_bytes)}", bubble, f"{lost:g}"])
    return markdown(["", "chunks kept: formula", "simulated", "bubble: formula", "simulated"], rows)


def offload_table(devices: int = 8, chunks: int = 16, micro_batches: int = 32) -> str:
    """Show what is left of the activations by the chunks that go to the host (PipeOffload's figures 3 and 9), in %.

    A chunk's share of the peak is that of its lifespan: chunk c of v lives v - c times as long as the last one.
    """
    budgets = (0, 2, 4, 8, 12, 16)
    lifespans = [100 * sum(range(chunks - budget + 1)) / sum(range(chunks + 1)) for budget in budgets]
    rows = [["sum of lifespans", *(f"{share:.0f}" for share in lifespans)]]
    for ratio in (0.25, 1.0):
        fields = {"chunks": chunks, "micro_batches": micro_batches, "offload_ratio": ratio}
        reports = [equal_chunks("po_f", devices, offload_chunks=budget, **fields) for budget in budgets]
        peaks = [max(report.peak_activation_bytes) for report in reports]
        rows.append([f"simulated, k = {ratio:g}", *(f"{100 * peak / peaks[0]:.0f}" for peak in peaks)])
    return markdown(["chunks offloaded of 16", *(f"{budget}" for budget in budgets)], rows)


def paci_table(devices: int = 8, micro_batches: int = 8) -> str:
    """Show the drift of PACI by its accumulation factor, and of asynchronous 1F1B, with equal stages."""
    cases = [(f"`paci`, a = {a}", "paci", -(-(devices - 1) // a), {"accumulate": a}) for a in (1, 2, 4, 8)]
    cases += [("`async_1f1b`", "async_1f1b", devices - 1, {}), ("`1f1b` (flush)", "1f1b", 0, {})]
    rows = []
    for shown, name, bound, fields in cases:
        result = equal_chunks(name, devices, 1, micro_batches, **fields)
        rows.append([shown, f"{bound}", f"{result.drift}", f"{100 * result.bubble:.1f}"])
    return markdown(["8 equal stages, 8 micro-batches", "drift: bound", "measured", "bubble, %"], rows)


def equal_chunks(name: str, devices: int, chunks: int, micro_batches: int, **fields: Any) -> ScheduleReport:
    """Simulate chunks of one layer: forward 1 s, backward 2 s, one byte kept, nothing recomputed."""
    layers = tuple(LayerCost(f"{i}", 1.0, 2.0, activation_bytes=1) for i in range(devices * chunks))
    setup = SimulationSetup(Costs(layers), devices, micro_batches, recompute=False, chunks=chunks, **fields)
    return simulate_schedule(name, setup)


def planned_table() -> str:
    """Show the bubbles of our plans in one round: within a card's memory first, then what no limit would take.

    Within a card's memory the fastest plan is shown beside that of least host memory which is about as fast.
    """
    rows = []
    for update, published_name in (("sync", "roundpipe_sync"), ("async", "roundpipe_async")):
        rows.append([f"`{update}`, published", *(f"{figure:.2f}" for figure in PUBLISHED[published_name])])
        for share in (0.0, AS_FAST):
            plans = [planned(file, update, DEVICE_GIB, share) for file in MODELS.values()]
            cells = [f"{percent(plan.bubble)} ({plan.host_activation_bytes / GIB:.1f} GiB)" for plan in plans]
            which = f"up to {share:.0%} longer".replace("%", " %") if share else "the fastest"
            rows.append([f"`{update}`, {DEVICE_GIB} GiB per card, {which}", *cells])
    for update in ("sync", "async"):
        plans = [planned(file, update, None) for file in MODELS.values()]
        cells = [f"{percent(plan.bubble)} ({plan.device_bytes / GIB:.0f} GiB)" for plan in plans]
        rows.append([f"`{update}`, no limit (needed per card)", *cells])
    return markdown(["bubble, %", *MODELS], rows)


def bounded_table() -> str:
    """Show plans of `bounded` beside those of the other modes: published layer times, then times counted for H100s.

    The former are planned within a card's memory.
    """
    rows = []
    for card in ("RTX 4090", "H100"):
        by_model = [
            {
                update: plan_for(replace(counted(model, "h100"), update=update))
                if card == "H100"
                else planned(CONFIGS[model], update, DEVICE_GIB)
                for update in MODES
            }
            for model in range(len(MODELS))
        ]
        for update in MODES:
            plans = [modes[update] for modes in by_model]
            cells = [f"{plan.step_s:.3g} s, {percent(plan.bubble)} %" for plan in plans]
            rows.append([f"8 x {card}, `{update}`", *cells])
        plans = [modes["bounded"] for modes in by_model]
        stale = [f"{plan.stale_layers} of {plan.partition.num_layers}" for plan in plans]
        rows.append([f"8 x {card}, stale layers", *stale])
    return markdown(["step, bubble", *MODELS], rows)


def asked(model: int, card: str, overrides: Sequence[str] = ()) -> RunQuestion:
    """Ask the planner's question for one of the paper's configs on eight cards, with counted times."""
    config = ["--config", str(ROOT / "configs" / f"{CONFIGS[model]}.toml")]
    machine = [
        f"--machines.card={card}",
        f"--engine.num_devices={DEVICES}",
        f"--engine.host_memory_gib={HOST_GIB}",
    ]
    options = parse_command_line([*config, *machine, *overrides])
    return configured_question(options, planned_hardware(options))


def counted(model: int, card: str) -> RunQuestion:
    """Ask the same question for a comparison of schedules.

    Nothing is kept for backward stages, so that the modes are compared with all that they recompute. Launches are left out:
    their seconds are those of a slow core of the host, which would hide the schedule. The host's memory has no limit.
    """
    question = asked(model, card)

    def without_launches(*size: int) -> Costs:
        return replace(question.costs_for(*size), launch_s=0.0)

    return replace(question, keep_activations="none", costs_for=without_launches, host_bytes=None)


def planned(file: str, update: str, device_gib: int | None, share: float = AS_FAST) -> Plan:
    """Plan a model's published layer times in one round."""
    limits = MemoryLimits(device_bytes=None if device_gib is None else device_gib * GIB)
    return make_plan(published_costs(file), DEVICES, MICRO_BATCHES, update, 1, limits, share)


def machines_table() -> str:
    """Show thousands of tokens/s of 1 to 16 machines over each network. Each machine has the batch of the config."""
    rows = []
    for update in ("sync", "async"):
        questions = [replace(counted(model, "rtx4090"), update=update) for model in range(len(MODELS))]
        plans = [plan_for(question) for question in questions]
        for count in MACHINE_COUNTS:
            cells = [machines_cell(*pair, count) for pair in zip(questions, plans, strict=True)]
            rows.append([f"`{update}`, {count}", *cells])
    return markdown(["mode, machines", *MODELS], rows)


def machines_cell(question: RunQuestion, plan: Plan, count: int) -> str:
    """Write a cell of `machines_table`; one figure if there is nothing to exchange."""
    # Each machine has as many micro-batches as one alone.
    batch, machines = count * question.global_batch_size, replace(question.machines, count=count)
    grown = replace(question, global_batch_size=batch, machines=machines)
    rates = [exchange_time.usable_bytes_per_s(gbit) for gbit in GBIT_PER_S]
    tokens = grown.global_batch_size * grown.seq_len
    steps = [exchange_time.machine_step_seconds(grown, plan, rate) for rate in rates]
    return " / ".join(f"{tokens / step_s / 1000:.1f}" for step_s in (steps if count > 1 else steps[:1]))


def percent(share: float) -> str:
    """Format a share; a tiny negative one is rounding."""
    return f"{100 * max(share, 0.0):.2f}"


def throughput_table() -> str:
    """Compare predicted and measured tokens/s with the paper's batches, in one round and within a card's memory."""
    rows = []
    for update, devices in product(("async", "sync"), (8, 4, 2, 1)):
        predicted = [tokens_per_s(model, update, devices) for model in range(len(MODELS))]
        cards = f"{devices} x RTX 4090"
        rows.append([f"{cards}, `{update}`, predicted", *(f"{rate:.0f}" for rate in predicted)])
        if measured := MEASURED.get((update, devices)):
            shares = zip(measured, predicted, strict=True)
            cells = [f"{rate} ({rate / ours:.2f})" for rate, ours in shares]
            rows.append([f"{cards}, RoundPipe `{update}`, measured", *cells])
    return markdown(["tokens/s", *MODELS], rows)


def tokens_per_s(model: int, update: str, devices: int) -> float:
    """Predict the tokens/s of a model's plan with the paper's batch."""
    return BATCHES[model] * TOKENS / step_s(model, update, published_costs(CONFIGS[model]), devices)


def step_s(model: int, update: str, costs: Costs, devices: int = DEVICES) -> float:
    """Plan the paper's batch in one round and within a card's memory; return the seconds of the fastest step."""
    limits = MemoryLimits(device_bytes=DEVICE_GIB * GIB)
    return make_plan(costs, devices, BATCHES[model] // SEQUENCES, update, 1, limits, 0.0).step_s


def kept_table() -> str:
    """Show what plans keep for their backward stages, and what that gains, within the paper's host memory."""
    rows = []
    for model, card, tokens in product(range(len(MODELS)), ("rtx4090", "h100"), (TOKENS, 8 * TOKENS)):
        sizes = {
            "seq_len": tokens,
            "global_batch_size": max(DEVICES, BATCHES[model] * TOKENS // tokens),
            "micro_batch_size": max(1, SEQUENCES * TOKENS // tokens),
        }
        keys = [f"--training.{key}={size}" for key, size in sizes.items()]
        # Compiled layers keep all or nothing; this table is of single parts.
        question = asked(model, card, [*keys, "--engine.compile=false"])
        bare = replace(question, keep_activations="none")
        without, plan = plan_for(bare), plan_for(question)
        kept = Counter(name for names in plan.kept for name in names)
        host = [host_memory(*pair).total_bytes / GIB for pair in ((bare, without), (question, plan))]
        rows.append(
            [
                *(f"`{CONFIGS[model]}`", card, f"{tokens}"),
                ", ".join(f"`{name}` {number}" for name, number in kept.items()) or "nothing",
                f"{without.step_s:.2f} to {plan.step_s:.2f}",
                f"{without.step_s / plan.step_s:.2f}",
                f"{host[0]:.0f} to {host[1]:.0f}",
            ]
        )
    return markdown(["model", "card", "tokens", "kept, by layers", "step, s", "gain", "host, GiB"], rows)


def longest_table() -> str:
    """Ask the planner for the longest sequence of each of the paper's configs on eight cards."""
    questions = [asked(model, "rtx4090") for model in range(len(CONFIGS))]
    rows = [["predicted"], ['predicted, `engine.accumulate_dtype = "bfloat16"`'], ["published", *LONGEST]]
    for question in questions:
        rows[0].append(f"{longest_tokens(question)}")
        rows[1].append(f"{longest_tokens(replace(question, accumulate_bytes=2))}")
    return markdown(["tokens", *MODELS], rows)


def published_costs(file: str) -> Costs:
    """Read the layer times measured by RoundPipe's authors, with bytes counted from the model's shapes."""
    return Costs.from_json((ROOT / "docs" / "costs" / f"rtx4090_{file}.json").read_text(encoding="utf-8"))


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table with numbers to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


TABLES: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "published": published_table,
        "bound": partial(compared_table, BOUND),
        "roundpipe": partial(compared_table, ROUNDPIPE),
        "pipeoffload": pipeoffload_table,
        "offload": offload_table,
        "paci": paci_table,
        "planned": planned_table,
        "bounded": bounded_table,
        "throughput": throughput_table,
        "kept": kept_table,
        "longest": longest_table,
        "machines": machines_table,
    }
)


if __name__ == "__main__":
    sys.exit(main())
