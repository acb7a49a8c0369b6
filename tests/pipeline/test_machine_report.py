"""Several machines before a run: wire times of the published models, shares of the batch, and memory of each machine."""

from dataclasses import replace

import pytest

from tests.pipeline.test_plan_report import MIB, QUESTION
from torchround.machines.links import CHUNK_BYTES, STAGED_CHUNKS
from torchround.pipeline.costs import ParameterCounts
from torchround.pipeline.machine_memory import STAGED_BYTES, landing_bytes, owned_parameters
from torchround.pipeline.machine_report import machine_rows, report_exchange, usable_bytes_per_s
from torchround.pipeline.plan_report import plan_for
from torchround.pipeline.run_question import PlannedMachines
from torchround.pipeline.simulation.exchange_time import Exchange, ExchangedBundle

# Llama 3.1 8B: an embedding, 32 blocks, a head with its norm.
LLAMA_8B = (128256 * 4096, *[218_112_000] * 32, 128256 * 4096 + 4096)
# Seven layers of 4 MiB parameters each, and who uses them.
LAYERS = ParameterCounts(28 * MIB, bundles=((4 * MIB, 1),) * 7, bundle_layers=tuple((index,) for index in range(7)))


def asked(count, gbit_per_s=None, **changes):
    rate = None if gbit_per_s is None else usable_bytes_per_s(gbit_per_s)
    return replace(QUESTION, parameters=LAYERS, machines=PlannedMachines(count, rate), **changes)


@pytest.mark.parametrize(("gbit_per_s", "seconds"), [(10, 14.3), (100, 1.4)])
def test_an_8b_model_on_two_machines_is_on_the_wire_for_the_counted_seconds(gbit_per_s, seconds):
    bundles = tuple(ExchangedBundle(numel, (index,)) for index, numel in enumerate(LLAMA_8B))
    exchange = Exchange(bundles, 2, usable_bytes_per_s(gbit_per_s), 2, 2)
    # 2 bytes of gradient out and 2 of weights back per parameter, for the half that the other machine owns.
    assert sum(exchange.wire_bytes(1)) / exchange.bytes_per_s == pytest.approx(seconds, abs=0.05)


def test_the_batch_is_split_over_the_machines():
    plans = {count: plan_for(asked(count)) for count in (1, 2, 3, 8)}
    assert {count: plan.num_micro_batches for count, plan in plans.items()} == {1: 8, 2: 4, 3: 3, 8: 1}
    assert asked(3).longest_micro_batch == asked(1).longest_micro_batch == 2
    # The integers and losses that the host holds are those of the machine's own micro-batches.
    alone, third = (asked(count).host_batch().integers_and_losses_bytes() for count in (1, 3))
    assert third * 8 == alone * 3


def test_an_exchange_over_a_fast_network_is_hidden_in_async_and_a_slow_one_sets_the_pace():
    hidden = asked(2, 100, update="async", device_bytes=120 * MIB)
    plan, costs = plan_for(hidden), hidden.costs()
    report = report_exchange(hidden, plan, costs)
    assert report.step_s == pytest.approx(plan.step_s, rel=1e-9) and report.exposed_s < 1e-9 * plan.step_s
    slow = asked(2, 0.01, update="async", device_bytes=120 * MIB)
    report = report_exchange(slow, plan, costs)
    # Each link carries seven layers of 8 MiB in each step: gradients of the owner's four or three, weights of the others.
    assert report.step_s == pytest.approx(7 * 8 * MIB / usable_bytes_per_s(0.01), rel=1e-6)
    assert report.exposed_s == pytest.approx(report.step_s - plan.step_s)


def test_changed_weights_are_a_quarter_of_the_bytes_back_and_gradients_stay():
    whole = asked(4, 10)
    changed = replace(whole, machines=replace(whole.machines, sends_changed=True))
    plan = plan_for(whole)
    before, after = (report_exchange(question, plan, whole.costs()) for question in (whole, changed))
    assert after.gradient_bytes == before.gradient_bytes and after.weight_bytes == before.weight_bytes / 4


def test_each_machine_holds_all_weights_and_its_share_of_the_state():
    alone = asked(1).state()
    for count in (2, 4, 7):
        state = asked(count).state()
        owned = -(-7 // count) * 4 * MIB
        assert owned_parameters(LAYERS, count) == owned
        assert state.weight_bytes == alone.weight_bytes
        assert state.optimizer_bytes == 12 * owned
        # The sums of owned gradients, and the window: two of seven equal parts.
        assert state.gradient_bytes == 4 * owned + 2 * 2 * 4 * MIB


def test_the_window_is_a_share_of_all_gradients_if_two_parts_are_less():
    many = ParameterCounts(100 * MIB, bundles=((MIB, 1),) * 100)
    assert landing_bytes(many, 2) == int(0.12 * 2 * 100 * MIB)
    assert landing_bytes(replace(many, bundles=((50 * MIB, 1), *[(MIB, 1)] * 50)), 2) == 2 * 51 * MIB


def test_a_table_has_a_row_for_each_number_of_machines_and_a_time_for_each_rate():
    question = asked(3)
    plan = plan_for(question)
    rows = machine_rows(question, plan)
    assert [row.count for row in rows] == [1, 2, 3, 4, 8, 16]
    assert rows[-1].problem == "without work" and not rows[-1].step_s
    for row in rows[:-1]:
        # 10, 25 and 100 Gb/s, and no exchange at all: faster networks never make longer steps.
        assert len(row.step_s) == 4 and sorted(row.step_s, reverse=True) == list(row.step_s)
    assert rows[2].step_s[-1] == pytest.approx(plan.step_s)
    assert rows[0].step_s == (pytest.approx(plan_for(asked(1)).step_s),) * 4


def test_a_run_that_outgrows_one_machine_has_a_row_that_says_so():
    question = asked(2, host_bytes=400 * MIB)
    rows = machine_rows(question, plan_for(question))
    assert rows[0].problem == "does not fit" and rows[1].host_bytes <= 400 * MIB
    assert STAGED_BYTES == STAGED_CHUNKS * CHUNK_BYTES
