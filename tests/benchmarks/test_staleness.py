"""The study of staleness: its loop is the engine, bit for bit; it can be interrupted, and repeats to the bit."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.byte_model import draw_batch, model_config
from benchmarks.delayed_loop import DelayedLoop, DelayRule
from benchmarks.installed_text import documentation_of
from benchmarks.staleness import describe, read_results
from benchmarks.staleness_cells import FIRST_RATES, PRETRAINING, StudySize, run_cell, tuned_rate, wanted_cells
from benchmarks.staleness_report import final_losses, tables
from benchmarks.study import AnotherStudyError, Cell, CellResult, ResultFile, complete, with_tables
from torchround.config import AdamWTable, EngineTable
from torchround.engine.device import CpuDevice
from torchround.engine.engine import Engine, EngineSettings
from torchround.engine.store.bundles import ASYNC_PREDICT, POLICIES
from torchround.engine.store.host_store import HostStore
from torchround.layer import MicroBatch
from torchround.models import FAMILIES
from torchround.pipeline.partition import Partition
from torchround.run.engine_parts import update_policy

DOCS = Path(__file__).parents[2] / "docs"
RESULTS, PAGE = DOCS / "staleness_results.jsonl", DOCS / "staleness.md"
# Two texts that are short and always installed.
SMALL = StudySize(
    pretraining_package="jinja2",
    fine_tuning_package="torchdata",
    blocks=1,
    width=8,
    heads=1,
    ffn_size=8,
    sequences=2,
    tokens=16,
    pretraining_steps=4,
    fine_tuning_steps=2,
    evaluations=2,
    held_out_sequences=2,
    seeds=(1,),
    most_rates=3,
)
MODEL = replace(SMALL, blocks=3)
STEPS, LR = 5, 1e-2
# Small enough that every step is clipped, by either scope of the norm.
MAX_NORM = 0.1


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def batches() -> list[list[MicroBatch]]:
    text, generator = documentation_of("jinja2").train, torch.Generator().manual_seed(0)
    return [
        [draw_batch(text, torch.randint(10_000, (2,), generator=generator), MODEL) for _ in range(2)]
        for _ in range(STEPS)
    ]


def new_store(**options) -> tuple:
    model = FAMILIES["llama3"].build(model_config(MODEL))
    store = HostStore(model, **options)
    store.initialize(model, seed=0)
    return model, store


@pytest.mark.parametrize("partition", [Partition((2, 2), 1, (2, 2)), Partition((3,), 2, (1, 2))], ids=str)
@pytest.mark.parametrize(
    "rule",
    [
        DelayRule("sync"),
        DelayRule("async"),
        DelayRule("async", correction="predict"),
        DelayRule("sync", clip="layer"),
        DelayRule("bounded", 0, clip="layer"),
        DelayRule("bounded", 1, clip="layer"),
        DelayRule("bounded", 3, clip="layer"),
    ],
    ids=lambda rule: f"{rule.update}-{rule.stale_layers}-{rule.correction}-{rule.clip}",
)
def test_the_loop_of_the_study_is_the_engine_bit_for_bit(rule: DelayRule, partition: Partition) -> None:
    model, store = new_store(policy=ASYNC_PREDICT if rule.correction == "predict" else POLICIES[rule.update])
    settings = EngineSettings(max_norm=MAX_NORM, clip=rule.clip, stale_layers=rule.stale_layers, hang_timeout_s=60.0)
    devices = [CpuDevice(0), CpuDevice(1)]
    with Engine(model, store, devices, partition, optimizer=AdamWTable(), settings=settings) as engine:
        results = []
        for micro_batches in batches():
            results.append(engine.forward_backward(micro_batches))
            engine.step(LR)
        engine.drain()
        losses = [result.loss() for result in results]
    own_model, own_store = new_store()
    loop = DelayedLoop(own_model, own_store, AdamWTable(), rule, MAX_NORM)
    assert [loop.step(micro_batches, LR) for micro_batches in batches()] == losses
    views = store.named_views()
    assert all(torch.equal(view, views[name]) for name, view in own_store.named_views().items())


def test_bounded_with_no_stale_layer_is_sync_with_a_norm_for_each_layer() -> None:
    states = []
    for rule in (DelayRule("bounded", 0, clip="layer"), DelayRule("sync", clip="layer"), DelayRule("sync")):
        model, store = new_store()
        loop = DelayedLoop(model, store, AdamWTable(), rule, MAX_NORM)
        states.append([loop.step(micro_batches, LR) for micro_batches in batches()])
    assert states[0] == states[1] != states[2]


def finished(size: StudySize, path: Path) -> ResultFile:
    file = ResultFile(path, describe(size))
    complete(file, partial(wanted_cells, size), partial(run_cell, size, path.parent), 0)
    return file


@pytest.fixture(scope="module")
def small_study(tmp_path_factory: pytest.TempPathFactory) -> ResultFile:
    return finished(SMALL, tmp_path_factory.mktemp("study") / "cells.jsonl")


def test_a_small_study_runs_every_mode_of_both_tasks_with_every_seed(small_study: ResultFile) -> None:
    found = {(cell.task, cell.mode, cell.seed) for cell in small_study.results}
    assert found == {(task, mode, seed) for task in FIRST_RATES for mode in SMALL.rules() for seed in (0, 1)}
    assert all(math.isfinite(result.final_loss) for result in small_study.results.values())
    by_mode = {
        mode: [small_study.results[Cell(PRETRAINING, mode, FIRST_RATES[PRETRAINING][0], 0)].losses]
        for mode in SMALL.rules()
    }
    assert len({str(losses) for losses in by_mode.values()}) == len(by_mode), "two modes gave the same losses"


def test_an_interrupted_study_ends_with_the_same_bits(small_study: ResultFile, tmp_path: Path) -> None:
    lines = small_study.path.read_text(encoding="utf-8").splitlines(keepends=True)
    path = tmp_path / "cells.jsonl"
    path.write_text("".join(lines[:-3]) + lines[-3][:20], encoding="utf-8")  # killed while it wrote a line
    assert sorted(finished(SMALL, path).path.read_text(encoding="utf-8").splitlines(keepends=True)) == sorted(lines)


def test_the_page_shows_the_tables_of_the_committed_results() -> None:
    size, file = read_results(RESULTS)
    assert wanted_cells(size, file.results) == [], "the committed study is not complete"
    assert size == StudySize()
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page, tables(size, file.results)) == page


def test_the_default_correction_of_async_is_the_better_one_in_both_tasks() -> None:
    size, file = read_results(RESULTS)
    for task in FIRST_RATES:
        plain, predicted = (final_losses(size, file.results, task, mode) for mode in ("async", "async predict"))
        assert all(predicted[seed] < plain[seed] for seed in size.seeds)
    assert update_policy(EngineTable(update="async")) is ASYNC_PREDICT
    assert update_policy(EngineTable(update="async", delay_correction="none")) is POLICIES["async"]
    assert update_policy(EngineTable()) is POLICIES["sync"]
    assert update_policy(EngineTable(update="bounded")) is POLICIES["bounded"]


def test_results_of_another_study_are_refused(small_study: ResultFile) -> None:
    with pytest.raises(AnotherStudyError, match="another study"):
        ResultFile(small_study.path, describe(replace(SMALL, seeds=(1, 2))))


def test_tuning_looks_beyond_the_better_end_until_the_best_rate_is_inside() -> None:
    size, results = StudySize(), {}
    tried = []
    while True:
        wanted = [cell for cell in wanted_cells(size, results) if cell.mode == "sync" and cell.seed == 0]
        if not wanted:
            break
        tried.append(wanted[0].lr)
        # Best at 32e-3; the rate above diverges.
        loss = None if wanted[0].lr > 40e-3 else abs(math.log2(wanted[0].lr / 32e-3))
        results[wanted[0]] = CellResult(wanted[0], (1,), (loss,))
        if wanted[0].task != PRETRAINING:
            break
    assert tried[:6] == [2e-3, 4e-3, 8e-3, 16e-3, 32e-3, 64e-3]
    assert tuned_rate(size, results, PRETRAINING, "sync") == 32e-3
