"""The parts of a run, built by its command and taken by its training loop."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchround.config import Config
from torchround.data.loader import Loader, ValidationLoader
from torchround.engine.device import Device
from torchround.hf import PretrainedWeights
from torchround.layer import FileTensor, LayeredModel, MicroBatch
from torchround.observe import MetricsLogger, open_metrics
from torchround.planning.plan import Plan
from torchround.planning.plan_report import plan_for
from torchround.planning.run_question import RunQuestion
from torchround.run.hardware import Hardware
from torchround.run.numbers import RunNumbers
from torchround.run.run_folder import RunFolder
from torchround.run.samples import RunSamples
from torchround.run.several_machines import RunMachines
from torchround.run.step_meter import StepMeter, flops_per_token


@dataclass(frozen=True)
class RunParts:
    """All that a trainer needs, checked against each other; nothing large is allocated yet.

    `loader` is at the start of the data. `validation` gives the same batches each time it is iterated over. `plan` is the
    answer to `question`. `mapped` are the frozen weights that stay in their files, by parameter name. `samples`
    continues the prompts of validations. `machines` are those of the run, this one among them.
    """

    config: Config
    folder: RunFolder
    model: LayeredModel
    loader: Loader
    validation: Iterable[MicroBatch]
    numbers: RunNumbers
    hardware: Hardware
    question: RunQuestion
    plan: Plan
    pretrained: PretrainedWeights | None
    mapped: Mapping[str, Sequence[FileTensor]]
    samples: RunSamples = field(default_factory=RunSamples)
    machines: RunMachines = field(default_factory=RunMachines)

    def identity(self) -> dict[str, str]:
        """Return what must be the same on all machines besides the configuration, by names for messages."""
        found = self.loader.fingerprints()
        if isinstance(self.validation, ValidationLoader):
            found |= self.validation.fingerprints()
        if self.pretrained is not None:
            found["pretrained weights"] = self.pretrained.fingerprint()
        return found

    def with_rule(self, rounds: int, stale_layers: int) -> "RunParts":
        """Return the parts with a plan of the first machine's numbers. Raises `InfeasiblePlanError`.

        The first machine's folder alone has the plan of an earlier start.
        """
        if (self.plan.rounds, self.plan.stale_layers) == (rounds, stale_layers):
            return self
        question = replace(self.question, rounds=rounds, stale_layers=stale_layers)
        return replace(self, question=question, plan=plan_for(question))

    def step_meter(self, devices: Sequence[Device], skipped_steps: int) -> StepMeter:
        """Make the meter of the run's steps, of which `skipped_steps` were skipped before. All machines make theirs."""
        training, spec = self.config.training, self.hardware.spec
        peak = None if spec is None else spec.flops_per_s(training.dtype, training.fp16_accumulation)
        return StepMeter(
            devices,
            flops_per_token(self.model, training.seq_len, self.numbers.dtype.itemsize),
            self.machines.all_flops_per_s(peak, len(devices)),
            skipped_steps,
        )

    def open_metrics(self, resumed_step: int, wandb_run_id: str | None) -> MetricsLogger:
        """Open the reporters of the run. Only the first machine has any."""
        if not self.machines.is_first:
            return MetricsLogger({}, wandb_run_id)
        return open_metrics(
            self.config.metrics,
            self.folder.path,
            self.config.run.name,
            self.config.training.num_steps,
            self.config.model_dump(mode="json"),
            resumed_step=resumed_step,
            wandb_run_id=wandb_run_id,
        )
