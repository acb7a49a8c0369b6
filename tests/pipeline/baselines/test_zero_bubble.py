"""Zero-bubble schedules against the bubble and memory that Qi et al. (2023) give for them."""

import pytest

from torchround.pipeline.baselines import SCHEDULES, ScheduleReport, SimulationSetup, measure_schedule
from torchround.pipeline.costs import Costs, LayerCost

CASES = [(2, 4), (4, 8), (8, 24)]


def uniform(name: str, devices: int, micro_batches: int, forward_s: float, backward_s: float) -> ScheduleReport:
    layers = tuple(LayerCost(f"{i}", forward_s, backward_s, activation_bytes=1) for i in range(devices))
    return measure_schedule(SCHEDULES[name](SimulationSetup(Costs(layers), devices, micro_batches, recompute=False)))


@pytest.mark.parametrize(("devices", "micro_batches"), CASES)
@pytest.mark.parametrize(("forward_s", "backward_s"), [(1.0, 2.0), (1.5, 2.0), (1.25, 1.5)])
def test_zb_h1_hides_the_weight_gradients_within_the_memory_of_1f1b(
    devices: int, micro_batches: int, forward_s: float, backward_s: float
) -> None:
    # The formula needs f >= w: device 0 has nothing to fill the (p - 1) b before its first backward with.
    report = uniform("zb_h1", devices, micro_batches, forward_s, backward_s)
    half = backward_s / 2
    work_s = micro_batches * (forward_s + backward_s)
    assert report.makespan_s - work_s == pytest.approx((devices - 1) * (forward_s + half - half))
    assert max(report.peak_activation_bytes) == devices


@pytest.mark.parametrize(("devices", "micro_batches"), CASES)
def test_zb_h2_has_no_bubble_for_nearly_twice_the_memory(devices: int, micro_batches: int) -> None:
    report = uniform("zb_h2", devices, micro_batches, 1.0, 2.0)
    assert report.bubble == pytest.approx(0, abs=1e-9)
    assert max(report.peak_activation_bytes) == 2 * devices - 1
    assert report.drift == 0


def test_recomputed_activations_stay_until_the_weight_gradient() -> None:
    layers = (
        LayerCost("0", 1.0, 2.0, activation_bytes=100, boundary_bytes=1),
        LayerCost("1", 1.0, 2.0, activation_bytes=100, boundary_bytes=1),
    )
    setup = SimulationSetup(Costs(layers), 2, 6)
    kept = measure_schedule(SCHEDULES["1f1b"](setup)).peak_activation_bytes
    split = measure_schedule(SCHEDULES["zb_h1"](setup)).peak_activation_bytes
    # Device 0 recomputes one layer at a time in either schedule, but in ZB-H1 two micro-batches' are alive.
    assert kept == (100, 100)
    assert split == (100, 200)
