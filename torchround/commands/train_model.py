"""Train a model: parse the config, build the parts of the run, plan it, train.

    python train.py --config debug.toml --training.steps 100

docs/getting_started.md has the exit codes. The machines of one run end with the same one, except that 1 may stand for a
mistake of another machine.
"""

import logging
import os
import sys
from collections.abc import Iterable
from contextlib import nullcontext, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path

import torch

from torchround.accelerators import deterministic_operations
from torchround.checkpoint import (
    CheckpointError,
    MachineTeam,
    checkpoint_name,
)
from torchround.commands import configured_model, end_with_message
from torchround.commands.configured_model import (
    build_model,
    find_tokenizer,
    find_weights,
    model_config,
    starting_weights,
    with_family,
)
from torchround.commands.export_hf import export
from torchround.commands.generation_files import stop_tokens
from torchround.commands.plan_run import (
    exchange_text,
    mapped_packed,
    plan_with_advice,
    planned_hardware,
    planned_machines,
    question_of,
    show_plan,
)
from torchround.commands.try_model import prompts_of
from torchround.config import Config, Options, parse_command_line, show, to_toml
from torchround.data import DataError, Loader, Tokenizer, build_validation_loader, reading_order
from torchround.data.loader import reads_conversations
from torchround.engine.errors import EngineError
from torchround.hf import HFError
from torchround.layer import MicroBatch
from torchround.machines.group import LaunchError, MachineError
from torchround.observe.logger import users_writer
from torchround.planning.memory import size_text
from torchround.planning.plan_report import host_memory, report_plan
from torchround.planning.run_question import PlannedMachines, RunQuestion
from torchround.run.early_end import BadStepsError
from torchround.run.engine_parts import RunParts
from torchround.run.hardware import Hardware, find_hardware
from torchround.run.numbers import RunNumbers, num_parameters
from torchround.run.packed_base import PackedBase
from torchround.run.resume import check_start, first_state, given_folder, resumed_stale_layers
from torchround.run.run_folder import RunFolder, disk_text, require_room
from torchround.run.several_machines import RunMachines, joined_machines
from torchround.run.validation import RunValidation, best_of, kept_losses
from torchround.trainer import Trainer
from torchround.untrusted.terminal import Progress, say

# Errors of the user end with exit code 2, errors of the run with 1. Each is one message; any other error is a bug, with a
# traceback.
MISTAKES = (*configured_model.MISTAKES, LaunchError)
FAULTS = (BadStepsError, CheckpointError, DataError, EngineError, MachineError)


def main(arguments: list[str]) -> int:
    logging.basicConfig(format="%(levelname)s: %(message)s")
    return end_with_message(lambda: run(arguments), MISTAKES, FAULTS)


def run(arguments: list[str]) -> int:
    is_first = os.environ.get("RANK", "0") == "0"
    # The other processes of a launch print errors alone.
    with nullcontext() if is_first else open(os.devnull, "w") as out, redirect_stdout(out or sys.stdout):
        options = parse_command_line(arguments)
        if options.print_config:
            print(to_toml(options.config), end="")
            return 0
        with deterministic_operations(options.config.training.deterministic):  # plans count what it takes
            if options.dry_run:
                return dry_run(options) if is_first else 0
            with joined_machines(os.environ, options.config) as machines:
                return train(options, machines)


def train(options: Options, machines: RunMachines) -> int:
    """Train on this machine, one of `machines`. Returns the exit code."""
    return train_parts(build_parts(options, machines))


def build_parts(options: Options, machines: RunMachines) -> RunParts:
    """Build the parts of the run on each of `machines`, and plan together. Nothing is written."""
    planned = machines.planned()
    parts = machines.same_mistakes(
        lambda: build(options, machines, planned), MISTAKES, "what each machine found at the start"
    )
    machines.require_same(parts.identity)
    rule = machines.agree("start", [parts.plan.rounds, parts.plan.stale_layers], "rounds and stale layers")[0]
    return machines.same_mistakes(lambda: parts.with_rule(*rule), MISTAKES, "plans of as many rounds")


def train_parts(parts: RunParts) -> int:
    with parts.folder:  # locked to the end, the export included
        say(description(parts))
        exit_code = Trainer(parts).run()
        asked = parts.config.checkpoint.export
        if exit_code == 0 and asked != "off" and parts.machines.is_first:
            export_result(parts.folder, parts.config, asked == "adapters")
        return exit_code


