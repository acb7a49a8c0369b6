"""The answers before a run, against hand-made figures and against the planner itself."""

from dataclasses import replace

import pytest

from tests.support.counted_rules import COMPACT_ADAMW, COMPACT_VALUE, FULL
from torchround.pipeline.cards import DeviceSpec
from torchround.pipeline.costs import Costs, LayerCost, ParameterCounts
from torchround.pipeline.memory import GIB
from torchround.pipeline.partition import Partition
from torchround.pipeline.plan import micro_batches_to_hide, plan_transfers
from torchround.pipeline.plan_report import fits, longest_tokens, report_plan
from torchround.pipeline.planner import InfeasiblePlanError, evaluate_plan, make_plan
from torchround.pipeline.run_question import RunQuestion
from torchround.pipeline.update_costs import RuleCosts, UpdateCosts

CARD = DeviceSpec("card", 24, 10, {"bfloat16": 1e12})
MIB = 1 << 20


def costs_for(tokens, sequences, accumulate_bytes):
    """Make six blocks and a head; 1 ms, 1 MiB of activations and 1/8 MiB of output per 1024 tokens."""
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
    return Costs((*(LayerCost(f"block.{i}", **block) for i in range(6)), LayerCost("head", **head)))


QUESTION = RunQuestion(
    costs_for=costs_for,
    parameters=ParameterCounts(28 * MIB),
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
    assert answer.plan == plan and answer.problem == "" and answer.changes == ()
    assert answer.tokens_per_s == pytest.approx(16 * 2048 / plan.step_s)
    assert answer.host.state_bytes == 16 * 28 * MIB
    # The integers of two steps, and a page for each of their losses.
    assert answer.host.integer_bytes == 2 * (16 * 2048 * 32 + 8 * 4096)
    assert answer.host.activation_bytes == plan.host_activation_bytes
    assert answer.device.total_bytes == plan.device_bytes
    gains = {change.setting: change.gain for change in answer.faster}
    auto = make_plan(costs_for(2048, 2, 4), 2, 8, "sync", "auto", QUESTION.limits())
    assert gains['engine.rounds = "auto"'] == pytest.approx(1 - auto.step_s / plan.step_s)
    unknown = report_plan(replace(QUESTION, device=None))
    assert unknown.plan is not None and unknown.tokens_per_s is None and unknown.transfers is None


def test_the_longest_sequence_fits_and_one_step_more_does_not():
    tight = replace(QUESTION, device_bytes=300 * MIB)
    longest = longest_tokens(tight)

    def fits_at(tokens):
        return fits(replace(tight, seq_len=tokens, micro_batch_size=1, global_batch_size=2))

    assert longest > 2048 and fits_at(longest) and not fits_at(longest + 1024)
    assert longest_tokens(replace(QUESTION, device_bytes=20 * MIB)) == 0


@pytest.mark.parametrize(("device_mib", "host_mib"), [(40, 600), (60, 450), (80, 470), (120, 440), (300, 600)])
def test_a_question_gets_a_plan_exactly_if_the_report_says_that_it_fits(device_mib, host_mib):
    question = replace(QUESTION, device_bytes=device_mib * MIB, host_bytes=host_mib * MIB)
    answer = report_plan(question)
    assert (answer.plan is not None) == fits(question) == (not answer.problem)
    if answer.plan is not None:
        assert answer.host.total_bytes <= host_mib * MIB
        assert answer.plan.device_bytes <= device_mib * MIB


def test_a_change_that_is_said_to_fit_does():
    tight = replace(QUESTION, device_bytes=64 * MIB, micro_batch_size=8)
    answer = report_plan(tight)
    assert answer.plan is None and "GiB are missing" in answer.problem
    fitting = {change.setting: change.fits for change in answer.changes}
    assert fitting["training.micro_batch_size = 1"]
    assert report_plan(replace(tight, micro_batch_size=1)).plan is not None
    assert 'engine.update = "sync"' not in fitting  # it is that already


def test_a_state_that_does_not_fit_proposes_nothing_that_the_run_has_already():
    # Its parameters alone take more than one MiB.
    tight = replace(QUESTION, host_bytes=MIB)
    ways = ('training.dtype = "bfloat16"', 'engine.update = "sync"', "engine.rounds = 1", "data.shuffle_sequences")
    plain = report_plan(replace(tight, update="sync", rounds=1, element_bytes=2)).problem
    costly = replace(tight, update="async", rounds=2, element_bytes=4, loader_bytes_for=lambda *_: 3 * MIB)
    assert "lora.rank" in plain and not any(way in plain for way in ways)
    problem = report_plan(costly).problem
    assert "3.00 MiB" in problem and all(way in problem for way in ways)


OTHER_STATES = replace(
    FULL,
    smaller=(("half the state", UpdateCosts((COMPACT_ADAMW,))), ("a larger state", UpdateCosts((RuleCosts(9.0),)))),
)


# The state takes 448 MiB, and activations a few more.
@pytest.mark.parametrize("host_mib", [400, 449], ids=["state", "activations"])
def test_a_smaller_state_is_proposed_with_what_it_saves_if_the_host_is_short(host_mib):
    question = replace(QUESTION, updates=OTHER_STATES, host_bytes=host_mib * MIB)
    proposed = f"half the state (saves {(8 - 2 * COMPACT_VALUE) * 28 / 1024:.2f} GiB)"
    answer = report_plan(question)
    assert answer.plan is None and proposed in answer.problem and "a larger state" not in answer.problem
    [change] = [change for change in answer.changes if "the state" in change.setting]
    assert change.setting == proposed and change.fits
    assert not any("a larger state" in change.setting for change in answer.changes)
    needs_both = report_plan(replace(question, host_bytes=282 * MIB)).changes
    assert any(change.setting.startswith(f"{proposed} and training.global_batch") for change in needs_both)


def test_a_smaller_state_is_no_help_for_a_device_nor_without_trained_weights():
    for short in ({"device_bytes": 20 * MIB}, {"parameters": ParameterCounts(0, GIB), "host_bytes": MIB}):
        answer = report_plan(replace(QUESTION, updates=OTHER_STATES, **short))
        assert answer.plan is None and "the state" not in answer.problem


def test_the_proposed_batch_is_the_largest_halving_that_fits():
    tight = replace(QUESTION, host_bytes=451 * MIB, micro_batch_size=1, global_batch_size=64)
    answer = report_plan(tight)
    sizes = [size for size in (32, 16, 8, 4, 2, 1) if fits(replace(tight, global_batch_size=size))]
    assert answer.plan is None and 1 < sizes[0] < 32
    proposed = {change.setting: change.fits for change in answer.changes}
    assert proposed[f"training.global_batch_size = {sizes[0]}"]
    assert sum("global_batch_size" in setting for setting in proposed) == 1


def test_a_proposed_batch_has_a_micro_batch_for_each_round():
    never = replace(QUESTION, device_bytes=MIB, rounds=2, micro_batch_size=4)
    settings = {change.setting: change.fits for change in report_plan(never).changes}
    assert settings["training.global_batch_size = 8"] is False
    least = report_plan(replace(never, global_batch_size=8)).changes
    assert not any("global_batch_size" in change.setting for change in least)


def test_a_given_plan_is_judged_as_it_is():
    given = (Partition((6,), 1, (6,)), 2)
    answer = report_plan(replace(QUESTION, given=given))
    assert answer.plan is not None and (answer.plan.partition, answer.plan.rounds) == given
    assert [change.setting for change in answer.faster] == ["engine.plan left out"]
    with pytest.raises(InfeasiblePlanError):
        evaluate_plan(given[0], 2, costs_for(2048, 2, 4), 2, 8, limits=replace(QUESTION, device_bytes=1).limits())


def test_a_small_model_on_many_cards_is_told_to_take_larger_micro_batches():
    """One thread at a time launches kernels, so more cards launch no faster; a larger micro-batch has as many launches."""

    def launching(tokens, sequences, accumulate_bytes):
        return replace(costs_for(tokens, sequences, accumulate_bytes), launch_s=100.0)

    question = replace(QUESTION, costs_for=launching, num_devices=8, global_batch_size=64, micro_batch_size=1)
    answer = report_plan(question)
    assert answer.plan is not None and answer.plan.step_s == answer.plan.lower_bound_s == 64 * 100.0
    gains = {change.setting: change.gain for change in answer.faster}
    assert gains["training.micro_batch_size = 2"] == pytest.approx(0.5)


def test_transfers_count_weights_once_a_round_and_activations_with_every_micro_batch():
    costs = Costs((LayerCost("block", 1.0, 2.0, 1000, 2000, 0, 30), LayerCost("head", 1.0, 2.0, 100, 200, 0, 4)))
    plan = evaluate_plan(Partition((1,), 1, (1,)), 2, costs, 2, 8)
    transfers = plan_transfers(plan, costs, pcie_gb_per_s=1e-6, recompute="stage", gradient_share=0.5)
    # Up: the block twice a round, the head once; its input to the head, its output's gradient to the block.
    assert transfers.up_bytes == 2 * (2 * 1000 + 100) + 8 * (30 + 30)
    # Down: both gradients in 16 bits once a round; the block's output, and the gradient of the head's input.
    assert transfers.down_bytes == 2 * (1000 + 100) + 8 * (30 + 30)
    assert transfers.up_load == pytest.approx(transfers.up_bytes / (2 * plan.step_s * 1000))
    # The forward stage moves 1000 bytes up in 4 s, the backward stage 1000 + 4 x 30 in 12 s.
    assert (transfers.busiest_stage, transfers.busiest_load) == (0, pytest.approx(1000 / 4 / 1000))


def test_weights_are_hidden_by_as_many_micro_batches_as_take_as_long():
    layer = LayerCost("block", 1.0, 2.0, weight_bytes=6000, boundary_bytes=500)
    assert micro_batches_to_hide(layer, 1e-6) == pytest.approx(6.0 / (1.0 - 0.5))
    assert micro_batches_to_hide(replace(layer, boundary_bytes=1000), 1e-6) == float("inf")
