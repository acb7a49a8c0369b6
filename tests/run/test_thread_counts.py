"""Bits do not depend on `engine.cpu_threads`: initial weights, losses and trained weights, in every family and dtype."""

import itertools
import threading

import pytest
import torch

from torchround.config import EngineTable
from torchround.engine.device import CpuDevice
from torchround.run.hardware import MOST_VIRTUAL_DEVICES, find_hardware

# Sums over 1024 tokens, and 1024 x 56 activations whose third and fourth part do not end at a vector register.
CONFIG = """
tokenizer = { name = "bytes" }
data = { sources = [{ path = "text.txt" }] }
training = { steps = 2, seq_len = 1024, global_batch_size = 2, micro_batch_size = 1 }
engine = { devices = "cpu", num_devices = 1, measure_steps = 0 }
lr_schedule = { warmup_steps = 0 }
[model]
shape = { num_layers = 1, hidden_size = 64, num_heads = 2, ffn_size = 56 }
"""
EXPERTS = ["--model.shape.num_experts=3", "--model.shape.num_chosen=2"]
COMPILED = ["--engine.compile=true"]
FAMILIES = {"llama3": [], "qwen3": [], "qwen3 with experts": EXPERTS, "gpt_oss": EXPERTS}


def cases():
    for number, (family, dtype) in enumerate(itertools.product(FAMILIES, ("float32", "bfloat16"))):
        yield pytest.param(family, dtype, marks=[] if number in (0, 7) else pytest.mark.nightly)
    # Inductor writes a number of threads into its code, and keeps that code for the next run. Takes most of a minute.
    yield pytest.param("llama3 compiled", "bfloat16", marks=[pytest.mark.compiles, pytest.mark.nightly])


@pytest.mark.parametrize(("family", "dtype"), [*cases()])
def test_a_trained_run_has_the_same_bits_with_any_number_of_threads(family, dtype, small_runs, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(small_runs.folder / "compiled"))
    (small_runs.folder / "text.txt").write_text("".join(chr(32 + (index * index) % 90) for index in range(9000)))
    (small_runs.folder / "threads.toml").write_text(CONFIG)
    given = [f"--model.family={family.split()[0]}", f"--training.dtype={dtype}", *FAMILIES.get(family, COMPILED)]
    for threads in (1, 2, 4):
        assert small_runs(f"of-{threads}", *given, f"--engine.cpu_threads={threads}", config="threads.toml") == 0
        small_runs.assert_same(f"of-{threads}", "of-1", step=2)


def test_a_backward_runs_in_the_thread_that_asks_for_it_also_inside_another_backward():
    """Otherwise a virtual device's one thread would not be the one that computes its gradients."""
    seen = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value * 1

        @staticmethod
        def backward(ctx, gradient):
            seen.append((threading.current_thread(), torch.get_num_threads()))
            return gradient

    class Inside(Seen):
        @staticmethod
        def backward(ctx, gradient):
            with torch.enable_grad():  # as compiled layers do
                Seen.apply(torch.ones(1, requires_grad=True)).sum().backward()
            return gradient

    def compute():
        CpuDevice(0).enter_thread()
        Inside.apply(Seen.apply(torch.ones(1, requires_grad=True))).sum().backward()

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert seen == [(thread, 1)] * 2


def test_as_many_virtual_devices_as_threads_use_the_cores():
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    try:
        assert find_hardware(EngineTable(devices="cpu")).num_devices == 5
    finally:
        torch.set_num_threads(before)
    assert find_hardware(EngineTable(devices="cpu", cpu_threads=3)).num_devices == 3
    assert find_hardware(EngineTable(devices="cpu", cpu_threads=64)).num_devices == MOST_VIRTUAL_DEVICES
    assert find_hardware(EngineTable(devices="cpu", cpu_threads=3, num_devices=1)).num_devices == 1
