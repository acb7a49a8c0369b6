"""Train a model: parse the config, pick the model family, build, run.

    torchrun train.py --config debug.toml --training.steps 100

Exit codes: 0 the run is complete, 1 a fault, 2 a mistake in the config or in how this was launched, 128 + n
stopped by signal n after saving.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from models import FAMILIES, ModelConfigError
from torchround.checkpoint import CheckpointError
from torchround.config import Config, ConfigError, Options, parse_command_line, to_toml
from torchround.data import DataError, Tokenizer, TokenizerError, build_tokenizer
from torchround.engine.build import DeviceChoice, choose_devices, plan_run
from torchround.engine.errors import EngineError, EngineUsageError
from torchround.layer import LayeredModel
from torchround.pipeline.plan import InfeasiblePlanError, Plan
from torchround.trainer import Trainer

MISTAKES = (ConfigError, ModelConfigError, TokenizerError, EngineUsageError, InfeasiblePlanError)
FAULTS = (CheckpointError, DataError, EngineError)


@dataclass(frozen=True)
class Run:
    """Everything a trainer needs."""

    config: Config
    model: LayeredModel
    tokenizer: Tokenizer
    devices: DeviceChoice
    plan: Plan


def main(arguments: list[str]) -> int:
    """Run, and return the exit code."""
    try:
        refuse_several_processes(os.environ)
        options = parse_command_line(arguments)
        if options.print_config and not options.dry_run:
            print(to_toml(options.config), end="")
            return 0
        run = build(options)
        if options.dry_run:
            print(to_toml(run.config), run.plan, sep="\n")
            return 0
        return Trainer(run.config, run.model, run.tokenizer, run.devices, run.plan).run()
    except MISTAKES as error:
        print(error, file=sys.stderr, flush=True)
        return 2
    except FAULTS as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1


def build(options: Options) -> Run:
    """The parts of the run, checked against each other; nothing large is allocated yet."""
    config = options.config
    if config.engine.cpu_threads is not None:
        torch.set_num_threads(config.engine.cpu_threads)
    tokenizer = build_tokenizer(config.tokenizer, config.model.hf_path)
    model = build_model(options, tokenizer.vocab_size)
    devices = choose_devices(config.engine)
    plan = plan_run(model, config.training, config.engine, devices)
    return Run(config, model, tokenizer, devices, plan)


def build_model(options: Options, vocab_size: int) -> LayeredModel:
    """The model on `meta`, from a flavor or from a Hugging Face folder's config.json."""
    table = options.config.model
    if table.family not in FAMILIES:
        raise options.unknown_name("model.family", table.family, FAMILIES)
    family = FAMILIES[table.family]
    if table.flavor is not None:
        if table.flavor not in family.flavors:
            raise options.unknown_name("model.flavor", table.flavor, family.flavors)
        return family.build(family.config_from_flavor(table.flavor, vocab_size=vocab_size))
    assert table.hf_path is not None, "the config checks let neither flavor nor hf_path through"
    path = Path(table.hf_path).expanduser() / "config.json"
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise options.error("model.hf_path", f"{path} cannot be read: {error}") from error
    return family.build(family.config_from_hf(content))


def refuse_several_processes(environment: "os._Environ[str]") -> None:
    """One process drives every device of a node."""
    processes = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    if processes > 1:
        raise EngineUsageError(
            f"torchrun started {processes} processes on this node; one process drives all its GPUs. "
            "Launch with `torchrun train.py --config NAME.toml` (no --nproc_per_node), and choose GPUs with "
            "--engine.num_devices"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
