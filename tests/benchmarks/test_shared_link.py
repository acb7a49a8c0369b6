"""The replay of recorded runs: times that follow by hand, and turns that pay where copies disturb each other."""

import pytest

from benchmarks.shared_link import SHARED_LINK, Replay
from torchround.engine.watch.race_checker import Entry, Region

LINKS = {"a weight upload": 0, "b weight upload": 0, "c weight upload": 1}


def upload(actor, nbytes):
    return Entry(f"{actor} weight upload", "access", reads=(Region(0, 0, nbytes),))


def compute(actor):
    return Entry(f"{actor} compute", "access", reads=(Region(1, 0, 1),))


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        pytest.param([compute("a"), compute("a"), compute("b")], 2, id="two operations of one device"),
        pytest.param([upload("a", 10), upload("c", 10)], 1, id="links of their own"),
        pytest.param([upload("a", 10), upload("b", 10)], 4, id="together at half the link's rate"),
        pytest.param([upload("a", 10), upload("b", 20)], 5, id="the longer one ends alone"),
        pytest.param(
            [
                upload("a", 10),
                Entry("a weight upload", "signal", "end"),
                Entry("b weight upload", "wait", "end"),
                upload("b", 10),
            ],
            2,
            id="in turns",
        ),
    ],
)
def test_durations_are_those_worked_out_by_hand(entries, expected):
    """A link moves 10 bytes in the time of an operation, and half as much for several devices."""
    assert Replay(entries, LINKS, rate=10.0, carries=0.5).duration() == pytest.approx(expected)


def test_a_recording_that_cannot_continue_is_refused():
    with pytest.raises(AssertionError, match="b weight upload"):
        Replay([Entry("b weight upload", "wait", "never")], LINKS, 10.0, 1.0).duration()


def test_turns_pay_where_copies_disturb_each_other():
    """Compare the best of three recordings, since each depends on how far threads were ahead."""
    options = "--devices 2 --microbatches 4 --steps 2 --runs 3 --updates sync --carries 0.3 --uploads 1.5"
    [row] = SHARED_LINK.measure(SHARED_LINK.parse("shared-link", options.split()))["rows"]
    assert min(row["in_turns"]) < min(row["together"])
