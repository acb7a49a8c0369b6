"""The studies of staleness and of optimizers: their loop is the engine, bit for bit, and their pages show their results."""

from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import optimizer_study, staleness, staleness_report
from benchmarks.byte_model import draw_batch, model_config
from benchmarks.delayed_loop import DelayedLoop, DelayRule
from benchmarks.installed_text import documentation_of
from benchmarks.staleness_cells import FIRST_RATES, StudySize, run_cell, wanted_cells
from benchmarks.study import AnotherStudyError, ResultFile, complete, with_tables
from torchround.config import AdamWTable
from torchround.engine.device import CpuDevice
from torchround.engine.engine import Engine, EngineSettings
from torchround.engine.store.bundles import ASYNC_PREDICT, POLICIES
from torchround.engine.store.host_store import HostStore
from torchround.models import FAMILIES
from torchround.planning.partition import Partition

DOCS = Path(__file__).parents[2] / "docs"
# Two texts that are short and always installed.
SMALL = {"pretraining_package": "jinja2", "fine_tuning_package": "torchdata", "width": 8, "heads": 1, "ffn_size": 8}
SMALL |= {"sequences": 2, "tokens": 16, "pretraining_steps": 4, "fine_tuning_steps": 2, "evaluations": 2}
SMALL |= {"held_out_sequences": 2, "seeds": (1,), "most_rates": 3}
LR = 1e-2
MAX_NORM = 0.1  # small enough that every step is clipped, by either scope of the norm


def new_store(**options):
    model = FAMILIES["llama3"].build(model_config(StudySize(**SMALL, blocks=3)))
    store = HostStore(model, **options)
    store.initialize(model, seed=0)
    return model, store


@pytest.mark.parametrize(
    "rule",
    [
        DelayRule("sync"),
        DelayRule("async"),
        DelayRule("async", correction="predict"),
        DelayRule("bounded", 0, clip="layer"),
        DelayRule("bounded", 3, clip="layer"),
    ],
    ids=lambda rule: f"{rule.update}-{rule.stale_layers}-{rule.correction}",
)
def test_the_loop_of_the_study_is_the_engine_bit_for_bit(rule):
    size, text = StudySize(**SMALL, blocks=3), documentation_of("jinja2").train
    generator = torch.Generator().manual_seed(0)
    batches = [
        [draw_batch(text, torch.randint(10_000, (2,), generator=generator), size) for _ in range(2)] for _ in range(4)
    ]
    model, store = new_store(policy=ASYNC_PREDICT if rule.correction == "predict" else POLICIES[rule.update])
    settings = EngineSettings(max_norm=MAX_NORM, clip=rule.clip, stale_layers=rule.stale_layers, hang_timeout_s=60.0)
    devices, partition = [CpuDevice(0), CpuDevice(1)], Partition((2, 2), 1, (2, 2))
    with Engine(model, store, devices, partition, optimizer=AdamWTable(), settings=settings) as engine:
        results = []
        for micro_batches in batches:
            results.append(engine.forward_backward(micro_batches))
            engine.step(LR)
        engine.drain()
        losses = [result.loss() for result in results]
    own_model, own_store = new_store()
    loop = DelayedLoop(own_model, own_store, AdamWTable(), rule, MAX_NORM)
    assert [loop.step(micro_batches, LR) for micro_batches in batches] == losses
    views = store.named_views()
    assert all(torch.equal(view, views[name]) for name, view in own_store.named_views().items())


def finished(size, path):
    file = ResultFile(path, staleness.describe(size))
    complete(file, partial(wanted_cells, size), partial(run_cell, size, path.parent), 0)
    return file


@pytest.mark.nightly
def test_a_small_study_runs_every_mode_and_ends_with_the_same_bits_if_it_is_interrupted(tmp_path):
    size = StudySize(**SMALL, blocks=1)
    file = finished(size, tmp_path / "whole.jsonl")
    found = {(cell.task, cell.mode, cell.seed) for cell in file.results}
    assert found == {(task, mode, seed) for task in FIRST_RATES for mode in size.rules() for seed in (0, 1)}
    lines = file.path.read_text(encoding="utf-8").splitlines(keepends=True)
    path = tmp_path / "cells.jsonl"
    path.write_text("".join(lines[:-3]) + lines[-3][:20], encoding="utf-8")  # killed while it wrote a line
    assert sorted(finished(size, path).path.read_text(encoding="utf-8").splitlines(keepends=True)) == sorted(lines)
    with pytest.raises(AnotherStudyError, match="another study"):
        ResultFile(path, staleness.describe(StudySize(**SMALL | {"seeds": (1, 2)}, blocks=1)))


def test_the_pages_show_the_tables_of_the_committed_results():
    size, file = staleness.read_results(DOCS / "staleness_results.jsonl")
    page = (DOCS / "staleness.md").read_text(encoding="utf-8")
    assert (
        wanted_cells(size, file.results) == []
        and with_tables(page, staleness_report.tables(size, file.results)) == page
    )
    size, file = optimizer_study.read_results(DOCS / "optimizer_results.jsonl")
    page = (DOCS / "optimizers.md").read_text(encoding="utf-8")
    assert with_tables(page, optimizer_study.tables(size, file.results)) == page