def build(
    options: Options, machines: RunMachines, planned: PlannedMachines, hardware: Hardware | None = None
) -> RunParts:
    """Build the parts of the run and check them against each other. Nothing large is allocated.

    `planned` is what the planner knows of `machines`. `hardware` is this machine's if it is not given.
    """
    options = with_family(options)
    config, folder = options.config, RunFolder(options.config.run, MachineTeam.of(machines.group))
    checkpointer = folder.checkpointer()
    check_start(config, checkpointer)
    if config.engine.cpu_threads is not None:
        torch.set_num_threads(config.engine.cpu_threads)
    if config.metrics.module is not None and machines.is_first:
        users_writer(config.metrics.module)
    tokenizer = find_tokenizer(options)
    model = build_model(options, tokenizer.vocab_size)
    pretrained, mapped = find_weights(options, model)
    packed_base = None
    if model.packed:
        if pretrained is None:
            legal = 'model.hf_path, the folder of the model whose weights are packed, or "bf16"'
            raise options.error(
                "lora.base", f"given {show(config.lora.base)} for random weights; legal: {legal}"
            )
        packed_base = PackedBase(model, pretrained, config.lora.base_cache, machines.rank)
    hardware = hardware or find_hardware(config.engine, machines.host_share)
    start = given_folder(config)
    if start is not None and config.checkpoint.load == "weights" and not checkpointer.checkpoints():
        pretrained = starting_weights(start, model, mapped)
    question = question_of(config, model, hardware, [*mapped, *mapped_packed(config, model)], planned)
    question = with_kept_choices(question, config, folder)
    plan = plan_with_advice(question)
    if question.mode.updates_by_layer:
        question = replace(question, stale_layers=plan.stale_layers)  # the plan of measured times has as many
    loader, batches = build_loaders(options, tokenizer)
    if config.training.steps is None:
        config = config.with_steps(steps_of_epochs(options, loader, folder))
        check_start(config, checkpointer)  # now that the steps are known
    # A run on conversations asks as a user does: a chat model continues raw text with the end of a turn at once.
    asked, chats = config.validation.prompts, reads_conversations(config.data)
    prompts = prompts_of(asked, tokenizer, chats, "validation.prompts")
    ends = stop_tokens(config, tokenizer) if prompts else ()
    size = config.training.micro_batch_size
    validation = RunValidation(config.validation, batches, size, machines, prompts, tokenizer, ends)
    return RunParts(
        config=config,
        folder=folder,
        model=model,
        loader=loader,
        validation=validation,
        numbers=RunNumbers(config.training, config.engine, config.optimizer),
        hardware=hardware,
        question=question,
        plan=plan,
        pretrained=pretrained,
        mapped=mapped,
        machines=machines,
        packed_base=packed_base,
    )


def steps_of_epochs(options: Options, loader: Loader, folder: RunFolder) -> int:
    """Count the steps of `data.epochs`, for the learning rate: those done, and the batches that are left.

    So a resumed run may have another batch size. Packing depends on the length of every document, so what is left of the
    data is read once. Leaves `loader` where it was. Raises `ConfigError`, also if the warm-up takes all steps.
    """
    config, beginning = options.config, loader.state_dict()
    _, steps, state = first_state(config, folder.checkpointer())
    counted = Progress("counting steps (training.steps = N saves this)")
    level = reading_order.logger.level
    reading_order.logger.setLevel(logging.ERROR)  # the run warns of the same bad records
    try:
        with suppress(DataError):  # resuming refuses this position and says why
            loader.load_state_dict(state.get("data", beginning))
        for _ in loader:
            counted.advance()
    except DataError as error:
        raise options.error("data.sources", f"its steps cannot be counted: {error}") from error
    finally:
        loader.load_state_dict(beginning)
        reading_order.logger.setLevel(level)
    steps = max(steps + counted.done, 1)
    text, warmup = (
        f"data.epochs = {config.data.epochs} makes {steps:,} steps",
        config.lr_schedule.warmup_steps,
    )
    if warmup >= steps:
        given = f"given {warmup}, and {text}; legal: at most {steps - 1}"
        raise options.error("lr_schedule.warmup_steps", given)
    say(f"steps    {text}")
    return steps


def dry_run(options: Options) -> int:
    """Print the plan of the run on the machines of the config, otherwise on this one. Raises the errors of `build`."""
    config = options.config
    named = None if config.machines.card is None else planned_hardware(options)
    parts = build(options, RunMachines(), planned_machines(config.machines), named)
    if named is not None:
        say("planned for the machine that the config names (--machines.card none: for this one)")
    show_plan(parts.hardware, report_plan(parts.question))
    if parts.pretrained is not None and (text := parts.pretrained.carried_text()):
        say(f"not trained: {text}")
    say(f"disk: {disk_text(parts.folder, parts.question)}")
    if named is None:  # the disk of another machine is not known
        require_room(parts.folder, parts.question)
    return 0


