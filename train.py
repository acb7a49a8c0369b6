"""Train a model: parse the config, pick the model family, build, run.

    torchrun train.py --config debug.toml --training.steps 100

Exit codes: 0 the run is complete, 1 a fault, 2 a mistake in the config or in how this was launched, 128 + n
stopped by signal n after saving.
"""

import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from scripts.export_hf import Export, export
from torchround.checkpoint import Checkpointer, CheckpointError
from torchround.config import (
    MODEL_FOLDER,
    Config,
    ConfigError,
    LoraTable,
    ModelTable,
    Options,
    parse_command_line,
    show,
    to_toml,
)
from torchround.data import (
    DataError,
    MissingTokenizerError,
    Tokenizer,
    TokenizerError,
    build_loader,
    build_tokenizer,
    build_validation_loader,
)
from torchround.data.loader import Loader
from torchround.engine.build import DTYPES, DeviceChoice, choose_devices, plan_run
from torchround.engine.errors import EngineError, EngineUsageError, PipelineError
from torchround.hf import HFError, PretrainedWeights, WithAdapters, read_adapters
from torchround.layer import LayeredModel, MicroBatch
from torchround.models import (
    FAMILIES,
    Family,
    LoraShape,
    ModelConfigError,
    TransformerConfig,
    adapter_names,
    add_adapters,
)
from torchround.pipeline.memory import HostMemory
from torchround.pipeline.partition import PlanError
from torchround.pipeline.plan import Plan
from torchround.pipeline.plan_report import report_plan
from torchround.pipeline.planner import InfeasiblePlanError
from torchround.run.bad_steps import BadStepsError
from torchround.run.console import say
from torchround.run.dry_run import Hardware, rendered, run_question
from torchround.run.folder import RunFolder, RunFolderError
from torchround.run.host_budget import (
    HostMemoryError,
    available_host_bytes,
    budget_text,
    check_host_memory,
    host_budget,
    parameter_counts,
)
from torchround.run.mapped_base import Mapped, map_base, mapped_text
from torchround.run.resume import ResumeError
from torchround.trainer import Trainer
from torchround.untrusted.terminal import escape_unprintable

MISTAKES = (
    *(ConfigError, ModelConfigError, TokenizerError, EngineUsageError, InfeasiblePlanError),
    *(HostMemoryError, PlanError, RunFolderError, ResumeError, HFError),
)
FAULTS = (BadStepsError, CheckpointError, DataError, EngineError)

REPORT_WIDTH = 110  # of a dry run's tables where the output is no terminal


@dataclass(frozen=True)
class Run:
    """Everything a trainer needs, checked against each other; nothing large is allocated yet."""

    config: Config
    folder: RunFolder
    model: LayeredModel
    loader: Loader
    validation: Iterable[MicroBatch]
    devices: DeviceChoice
    plan: Plan
    pretrained: PretrainedWeights | WithAdapters | None
    mapped: Mapped

    @property
    def host_memory(self) -> HostMemory:
        config = self.config
        return host_budget(self.model, config.training, config.engine, self.plan.rounds, self.mapped)

    def describe(self) -> str:
        """The run for its user: what is trained, on what, with how much memory."""
        table, training = self.config.model, self.config.training
        counts = parameter_counts(self.model)
        trained = f" ({counts.trained:,} of them trained)" if counts.frozen else ""
        size = f"{counts.trained + counts.frozen:,} parameters{trained} in {len(self.model.layers)} layers"
        sources = ", ".join(source.path for source in self.config.data.sources)
        batch = f"{training.global_batch_size} sequences of {training.seq_len} tokens per step"
        lines = [
            f"model    {table.family} {table.flavor or table.hf_path}: {size}, {training.dtype}",
            f"data     {sources}: {batch}",
            f"devices  {self.devices.count} x {self.devices.kind}",
            f"host     {budget_text(self.host_memory)}",
            *(f"mapped   {line}" for line in self._mapped_lines()),
        ]
        return "\n".join(lines)

    def _mapped_lines(self) -> Iterator[str]:
        if self.config.lora.map_base:
            yield mapped_text(self.mapped, self.model, DTYPES[self.config.training.dtype])


