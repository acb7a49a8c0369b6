"""Speed of the optimizer's update beside two others that turn a bf16 gradient into bf16 weights by way of fp32 state."""

import argparse
import importlib
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.frame import Benchmark, Report, in_turns, timed
from torchround.optim import adamw_update_
from torchround.optim.kernel import AdamWKernel, get_kernels

HYPER: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
ACCURACY_PARAMETERS = 100_003  # a prime, so that the last elements never fill a whole vector

Optimizer = Callable[[list[torch.nn.Parameter]], Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add sizes, and the folder of the rival package."""
    parser.add_argument("--mi-parameters", type=int, default=64, help="parameters, in 2^20")
    parser.add_argument("--runs", type=int, default=7, help="turns, of which the median counts")
    parser.add_argument("--steps", type=int, default=100, help="steps after which weights are compared")
    parser.add_argument("--threads", type=int, help="threads of an operation (default: PyTorch's)")
    parser.add_argument("--deepspeed", metavar="FOLDER", help="folder that holds the package deepspeed")


def measure(options: argparse.Namespace) -> Report:
    """Time all passes in turns, then compare the weights that ours and PyTorch's arrive at."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    dtypes = (torch.bfloat16, torch.bfloat16)
    kernel = get_kernels([dtypes], lambda: None).get(dtypes)
    numel = options.mi_parameters * 2**20
    passes = contestants(numel, kernel, find_cpu_adam(options.deepspeed))
    seconds = in_turns(
        {name: lambda update=update: timed(update) for name, update in passes.items()},  # type: ignore[misc]
        options.runs,
        warm_up_turns=1,
    )
    speeds = {
        name: {"median": numel / statistics.median(times) / 1e9, "best": numel / min(times) / 1e9}
        for name, times in seconds.items()
    }
    ours = speeds.get("compiled", speeds["plain"])
    distances = distances_from_float64(kernel, options.steps)
    return {
        "parameters": numel,
        "threads": torch.get_num_threads(),
        "gparams_per_s": speeds,
        "speed_over": {
            name: {which: ours[which] / speed[which] for which in ("median", "best")}
            for name, speed in speeds.items()
            if name != "compiled"
        },
        "distance_from_float64": distances,
        "distance_ratio": distances["ours"] / distances["torch_adamw_fp32"],
    }


def contestants(
    numel: int, kernel: AdamWKernel | None, cpu_adam: Optimizer | None
) -> dict[str, Callable[[], None]]:
    """Return each pass by name, with state of its own and the common gradient and device weights."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(numel, generator=generator).mul_(0.02)
    gradient = torch.randn(numel, generator=generator).mul_(1e-3).bfloat16()
    device_weight = torch.zeros(numel, dtype=torch.bfloat16)
    found = {"plain": our_pass(start, gradient, device_weight, None)}
    if kernel is not None:
        found["compiled"] = our_pass(start, gradient, device_weight, kernel)
    found["fused"] = pass_with_casts(
        start, gradient, device_weight, lambda parameters: torch.optim.AdamW(parameters, **HYPER, fused=True)
    )
    if cpu_adam is not None:
        found["cpuadam"] = pass_with_casts(start, gradient, device_weight, cpu_adam)
    return found


def our_pass(
    start: Tensor, gradient: Tensor, device_weight: Tensor, kernel: AdamWKernel | None
) -> Callable[[], None]:
    """Return one update with our pass, by `kernel` or in plain operations."""
    weight, exp_avg, exp_avg_sq = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    step = [0]

    def update() -> None:
        step[0] += 1
        adamw_update_(
            *(weight, exp_avg, exp_avg_sq, gradient, device_weight),
            **HYPER,
            bias_correction_step=step[0],
            kernel=kernel,
        )

    return update


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


def distances_from_float64(kernel: AdamWKernel | None, num_steps: int) -> dict[str, float]:
    """Return the 2-norms of the weights' distance from AdamW in float64 after steps on the same bf16 gradients."""
    start = torch.randn(ACCURACY_PARAMETERS, generator=torch.Generator().manual_seed(1))
    torchs, exact = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.double())
    optimizers = [torch.optim.AdamW([parameter], **HYPER, foreach=False) for parameter in (torchs, exact)]
    gradient, device_weight = (torch.zeros_like(start, dtype=torch.bfloat16) for _ in range(2))
    weight, exp_avg, exp_avg_sq = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for step in range(1, num_steps + 1):
        gradient.copy_(torch.randn(start.shape, generator=torch.Generator().manual_seed(step)).mul_(0.1))
        torchs.grad, exact.grad = gradient.float(), gradient.double()
        for optimizer in optimizers:
            optimizer.step()
        adamw_update_(
            *(weight, exp_avg, exp_avg_sq, gradient, device_weight),
            **HYPER,
            bias_correction_step=step,
            kernel=kernel,
        )
    return {
        "ours": float((weight - exact.detach()).norm()),
        "torch_adamw_fp32": float((torchs.detach() - exact.detach()).norm()),
    }


def headline(figures: Report) -> tuple[str, str]:
    """Name our speed and each rival's."""
    speeds = figures["gparams_per_s"]
    ours = "compiled" if "compiled" in speeds else "plain"
    rivals = ", ".join(
        f"{name} {speeds[name]['median']:.2f} ({figures['speed_over'][name]['median']:.2f} times)"
        for name in speeds
        if name not in ("compiled", "plain")
    )
    return f"{ours} pass {speeds[ours]['median']:.2f} Gparam/s", f"with casts: {rivals}"


SPEED = Benchmark(
    """The optimizer's update against others that turn a bf16 gradient into bf16 weights by way of fp32 state.

One process, one buffer, AdamW. The passes take turns, and each figure is the median of --runs turns, because a shared
machine changes its speed from second to second:

    compiled  gradient in, state updated, device weights out, in one compiled update (28 bytes per parameter)
    plain     the same in PyTorch operations, chunk by chunk: what runs if there is no C++ compiler
    fused     cast the gradient to fp32, torch.optim.AdamW(fused=True), cast the weights
    cpuadam   cast the gradient to fp32, DeepSpeed's CPUAdam, cast the weights (with --deepspeed)

Then --steps steps of ours and of torch.optim.AdamW in fp32 on the same gradients: how far each is from float64.""",
    add_options,
    measure,
    headline,
    "--mi-parameters 1 --runs 2 --steps 3",
)
