"""Speed of the optimizer's update beside another that turns a bf16 gradient into bf16 weights by way of fp32 state."""

import argparse
import ctypes
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.frame import Benchmark, Option, Report, in_turns
from torchround.compiled_loops import RangeThreads
from torchround.optim import COMPACT, EXACT, StateFormat, UpdateBuffers, UpdateKernel, update_
from torchround.optim.kernel import KernelKind, get_kernels
from torchround.optim.rules.adamw import AdamWRule
from torchround.optim.split_weights import split

HYPER: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
ADAMW = AdamWRule(HYPER["betas"], HYPER["eps"], HYPER["weight_decay"])
ACCURACY_PARAMETERS = 100_003  # a prime, so that the last elements never fill a whole vector
# Bytes read and written per parameter.
TRAFFIC_BYTES = {"exact": 26, "compact": 14, "copy": 14}
COPIED_BYTES = 2**20  # the piece that a thread copies at once


def measure(options: argparse.Namespace) -> Report:
    """Time all passes in turns, then compare the weights that ours and PyTorch's arrive at."""
    num_threads = options.threads or torch.get_num_threads()
    torch.set_num_threads(num_threads)
    numel = options.mi_parameters * 2**20
    passes = contestants(numel, RangeThreads(num_threads))
    works = {name: partial(wall_and_cpu_s, update) for name, update in passes.items()}
    seconds = in_turns(works, options.runs, warm_up_turns=1)
    speeds = {
        name: {
            "median": numel / statistics.median(wall for wall, _ in times) / 1e9,
            "best": numel / min(wall for wall, _ in times) / 1e9,
            "median_per_cpu_s": numel / statistics.median(cpu for _, cpu in times) / 1e9,
        }
        for name, times in seconds.items()
    }
    distances = distances_from_float64(options.steps)
    return {
        "parameters": numel,
        "threads": num_threads,
        "gparams_per_s": speeds,
        "gbytes_per_s": {
            name: nbytes * speeds[name]["median"] for name, nbytes in TRAFFIC_BYTES.items() if name in speeds
        },
        "distance_from_float64": distances,
        "distance_ratio": distances["ours"] / distances["torch_adamw_fp32"],
    }


def wall_and_cpu_s(update: Callable[[], None]) -> tuple[float, float]:
    """Measure the seconds that an update takes, and those of processors: waiting for others is not in the second."""
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    update()
    return time.perf_counter() - start_s, time.process_time() - start_cpu_s


def contestants(numel: int, threads: RangeThreads) -> dict[str, Callable[[], None]]:
    """Make each pass by name, with state of its own and the common gradient."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(numel, generator=generator).mul_(0.02)
    gradient = torch.randn(numel, generator=generator).mul_(1e-3).bfloat16()
    found = {"plain": our_pass(start, gradient, EXACT)}
    for name, state in (("exact", EXACT), ("compact", COMPACT)):
        kind = KernelKind.of(buffers_of(start[:0], gradient[:0], state), predicts=False)
        assert kind is not None, "every rule here has a kernel"
        if kind in (kernels := get_kernels([kind], lambda: None, threads)):
            found[name] = our_pass(start, gradient, state, kernels[kind])
    return found | {"copy": copy_loop(numel, threads), "fused": fused_with_casts(start, gradient)}


def buffers_of(start: Tensor, gradient: Tensor, state: StateFormat) -> UpdateBuffers:
    """Make split bf16 weights in one round, as in `sync`, with state that is zero."""
    current, residual = split(start)
    parts = {
        part.name: torch.zeros(part.numel(start.numel()), dtype=part.dtype)
        for value in ADAMW.values
        for part in state.parts(value)
    }
    return UpdateBuffers(ADAMW, state, None, residual, current, current, parts, gradient)


def our_pass(
    start: Tensor, gradient: Tensor, state: StateFormat, kernel: UpdateKernel | None = None
) -> Callable[[], None]:
    """Make an update with our pass, by `kernel` or in plain operations."""
    buffers, step = buffers_of(start, gradient, state), [0]

    def update() -> None:
        step[0] += 1
        update_(buffers, lr=HYPER["lr"], update=step[0], kernel=kernel)

    return update


def copy_loop(numel: int, threads: RangeThreads) -> Callable[[], None]:
    """Make a copy that moves as many bytes as the compact pass, by the same threads: what memory can do."""
    nbytes = numel * TRAFFIC_BYTES["copy"] // 2
    source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))

    taking = threading.Lock()

    def work(following: ctypes.c_int64) -> None:
        while True:
            with taking:
                first = following.value
                following.value += COPIED_BYTES
            if first >= nbytes:
                return
            ctypes.memmove(
                target.data_ptr() + first, source.data_ptr() + first, min(COPIED_BYTES, nbytes - first)
            )

    return lambda: threads.run(nbytes, COPIED_BYTES, work)


def fused_with_casts(start: Tensor, gradient: Tensor) -> Callable[[], None]:
    """Make an update with PyTorch's fused optimizer over fp32 parameters, between the casts that it needs."""
    parameter = torch.nn.Parameter(start.clone())
    parameter.grad = fp32_gradient = torch.zeros_like(parameter)
    device_weight = torch.zeros_like(gradient)
    optimizer = torch.optim.AdamW([parameter], **HYPER, fused=True)

    def update() -> None:
        fp32_gradient.copy_(gradient)
        optimizer.step()
        device_weight.copy_(parameter.detach())

    return update