def main(arguments: list[str]) -> int:
    """Run, and return the exit code."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        return run(arguments)
    except MISTAKES as error:
        print(escape_unprintable(str(error)), file=sys.stderr, flush=True)
        return 2
    except FAULTS as error:
        if isinstance(error, PipelineError) and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        print(f"{type(error).__name__}: {escape_unprintable(str(error))}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("interrupted before the first step", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT


def run(arguments: list[str]) -> int:
    """Do what the command line says. Raises what `main` turns into messages."""
    refuse_several_processes(os.environ)
    options = parse_command_line(arguments)
    if options.print_config and not options.dry_run:
        print(to_toml(options.config), end="")
        return 0
    if options.dry_run:
        return dry_run(options)
    parts = build(options)
    check_host_memory(parts.host_memory, available_host_bytes())
    with parts.folder:
        say(parts.describe())
        exit_code = Trainer(**vars(parts)).run()
        if exit_code == 0 and options.config.checkpoint.export != "off":
            export_newest(parts.folder, adapters=options.config.checkpoint.export == "adapters")
        return exit_code


def export_newest(folder: RunFolder, adapters: bool) -> None:
    """The newest checkpoint in Hugging Face format, unless it is there already. Raises `HFError`."""
    step = Checkpointer(folder.checkpoints).latest_step()
    checkpoint, output = folder.checkpoints / f"step-{step}", folder.path / "export" / f"step-{step}"
    if output.exists():
        return
    try:
        say(export(Export(checkpoint, output, adapters=adapters)))
    except OSError as error:
        raise HFError(
            f"{output} could not be written: {error}; {checkpoint} is whole, and scripts/export_hf.py exports it"
        ) from error


def dry_run(options: Options) -> int:
    """Print the config, and the plan of the run with all it needs or what would make it fit."""
    config = options.config
    print(to_toml(config))
    tokenizer = find_tokenizer(options)
    model = build_model(options, tokenizer.vocab_size)
    devices = choose_devices(config.engine)
    build_loaders(options, tokenizer)  # for the mistakes that only show when the data is looked at
    # Without a base that stays in its files, they need not be there yet.
    mapped = find_weights(config, model)[1] if config.lora.map_base else {}
    plan = None
    with suppress(InfeasiblePlanError):  # the report says why, and what helps
        plan = plan_for(config, RunFolder(config.run), model, devices)
    hardware = Hardware(
        devices.count, devices.spec, devices.memory_bytes, available_host_bytes(), devices.kind
    )
    answer = report_plan(run_question(config, model, hardware, mapped), plan)
    Console(width=None if sys.stdout.isatty() else REPORT_WIDTH).print(rendered(answer), highlight=False)
    return 0 if answer.plan is not None else 2


def build(options: Options) -> Run:
    """The parts of the run."""
    config = options.config
    if config.engine.cpu_threads is not None:
        torch.set_num_threads(config.engine.cpu_threads)
    tokenizer = find_tokenizer(options)
    model = build_model(options, tokenizer.vocab_size)
    pretrained, mapped = find_weights(config, model)
    devices = choose_devices(config.engine)
    folder = RunFolder(config.run)
    plan = plan_for(config, folder, model, devices)
    loader, validation = build_loaders(options, tokenizer)
    return Run(config, folder, model, loader, validation, devices, plan, pretrained, mapped)


def find_tokenizer(options: Options) -> Tokenizer:
    """The tokenizer that the config names. Raises `TokenizerError`, or `ConfigError` where nothing is at its path."""
    config = options.config
    try:
        return build_tokenizer(config.tokenizer, config.model.hf_path)
    except MissingTokenizerError as error:
        raise options.error(error.key, error.message) from error


def build_model(options: Options, vocab_size: int) -> LayeredModel:
    """The model on `meta`; with `lora.rank`, frozen and with adapters."""
    family, config = model_config(options, vocab_size)
    model, lora = family.build(config), options.config.lora
    if lora.rank:
        shape = LoraShape(lora.rank, lora.alpha, lora.dropout, tuple(lora.targets))
        add_adapters(model, family.hf_names(config), shape)
    return model


def model_config(options: Options, vocab_size: int) -> tuple[Family[Any], TransformerConfig]:
    """The family, and a config of it: from a flavor or from a Hugging Face folder's config.json."""
    table = options.config.model
    if table.family not in FAMILIES:
        raise options.unknown_name("model.family", table.family, FAMILIES)
    family = FAMILIES[table.family]
    if table.flavor is not None:
        if table.flavor not in family.flavors:
            raise options.unknown_name("model.flavor", table.flavor, family.flavors)
        return family, family.config_from_flavor(table.flavor, vocab_size=vocab_size)
    assert table.hf_path is not None, "the config checks let neither flavor nor hf_path through"
    path = Path(os.path.expanduser(table.hf_path)) / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        lacks = f"no {path}" if path.parent.is_dir() else "no such folder"
        raise options.error(
            "model.hf_path", f"given {show(table.hf_path)}, but there is {lacks}; {MODEL_FOLDER}"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise options.error("model.hf_path", f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise options.error("model.hf_path", f"{path} holds no JSON object")
    refuse_another_family(options, path, content.get("model_type"))
    model = family.config_from_hf(content)
    if model.vocab_size < vocab_size:
        raise options.error(
            "tokenizer",
            f"it has {vocab_size} tokens, and the model of {path} only {model.vocab_size}; "
            "legal: a tokenizer with at most as many",
        )
    return family, model


def refuse_another_family(options: Options, path: Path, model_type: Any) -> None:
    """A type that no family reads is left to the family's own message."""
    given = options.config.model.family
    fitting = [family.name for family in FAMILIES.values() if model_type in family.hf_model_types]
    if fitting and given not in fitting:
        raise options.error(
            "model.family",
            f"given {show(given)}, but {path} has model_type {show(model_type)}; "
            f"legal for it: {' or '.join(show(name) for name in fitting)}",
        )


def find_weights(
    config: Config, model: LayeredModel
) -> tuple[PretrainedWeights | WithAdapters | None, Mapped]:
    """The weights in the Hugging Face folder, and those of them that stay in its files; none for a flavor."""
    pretrained = open_weights(config.model, config.lora, model)
    if not config.lora.map_base:
        return pretrained, {}
    assert pretrained is not None, "the config checks ask for model.hf_path"
    return pretrained, map_base(pretrained, model, DTYPES[config.training.dtype])


def open_weights(
    table: ModelTable, lora: LoraTable, model: LayeredModel
) -> PretrainedWeights | WithAdapters | None:
    """The folder's weights, checked by their headers against the model."""
    if table.hf_path is None:
        return None
    family, folder = FAMILIES[table.family], Path(os.path.expanduser(table.hf_path))
    config = family.config_from_hf(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    names, shapes = family.hf_names(config), model.stored_shapes()
    base = PretrainedWeights(folder, names, shapes, family.hf_redundant(config))
    if lora.path is None:
        return base
    return WithAdapters(base, read_adapters(lora, adapter_names(model, names), shapes))


def build_loaders(options: Options, tokenizer: Tokenizer) -> tuple[Loader, Iterable[MicroBatch]]:
    """The data, and what is validated on: nothing where validation is off."""
    config, training = options.config, options.config.training
    sizes = training.seq_len, training.global_batch_size
    try:
        loader = build_loader(config.data, tokenizer, *sizes, config.run.seed)
    except DataError as error:
        raise options.error("data.sources", str(error)) from error
    if not config.validation.interval_steps:
        return loader, ()
    try:
        return loader, build_validation_loader(config.validation, tokenizer, *sizes, config.data)
    except DataError as error:
        raise options.error("validation.sources", str(error)) from error


def plan_for(config: Config, folder: RunFolder, model: LayeredModel, devices: DeviceChoice) -> Plan:
    """The run's plan. A run that goes on keeps its rounds, which decide how gradients round."""
    goes_on = Checkpointer(folder.checkpoints).latest_step() is not None
    kept = folder.kept_plan() if goes_on else None
    kept_rounds = min(kept.rounds, config.num_micro_batches) if kept is not None else None
    return plan_run(model, config.training, config.engine, devices, kept_rounds)


def refuse_several_processes(environment: Mapping[str, str]) -> None:
    """One process drives every device of a node, and there is one node."""
    processes, world = (environment.get(name, "1") for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    if processes != "1":
        raise EngineUsageError(
            f"torchrun started {processes} processes on this node; one process drives all its GPUs. "
            "Launch with `torchrun train.py --config NAME.toml` (no --nproc_per_node), and choose GPUs with "
            "--engine.num_devices"
        )
    if world != "1":
        raise EngineUsageError(
            f"torchrun started {world} processes on several nodes; several nodes are not built yet. "
            "Launch with `torchrun train.py --config NAME.toml` on one node"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
