"""Speed of the optimizer's update beside two others that turn a bf16 gradient into bf16 weights by way of fp32 state."""

import argparse
import atexit
import ctypes
import importlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.frame import Benchmark, Report, in_turns
from torchround.optim import COMPACT, EXACT, StateFormat, UpdateBuffers, UpdateKernel, UpdateRule, update_
from torchround.optim.kernel import get_kernels
from torchround.optim.kernel_kind import KernelKind
from torchround.optim.range_threads import Range, RangeThreads
from torchround.optim.rules.adamw import AdamWRule
from torchround.optim.split_weights import split

HYPER: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
ACCURACY_PARAMETERS = 100_003  # a prime, so that the last elements never fill a whole vector

ADAMW = AdamWRule(HYPER["betas"], HYPER["eps"], HYPER["weight_decay"])
# Bytes read and written per parameter. `before` has to fetch the device weights' lines before it overwrites them.
TRAFFIC_BYTES = {"exact": 26, "compact": 14, "copy": 14, "before": 30}

COPIED_BYTES = 2**20  # the piece that a thread copies at once

# What the process of another checkout runs.
RIVAL = """
import sys, time, torch
from torchround.optim.adamw import adamw_update_
from torchround.optim.kernel import get_kernels
numel, threads = map(int, sys.argv[1:])
torch.set_num_threads(threads)
kernel = get_kernels([(torch.bfloat16, torch.bfloat16)], lambda: None)[torch.bfloat16, torch.bfloat16]
weight = torch.randn(numel).mul_(0.02)
state = [weight, torch.zeros(numel), torch.zeros(numel), torch.randn(numel).mul_(1e-3).bfloat16(), weight.bfloat16()]
for step, _ in enumerate(sys.stdin, 1):
    start_s = time.process_time()
    adamw_update_(*state, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, bias_correction_step=step, kernel=kernel)
    print(time.process_time() - start_s, flush=True)
"""