def with_kept_choices(question: RunQuestion, config: Config, folder: RunFolder) -> RunQuestion:
    """Fix the rounds, the stale layers and uncompiled layers at a run's first start: losses depend on them.

    Raises `RunError` if the config gives another number of stale layers than the checkpoint has.
    """
    checkpointer, kept = folder.checkpointer(), folder.kept_plan()
    if kept is not None and checkpointer.latest_step() is None:
        # The first start ended before its first checkpoint, and its settings may have been edited since.
        same = kept.update == question.update and kept.partition.num_layers == len(question.costs().layers)
        kept = kept if same else None
    if question.mode.updates_by_layer:
        stale_layers = resumed_stale_layers(config, checkpointer, question.stale_layers)
        if stale_layers is None and kept is not None:
            stale_layers = kept.stale_layers
        question = replace(question, stale_layers=stale_layers)
    if kept is not None and kept.stays_uncompiled:
        question = question.uncompiled()
    if kept is None or question.rounds != "auto" or question.given is not None:
        return question
    # The batch may be smaller now, and a round has at least one micro-batch.
    return replace(question, rounds=min(kept.rounds, question.num_micro_batches))


def description(parts: RunParts) -> str:
    config, machines, host = parts.config, parts.machines, host_memory(parts.question, parts.plan)
    table, training = config.model, config.training
    name = table.flavor or table.hf_path or "of its own shape"
    if table.flavor and table.shape:
        name = f"{name} with other sizes"
    total, trained = num_parameters(parts.model)
    of_them = f" ({trained:,} of them trained)" if trained < total else ""
    size = f"{total:,} parameters{of_them} in {len(parts.model.layers)} layers"
    sources = ", ".join(source.path for source in config.data.sources)
    lines = [
        f"model    {table.family} {name}: {size}, {training.dtype}",
        f"data     {sources}: {training.global_batch_size} sequences of {training.seq_len} tokens per step",
        f"devices  {parts.hardware.num_devices} x {parts.hardware.kind}{parts.hardware.note}",
        f"host     {size_text(host.total_bytes)} ({host.text()})",
        f"disk     {disk_text(parts.folder, parts.question)}",
    ]
    if machines.group is not None:
        names = f"{machines.size}: {', '.join(machines.names)}"
        lines += [f"machines {names}", f"network  {exchange_text(parts.question, parts.plan)}"]
    if parts.pretrained is not None and (text := parts.pretrained.carried_text()):
        lines.append(f"frozen   {text}")
    return "\n".join(lines)


def export_result(folder: RunFolder, config: Config, adapters: bool, name: str = "export") -> Path:
    """Export the newest checkpoint, or the best with `keep_best`, unless its folder exists. Raises `HFError`."""
    checkpointer = folder.checkpointer()
    step = best_of(kept_losses(checkpointer)) if config.validation.keep_best else None
    step = checkpointer.latest_step() if step is None else step
    assert step is not None, "a complete run has a checkpoint"
    checkpoint = folder.checkpoints / checkpoint_name(step)
    output = folder.path / name / checkpoint.name
    if output.exists():
        return output  # a complete run that is started again has exported already
    try:
        say(export(checkpoint, output, config, adapters=adapters))
    except OSError as error:
        raise HFError(
            f"{output} could not be written: {error}; {checkpoint} is whole, and torchround export_hf exports it"
        ) from error
    return output


def build_loaders(options: Options, tokenizer: Tokenizer) -> tuple[Loader, Iterable[MicroBatch]]:
    """Build the training data, and the validation batches, which are empty when validation is off."""
    config, training = options.config, options.config.training
    sizes = training.seq_len, training.global_batch_size
    # The model's vocabulary, which data that is token ids may use; the tokenizer's may be smaller.
    vocab_size = model_config(options, tokenizer.vocab_size)[1].vocab_size
    try:
        loader = Loader(config.data, tokenizer, *sizes, config.run.seed, vocab_size=vocab_size)
        loader.check_first_records()
    except DataError as error:
        raise options.error("data.sources", str(error)) from error
    if not config.validation.interval_steps:
        return loader, ()
    try:
        return loader, build_validation_loader(config.validation, tokenizer, *sizes, config.data, vocab_size)
    except DataError as error:
        raise options.error("validation.sources", str(error)) from error
