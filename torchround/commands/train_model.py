"""Train a model: parse the config, build the parts of the run, plan it, train.

    python train.py --config debug.toml --training.steps 100

Exit codes: 0 the run is complete; 1 a fault; 2 a mistake in the config or in the launch; 128 + n stopped by signal n,
after saving. The machines of one run end with the same code, except that 1 may stand for a mistake of another machine.
"""

import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterable
from dataclasses import replace

import torch

from torchround.accelerators import deterministic_operations
from torchround.checkpoint import (
    CheckpointError,
    MachineTeam,
    NoCheckpointError,
    checkpoint_name,
    open_checkpoint,
)
from torchround.commands import configured_model
from torchround.commands.configured_model import (
    build_model,
    find_tokenizer,
    find_weights,
    model_config,
)
from torchround.commands.export_hf import Export, export, own_paths
from torchround.commands.generation_files import stop_tokens
from torchround.commands.plan_run import (
    configured_question,
    dry_run_hardware,
    exchange_text,
    plan_with_advice,
    question_of,
    show_plan,
)
from torchround.commands.try_model import prompts_of
from torchround.config import Config, ConfigError, Options, parse_command_line, to_toml
from torchround.data import DataError, Tokenizer, build_loader, build_validation_loader, reading_order
from torchround.data.loader import Loader, reads_conversations
from torchround.engine.errors import EngineError, PipelineError
from torchround.hf import HFError
from torchround.layer import MicroBatch
from torchround.machines.group import LaunchError, MachineError
from torchround.observe.logger import users_writer
from torchround.planning.memory import size_text
from torchround.planning.plan_report import gain_text, gains, host_memory, report_plan
from torchround.planning.run_question import PlannedMachines, RunQuestion
from torchround.run.early_end import BadStepsError
from torchround.run.engine_parts import RunParts
from torchround.run.hardware import find_hardware
from torchround.run.numbers import RunNumbers, num_parameters
from torchround.run.resume import (
    given_folder,
    require_same_optimizer,
    require_steps_left,
    resumable,
    resumed_stale_layers,
)
from torchround.run.run_folder import RunError, RunFolder, disk_need
from torchround.run.several_machines import (
    RunMachines,
    is_first_process,
    joined_machines,
    quiet_unless_first,
)
from torchround.run.validation import RunSamples, best_of, kept_losses
from torchround.trainer import Trainer
from torchround.untrusted.terminal import Progress, escape_unprintable, say

# Errors of the user end with exit code 2, errors of the run with 1. Each is one message; any other error is a bug, with a
# traceback.
MISTAKES = (*configured_model.MISTAKES, LaunchError)
FAULTS = (BadStepsError, CheckpointError, DataError, EngineError, MachineError)


