"""Each shipped config fits the machine that its first line names: with a validation, before and after measuring."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.support.random_costs import short_search
from torchround.commands.configured_model import build_model
from torchround.commands.plan_run import planned_hardware, planned_machines
from torchround.config import parse_command_line
from torchround.data.loader import loader_bytes
from torchround.planning.plan_report import fits, host_memory, plan_for
from torchround.run.numbers import run_question

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


def question_for(config, *keys):
    options = parse_command_line(["--config", str(config), *keys])
    table = options.config.machines
    name = (table.card or "").upper().replace("RTX", "RTX ")
    first = config.read_text(encoding="utf-8").splitlines()[0]
    if table.card is None:
        assert first.startswith("# Any machine")
        return None
    assert first.startswith(f"# {table.num_cards} x {name} (24 GiB), {table.host_memory_gib:g} GiB of host memory")
    machine = planned_hardware(options)
    machines = planned_machines(table)
    loading = partial(loader_bytes, options.config.data)
    return run_question(build_model(options), options.config, machine, (), machines, loading)


def by_tier(path):
    by_default = ("debug", "qwen3_1_7b")
    return pytest.param(path, marks=[] if path.stem in by_default else pytest.mark.nightly, id=path.stem)


@pytest.mark.parametrize("config", [by_tier(path) for path in CONFIGS])
@short_search()
def test_a_shipped_config_fits_its_machine_while_it_measures_and_afterwards(config):
    question = question_for(config, "--validation.interval_steps=10", "--data.validation_fraction=0.1")
    if question is None:
        return
    assert question.validates and fits(question)
    plan = plan_for(question)
    # After measuring, layers may take other times in proportion; the limits stay.
    costs = question.costs()
    other = (
        replace(layer, forward_s=layer.forward_s * (1 + index % 3), backward_s=layer.backward_s * 1.5)
        for index, layer in enumerate(costs.layers)
    )
    for made in (plan, plan_for(question, replace(costs, layers=tuple(other)))):
        assert host_memory(question, made).total_bytes <= (question.host_bytes or 0)
        assert made.device_bytes <= (question.device_bytes or 0)
