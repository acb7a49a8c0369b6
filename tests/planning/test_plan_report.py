"""The answers before a run, of one machine or several, against hand-made figures and against the planner itself."""

import itertools
import math
import re
from dataclasses import replace

import pytest

from tests.support.counted_rules import COMPACT_ADAMW, FULL
from torchround.machines.links import CHUNK_BYTES, STAGED_CHUNKS
from torchround.planning.cards import DeviceSpec
from torchround.planning.costs import BundleCount, Costs, KeptCost, LayerCost, ParameterCounts
from torchround.planning.exchange_time import machine_step_seconds, report_exchange, usable_bytes_per_s
from torchround.planning.machine_shares import assign_owners, landing_bytes, step_share
from torchround.planning.memory import GIB, STAGED_BYTES, gib_text
from torchround.planning.partition import Partition, PlanError, split_evenly
from torchround.planning.plan_report import (
    changes_that_fit,
    fits,
    kept_text,
    link_text,
    longest_tokens,
    plan_for,
    report_plan,
    step_transfers,
)
from torchround.planning.planner import InfeasiblePlanError, evaluate_plan, make_plan
from torchround.planning.run_question import PlannedMachines, RunQuestion
from torchround.planning.update_costs import RuleCosts, UpdateCosts

CARD = DeviceSpec("card", 24, 10, {"bfloat16": 1e12})
MIB = 1 << 20
# So few that every partition is tried, in any number of rounds.
LAYERS_OF_MODEL, STATE_MIB = 5, 16 * 20


def costs_for(tokens, sequences, accumulate_bytes):
    units = tokens * sequences / 1024
    block = {
        "forward_s": 1e-3 * units,
        "backward_s": 2e-3 * units,
        "weight_bytes": 8 * MIB,
        "gradient_bytes": 4 * accumulate_bytes * MIB,
        "activation_bytes": round(units * MIB),
        "boundary_bytes": round(units * MIB / 8),
    }
    head = {**block, "boundary_bytes": 4}
    return Costs((*(LayerCost(f"block.{i}", **block) for i in range(LAYERS_OF_MODEL - 1)), LayerCost("head", **head)))