def main(arguments: list[str]) -> int:
    """Run the command. Returns the exit code."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        return run(arguments)
    except MISTAKES as error:
        print(escape_unprintable(str(error)), file=sys.stderr, flush=True)
        return 2
    except FAULTS as error:
        # The cause is an error inside a stage or a worker, often in a model's own code: only its traceback says where.
        # An error on another machine has no traceback here.
        is_here = not isinstance(error.__cause__, MachineError | None)
        if isinstance(error, PipelineError) and is_here:
            traceback.print_exception(error.__cause__)
        print(f"{type(error).__name__}: {escape_unprintable(str(error))}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("interrupted before the first step", file=sys.stderr)
        return 128 + signal.SIGINT


def run(arguments: list[str]) -> int:
    """Do what the command line says. Raises the errors that `main` turns into messages."""
    with quiet_unless_first(os.environ):
        options = parse_command_line(arguments)
        if options.print_config and not options.dry_run:
            print(to_toml(options.config), end="")
            return 0
        with deterministic_operations(options.config.training.deterministic):  # plans count what it takes
            if options.dry_run:
                check_start(options, RunMachines())
                return dry_run(options) if is_first_process(os.environ) else 0
            with joined_machines(os.environ, options.config) as machines:
                return train(options, machines)


def train(options: Options, machines: RunMachines) -> int:
    """Train on this machine, one of `machines`. Returns the exit code."""
    planned = machines.planned()

    def checked() -> RunParts:
        check_start(options, machines)
        return build(options, machines, planned)

    parts = machines.same_mistakes(checked, MISTAKES, "what each machine found at the start")
    machines.require_same(parts.identity)
    rule = machines.of_first((parts.plan.rounds, parts.plan.stale_layers), "rounds and stale layers")
    parts = machines.same_mistakes(lambda: parts.with_rule(*rule), MISTAKES, "plans of as many rounds")
    with parts.folder:  # locked to the end, the export included
        say(description(parts))
        exit_code = Trainer(parts).run()
        if exit_code == 0 and options.config.checkpoint.export != "off" and machines.is_first:
            export_result(parts.folder, options.config)
        return exit_code


def build(options: Options, machines: RunMachines, planned: PlannedMachines) -> RunParts:
    """Build the parts of the run and check them against each other. Nothing large is allocated.

    `planned` is what the planner knows of `machines`.
    """
    config = options.config
    if config.engine.cpu_threads is not None:
        torch.set_num_threads(config.engine.cpu_threads)
    if config.metrics.module is not None and machines.is_first:
        users_writer(config.metrics.module)
    tokenizer = find_tokenizer(options)
    model = build_model(options, tokenizer.vocab_size)
    pretrained, mapped = find_weights(options, model)
    hardware = find_hardware(config.engine, machines.host_share)
    folder = run_folder(options, machines)
    question = question_of(config, model, hardware, mapped, planned)
    question = with_kept_choices(question, config, folder)
    plan = plan_with_advice(question)
    if question.update == "bounded":
        question = replace(question, stale_layers=plan.stale_layers)  # the plan of measured times has as many
    loader, validation = build_loaders(options, tokenizer)
    if config.training.steps is None:
        config = config.with_steps(steps_of_epochs(options, loader, folder))
    samples, table = RunSamples(), config.validation
    if table.prompts:
        # A run on conversations asks them as a user does: a chat model continues raw text with the end of a turn at once.
        with_chat = reads_conversations(config.data)
        prompts = prompts_of(table.prompts, tokenizer, with_chat, "validation.prompts")
        samples = RunSamples(prompts, table.prompt_tokens, tokenizer, stop_tokens(config, tokenizer))
    return RunParts(
        config=config,
        folder=folder,
        model=model,
        loader=loader,
        validation=validation,
        numbers=RunNumbers.of(config),
        hardware=hardware,
        question=question,
        plan=plan,
        pretrained=pretrained,
        mapped=mapped,
        samples=samples,
        machines=machines,
    )


def steps_of_epochs(options: Options, loader: Loader, folder: RunFolder) -> int:
    """Return the steps that `data.epochs` makes, so that the learning rate reaches its end with the data.

    Packing depends on the length of every document, so what is left of the data is read once. Raises `ConfigError` if it
    cannot be, or if the warm-up takes all steps.
    """
    config = options.config
    try:
        steps = count_steps(config, loader, folder)
    except DataError as error:
        raise options.error("data.sources", f"its steps cannot be counted: {error}") from error
    text, warmup = (
        f"data.epochs = {config.data.epochs} makes {steps:,} steps",
        config.lr_schedule.warmup_steps,
    )
    if warmup >= steps:
        legal = f"legal: at most {steps - 1}"
        raise options.error("lr_schedule.warmup_steps", f"given {warmup}, and {text}; {legal}")
    say(f"steps    {text}")
    return steps


def count_steps(config: Config, loader: Loader, folder: RunFolder) -> int:
    """Count the steps done and the batches that are left, so that a resumed run may have another batch size.

    `loader` is at the start of the data before and after. Raises `DataError`.
    """
    beginning = loader.state_dict()
    _, done, state = next(resumable(config, folder.checkpointer()), (None, 0, {}))
    try:
        if (position := state.get("data")) is not None:
            loader.load_state_dict(position)
    except DataError:
        # Resuming refuses this position and says why: the run must not look complete before it does.
        return done + 1
    counted = Progress("counting steps (training.steps = N saves this)")
    level = reading_order.logger.level
    reading_order.logger.setLevel(logging.ERROR)  # the run warns of the same bad records
    try:
        for _ in loader:
            counted.advance()
    finally:
        loader.load_state_dict(beginning)
        reading_order.logger.setLevel(level)
    return max(done + counted.done, 1)


def run_folder(options: Options, machines: RunMachines) -> RunFolder:
    team = MachineTeam.of(machines.group, options.config.machines.checkpoints == "shared")
    return RunFolder(options.config.run, team)


def check_start(options: Options, machines: RunMachines) -> None:
    """Raise `RunError` if there is no checkpoint to start from, or one of another optimizer.

    Only names, sizes and states of checkpoints are looked at; loading reads the tensors.
    """
    config, folder = options.config, run_folder(options, machines)
    path, checkpointer = given_folder(config), folder.checkpointer()
    if path is not None and not checkpointer.checkpoints():
        step = None
        try:
            step = open_checkpoint(path, checkpointer.is_part).step
        except CheckpointError as error:
            # The checkpoint may be on the disks of other machines, and loading asks all.
            may_be_elsewhere = checkpointer.is_part and not folder.team.is_alone
            if not (isinstance(error, NoCheckpointError) and may_be_elsewhere):
                raise RunError(f"checkpoint.load_path: {error}") from error
        steps_are_known = config.training.steps is not None or config.data.epochs is None
        if step is not None and config.checkpoint.load == "all" and steps_are_known:
            require_steps_left(config, path, step)
    require_same_optimizer(config, checkpointer)


def dry_run(options: Options) -> int:
    """Print the run's plan with all that it needs, or what would make it fit; with `--print-config` the config too."""
    config = options.config
    if options.print_config:
        print(to_toml(config))
    tokenizer = None
    try:
        tokenizer = find_tokenizer(options)
    except ConfigError as missing:
        say(
            f"{missing}\nthe run needs it; planned without, for the model's vocabulary and no look at the data"
        )
    vocab_size = None if tokenizer is None else tokenizer.vocab_size
    # The headers of the pretrained files too, so that a dry run refuses what the run would refuse.
    find_weights(options, build_model(options, vocab_size, warns=False))
    machine, folder = dry_run_hardware(config), RunFolder(config.run)
    question = configured_question(options, vocab_size, machine)
    if tokenizer is not None:
        # Finds the mistakes that only show when the data is looked at.
        build_loaders(options, tokenizer)
        if config.training.steps is None:
            say(f"steps    of data.epochs = {config.data.epochs}, counted when the run starts")
    answer = report_plan(with_kept_choices(question, config, folder))
    show_plan(machine, answer)
    stale_layers = answer.plan.stale_layers if answer.plan else question.stale_layers
    need = disk_need(config, folder, replace(question, stale_layers=stale_layers))
    say(f"disk: {need.text()}")
    if config.machines.card is None:  # the disk of another machine is not known
        need.require_one()
    return 0 if answer.plan is not None else 2