Optimizer = Callable[[list[torch.nn.Parameter]], Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add sizes, and the folder of the rival package."""
    parser.add_argument("--mi-parameters", type=int, default=64, help="parameters, in 2^20")
    parser.add_argument("--runs", type=int, default=7, help="turns, of which the median counts")
    parser.add_argument("--steps", type=int, default=100, help="steps after which weights are compared")
    parser.add_argument("--threads", type=int, help="threads of an operation (default: PyTorch's)")
    parser.add_argument("--rival-checkout", metavar="FOLDER", help="a checkout of torchround of October 2026")
    parser.add_argument("--deepspeed", metavar="FOLDER", help="folder that holds the package deepspeed")


def measure(options: argparse.Namespace) -> Report:
    """Time all passes in turns, then compare the weights that ours and PyTorch's arrive at."""
    num_threads = options.threads or torch.get_num_threads()
    torch.set_num_threads(num_threads)
    threads = RangeThreads(num_threads)
    numel = options.mi_parameters * 2**20
    passes: dict[str, Callable[[], float | None]] = dict(
        contestants(numel, threads, find_cpu_adam(options.deepspeed))
    )
    if options.rival_checkout is not None:
        passes["before"] = RivalCheckout(options.rival_checkout, numel, num_threads).update
    seconds = in_turns(
        {name: lambda update=update: wall_and_cpu_s(update) for name, update in passes.items()},  # type: ignore[misc]
        options.runs,
        warm_up_turns=1,
    )
    speeds = {
        name: {
            "median": numel / statistics.median(wall for wall, _ in times) / 1e9,
            "best": numel / min(wall for wall, _ in times) / 1e9,
            "median_per_cpu_s": numel / statistics.median(cpu for _, cpu in times) / 1e9,
        }
        for name, times in seconds.items()
    }
    ours = speeds.get("exact", speeds["plain"])
    distances = distances_from_float64(options.steps)
    return {
        "parameters": numel,
        "threads": num_threads,
        "gparams_per_s": speeds,
        "gbytes_per_s": {
            name: {which: TRAFFIC_BYTES[name] * speed for which, speed in speeds[name].items()}
            for name in speeds
            if name in TRAFFIC_BYTES
        },
        "speed_over": {
            name: {which: ours[which] / speed[which] for which in speed}
            for name, speed in speeds.items()
            if name != "exact"
        },
        "distance_from_float64": distances,
        "distance_ratio": distances["ours"] / distances["torch_adamw_fp32"],
    }


def wall_and_cpu_s(update: Callable[[], float | None]) -> tuple[float, float]:
    """Return the seconds that an update takes, and those of processors: waiting for others is not in the second.

    An update in another process returns the latter itself.
    """
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    cpu_s = update()
    wall_s = time.perf_counter() - start_s
    return wall_s, time.process_time() - start_cpu_s if cpu_s is None else cpu_s


def contestants(
    numel: int, threads: RangeThreads, cpu_adam: Optimizer | None
) -> dict[str, Callable[[], None]]:
    """Return each pass by name, with state of its own and the common gradient and device weights."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(numel, generator=generator).mul_(0.02)
    gradient = torch.randn(numel, generator=generator).mul_(1e-3).bfloat16()
    device_weight = torch.zeros(numel, dtype=torch.bfloat16)
    buffers = {"exact": buffers_of(start, gradient, EXACT), "compact": buffers_of(start, gradient, COMPACT)}
    found = {"plain": our_pass(buffers_of(start, gradient, EXACT), None)}
    for name, ours in buffers.items():
        kind = KernelKind.of(ours, predicts=False)
        assert kind is not None, "every rule here has a kernel"
        kernel = get_kernels([kind], lambda: None, threads).get(kind)
        if kernel is not None:
            found[name] = our_pass(ours, kernel)
    found["copy"] = copy_loop(numel, threads)
    found["fused"] = pass_with_casts(
        start, gradient, device_weight, lambda parameters: torch.optim.AdamW(parameters, **HYPER, fused=True)
    )
    if cpu_adam is not None:
        found["cpuadam"] = pass_with_casts(start, gradient, device_weight, cpu_adam)
    return found


def buffers_of(
    start: Tensor, gradient: Tensor, state: StateFormat, rule: UpdateRule = ADAMW
) -> UpdateBuffers:
    """Return split bf16 weights in one round, as in `sync`, with state that is zero."""
    current, residual = split(start)
    parts = {
        part.name: torch.zeros(part.numel(start.numel()), dtype=part.dtype)
        for value in rule.values
        for part in state.parts(value)
    }
    return UpdateBuffers(rule, state, None, residual, current, current, parts, gradient)


def our_pass(buffers: UpdateBuffers, kernel: UpdateKernel | None) -> Callable[[], None]:
    """Return one update with our pass, by `kernel` or in plain operations."""
    step = [0]

    def update() -> None:
        step[0] += 1
        update_(buffers, lr=HYPER["lr"], update=step[0], kernel=kernel)

    return update


def copy_loop(numel: int, threads: RangeThreads) -> Callable[[], None]:
    """Return a copy that moves as many bytes as the compact pass, by the same threads: what memory can do."""
    nbytes = numel * TRAFFIC_BYTES["copy"] // 2
    source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))

    def work(whole: Range) -> None:
        while (piece := whole.take(COPIED_BYTES)) is not None:
            first, stop = piece
            ctypes.memmove(target.data_ptr() + first, source.data_ptr() + first, stop - first)

    return lambda: threads.run(nbytes, COPIED_BYTES, work)


class RivalCheckout:
    """The compiled pass of another checkout, in a process of its own that answers each line with an update."""

    def __init__(self, folder: str, numel: int, threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", RIVAL, str(numel), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,  # where Python looks first
            env={**os.environ, "PYTHONPATH": folder},
        )
        atexit.register(self._process.kill)

    def update(self) -> float:
        """Let it update once, and return the seconds of processors that it took."""
        assert self._process.stdin is not None and self._process.stdout is not None, "both are pipes"
        print("update", file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("the other checkout's pass failed; its message is above")
        return float(answer)


def pass_with_casts(
    start: Tensor, gradient: Tensor, device_weight: Tensor, optimizer: Optimizer
) -> Callable[[], None]:
    """Return one update with an optimizer over fp32 parameters, between the casts that it needs."""
    parameter = torch.nn.Parameter(start.clone())
    parameter.grad = torch.zeros_like(parameter)
    stepper = optimizer([parameter])

    def update() -> None:
        assert parameter.grad is not None, "the optimizer dropped the gradient"
        parameter.grad.copy_(gradient)
        stepper.step()
        device_weight.copy_(parameter.detach())

    return update


def find_cpu_adam(folder: str | None) -> Optimizer | None:
    """Return DeepSpeed's optimizer if the package can be imported and its operation compiled."""
    if folder is not None:
        sys.path.append(folder)
    # Otherwise DeepSpeed chooses an accelerator by itself while it is imported.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        module = importlib.import_module("deepspeed.ops.adam")
    except ImportError as error:
        print(f"without DeepSpeed's CPUAdam: {error}", file=sys.stderr)
        return None
    return lambda parameters: module.DeepSpeedCPUAdam(parameters, **HYPER, adamw_mode=True)


def distances_from_float64(num_steps: int) -> dict[str, float]:
    """Return the 2-norms of the weights' distance from AdamW in float64 after steps on the same bf16 gradients."""
    start = torch.randn(ACCURACY_PARAMETERS, generator=torch.Generator().manual_seed(1))
    torchs, exact = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.double())
    optimizers = [torch.optim.AdamW([parameter], **HYPER, foreach=False) for parameter in (torchs, exact)]
    buffers = buffers_of(start, torch.zeros_like(start, dtype=torch.bfloat16), EXACT)
    assert buffers.gradient is not None, "just given"
    for step in range(1, num_steps + 1):
        buffers.gradient.copy_(
            torch.randn(start.shape, generator=torch.Generator().manual_seed(step)).mul_(0.1)
        )
        torchs.grad, exact.grad = buffers.gradient.float(), buffers.gradient.double()
        for optimizer in optimizers:
            optimizer.step()
        update_(buffers, lr=HYPER["lr"], update=step)
    return {
        "ours": float((buffers.weights(0, buffers.numel) - exact.detach()).norm()),
        "torch_adamw_fp32": float((torchs.detach() - exact.detach()).norm()),
    }


