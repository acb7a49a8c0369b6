"""The optimizer's pass against two others that turn a bf16 gradient into bf16 weights by way of fp32 state.

    python benchmarks/optimizer.py
    python benchmarks/optimizer.py --deepspeed FOLDER     # a folder that holds the package deepspeed

One process, one buffer of `--mi-parameters` x 2^20 parameters, AdamW. The contestants take turns, and each
figure is the median of `--runs` turns, because a shared machine changes its speed from second to second:

    compiled  gradient in, state updated, master out, in one compiled pass (28 bytes per parameter)
    plain     the same in PyTorch operations, chunk by chunk: where there is no C++ compiler
    fused     cast the gradient to fp32, torch.optim.AdamW(fused=True), cast the weights
    cpuadam   cast the gradient to fp32, DeepSpeed's CPUAdam, cast the weights

Then `--steps` steps of compiled and of torch.optim.AdamW in fp32 on the same gradients, and how far each is from
AdamW in float64. Prints JSON.
"""

import argparse
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from torchround.optim import adamw_update_
from torchround.optim.kernel import AdamWKernel, get_kernels

HYPER: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
ACCURACY_PARAMETERS = 100_003

Optimizer = Callable[[list[torch.nn.Parameter]], Any]


def ours(start: Tensor, gradient: Tensor, master: Tensor, kernel: AdamWKernel | None) -> Callable[[], None]:
    """One update with our pass, by `kernel` or in plain operations."""
    weight, exp_avg, exp_avg_sq = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    step = [0]

    def update() -> None:
        step[0] += 1
        adamw_update_(
            *(weight, exp_avg, exp_avg_sq, gradient, master),
            **HYPER,
            bias_correction_step=step[0],
            kernel=kernel,
        )

    return update


def with_casts(start: Tensor, gradient: Tensor, master: Tensor, optimizer: Optimizer) -> Callable[[], None]:
    """One update with an optimizer over fp32 parameters, between the casts that it needs."""
    parameter = torch.nn.Parameter(start.clone())
    parameter.grad = torch.zeros_like(parameter)
    stepper = optimizer([parameter])

    def update() -> None:
        assert parameter.grad is not None, "the optimizer dropped the gradient"
        parameter.grad.copy_(gradient)
        stepper.step()
        master.copy_(parameter.detach())

    return update


def contestants(
    numel: int, kernel: AdamWKernel | None, cpu_adam: Optimizer | None
) -> dict[str, Callable[[], None]]:
    """Each by name, with state of its own and the common gradient and master."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(numel, generator=generator).mul_(0.02)
    gradient = torch.randn(numel, generator=generator).mul_(1e-3).bfloat16()
    master = torch.zeros(numel, dtype=torch.bfloat16)
    found = {"plain": ours(start, gradient, master, None)}
    if kernel is not None:
        found["compiled"] = ours(start, gradient, master, kernel)
    found["fused"] = with_casts(
        start, gradient, master, lambda parameters: torch.optim.AdamW(parameters, **HYPER, fused=True)
    )
    if cpu_adam is not None:
        found["cpuadam"] = with_casts(start, gradient, master, cpu_adam)
    return found


def find_cpu_adam(folder: str | None) -> Optimizer | None:
    """DeepSpeed's optimizer, where the package can be imported and its operation compiled."""
    if folder is not None:
        sys.path.append(folder)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        module = importlib.import_module("deepspeed.ops.adam")
    except ImportError as error:
        print(f"without DeepSpeed's CPUAdam: {error}", file=sys.stderr)
        return None
    return lambda parameters: module.DeepSpeedCPUAdam(parameters, **HYPER, adamw_mode=True)


def gparams_per_s(
    updates: dict[str, Callable[[], None]], numel: int, runs: int
) -> dict[str, dict[str, float]]:
    """Speed by contestant: median and best of `runs` turns, after one turn that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in updates}
    for _ in range(1 + runs):
        for name, update in updates.items():
            start = time.perf_counter()
            update()
            seconds[name].append(time.perf_counter() - start)
    return {
        name: {
            "median": numel / statistics.median(times[1:]) / 1e9,
            "best": numel / min(times[1:]) / 1e9,
        }
        for name, times in seconds.items()
    }


def distances_from_float64(kernel: AdamWKernel | None, num_steps: int) -> dict[str, float]:
    """2-norm of the weights' distance from AdamW in float64 after `num_steps` steps on the same bf16 gradients."""
    start = torch.randn(ACCURACY_PARAMETERS, generator=torch.Generator().manual_seed(1))
    torchs, exact = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.double())
    optimizers = [torch.optim.AdamW([parameter], **HYPER, foreach=False) for parameter in (torchs, exact)]
    gradient, master = (
        torch.zeros_like(start, dtype=torch.bfloat16),
        torch.zeros_like(start, dtype=torch.bfloat16),
    )
    weight, exp_avg, exp_avg_sq = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for step in range(1, num_steps + 1):
        gradient.copy_(torch.randn(start.shape, generator=torch.Generator().manual_seed(step)).mul_(0.1))
        torchs.grad, exact.grad = gradient.float(), gradient.double()
        for optimizer in optimizers:
            optimizer.step()
        adamw_update_(
            *(weight, exp_avg, exp_avg_sq, gradient, master),
            **HYPER,
            bias_correction_step=step,
            kernel=kernel,
        )
    return {
        "ours": float((weight - exact.detach()).norm()),
        "torch_adamw_fp32": float((torchs.detach() - exact.detach()).norm()),
    }


def main() -> None:
    """Time, compare, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mi-parameters", type=int, default=64, help="parameters, in 2^20")
    parser.add_argument("--runs", type=int, default=7, help="turns of each contestant")
    parser.add_argument("--steps", type=int, default=100, help="steps of the comparison with float64")
    parser.add_argument("--threads", type=int, help="threads of each contestant; default: PyTorch's choice")
    parser.add_argument(
        "--deepspeed", help="folder that holds the package deepspeed, where it is not installed"
    )
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    dtypes = (torch.bfloat16, torch.bfloat16)
    kernel = get_kernels([dtypes], lambda: None).get(dtypes)
    numel = options.mi_parameters * 2**20
    updates = contestants(numel, kernel, find_cpu_adam(options.deepspeed))
    load_before = os.getloadavg()[0]
    speeds = gparams_per_s(updates, numel, options.runs)
    distances = distances_from_float64(kernel, options.steps)
    best_of_ours = speeds.get("compiled", speeds["plain"])
    report = {
        "parameters": numel,
        "threads": torch.get_num_threads(),
        "load_average": [load_before, os.getloadavg()[0]],
        "gparams_per_s": speeds,
        "speed_over": {
            name: {which: best_of_ours[which] / speed[which] for which in ("median", "best")}
            for name, speed in speeds.items()
            if name != "compiled"
        },
        "distance_from_float64": distances,
        "distance_ratio": distances["ours"] / distances["torch_adamw_fp32"],
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