def with_kept_choices(question: RunQuestion, config: Config, folder: RunFolder) -> RunQuestion:
    """Fix the rounds and the stale layers at a run's first start. Losses depend on them, so they are not planned again.

    Raises `RunError` if the config gives another number of stale layers than the checkpoint has.
    """
    checkpointer, kept = folder.checkpointer(), folder.kept_plan()
    if kept is not None and checkpointer.latest_step() is None:
        # The first start ended before its first checkpoint, and its settings may have been edited since.
        is_same_run = (kept.update, kept.partition.num_layers) == (
            question.update,
            len(question.costs().layers),
        )
        kept = kept if is_same_run else None
    if question.update == "bounded":
        stale_layers = resumed_stale_layers(config, checkpointer, question.stale_layers)
        if stale_layers is None and kept is not None and kept.update == "bounded":
            stale_layers = kept.stale_layers
        question = replace(question, stale_layers=stale_layers)
    if kept is None or question.rounds != "auto" or question.given is not None:
        return question
    # The batch may be smaller now, and a round has at least one micro-batch.
    return replace(question, rounds=min(kept.rounds, question.num_micro_batches))


def description(parts: RunParts) -> str:
    """Describe the run for its user: what is trained, on what, with how much memory."""
    table, training = parts.config.model, parts.config.training
    name = table.flavor or table.hf_path or "of its own shape"
    if table.flavor and table.shape:
        name = f"{name} with other sizes"
    total, trained = num_parameters(parts.model)
    of_them = f" ({trained:,} of them trained)" if trained < total else ""
    size = f"{total:,} parameters{of_them} in {len(parts.model.layers)} layers"
    sources = ", ".join(source.path for source in parts.config.data.sources)
    batch = f"{training.global_batch_size} sequences of {training.seq_len} tokens per step"
    machines, host = parts.machines, host_memory(parts.question, parts.plan)
    lines = [
        f"model    {table.family} {name}: {size}, {training.dtype}",
        f"data     {sources}: {batch}",
        f"devices  {parts.hardware.num_devices} x {parts.hardware.kind}{parts.hardware.note}",
        f"host     {size_text(host.total_bytes)} ({host.text()})",
        f"disk     {disk_need(parts.config, parts.folder, parts.question).text()}",
    ]
    if machines.group is not None:
        lines.insert(2, f"machines {machines.size}: {', '.join(machines.names)}")
        lines.insert(3, f"network  {exchange_text(parts.question, parts.plan)}")
    # A run that continues keeps its rounds, and would have other losses with others.
    is_new = parts.folder.checkpointer().latest_step() is None
    if is_new and (found := gains(parts.question, parts.plan, every=False)):
        lines.append(f"faster   {gain_text(parts.question, *max(found.items(), key=lambda gain: gain[1]))}")
    if parts.config.lora.map_base:
        mapped_bytes = sum(tensor.memory.nbytes for each in parts.mapped.values() for tensor in each)
        lines.append(f"mapped   {size_text(mapped_bytes)} of frozen weights stay in their files")
    return "\n".join(lines)