def headline(figures: Report) -> tuple[str, str]:
    """Name our speed and each rival's."""
    speeds = figures["gparams_per_s"]
    ours = "exact" if "exact" in speeds else "plain"
    rivals = ", ".join(
        f"{name} {speeds[name]['median']:.2f} ({figures['speed_over'][name]['median']:.2f} times)"
        for name in speeds
        if name not in ("exact", "plain")
    )
    return f"{ours} state {speeds[ours]['median']:.2f} Gparam/s", rivals


SPEED = Benchmark(
    """The optimizer's update against others that turn a bf16 gradient into bf16 weights by way of fp32 state.

One process, one buffer, AdamW. The passes take turns, and each figure is the median of --runs turns, because a shared
machine changes its speed from second to second:

    exact     gradient in, weights and state updated, device weights out, in one compiled update; split weights,
              fp32 state (26 bytes read and written per parameter)
    compact   the same with 8-bit state (14 bytes)
    copy      a copy that reads and writes 14 bytes per parameter, by the same threads
    plain     `exact` in PyTorch operations, chunk by chunk: what runs if there is no C++ compiler
    fused     cast the gradient to fp32, torch.optim.AdamW(fused=True), cast the weights
    cpuadam   cast the gradient to fp32, DeepSpeed's CPUAdam, cast the weights (with --deepspeed)
    before    the compiled pass of a checkout whose `adamw_update_` took fp32 weights and an Inductor kernel, in a
              process of its own (with --rival-checkout; 30 bytes)

Then --steps steps of ours and of torch.optim.AdamW in fp32 on the same gradients: how far each is from float64.""",
    add_options,
    measure,
    headline,
    "--mi-parameters 1 --runs 2 --steps 3",
)
