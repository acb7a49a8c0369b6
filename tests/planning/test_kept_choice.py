"""The choice of what to keep: never a longer step, within the limits, as much as it should gain, no shorter text."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.check_tree import ROOT
from tests.support.published_models import PARTITIONS, by_night
from tests.support.random_costs import LINKS, costs, limits, short_search
from torchround.commands.plan_run import configured_question, planned_hardware
from torchround.config import parse_command_line
from torchround.planning import planner
from torchround.planning.costs import Costs, KeptCost, LayerCost
from torchround.planning.keep_rule import KeepRule
from torchround.planning.memory import MemoryLimits
from torchround.planning.partition import Partition, PlanError
from torchround.planning.plan_report import longest_tokens, plan_for
from torchround.planning.planner import InfeasiblePlanError, evaluate_plan
from torchround.planning.stage_times import KeptLink

# The rules of what is kept hold for plans of a short search too.
make_plan = short_search()(planner.make_plan)
PARTS = (KeptCost("attention", 10, 0.1), KeptCost("gate_up", 100, 0.5), KeptCost("down", 20, 0.3))


def blocks(number, **fields):
    block = LayerCost("block", 1.0, 2.0, 100, 200, 300, 10, keepable=PARTS)
    layers = [replace(block, name=f"block.{index}", **fields) for index in range(number)]
    return Costs((*layers, LayerCost("head", 0.5, 1.0, 50, 100, 50)), hop_s=0.01)


@given(
    costs=costs(max_layers=4),
    devices=st.integers(1, 3),
    micro_batches=st.integers(1, 3),
    update=st.sampled_from(["sync", "async", "bounded"]),
    rounds=st.sampled_from([1, "auto"]),
    link=LINKS,
    limits=limits(600, 3000),
)
def test_a_chosen_plan_is_never_slower_and_keeps_within_the_limits(
    costs, devices, micro_batches, update, rounds, link, limits
):
    question = devices, micro_batches, update, rounds, limits
    try:
        without = make_plan(costs, *question, keep=KeepRule("none", link))
    except InfeasiblePlanError:
        with pytest.raises(InfeasiblePlanError):
            make_plan(costs, *question, keep=KeepRule("auto", link))
        return
    plan = make_plan(costs, *question, keep=KeepRule("auto", link))
    assert plan.step_s <= without.step_s
    assert limits.device_bytes is None or plan.device_bytes <= limits.device_bytes
    assert limits.host_bytes is None or plan.host_activation_bytes <= limits.host_bytes
    # More host memory is taken for clearly shorter steps alone.
    if plan.host_activation_bytes > without.host_activation_bytes:
        assert plan.step_s * 1.01 < without.step_s * (1 + 1e-9)


def test_a_plan_between_no_gain_and_the_fastest_pays_no_host_memory_for_a_gain_of_less_than_a_hundredth():
    """The fastest plan takes 51.6 s, the one that keeps nothing 52.2 s, and one of 52.1 s is within 1 % of the fastest."""
    block = LayerCost("block", 0.5, 3.0, optimizer_s=3.0, keepable=(KeptCost("attention", 1, 0.5),))
    blocks = [replace(block, name=f"block.{index}") for index in range(7)]
    model = Costs((*blocks, LayerCost("head", 0.0, 1.0)), hop_s=0.7)
    without = planner.make_plan(model.keeping(()), 2, 2, "sync", 1)
    plan = planner.make_plan(model, 2, 2, "sync", 1, keep=KeepRule("auto"))
    assert plan.step_s * 1.01 < without.step_s and plan.host_activation_bytes > 0
    partition = without.partition
    given = [evaluate_plan(partition, 1, model, 2, 2, keep=KeepRule(name)) for name in ("none", "auto")]
    assert given[1].step_s * 1.01 < given[0].step_s or not given[1].kept


def test_with_room_for_all_and_an_idle_link_the_step_is_shorter_by_what_is_saved():
    model = blocks(23)
    without = make_plan(model, 4, 32, "sync", 1, as_fast=0.0)
    plan = make_plan(model, 4, 32, "sync", 1, as_fast=0.0, keep=KeepRule("auto", KeptLink(1e9)))
    # Of 4 s per block and micro-batch 0.9 s are saved. A few blocks lie in the fused stage, which recomputes nothing.
    assert without.step_s / plan.step_s > 1.2
    assert Counter(name for names in plan.kept for name in names).keys() == {"attention", "gate_up", "down"}


def test_a_slow_link_leaves_room_for_the_best_parts_alone():
    """A block moves 25 bytes in its forward second: `down` and hardly more, though all would be worth keeping."""
    plan = make_plan(blocks(11), 4, 32, "async", 1, keep=KeepRule("auto", KeptLink(35.0)))
    kept = Counter(name for names in plan.kept for name in names)
    assert kept["down"] > 6 and kept["gate_up"] == 0
    # A slower link hides nothing, and a step that launches bound gains nothing.
    for link, launch_s in ((1.0, 0.0), (35.0, 100.0)):
        slow = replace(blocks(11), launch_s=launch_s)
        assert make_plan(slow, 4, 32, "async", 1, keep=KeepRule("auto", KeptLink(link))).kept == ()


def test_little_host_memory_goes_to_the_parts_that_save_most_per_byte():
    free = make_plan(blocks(11), 4, 32, "sync", 1)
    room = free.host_activation_bytes + 32 * 20 * 11
    rule = KeepRule("auto", KeptLink(1e9))
    plan = make_plan(blocks(11), 4, 32, "sync", 1, MemoryLimits(host_bytes=room), keep=rule)
    assert plan.host_activation_bytes <= room
    assert plan.step_s < free.step_s
    kept = Counter(name for names in plan.kept for name in names)
    assert kept["down"] > 2 * kept["gate_up"]


def test_more_rounds_make_room_for_more():
    rule, room = (KeepRule("auto", KeptLink(1e9)), MemoryLimits(device_bytes=4000, host_bytes=8 * 130 * 11 // 4))
    one = make_plan(blocks(11), 4, 8, "async", 1, room, keep=rule)
    chosen = make_plan(blocks(11), 4, 8, "async", "auto", room, keep=rule)
    assert chosen.rounds > 1
    assert chosen.step_s < one.step_s
    assert sum(map(len, chosen.kept)) > sum(map(len, one.kept))


def test_numbers_of_rounds_without_room_for_their_tokens_are_left_out():
    """A device has no room for the tokens of all micro-batches, whatever is kept; `anneal` had no cuts to start from."""
    room = MemoryLimits(device_bytes=400, host_bytes=10**6, integer_bytes=60)
    model = Costs(tuple(LayerCost(f"block.{i}", 1.0, 2.0, keepable=(KeptCost("down", 5, 0.4),)) for i in range(13)))
    rule = KeepRule("auto", KeptLink(1e9))
    assert make_plan(model, 2, 8, "sync", "auto", room, keep=rule).rounds > 1
    assert make_plan(Costs(model.layers[:1]), 2, 4, keep=rule).partition.num_layers == 1


def test_a_layer_that_keeps_whole_keeps_all_or_nothing():
    model = blocks(11, keeps_whole=True)
    plan = make_plan(model, 4, 32, "async", 1, keep=KeepRule("auto", KeptLink(80.0)))
    assert {len(names) for names in plan.kept} == {0, 3}
    with pytest.raises(PlanError, match="all or nothing"):
        make_plan(model, 4, 32, keep=KeepRule("attention"))


@pytest.mark.parametrize(
    ("setting", "kept"),
    [
        ("none", ()),
        ("attention", (("attention",), ("attention",), ("attention",), ())),
        ("half", ((), ("attention", "gate_up", "down"), (), ())),
        ("all", (*(("attention", "gate_up", "down"),) * 3, ())),
        (("down", "attention"), (*(("attention", "down"),) * 3, ())),
    ],
)
def test_a_setting_by_name_keeps_what_it_says_before_the_fused_stage(setting, kept):
    partition = Partition((1, 2), 1, (2, 1))
    assert evaluate_plan(partition, 1, blocks(3), 2, 4, keep=KeepRule(setting)).kept == kept
    # The fused stage keeps its activations on the device.
    whole = Partition((), 4, ())
    assert evaluate_plan(whole, 1, blocks(3), 2, 4, keep=KeepRule(setting)).kept == ()


def test_a_setting_that_does_not_fit_or_that_no_layer_can_follow_is_refused():
    large, limit = blocks(11, keepable=(KeptCost("down", 5000, 0.5),)), MemoryLimits(device_bytes=4000)
    assert make_plan(large, 4, 32, "sync", 1, limit, keep=KeepRule("auto")).kept == ()
    with pytest.raises(InfeasiblePlanError, match="are missing"):
        make_plan(large, 4, 32, "sync", 1, limit, keep=KeepRule("all"))
    with pytest.raises(PlanError, match="qkv"):
        make_plan(blocks(3), 2, 4, keep=KeepRule(("qkv",)))


def test_a_plan_of_least_host_memory_is_found_where_its_limit_is_tight():
    """The search finds none. A fused stage larger than the others keeps nothing, and fits next to smaller ones."""
    costs, limits = blocks(23, keepable=(KeptCost("down", 5, 0.5),)), MemoryLimits(device_bytes=3000, host_bytes=1360)
    assert make_plan(costs, 2, 8, "sync", 1, limits, keep=KeepRule("all")).host_activation_bytes <= 1360


@pytest.mark.parametrize("config", by_night(PARTITIONS))
def test_the_longest_sequence_of_each_published_model_is_as_long_as_without_keeping(config):
    path = str(ROOT / "configs" / f"{config}.toml")
    machine = ["--machines.card=rtx4090", "--engine.num_devices=8", "--engine.host_memory_gib=745"]
    options = parse_command_line(["--config", path, "--engine.compile", "false", *machine])
    card = planned_hardware(options)
    question = configured_question(options, card)
    assert question.keep_rule().is_open
    tokens = longest_tokens(replace(question, keep_activations="none"))
    assert longest_tokens(question) == tokens > 0
    plan = plan_for(replace(question, seq_len=tokens, micro_batch_size=1, global_batch_size=8))
    assert card.device_bytes is not None and plan.device_bytes <= card.device_bytes