QUESTION = RunQuestion(
    costs_for=costs_for,
    parameters=ParameterCounts((BundleCount((STATE_MIB // 16 * MIB,)),)),
    updates=FULL,
    seq_len=2048,
    global_batch_size=16,
    micro_batch_size=2,
    num_devices=2,
    device=CARD,
    device_bytes=GIB,
)


def test_the_plan_is_the_planners_and_the_speed_is_its_step():
    answer = report_plan(QUESTION)
    plan = make_plan(costs_for(2048, 2, 4), 2, 8, "sync", 1, QUESTION.limits())
    assert answer.plan == plan and answer.problem == ""
    assert answer.tokens_per_s == pytest.approx(16 * 2048 / plan.step_s)
    assert answer.host.state_bytes == STATE_MIB * MIB
    # The integers of two steps, and a page for each of their losses.
    assert answer.host.integer_bytes == 2 * (16 * 2048 * 32 + 8 * 4096)
    assert answer.host.activation_bytes == plan.host_activation_bytes
    assert answer.device.total_bytes == plan.device_bytes
    unknown = report_plan(replace(QUESTION, device=None))
    assert unknown.plan is not None and unknown.tokens_per_s is None


def test_the_longest_sequence_fits_and_one_step_more_does_not():
    tight = replace(QUESTION, device_bytes=300 * MIB)
    longest = longest_tokens(tight)

    def fits_at(tokens):
        return fits(replace(tight, seq_len=tokens, micro_batch_size=1, global_batch_size=2))

    assert longest > 2048 and fits_at(longest) and not fits_at(longest + 1024)
    assert longest_tokens(replace(QUESTION, device_bytes=20 * MIB)) == 0


@pytest.mark.parametrize(("device_mib", "host_mib"), [(40, 472), (60, 322), (80, 342), (120, 312), (300, 472)])
def test_a_question_gets_a_plan_exactly_if_the_report_says_that_it_fits(device_mib, host_mib):
    question = replace(QUESTION, device_bytes=device_mib * MIB, host_bytes=host_mib * MIB)
    answer = report_plan(question)
    assert (answer.plan is not None) == fits(question) == (not answer.problem)
    if answer.plan is not None:
        assert answer.host.total_bytes <= host_mib * MIB
        assert answer.plan.device_bytes <= device_mib * MIB


OTHER_STATES = replace(
    FULL,
    smaller=(("half the state", UpdateCosts((COMPACT_ADAMW,))), ("a larger state", UpdateCosts((RuleCosts(9.0),)))),
)
GIVEN = (Partition((4,), 1, (4,)), 2)
# What a question lacks, and the changes that are proposed for it. The state takes 320 MiB, and activations a few more.
BFLOAT16 = 'engine.accumulate_dtype = "bfloat16"'
SHORT = [
    ({"device_bytes": 64 * MIB, "micro_batch_size": 8}, ["training.micro_batch_size = 2", BFLOAT16]),
    ({"host_bytes": 321 * MIB}, ["half the state", "training.global_batch_size = 4", "training.seq_len = 960"]),
    ({"host_bytes": 290 * MIB, "update": "async"}, ["half the state"]),
    ({"host_bytes": 202 * MIB}, ["half the state and training.global_batch_size = 8"]),
    ({"device_bytes": 80 * MIB, "given": GIVEN}, ["engine.plan left out"]),
    ({"device_bytes": 60 * MIB, "micro_batch_size": 1, "global_batch_size": 64}, ["engine.rounds = 8", BFLOAT16]),
    ({"device_bytes": MIB, "rounds": 2}, []),
    ({"parameters": ParameterCounts((), GIB), "host_bytes": MIB}, []),
]


def with_settings(question, text):
    fields = {"engine.plan left out": {"given": None}, 'engine.update = "sync"': {"update": "sync"}}
    fields['engine.accumulate_dtype = "bfloat16"'] = {"accumulate_bytes": 2}
    fields |= {setting: {"updates": updates} for setting, updates in question.updates.smaller}
    for setting in text.split(" and "):
        key, _, value = setting.partition(" = ")
        question = replace(question, **fields.get(setting) or {key.partition(".")[2]: int(value)})
    return question


@pytest.mark.parametrize(("short", "proposed"), SHORT)
def test_the_proposed_changes_fit_and_are_the_smallest_that_do(short, proposed):
    question = replace(QUESTION, updates=OTHER_STATES, **short)
    answer, found = report_plan(question), list(changes_that_fit(question))
    assert answer.plan is None and "are missing" in answer.problem
    for text in found:
        assert report_plan(with_settings(question, text)).plan is not None
        key, _, value = text.partition(" = ")
        if "and" not in text and key in ("training.global_batch_size", "training.micro_batch_size"):
            assert not fits(with_settings(question, f"{key} = {2 * int(value)}"))
        if key == "training.seq_len":
            assert not fits(with_settings(question, f"{key} = {int(value) + 64}"))
    assert found[: len(proposed)] == proposed if proposed else not found


@pytest.mark.parametrize("limits", [{"device_bytes": 60 * MIB}, {"host_bytes": 302 * MIB}, {"host_bytes": 321 * MIB}])
def test_what_a_run_needs_is_one_number_and_with_it_the_run_fits(limits):
    question = replace(QUESTION, rounds="auto", micro_batch_size=8, **limits)
    answer = report_plan(question)
    assert answer.plan is None and answer.device is not None
    needed = {"device_bytes": answer.device.total_bytes, "host_bytes": answer.host.total_bytes}
    needed = {key: max(needed[key], limits[key]) for key in limits}
    for key in limits:
        assert f"{gib_text(needed[key] - limits[key])} are missing" in answer.problem
    assert needed != limits and report_plan(replace(question, **needed)).plan is not None


def test_a_given_plan_is_judged_as_it_is():
    answer = report_plan(replace(QUESTION, given=GIVEN))
    assert answer.plan is not None and (answer.plan.partition, answer.plan.rounds) == GIVEN
    # Its rounds are added up on the host, whatever `engine.rounds` says.
    for host_bytes, is_fitting in ((answer.host.total_bytes, True), (answer.host.total_bytes - 1, False)):
        limited = replace(QUESTION, given=GIVEN, host_bytes=host_bytes)
        assert fits(limited) is (report_plan(limited).plan is not None) is is_fitting
    with pytest.raises(InfeasiblePlanError):
        evaluate_plan(GIVEN[0], 2, costs_for(2048, 2, 4), 2, 8, limits=replace(QUESTION, device_bytes=1).limits())


def test_transfers_count_weights_once_a_round_and_activations_with_every_micro_batch():
    costs = Costs((LayerCost("block", 1.0, 2.0, 1000, 2000, 0, 30), LayerCost("head", 1.0, 2.0, 100, 200, 0, 4)))
    plan = evaluate_plan(Partition((1,), 1, (1,)), 2, costs, 2, 8)
    up, down = zip(*step_transfers(plan, costs, gradient_share=0.5), strict=True)
    # Up: the block twice a round, the head once; its input to the head, its output's gradient to the block.
    assert sum(up) == 2 * (2 * 1000 + 100) + 8 * (30 + 30)
    # Down: both gradients in 16 bits once a round; the block's output, and the gradient of the head's input.
    assert sum(down) == 2 * (1000 + 100) + 8 * (30 + 30)
    slow = DeviceSpec("slow", 24, 1e-6)
    question = replace(QUESTION, costs_for=lambda *shape: costs, device=slow, gradient_bytes=2, accumulate_bytes=4)
    figures = [int(figure) for figure in re.findall(r"(\d+) %", link_text(question, plan))]
    # The forward stage moves 1000 bytes up in 4 s, the backward stage 1000 + 4 x 30 in 12 s.
    assert figures == [round(sum(way) / (20 * plan.step_s)) for way in (up, down)] + [25]


PARTS = (KeptCost("attention", MIB, 0.1), KeptCost("down", 2 * MIB, 0.4))


def keeping_costs(tokens, sequences, accumulate_bytes):
    block = LayerCost("block", 1.0, 2.0, MIB, 2 * MIB, MIB, 4096, keepable=PARTS)
    blocks = [replace(block, name=f"block.{index}") for index in range(4)]
    return Costs((*blocks, LayerCost("head", 1.0, 2.0, MIB, 2 * MIB, MIB)))


KEEPING = replace(
    QUESTION,
    costs_for=keeping_costs,
    parameters=ParameterCounts((BundleCount((1000,)),)),
    seq_len=1024,
    global_batch_size=8,
    micro_batch_size=1,
    device=DeviceSpec("card", 24, MIB / 1e6),
    given=(Partition((2, 2), 1, (2, 2)), 1),
    given_kept=(("down",), ("attention", "down"), ("down",), ("down",), ()),
)


def test_the_report_counts_bytes_load_and_seconds_of_what_is_kept():
    bare = replace(KEEPING, given_kept=())
    answers = report_plan(KEEPING), report_plan(bare)
    plans = plan_for(KEEPING), plan_for(bare)
    figures = [float(figure) for figure in re.findall(r"\d[\d.]*", kept_text(KEEPING, plans[0]))]
    assert figures == [9, 72, 8 * 1.7 / 2] and kept_text(bare, plans[1]) == ""
    assert "saves" not in kept_text(replace(KEEPING, device=None), plans[0])
    kept, nothing = (zip(*step_transfers(plan, KEEPING.costs(), 0.5), strict=True) for plan in plans)
    assert [sum(with_kept) - sum(without) for with_kept, without in zip(kept, nothing, strict=True)] == [72 * MIB] * 2
    assert [answer.device.kept_bytes for answer in answers] == [2 * (3 + 5) * MIB, 0]
    assert answers[0].device.total_bytes == plans[0].device_bytes


# Copies of virtual devices take the time of the processors that compute. Without a limit any amount would be filled.
VIRTUAL, CUT = {"device": None, "devices_on_host": True}, {"given": KEEPING.given, "device_bytes": GIB}


@pytest.mark.parametrize(
    ("setting", "changes", "is_kept"),
    [
        *[("auto", {}, True), ("auto", VIRTUAL, False), ("all", VIRTUAL, True), ("auto", {"host_bytes": None}, False)],
        ("auto", CUT, True),
    ],
)
def test_auto_keeps_nothing_if_copies_take_the_time_of_processors_or_memory_has_no_limit(setting, changes, is_kept):
    question = replace(KEEPING, given=None, given_kept=None, keep_activations=setting, rounds=1)
    fast = DeviceSpec("card", 24, 1000)
    narrow = replace(question, **{"device": fast, "device_bytes": 22 * MIB, "host_bytes": GIB, **changes})
    assert bool(plan_for(narrow).kept) is is_kept


# 4 MiB parameters of each layer, and who uses them.
LAYERS = ParameterCounts(tuple(BundleCount((4 * MIB,), (index,)) for index in range(LAYERS_OF_MODEL)))


def asked(count, gbit_per_s=None, **changes):
    rate = None if gbit_per_s is None else usable_bytes_per_s(gbit_per_s)
    return replace(QUESTION, parameters=LAYERS, machines=PlannedMachines(count, rate), **changes)


def test_the_batch_is_split_over_the_machines():
    plans = {count: plan_for(asked(count)) for count in (1, 2, 3, 8)}
    assert {count: plan.num_micro_batches for count, plan in plans.items()} == {1: 8, 2: 4, 3: 3, 8: 1}
    assert asked(3).longest_micro_batch == asked(1).longest_micro_batch == 2
    # The integers and losses that the host holds are those of the machine's own micro-batches.
    alone, third = (asked(count).host_batch().integers_and_losses_bytes() for count in (1, 3))
    assert third * 8 == alone * 3


def test_an_exchange_over_a_fast_network_is_hidden_in_async_and_a_slow_one_sets_the_pace():
    hidden = asked(2, 100, update="async", device_bytes=120 * MIB)
    plan = plan_for(hidden)
    report = report_exchange(hidden, plan)
    assert report.step_s == pytest.approx(plan.step_s, rel=1e-9) and report.exposed_s < 1e-9 * plan.step_s
    slow = asked(2, 0.01, update="async", device_bytes=120 * MIB)
    report = report_exchange(slow, plan)
    # Each link carries all layers of 8 MiB in each step: gradients of those that its machine owns, weights of the others.
    assert report.step_s == pytest.approx(LAYERS_OF_MODEL * 8 * MIB / usable_bytes_per_s(0.01), rel=1e-6)
    assert report.exposed_s == pytest.approx(report.step_s - plan.step_s)


def test_each_machine_holds_all_weights_and_its_share_of_the_state():
    alone = asked(1).state()
    for count in (2, 4, LAYERS_OF_MODEL):
        state = asked(count).state()
        owned = -(-LAYERS_OF_MODEL // count) * 4 * MIB
        assert state.weight_bytes == alone.weight_bytes
        assert state.optimizer_bytes == 12 * owned
        # The sums of owned gradients, and two places for equal parts.
        assert state.gradient_bytes == 4 * owned + 2 * 2 * 4 * MIB


def test_parts_of_each_size_have_a_share_of_places_and_two_of_four_or_more():
    small, large = BundleCount((MIB,)), BundleCount((50 * MIB,))
    assert landing_bytes(ParameterCounts((small,) * 100), 2, 1, 2) == int(0.12 * 2 * 100 * MIB)
    assert landing_bytes(ParameterCounts((large, large, *(small,) * 5)), 2, 1, 2) == 2 * (50 + 2) * MIB


def test_faster_networks_never_make_longer_steps():
    question = asked(3)
    plan = plan_for(question)
    rates = [*map(usable_bytes_per_s, (10.0, 25.0, 100.0)), math.inf]
    steps = [machine_step_seconds(question, plan, rate) for rate in rates]
    assert sorted(steps, reverse=True) == steps and steps[-1] == pytest.approx(plan.step_s)
    assert STAGED_BYTES == STAGED_CHUNKS * CHUNK_BYTES


@pytest.mark.parametrize(("num_machines", "rounds"), [(1, 3), (2, 2), (3, 1), (4, 3)])
def test_machines_together_run_the_rounds_of_one_machine(num_machines, rounds):
    for count in range(1, 30):
        shares = [step_share(count, rounds, machine, num_machines) for machine in range(num_machines)]
        total = min(num_machines * rounds, count)
        expected = dict(enumerate(split_evenly(count, total)))
        found = {}
        for share in shares:
            assert share.total_rounds == total and share.total_micro_batches == count
            # The engine cuts a machine's own micro-batches into its own rounds.
            cuts = split_evenly(len(share.micro_batches), len(share.rounds)) if share.rounds else []
            for local, (round_index, cut) in enumerate(zip(share.rounds, cuts, strict=True)):
                assert round_index == local * num_machines + share.machine
                found[round_index] = tuple(share.micro_batches[index] for index in cut)
        assert found == {index: tuple(cut) for index, cut in expected.items()}


def test_a_machine_may_have_nothing_to_compute_and_impossible_shares_are_refused():
    share = step_share(2, 2, machine=3, num_machines=4)
    assert share.micro_batches == share.rounds == () and share.total_rounds == 2
    for arguments in ((0, 1, 0, 1), (4, 0, 0, 1), (4, 1, 2, 2)):
        with pytest.raises(PlanError, match="no share of"):
            step_share(*arguments)


def test_owners_are_balanced_by_size_and_ties_go_to_the_lower_rank():
    assert assign_owners([10, 10, 10, 10], 2) == (0, 1, 0, 1)
    assert assign_owners([1, 2, 9, 3], 2) == (1, 1, 0, 1)
    assert assign_owners([5, 5], 4) == (0, 1)
    for sizes in itertools.product((1, 4, 7), repeat=6):
        owners = assign_owners(sizes, 3)
        loads = [sum(s for s, owner in zip(sizes, owners, strict=True) if owner == m) for m in range(3)]
        assert max(loads) - min(loads) <= max(sizes)
