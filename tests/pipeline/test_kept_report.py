"""What a plan keeps, in figures: groups of layers, bytes, load and seconds."""

from dataclasses import replace

import pytest

from tests.support.counted_rules import FULL
from torchround.pipeline.cards import DeviceSpec
from torchround.pipeline.costs import Costs, KeptCost, LayerCost, ParameterCounts
from torchround.pipeline.kept_report import report_kept
from torchround.pipeline.memory import GIB
from torchround.pipeline.partition import Partition
from torchround.pipeline.plan import plan_transfers
from torchround.pipeline.plan_report import plan_for, report_plan
from torchround.pipeline.run_question import RunQuestion

MIB = 2**20
PARTS = (KeptCost("attention", MIB, 0.1), KeptCost("down", 2 * MIB, 0.4))


def costs_for(tokens, sequences, accumulate_bytes):
    """Build four blocks of 1 s and 2 s for each sequence, and a head."""
    block = LayerCost("block", 1.0, 2.0, MIB, 2 * MIB, MIB, 4096, keepable=PARTS)
    blocks = [replace(block, name=f"block.{index}") for index in range(4)]
    return Costs((*blocks, LayerCost("head", 1.0, 2.0, MIB, 2 * MIB, MIB)))


QUESTION = RunQuestion(
    costs_for=costs_for,
    parameters=ParameterCounts(trained=1000),
    updates=FULL,
    seq_len=1024,
    global_batch_size=8,
    micro_batch_size=1,
    num_devices=2,
    device=DeviceSpec("card", 24, MIB / 1e6),
    device_bytes=GIB,
    given=(Partition((2, 2), 1, (2, 2)), 1),
    given_kept=(("down",), ("attention", "down"), ("down",), ("down",), ()),
)


def test_the_report_counts_bytes_load_and_seconds():
    plan = plan_for(QUESTION)
    report = report_kept(QUESTION, plan, QUESTION.costs())
    assert report is not None
    assert [(group.number, group.first, group.last, group.names) for group in report.groups] == [
        (3, "block.0", "block.3", ("down",)),
        (1, "block.1", "block.1", ("attention", "down")),
    ]
    assert report.micro_batch_bytes == 9 * MIB
    assert report.step_bytes == report.host_bytes == 8 * 9 * MIB
    assert report.saved_s == pytest.approx(8 * 1.7 / 2)
    # Each of the two links moves 1000 MiB per second each way.
    assert report.load == pytest.approx(8 * 9 / (2 * 1e3 * plan.step_s))
    assert "6.8 s" in report.lines(timed=True)[-1] and "saves" not in report.lines(timed=False)[-1]


def test_the_load_of_the_links_counts_what_is_kept_in_both_directions():
    bare = replace(QUESTION, given_kept=())
    plans = plan_for(QUESTION), plan_for(bare)
    moved = [plan_transfers(plan, QUESTION.costs(), 1.0, "stage", 0.5) for plan in plans]
    assert moved[0].up_bytes - moved[1].up_bytes == 8 * 9 * MIB
    assert moved[0].down_bytes - moved[1].down_bytes == 8 * 9 * MIB
    answers = report_plan(QUESTION), report_plan(bare)
    assert answers[0].device and answers[1].device and answers[0].plan
    assert answers[0].device.kept_bytes == 2 * (3 + 5) * MIB and answers[1].device.kept_bytes == 0
    assert answers[0].device.total_bytes == answers[0].plan.device_bytes
    assert answers[1].kept is None


@pytest.mark.parametrize(("setting", "is_kept"), [("auto", False), ("all", True)])
def test_virtual_devices_keep_what_a_setting_names_and_nothing_by_themselves(setting, is_kept):
    """Their copies take the time of the processors that compute."""
    question = replace(QUESTION, given=None, given_kept=None, keep_activations=setting, rounds=1)
    narrow = replace(question, device=None, device_bytes=22 * MIB, devices_on_host=True)
    assert bool(plan_for(narrow).kept) is is_kept
