"""Train a model: parse the config, build the parts of the run, plan it, train.

    python train.py --config debug.toml --training.steps 100

docs/getting_started.md has the exit codes. The machines of one run end with the same one, except that 1 may stand for a
mistake of another machine.
"""

import logging
import os
import sys
from collections.abc import Iterable
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from torchround.accelerators import deterministic_operations
from torchround.checkpoint import CheckpointError, MachineTeam, checkpoint_name
from torchround.commands import configured_model, end_with_message, plan_run
from torchround.commands.export_hf import export, stop_tokens
from torchround.config import Config, Options, parse_command_line, show, to_toml
from torchround.data import DataError, Loader, Tokenizer, build_validation_loader
from torchround.data.loader import loader_bytes, reads_conversations
from torchround.data.text.chat import prompts_of
from torchround.engine.errors import EngineError
from torchround.hf import HFError
from torchround.layer import MicroBatch
from torchround.machines.group import LaunchError, MachineError, measure_rate
from torchround.observe.logger import users_writer
from torchround.planning.exchange_time import exchange_text
from torchround.planning.memory import size_text
from torchround.planning.plan_report import host_memory, plan_for, report_plan
from torchround.planning.run_question import ONE_MACHINE, PlannedMachines, RunQuestion
from torchround.run.checkpoints import check_start, first_state, given_folder
from torchround.run.early_end import BadStepsError
from torchround.run.hardware import Hardware, find_hardware
from torchround.run.numbers import num_parameters, run_question
from torchround.run.packed_base import PackedBase
from torchround.run.run_folder import RunError, RunFolder, disk_text, require_room
from torchround.run.several_machines import RunMachines, joined_machines
from torchround.run.validation import RunValidation, best_of, kept_losses
from torchround.trainer import RunParts, Trainer
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
                return train_parts(build_parts(options, machines))


def build_parts(options: Options, machines: RunMachines) -> RunParts:
    """Build the parts of the run on each of `machines`, and plan together. Nothing is written."""
    planned = ONE_MACHINE
    if machines.group is not None:  # all measure the network, for about half a second
        planned = PlannedMachines(machines.size, measure_rate(machines.group))
    what = "what each machine found at the start"
    parts = machines.same_mistakes(lambda: build(options, machines, planned), MISTAKES, what)
    machines.require_same(parts.identity)
    rule = machines.agree("start", [parts.plan.rounds, parts.plan.stale_layers], "rounds and stale layers")[0]

    def planned_alike() -> RunParts:
        if [parts.plan.rounds, parts.plan.stale_layers] == rule:  # losses depend on both
            return parts
        question = replace(parts.question, rounds=rule[0], stale_layers=rule[1])
        return replace(parts, question=question, plan=plan_for(question))

    return machines.same_mistakes(planned_alike, MISTAKES, "plans of as many rounds")


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
    options = configured_model.with_family(options)
    config, folder = options.config, RunFolder(options.config.run, MachineTeam.of(machines.group))
    checkpointer = folder.checkpointer()
    check_start(config, checkpointer)
    if config.engine.cpu_threads is not None:
        torch.set_num_threads(config.engine.cpu_threads)
    if config.metrics.module is not None and machines.is_first:
        users_writer(config.metrics.module)
    tokenizer = configured_model.find_tokenizer(options)
    model = configured_model.build_model(options, tokenizer.vocab_size)
    pretrained, mapped = configured_model.find_weights(options, model)
    packed_base = None
    if model.packed:
        if pretrained is None:
            legal = 'model.hf_path, the folder of the model whose weights are packed, or "bf16"'
            text = f"given {show(config.lora.base)} for random weights; legal: {legal}"
            raise options.error("lora.base", text)
        packed_base = PackedBase(model, pretrained, config.lora.base_cache, machines.rank)
    hardware = hardware or find_hardware(config.engine, machines.host_share)
    start = given_folder(config)
    if start is not None and config.checkpoint.load == "weights" and not checkpointer.checkpoints():
        pretrained = configured_model.starting_weights(start, model, mapped)
    loading = partial(loader_bytes, config.data)
    question = run_question(model, config, hardware, mapped, planned, loading)
    question = with_kept_choices(question, config, folder)
    plan = plan_run.plan_with_advice(question, options, hardware)
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
    config = options.config
    _, done, state = first_state(config, folder.checkpointer())
    counted = Progress("counting steps (training.steps = N saves this)")
    with options.blaming("data.sources", DataError, what="its steps cannot be counted: "):
        steps = max(done + loader.num_left(state.get("data"), counted.advance), 1)
    text = f"data.epochs = {config.data.epochs} makes {steps:,} steps"
    warmup = config.lr_schedule.warmup_steps
    if warmup >= steps:
        given = f"given {warmup}, and {text}; legal: at most {steps - 1}"
        raise options.error("lr_schedule.warmup_steps", given)
    say(f"steps    {text}")
    return steps


def dry_run(options: Options) -> int:
    """Print the plan of the run on the machines of the config, otherwise on this one. Raises the errors of `build`."""
    config = options.config
    named = None if config.machines.card is None else plan_run.planned_hardware(options)
    parts = build(options, RunMachines(), plan_run.planned_machines(config.machines), named)
    if named is not None:
        say("planned for the machine that the config names (--machines.card none: for this one)")
    plan_run.show_plan(parts.hardware, report_plan(parts.question), options)
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
        (path, _, state), given = first_state(config, checkpointer), question.stale_layers
        saved = state.get("stale_layers")
        if type(saved) is not int:  # there is no checkpoint, or it is of a run with another `engine.update`
            saved = kept.stale_layers if given is None and kept is not None else given
        elif given not in (None, saved):
            raise RunError(
                f'engine.stale_layers: given {given}, and {path} was made with {saved}; legal: {saved}, or "auto", which '
                "keeps the checkpoint's. A run of another name (--run.name NAME) may begin with other values"
            )
        question = replace(question, stale_layers=saved)
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
    vocab_size = configured_model.model_config(options, tokenizer.vocab_size)[1].vocab_size
    with options.blaming("data.sources", DataError):
        loader = Loader(config.data, tokenizer, *sizes, config.run.seed, vocab_size=vocab_size)
        loader.check_first_records()
    if not config.validation.interval_steps:
        return loader, ()
    with options.blaming("validation.sources", DataError):
        return loader, build_validation_loader(config.validation, tokenizer, *sizes, config.data, vocab_size)