def export_result(folder: RunFolder, config: Config) -> None:
    """Export the newest checkpoint in Hugging Face format, unless its folder exists already. Raises `HFError`.

    With `validation.keep_best`, the one with the lowest validation loss instead, if there is one.
    """
    checkpointer = folder.checkpointer()
    step = best_of(kept_losses(checkpointer)) if config.validation.keep_best else None
    step = checkpointer.latest_step() if step is None else step
    assert step is not None, "a complete run has a checkpoint"
    checkpoint = folder.checkpoints / checkpoint_name(step)
    output = folder.path / "export" / checkpoint.name
    if checkpointer.is_part and not folder.team.is_alone:
        say(
            f"not exported: each machine has its own part of {checkpoint}; put the files of all parts into one folder, "
            "and torchround export_hf exports it"
        )
        return
    if output.exists():
        return  # a complete run that is started again has exported already
    try:
        is_adapters = config.checkpoint.export == "adapters"
        say(export(Export(checkpoint, output, adapters=is_adapters, **own_paths(config))))
    except OSError as error:
        raise HFError(
            f"{output} could not be written: {error}; {checkpoint} is whole, and torchround export_hf exports it"
        ) from error


def build_loaders(options: Options, tokenizer: Tokenizer) -> tuple[Loader, Iterable[MicroBatch]]:
    """Build the training data, and the validation batches, which are empty when validation is off."""
    config, training = options.config, options.config.training
    sizes = training.seq_len, training.global_batch_size
    # The model's vocabulary, which data that is token ids may use; the tokenizer's may be smaller.
    vocab_size = model_config(options, tokenizer.vocab_size)[1].vocab_size
    try:
        loader = build_loader(config.data, tokenizer, *sizes, config.run.seed, vocab_size=vocab_size)
        loader.check_first_records()
    except DataError as error:
        raise options.error("data.sources", str(error)) from error
    if not config.validation.interval_steps:
        return loader, ()
    try:
        return loader, build_validation_loader(config.validation, tokenizer, *sizes, config.data, vocab_size)
    except DataError as error:
        raise options.error("validation.sources", str(error)) from error
