"""The study of optimizers: it repeats to the bit, can be interrupted, and its page says what its results say."""

import math
import statistics
from functools import partial
from pathlib import Path

import pytest

from benchmarks.optimizer_cells import (
    COMPACT,
    EXACT,
    MODES,
    MUON,
    RATES,
    SAME_RATE,
    TASK,
    OptimizerStudySize,
    final_cells,
    run_cell,
    tuned_rate,
    wanted_cells,
)
from benchmarks.optimizer_study import describe, final_losses, read_results, steps_to_reach, tables
from benchmarks.study import Cell, CellResult, ResultFile, complete, with_tables

DOCS = Path(__file__).parents[2] / "docs"
RESULTS, PAGE = DOCS / "optimizer_results.jsonl", DOCS / "optimizers.md"
# A text that is short and always installed.
SMALL = OptimizerStudySize(
    package="jinja2",
    blocks=1,
    width=16,
    heads=1,
    ffn_size=16,
    sequences=2,
    tokens=16,
    steps=3,
    evaluations=3,
    held_out_sequences=2,
    seeds=(1,),
    most_rates=4,
)


def finished(size: OptimizerStudySize, path: Path) -> ResultFile:
    file = ResultFile(path, describe(size))
    complete(file, partial(wanted_cells, size), partial(run_cell, size), 0)
    return file


@pytest.fixture(scope="module")
def small_study(tmp_path_factory: pytest.TempPathFactory) -> ResultFile:
    return finished(SMALL, tmp_path_factory.mktemp("study") / "cells.jsonl")


def test_a_small_study_tunes_each_optimizer_and_runs_every_mode_with_every_seed(small_study: ResultFile) -> None:
    tuned = {(cell.mode, cell.lr) for cell in small_study.results if cell.seed == 0}
    assert tuned == {(mode, lr) for mode, rates in RATES.items() for lr in rates}
    assert {cell.mode for cell in small_study.results if cell.seed == 1} == set(MODES)
    assert all(math.isfinite(result.final_loss) for result in small_study.results.values())
    for mode, other in SAME_RATE.items():
        assert tuned_rate(SMALL, small_study.results, mode) == tuned_rate(SMALL, small_study.results, other)
    learnt = {result.losses for cell, result in small_study.results.items() if cell.seed == 1}
    assert len(learnt) == len(MODES), "two modes gave the same losses"


def test_an_interrupted_study_ends_with_the_same_bits(small_study: ResultFile, tmp_path: Path) -> None:
    lines = small_study.path.read_text(encoding="utf-8").splitlines(keepends=True)
    path = tmp_path / "cells.jsonl"
    path.write_text("".join(lines[:-2]) + lines[-2][:20], encoding="utf-8")  # killed while it wrote a line
    assert finished(SMALL, path).path.read_text(encoding="utf-8").splitlines(keepends=True) == lines


def test_the_first_evaluation_at_the_goal_is_what_counts() -> None:
    cell = Cell(TASK, EXACT, 1e-3, 1)
    results = {cell: CellResult(cell, (25, 50, 75), (3.0, 2.0, 2.5))}
    assert [steps_to_reach(results, cell, goal) for goal in (3.5, 2.4, 2.0, 1.9)] == [25, 50, 50, None]


def test_the_page_shows_the_tables_of_the_committed_results() -> None:
    size, file = read_results(RESULTS)
    assert wanted_cells(size, file.results) == [], "the committed study is not complete"
    assert size == OptimizerStudySize()
    assert {mode: table.model_dump(mode="json") for mode, table in MODES.items()} == file.description["optimizers"]
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page, tables(size, file.results)) == page


def test_compact_state_ends_within_the_spread_of_seeds_of_exact_state() -> None:
    size, file = read_results(RESULTS)
    losses = final_losses(size, file.results)
    exact, compact = losses[EXACT], losses[COMPACT]
    assert len(exact) == len(compact) == 3
    spread = max(exact.values()) - min(exact.values())
    assert abs(statistics.mean(compact.values()) - statistics.mean(exact.values())) < spread


def test_muon_reaches_the_final_loss_of_adamw_in_fewer_steps_with_every_seed() -> None:
    size, file = read_results(RESULTS)
    goal = final_losses(size, file.results)[EXACT]
    steps = [steps_to_reach(file.results, cell, goal[cell.seed]) for cell in final_cells(size, file.results, MUON)]
    assert len(steps) == 3
    assert all(step is not None and step < size.steps for step in steps)
