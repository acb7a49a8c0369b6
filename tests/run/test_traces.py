"""The trace of a step of the hardest kind of run: async, two rounds, adapters on frozen weights."""

import json
from collections import Counter

from tests.support.small_run import ASYNC, MICRO_BATCHES, TWO_ROUNDS

RUN = (ASYNC, TWO_ROUNDS, "--lora.rank=2", '--lora.targets=["q_proj", "down_proj"]')
ROUNDS, DEVICES = 2, 2
# First layers of the stages of `TWO_ROUNDS`. The second forward stage pauses to send the input of layer 2.
STAGES = {("forward", 0), ("forward", 1), ("forward", 2), ("fused", 3), ("backward", 2), ("backward", 0)}
STAGES |= {("recompute", 2), ("recompute", 0)}


def first_layer(span):
    return int(span["name"].split()[1].split("-")[0])


def test_a_run_writes_traces_of_every_slot_transfer_and_update_and_trains_as_without(small_runs):
    """Weights go up for every stage, and only gradients of adapters come down. `tests/engine/test_tracing.py` has more."""
    assert small_runs("run", *RUN, "--trace.steps=[3, 9]") == small_runs("plain", *RUN) == 0
    small_runs.assert_same("run", "plain")
    assert not (small_runs.path("plain") / "trace").exists()
    [file] = (small_runs.path("run") / "trace").iterdir()
    events = json.loads(file.read_text())["traceEvents"]
    assert file.name == "step-3.json" and {event["ph"] for event in events} == {"X", "M"}
    spans = [event for event in events if event["ph"] == "X"]
    threads = {(event["pid"], event["tid"]) for event in spans}
    assert threads == {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {event["args"]["step"] for event in spans} == {3}
    own, moved = [event for event in spans if event["args"]["step"] == 3], Counter()
    for span in own:
        moved[span["cat"]] += span["args"].get("moved_bytes", 0)
    kinds = Counter(span["cat"] for span in own)
    pieces = [(s["cat"], first_layer(s), s["args"]["micro_batch"]) for s in own if s["cat"] in {k for k, _ in STAGES}]
    assert Counter(pieces) == Counter((kind, start, m) for kind, start in STAGES for m in range(MICRO_BATCHES))
    # Inputs of layers 1, 3 and 2, gradients of layers 3 and 2; integers once for each device.
    assert kinds["reload"] == (3 + 2 + DEVICES) * MICRO_BATCHES
    # Inputs of layers 1 and 3 and, kept, 2; the loss, the gradients of layers 3 and 2.
    assert kinds["offload"] == 6 * MICRO_BATCHES
    assert [first_layer(span) for span in own if span["cat"] == "update"] == [1, 2]
    weights = {key: view.nbytes for key, view in small_runs.state("run").items() if key.startswith("weights/")}
    trained = sum(nbytes for key, nbytes in weights.items() if "lora_" in key)
    head = sum(nbytes for key, nbytes in weights.items() if key.startswith("weights/head."))
    padding = 128 * 4 * len(weights)  # each parameter starts at a multiple of 128 elements
    least, most = 2 * sum(weights.values()) - head, 2 * (sum(weights.values()) + padding)
    assert ROUNDS * least <= moved["weights"] <= ROUNDS * most
    assert ROUNDS * trained <= moved["gradients"] <= min(ROUNDS * (trained + padding), moved["weights"] / 4)