def distances_from_float64(num_steps: int) -> dict[str, float]:
    """Measure the 2-norms of the weights' distance from AdamW in float64 after steps on the same bf16 gradients."""
    start = torch.randn(ACCURACY_PARAMETERS, generator=torch.Generator().manual_seed(1))
    torchs, exact = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.double())
    optimizers = [torch.optim.AdamW([parameter], **HYPER, foreach=False) for parameter in (torchs, exact)]
    gradient = torch.zeros_like(start, dtype=torch.bfloat16)
    buffers = buffers_of(start, gradient, EXACT)
    for step in range(1, num_steps + 1):
        gradient.copy_(torch.randn(start.shape, generator=torch.Generator().manual_seed(step)).mul_(0.1))
        torchs.grad, exact.grad = gradient.float(), gradient.double()
        for optimizer in optimizers:
            optimizer.step()
        update_(buffers, lr=HYPER["lr"], update=step)
    return {
        "ours": float((buffers.weights(0, buffers.numel) - exact.detach()).norm()),
        "torch_adamw_fp32": float((torchs.detach() - exact.detach()).norm()),
    }


def headline(figures: Report) -> tuple[str, str]:
    """Name our speeds and those beside them."""
    speeds = {name: f"{name} {speed['median']:.2f}" for name, speed in figures["gparams_per_s"].items()}
    ours = ", ".join(speeds[name] for name in ("exact", "compact", "plain") if name in speeds)
    return f"{ours} Gparam/s", f"{speeds['fused']}, {speeds['copy']}"


SPEED = Benchmark(
    """The optimizer's update beside PyTorch's, from a bf16 gradient to bf16 weights by way of fp32 state.

One process, one buffer, AdamW. The passes take turns, and each figure is the median of --runs turns, because a shared
machine changes its speed from second to second:

    exact     gradient in, weights and state updated, device weights out, in one compiled update; split weights,
              fp32 state (26 bytes read and written per parameter)
    compact   the same with 8-bit state (14 bytes)
    copy      a copy that reads and writes 14 bytes per parameter, by the same threads
    plain     `exact` in PyTorch operations, chunk by chunk: what runs if there is no C++ compiler
    fused     cast the gradient to fp32, torch.optim.AdamW(fused=True), cast the weights

Then --steps steps of ours and of torch.optim.AdamW in fp32 on the same gradients: how far each is from float64.""",
    {
        "--mi-parameters": Option(64, "parameters, in 2^20"),
        "--runs": Option(7, "turns, of which the median counts"),
        "--steps": Option(100, "steps after which weights are compared"),
        "--threads": Option(None, "threads of an operation (default: PyTorch's)", type=int),
    },
    measure,
    headline,
    "--mi-parameters 1 --runs 2 --steps 3",
)
