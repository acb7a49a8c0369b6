"""The one re-plan of a run: first steps with one layer a stage, then the planner again with measured times.

The plan that comes of it stays, also for a run that goes on, so that a run is the same all through. The number of
rounds is not chosen again: it decides how gradients round, and results may not depend on timing.
"""

from torchround.config import Config
from torchround.engine.build import DeviceChoice, model_costs, plan_of, replan
from torchround.engine.results import StepResult, costs_from_reports, one_layer_a_stage
from torchround.layer import LayeredModel
from torchround.pipeline.partition import Partition
from torchround.pipeline.plan import Plan, PlannedStage
from torchround.pipeline.planner import InfeasiblePlanError


class PlanByMeasuring:
    """The steps from `first_step` up to `until` measure; `settled` then is the plan of all later ones.

    `counted` is the plan from FLOPs and bytes, `kept` the plan that a run which goes on had, if any.
    """

    def __init__(
        self,
        config: Config,
        model: LayeredModel,
        devices: DeviceChoice,
        counted: Plan,
        kept: Plan | None,
        first_step: int,
    ) -> None:
        self._config = config
        self._devices = devices
        self._costs = model_costs(model, config.training, config.engine, devices)
        self._measured: list[StepResult] = []
        self._is_kept = False
        self._first_step = first_step
        self.settled = counted
        self.until = first_step
        steps = config.engine.measure_steps
        if config.engine.plan is not None or steps == 0:
            return
        if kept is not None and first_step >= steps and self._fits(kept, counted):
            self.settled, self._is_kept = kept, True
            return
        self.until = min(first_step + steps, config.training.steps)
        self.measuring = self._evaluated(one_layer_a_stage(len(model.layers)), counted.rounds)

    def text(self) -> str:
        """What is known of the plan when the run starts. A card whose speed is not known gets no times."""
        is_timed = self._devices.spec is not None
        if self._is_kept:
            return f"plan     as in the run so far\n{self.settled}"
        if self.until == self._first_step:
            return f"plan     of {len(self.settled.stages)} stages\n{self.settled.text(is_timed)}"
        first = (
            f"each layer is a stage for {self.until - self._first_step} steps, which are measured to make it"
        )
        forecast = f"; counted from FLOPs it would be\n{self.settled}" if is_timed else ""
        return f"plan     {first}{forecast}"

    def add(self, result: StepResult) -> None:
        """A step that was dispatched under the measuring plan."""
        self._measured.append(result)

    def settle(self) -> None:
        """Plan again, with the medians of the steps that were added, which are all done."""
        training, engine = self._config.training, self._config.engine
        reports = [report for result in self._measured for report in result.reports()]
        updates = [result.update().bundles for result in self._measured]
        costs = costs_from_reports(self._costs, reports, updates)
        self.settled = replan(self.settled, costs, training, engine, self._devices)
        self._measured.clear()

    def _fits(self, kept: Plan, counted: Plan) -> bool:
        """Whether a kept plan is for this model, these devices and this batch, and still within memory."""
        if (kept.num_devices, kept.num_micro_batches, kept.update, kept.rounds) != (
            counted.num_devices,
            counted.num_micro_batches,
            counted.update,
            counted.rounds,
        ) or kept.partition.num_layers != counted.partition.num_layers:
            return False
        try:
            made = self._evaluated(kept.partition, kept.rounds)
        except InfeasiblePlanError:
            return False
        return [_what(stage) for stage in kept.stages] == [_what(stage) for stage in made.stages]

    def _evaluated(self, partition: Partition, rounds: int) -> Plan:
        training, engine = self._config.training, self._config.engine
        return plan_of(partition, rounds, self._costs, training, engine, self._devices)


def _what(stage: PlannedStage) -> tuple[str, str, str, int]:
    """What a stage is, without what it costs."""
    return stage.kind, stage.first_layer, stage.last_layer, stage.num_layers
