"""Costs measured from real steps are the layers' own times."""

from collections import Counter
from dataclasses import replace

import pytest

from tests.support.toy import PARTITIONS, assert_same_state, toy_batches, toy_engine
from torchround.engine.device import Span
from torchround.engine.reports import StageReport, layer_times
from torchround.planning.costs import Costs, KeptCost, LayerCost, measured_costs
from torchround.planning.partition import SpanKind, StageKind, StageTask

COUNTED = Costs(tuple(LayerCost(f"layer.{index}", 1.0, 2.0, weight_bytes=7) for index in range(7)), hop_s=0.5)


def reports_of(steps):
    reports = []
    with toy_engine(PARTITIONS["one layer a stage"], 2) as engine:
        for micro_batches in toy_batches(steps, micro_batches=3):
            result = engine.forward_backward(micro_batches)
            engine.step(1e-2)
            reports += result.reports()
    return reports


class At:
    def __init__(self, seconds):
        self.seconds = seconds

    def seconds_since(self, earlier):
        return self.seconds - earlier.seconds


def test_bytes_names_and_the_heads_proportion_stay_as_counted():
    costs = measured_costs(replace(COUNTED, launch_s=1.0), layer_times(reports_of(2)))
    assert costs.launch_s == 0, "measured seconds contain launches"
    assert [layer.name for layer in costs.layers] == [layer.name for layer in COUNTED.layers]
    assert all(layer.weight_bytes == 7 for layer in costs.layers) and costs.hop_s == 0.5
    head = costs.layers[-1]
    assert head.backward_s == pytest.approx(2 * head.forward_s) and head.forward_s > 0


def test_each_layer_gets_the_median_time_of_its_update_and_skipped_updates_do_not_count():
    updates = [[(0, 1.0), (3, 0.25)], [], [(0, 2.0), (0, 1.0), (3, 0.5)], [(0, 2.0), (3, 0.25)]]
    times = layer_times(reports_of(1))
    costs = measured_costs(COUNTED, times, updates)
    assert [layer.optimizer_s for layer in costs.layers] == pytest.approx([2.0, 0, 0, 0.25, 0, 0, 0])
    assert all(layer.optimizer_s == 0 for layer in measured_costs(COUNTED, times, [[]]).layers)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_layers_time_is_the_median_of_its_samples_so_that_one_slow_sample_does_not_count(keeps):
    """A mean would give each layer 34 s in place of 2 s or 4 s. The recomputation of a layer that keeps is no sample."""
    partition = PARTITIONS["one layer a stage"]
    samples_s = {
        SpanKind.FORWARD: (1.0, 2.0, 99.0),
        SpanKind.BACKWARD: (3.0, 4.0, 95.0),
        SpanKind.FUSED: (96.0, 3.0, 1.0),
    }
    kinds = {
        StageKind.FORWARD: [SpanKind.FORWARD],
        StageKind.FUSED: [SpanKind.FUSED],
        StageKind.BACKWARD: [SpanKind.RECOMPUTE, SpanKind.BACKWARD],
    }
    samples_s[SpanKind.RECOMPUTE] = (0.0,) * 3 if keeps else samples_s[SpanKind.FORWARD]
    reports = []
    for slot, stage in enumerate(partition.stages()):
        for sample in range(3):
            layers = range(stage.start, stage.stop)
            spans = tuple(Span(kind, At(0.0), At(samples_s[kind][sample]), layers=layers) for kind in kinds[stage.kind])
            task = StageTask(slot=slot, device=0, round=0, stage_index=slot, stage=stage, micro_batches=range(1))
            reports.append(StageReport(task, None, At(0.0), 0.0, spans, 0, 0))
    counted = Costs(tuple(replace(layer, keepable=(KeptCost("down", 8, 0.25),)) for layer in COUNTED.layers))
    costs = measured_costs(counted.keeping((("down",) * keeps,) * 6 + ((),)), layer_times(reports))
    assert [layer.forward_s for layer in costs.layers] == [2.0] * 6 + [1.0]
    assert [layer.backward_s for layer in costs.layers] == [4.0] * 6 + [2.0]


@pytest.mark.parametrize(
    ("name", "layerwise"), [("one stage", True), ("one layer a stage", False), ("backward coarser", True)]
)
def test_each_layer_is_a_span_of_its_own_under_any_plan_and_the_results_are_the_same(name, layerwise):
    partition, found = PARTITIONS[name], []
    for times_layers in (True, False):
        settings = {"times_layers": times_layers, "layerwise_recompute": layerwise}
        with toy_engine(partition, 2, **settings) as engine:
            result = engine.forward_backward(toy_batches(1, micro_batches=3)[0])
            engine.step(1e-2)
            engine.drain()
            loss, reports = result.loss(), list(result.reports())
        if times_layers:
            spans = Counter((s.kind, s.layers.start) for report in reports for s in report.spans if s.layers)
            assert all(len(span.layers) == 1 for report in reports for span in report.spans)
        found.append((loss, engine.store.named_views()))
    inner = [SpanKind.FORWARD, SpanKind.BACKWARD]
    assert spans == {
        **{(kind, layer): 3 for kind in inner for layer in range(6)},
        **{(SpanKind.RECOMPUTE, layer): 3 for layer in range(sum(partition.backward))},
        (SpanKind.FUSED, 6): 3,
    }
    assert found[0][0] == found[1][0]
    assert_same_state(*(views for _, views in found))


def test_a_layer_that_runs_again_in_its_backward_is_not_counted_twice():
    """With `recompute = "layer"` all layers but a stage's last run again, in the span of their backward."""
    times = {("fused", 3): [3.0]}
    for layer in range(3):
        times |= {("forward", layer): [1.0 + layer], ("backward", layer): [10.0]}
    layers = measured_costs(Costs(COUNTED.layers[:4]), times, run_again={0, 1}).layers
    assert [layer.forward_s for layer in layers[:3]] == [1.0, 2.0, 3.0]
    assert [layer.backward_s for layer in layers[:3]] == [9.0, 8.0, 10.0]
