"""The plan of a run: first counted from FLOPs and bytes, then made once more from steps that were measured.

The measured steps run under the counted plan, which fits: a plan of one layer per stage would keep every boundary
of every micro-batch on the host.
The measured plan stays for the rest of the run, also after a resume. The number of rounds is not chosen again: it
decides how gradients round, and results must not depend on timing.
"""

import logging
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from torchround.config import EngineTable
from torchround.engine.errors import EngineUsageError
from torchround.engine.passes import StepResult
from torchround.engine.reports import costs_from_reports
from torchround.planning.partition import KeptNames, Partition, PlanError
from torchround.planning.plan import Plan, kept_before
from torchround.planning.plan_report import plan_for
from torchround.planning.planner import InfeasiblePlanError
from torchround.planning.run_question import RunQuestion

logger = logging.getLogger(__name__)

# What a plan must share with a run to be its plan; and a stage, without its costs.
RUN_OF = attrgetter(
    "num_devices", "num_micro_batches", "update", "rounds", "stale_layers", "partition.num_layers"
)
SHAPE_OF = attrgetter("kind", "first_layer", "last_layer", "num_layers")


class PlanByMeasuring:
    """The plans of one start of a run: steps from `first_step` up to `until` measure, `settled` is the plan after them.

    `counted` is the plan from FLOPs and bytes. `kept` is the plan that the run had before it was resumed, if any.
    `measure_steps` is 0 if the run does not measure; `total_steps` is the run's last step. The `question` has the stale
    layers of `counted`.
    """

    def __init__(
        self,
        question: RunQuestion,
        counted: Plan,
        kept: Plan | None,
        first_step: int,
        measure_steps: int,
        total_steps: int,
    ) -> None:
        self._question = question
        self._costs = question.costs()
        self._measured: list[StepResult] = []
        self._first_step = first_step
        self._counted = self.settled = counted
        is_measuring = question.given is None and measure_steps > 0
        # Until that many steps are done, the kept plan is still the counted one, so the run measures.
        if is_measuring and kept and first_step >= measure_steps and self._fits(kept, counted):
            self.settled = kept
        self.is_kept = self.settled is not counted
        self._last_measured = min(first_step + measure_steps, total_steps)
        self.until = self._last_measured if is_measuring and not self.is_kept else first_step

    def measure(self) -> None:
        """Measure although the kept plan would do, because another machine of the run has none that fits."""
        if self.is_kept:
            self.settled, self.is_kept = self._counted, False
            self.until = self._last_measured

    def text(self) -> str:
        """Say what is known of the plan when the run starts. A card of unknown speed gets no times."""
        is_timed = self._question.device is not None
        if self.is_kept:
            return f"plan     as in the run so far\n{self.settled}"
        if self.until == self._first_step:
            return f"plan     of {len(self.settled.stages)} stages\n{self.settled.text(is_timed)}"
        first = f"each layer is timed for {self.until - self._first_step} steps; the plan is made from their times"
        forecast = f"; until then from counted ones\n{self.settled}" if is_timed else ""
        return f"plan     {first}{forecast}"

    def add(self, result: StepResult) -> None:
        """Add a step whose layers are timed."""
        self._measured.append(result)

    def settle(self) -> None:
        """Plan again from the medians of the measured steps, all of which must be done."""
        reports = [report for result in self._measured for report in result.reports()]
        updates = [result.update().bundles for result in self._measured]
        counted = self._costs.keeping(self.settled.kept)
        costs = costs_from_reports(counted, reports, updates, self._question.recompute).keeping(())
        try:
            # Losses depend on the rounds and on the stale layers. Both stay as they were counted: the question has the latter.
            self.settled = plan_for(replace(self._question, rounds=self.settled.rounds), costs)
        except InfeasiblePlanError as error:
            # The search is not exhaustive: under other times it may miss the partitions that fit. One is known.
            logger.warning("no plan from measured times fits, so the counted one stays: %s", error)
        self._measured.clear()  # the results hold the marks of an engine that has ended

    def _fits(self, kept: Plan, counted: Plan) -> bool:
        """Whether a kept plan is for this model, these devices and this batch, and still within memory."""
        if RUN_OF(kept) != RUN_OF(counted):
            return False
        # A setting by name says itself what is kept; it may have changed since the plan was made.
        names = kept.kept if self._question.keep_rule().is_open else None
        given = replace(self._question, given=(kept.partition, kept.rounds), given_kept=names)
        try:
            made = plan_for(replace(given, stale_layers=kept.stale_layers), self._costs)
        except (InfeasiblePlanError, PlanError):
            return False
        layers = [[SHAPE_OF(stage) for stage in plan.stages] for plan in (kept, made)]
        return layers[0] == layers[1] and kept.kept == made.kept


def given_plan(
    engine: EngineTable, num_layers: int
) -> tuple[tuple[Partition, int] | None, int | None, KeptNames | None]:
    """Return what `engine.plan` gives, a table or the path of a plan.json, and `engine.stale_layers`.

    That is the partition with its rounds, the number of stale layers, and what each layer keeps. None is left to the
    planner. A key of the config comes before the file's value. Raises `EngineUsageError` for a file without a plan, and
    for a plan of another number of layers.
    """
    given = engine.plan
    stale_layers = None if engine.stale_layers == "auto" else engine.stale_layers
    if given is None:
        return None, stale_layers, None
    if isinstance(given, str):
        try:
            plan = Plan.from_json(Path(given).read_text())
        except (OSError, ValueError) as error:
            raise EngineUsageError(f'engine.plan = "{given}" cannot be read as a plan: {error}') from error
        if stale_layers is None and plan.update == engine.update == "bounded":
            stale_layers = plan.stale_layers
        partition, rounds = plan.partition, plan.rounds
        kept = plan.kept if engine.keep_activations == "auto" else None
    else:
        rounds = given.rounds or (engine.rounds if isinstance(engine.rounds, int) else 1)
        partition = Partition.from_lists(given.forward, given.fused, given.backward)
        kept = None if given.kept is None else kept_before(partition, given.kept)
    if partition.num_layers != num_layers:
        raise EngineUsageError(
            f"engine.plan covers {partition.num_layers} layers, the model has {num_layers} (embedding and head included)"
        )
    return (partition, rounds), stale_layers, kept
