"""How a process of a run meets the other machines, and what all of them must agree on before anything is allocated."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace

from torchround.config import Config
from torchround.data.validation_batches import ValidationLoader
from torchround.machines.launch import join
from torchround.planning.plan_report import plan_for
from torchround.run.run_parts import RunParts
from torchround.run.several_machines import RunMachines


def is_first_process(environment: Mapping[str, str]) -> bool:
    """Whether a process of this environment is the first of its launch, or the only one."""
    return environment.get("RANK", "0") == "0"


@contextmanager
def quiet_unless_first(environment: Mapping[str, str]) -> Iterator[None]:
    """Let only the first process of a launch print to standard output in the block. All may print errors."""
    if is_first_process(environment):
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


@contextmanager
def joined_machines(environment: Mapping[str, str], config: Config) -> Iterator[RunMachines]:
    """Meet the other machines for the block; one process is a run on one machine. Raises `LaunchError`."""
    machines = RunMachines(join(environment, config))
    with machines.until_the_end():
        yield machines


def start_identity(parts: RunParts) -> dict[str, str]:
    """Return what must be the same on all machines besides the configuration, by names for messages."""
    validation = parts.validation
    found = parts.loader.fingerprints()
    if isinstance(validation, ValidationLoader):
        found |= validation.fingerprints()
    if parts.pretrained is not None:
        found["pretrained weights"] = parts.pretrained.fingerprint()
    return found


def with_agreed_rule(parts: RunParts, rounds: int, stale_layers: int) -> RunParts:
    """Return the parts with a plan of the first machine's numbers. Raises `InfeasiblePlanError`.

    The first machine's folder alone has the plan of an earlier start.
    """
    if (parts.plan.rounds, parts.plan.stale_layers) == (rounds, stale_layers):
        return parts
    question = replace(parts.question, rounds=rounds, stale_layers=stale_layers)
    return replace(parts, question=question, plan=plan_for(question))
