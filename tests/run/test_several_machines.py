"""Whole runs on several machines, each a process of its own that joins the others as under torchrun."""

import re
import signal

import pytest
import torch

from tests.support.borrowed_toys import write_toy
from tests.support.small_machines import ended
from tests.support.small_run import STEPS
from torchround.checkpoint.folders import checkpoint_name

BF16 = "--training.dtype=bfloat16"
ASYNC = "--engine.update=async"
LORA = ("--lora.rank=2", "--training.dtype=bfloat16")
QUERIES = ("--lora.rank=2", "--lora.targets=['q_proj']")
VALIDATED = ("--validation.interval_steps=2", "--validation.max_batches=1")
VALIDATED += ('--validation.sources=[{ path = "text.jsonl" }]',)
PACKED = (*QUERIES, "--lora.base=nf4", "--lora.base_cache=cache", *VALIDATED)
PROMPTED = ('--validation.prompts=["a prompt", "b"]', "--validation.prompt_tokens=3")
TIED = ("--model.flavor=tied", "--training.dtype=bfloat16", ASYNC)


@pytest.mark.parametrize("num_machines", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_machines_train_as_one_machine_with_all_rounds(small_machines, num_machines):
    settings = (*VALIDATED, *PROMPTED, "--checkpoint.interval_steps=2")
    small_machines("one", 1, *settings)
    first, *others = small_machines("several", num_machines, *settings, "--checkpoint.export=weights")
    small_machines.assert_same("several", "one")
    earlier, expected = (small_machines.state(name, 4) for name in ("several", "one"))
    assert earlier.keys() == expected.keys() != set()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in earlier.items())
    one, several = ([line.get("samples") for line in small_machines.steps(name)] for name in ("one", "several"))
    assert one == several and sum(map(bool, one)) == 3
    assert "the run is complete" in first and not any(others)
    assert re.search(r"^network  .* of gradients out and .* s at \S+ Gb/s", first, re.MULTILINE)
    assert (small_machines.path("several") / "export" / checkpoint_name(STEPS)).is_dir()
    assert [len(line["machines"]["name"]) for line in small_machines.steps("several")] == [num_machines] * STEPS


@pytest.mark.nightly
@pytest.mark.parametrize("num_machines", [2, 3, 4])
@pytest.mark.parametrize(
    "settings", [(BF16,), (ASYNC,), TIED, LORA], ids=["bfloat16", "async", "tied-async-bfloat16", "lora"]
)
def test_machines_train_as_one_machine_in_every_mode(small_machines, num_machines, settings):
    small_machines("one", 1, *settings)
    small_machines("several", num_machines, *settings)
    small_machines.assert_same("several", "one")


@pytest.mark.nightly
@pytest.mark.parametrize("adapted", [(), QUERIES, PACKED], ids=["all", "lora", "packed lora"])
def test_machines_begin_with_the_weights_of_a_released_folder(small_machines, adapted):
    write_toy("qwen2", small_machines.folder / "release", vocab_size=264, hidden_size=64, intermediate_size=128)
    released = ("--model.family=transformers", "--model.flavor=none", "--model.hf_path=release")
    for name, num_machines in (("one", 1), ("several", 2)):
        small_machines(name, num_machines, *released, *adapted)
    small_machines.assert_same("several", "one")


@pytest.mark.nightly
def test_a_run_continues_on_other_numbers_of_machines(small_machines):
    small_machines("one", 1, "--training.steps=8", "--lr_schedule.decay=none")
    for steps, num_machines in ((2, 4), (4, 2), (6, 1), (8, 3)):
        texts = small_machines("moved", num_machines, f"--training.steps={steps}", "--lr_schedule.decay=none")
        assert steps == 2 or f"resuming after step {steps - 2}" in texts[0]
    small_machines.assert_same("moved", "one", step=8)


@pytest.mark.nightly
def test_a_signal_on_one_machine_stops_all_after_the_same_step_with_a_checkpoint(small_machines):
    machines = small_machines.start("stopped", 2, "--training.steps=100000", "--lr_schedule.decay=none")
    machines[0].wait_until_printed("step      2/")
    machines[1].send(signal.SIGTERM)
    first, second = ended(machines, 128 + signal.SIGTERM)
    [saved] = small_machines.saved("stopped")
    assert len(small_machines.losses("stopped")) == saved
    assert "machine 1 (" in first.splitlines()[-1] and "SIGTERM; run the same command" in first.splitlines()[-1]
    assert "Traceback" not in first + second
    small_machines("stopped", 2, f"--training.steps={saved + 1}", "--lr_schedule.decay=none")
    small_machines("whole", 1, f"--training.steps={saved + 1}", "--lr_schedule.decay=none")
    small_machines.assert_same("stopped", "whole", step=saved + 1)


def test_several_processes_on_a_host_are_refused_with_how_to_launch(starter, tmp_path):
    machines = starter.start(2, "train:main", ["--config", "debug.toml"], folder=tmp_path)
    first, second = ended(machines, 2)
    assert first == second and "--nproc-per-node 1" in first and "machine 0" in first and "machine 1" in first
    assert list(tmp_path.iterdir()) == []
