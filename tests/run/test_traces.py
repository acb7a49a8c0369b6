"""The trace of a step of the hardest kind of run: async, two rounds, adapters on frozen weights."""

import json
from collections import Counter

import pytest

from tests.support.small_run import ASYNC, TWO_ROUNDS, shared_runs

__all__ = ["shared_runs"]
pytestmark = pytest.mark.thorough

LORA = ("--lora.rank=2", '--lora.targets=["q_proj", "down_proj"]')
BLOCKS, ROUNDS, MICRO_BATCHES, DEVICES = 3, 2, 4, 2
# Layers of the stages, as `TWO_ROUNDS` has them.
STAGES = {("forward", 0), ("forward", 2), ("fused", 4), ("backward", 3), ("backward", 0)}


@pytest.fixture(scope="module")
def spans(shared_runs):
    """Return the events of step 3 in its trace, after checking everything that a viewer relies on."""
    assert shared_runs("run", ASYNC, TWO_ROUNDS, *LORA, "--trace.steps=[3, 9]") == 0
    assert [path.name for path in (shared_runs.path("run") / "trace").iterdir()] == ["step-3.json"]

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    text = (shared_runs.path("run") / "trace" / "step-3.json").read_text()
    events = json.loads(text, parse_constant=refuse)["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["ph"] for event in events} == {"X", "M"}
    for event in spans:
        assert event["ts"] >= 0 and event["dur"] > 0 and event["name"]
    threads = {(event["pid"], event["tid"]) for event in spans}
    assert threads == {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {pid for pid, _ in threads} == {e["pid"] for e in events if e["name"] == "process_name"}
    own = [event for event in spans if event["args"]["step"] == 3]
    # Several steps, because a run does not drain the engine for a trace.
    steps = {event["args"]["step"] for event in spans}
    assert steps <= {2, 3, 4} and len(steps) > 1
    first, last = min(event["ts"] for event in own), max(event["ts"] + event["dur"] for event in own)
    # Events are rounded to doubles of microseconds, each its start and its duration.
    near = 1e-3
    assert all(event["ts"] < last + near and event["ts"] + event["dur"] > first - near for event in spans)
    return own


def of_kind(spans, kind):
    return [span for span in spans if span["cat"] == kind]


def moved_bytes(spans):
    return sum(span["args"]["moved_bytes"] for span in spans)


def first_layer(span):
    """Return the first layer of a label such as `FB 4` or `B 0-2`."""
    return int(span["name"].split()[1].split("-")[0])


def test_a_trace_of_the_hardest_run_holds_every_slot_transfer_and_update(shared_runs, spans):
    pieces = Counter(
        (span["cat"], first_layer(span), span["args"]["micro_batch"])
        for kind in ("forward", "fused", "recompute", "backward")
        for span in of_kind(spans, kind)
    )
    stages = STAGES | {("recompute", start) for kind, start in STAGES if kind == "backward"}
    stages |= {("forward", 3)}  # the second forward stage pauses to send the input of layer 3
    assert pieces == Counter((kind, start, m) for kind, start in stages for m in range(MICRO_BATCHES))
    # Inputs of layers 2, 4 and 3, gradients of layers 4 and 3; integers once for each device.
    assert len(of_kind(spans, "reload")) == (3 + 2 + DEVICES) * MICRO_BATCHES
    # Inputs of layers 2 and 4 and, kept, 3; the loss, the gradients of layers 4 and 3.
    assert len(of_kind(spans, "offload")) == 6 * MICRO_BATCHES
    assert [first_layer(span) for span in of_kind(spans, "update")] == [1, 2, 3]
    assert shared_runs("plain", ASYNC, TWO_ROUNDS, *LORA) == 0
    shared_runs.assert_same("run", "plain")
    assert not (shared_runs.path("plain") / "trace").exists()


def test_weights_go_up_for_every_stage_and_only_gradients_of_adapters_come_down(shared_runs, spans):
    state = shared_runs.state("run")
    weights = {name: view.nbytes for name, view in state.items() if name.startswith("weights/")}
    trained = sum(nbytes for name, nbytes in weights.items() if "lora_" in name)
    head = sum(nbytes for name, nbytes in weights.items() if name.startswith("weights/head."))
    # Each parameter starts at a multiple of 128 elements.
    padding = 128 * 4 * len(weights)
    up = moved_bytes(of_kind(spans, "weights"))
    assert ROUNDS * (2 * sum(weights.values()) - head) <= up <= ROUNDS * 2 * (sum(weights.values()) + padding)
    down = moved_bytes(of_kind(spans, "gradients"))
    assert ROUNDS * trained <= down <= ROUNDS * (trained + padding)
    assert down < up / 4
