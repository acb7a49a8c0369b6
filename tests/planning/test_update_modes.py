"""The table of update modes: a mode of facts alone plans, is simulated and trains, and a name without facts is refused."""

import json
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.random_costs import costs, exact_step_s, partitions, simulated_step_s
from tests.support.reference import Reference
from tests.support.toy import PARTITIONS, toy_batches, toy_engine, toy_model, toy_store, train
from torchround.planning.costs import BundleCount, Costs, LayerCost, ParameterCounts
from torchround.planning.exchange_time import Exchange, ExchangedBundle, exchange_step_seconds
from torchround.planning.memory import host_state
from torchround.planning.partition import Partition, PlanError
from torchround.planning.plan import Plan
from torchround.planning.planner import make_plan
from torchround.planning.stage_times import LayerSums
from torchround.planning.update_costs import RuleCosts, UpdateCosts
from torchround.planning.update_modes import MODES, ModeName, UpdateMode
from torchround.simulate.dispatch import dispatch_tasks

COSTS = Costs(tuple(LayerCost(f"l{number}", 1.0, 2.0, boundary_bytes=8) for number in range(9)))
FUSED = Partition((), 9, ())
COUNTS = ParameterCounts((BundleCount((100,)),))
UPDATES = UpdateCosts((RuleCosts(8.0),), splits_weights=True)


@pytest.fixture(scope="module")
def delayed():
    """Weights that are two updates old: nothing but facts."""
    mode = UpdateMode("delayed", versions=3, search_effort=7_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODES, mode.name, mode)
        yield mode


def test_the_config_has_the_names_of_the_table():
    assert get_args(ModeName) == tuple(MODES) and all(name == mode.name for name, mode in MODES.items())


@pytest.mark.parametrize(
    "ask",
    [
        lambda name: make_plan(COSTS, 2, 4, name),
        lambda name: Plan.from_json(json.dumps(json.loads(make_plan(COSTS, 2, 4).to_json()) | {"update": name})),
        lambda name: host_state(COUNTS, name, 1, 2, 2, UPDATES),
        lambda name: UPDATES.traffic_bytes([1], name, 2, 2),
        lambda name: LayerSums(COSTS).times(FUSED, name),
        lambda name: dispatch_tasks(FUSED, COSTS, 2, 4, 1, update=name),
    ],
    ids=["plan", "plan.json", "host memory", "traffic", "times", "simulation"],
)
def test_a_mode_without_facts_is_refused_by_name(ask):
    with pytest.raises(PlanError, match=r"update = 'Sync' must be one of \('sync', 'async', 'bounded'\)"):
        ask("Sync")


@given(data=st.data(), drawn=costs(max_layers=4, jobs=True), devices=st.integers(1, 4), micro_batches=st.integers(1, 4))
def test_steps_of_an_added_mode_take_as_long_as_simulated(delayed, data, drawn, devices, micro_batches):
    rounds = data.draw(st.integers(1, micro_batches))
    run = data.draw(partitions(drawn.num_layers)), drawn, devices, micro_batches, rounds, delayed.name
    assert exact_step_s(*run) == pytest.approx(simulated_step_s(*run), rel=1e-6, abs=1e-9)


def test_an_added_mode_hides_an_exchange_of_two_steps_and_counts_its_versions(delayed):
    """A step of 3 s, whose gradient travels for 3 s and whose new weights for 3 s: three steps hide it, two do not."""
    costs = Costs((LayerCost("only", 1.0, 2.0),))
    bundle, steps_s = ExchangedBundle(100, (0,)), {}
    for name in ("async", "delayed"):
        times = LayerSums(costs).times(Partition((), 1, ()), name)
        steps_s[name] = exchange_step_seconds(times, [1], 1, Exchange((bundle,), 2, 40.0, 1.2, 1.2))
    assert steps_s == {"async": pytest.approx(4.5), "delayed": pytest.approx(3.0)}
    weights = {name: host_state(COUNTS, name, 1, 2, 2, UPDATES).weight_bytes for name in MODES}
    assert weights == {"sync": 200, "async": 400, "bounded": 200, "delayed": 600}
    assert UPDATES.is_split("delayed") and not replace(UPDATES, predicts=True).is_split("async")
    plan = make_plan(COSTS, 3, 6, "delayed")
    assert plan.step_s <= make_plan(COSTS, 3, 6, "sync").step_s and Plan.from_json(plan.to_json()) == plan


class Delayed(Reference):
    """The plain loop of `async`, whose steps read the weights of two updates before."""

    between = None

    def update(self, *arguments, **options):
        before = self.between or self.versions[0]
        super().update(*arguments, **options)
        self.between, self.versions[0] = self.versions[0], before


def test_an_added_mode_trains_as_the_plain_loop_does(delayed):
    model, batches = toy_model(), toy_batches(6, micro_batches=3)
    store = toy_store(model, mode=delayed)
    reference = Delayed.of(model, store, update="async")
    with toy_engine(PARTITIONS["backward coarser"], 2, model=model, store=store) as engine:
        losses = train(engine, batches)
    assert losses == [reference.step(batch) for batch in batches]
