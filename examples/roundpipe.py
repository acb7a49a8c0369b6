"""RoundPipe in one file: train a net whose weights live on the host, on devices that own nothing.

    python examples/roundpipe.py

A pipeline usually ties layers to GPUs, so the GPU with the largest layers keeps all others waiting. RoundPipe ties
nothing. Weights, gradients, optimizer state and the activations between stages live in host memory. A device takes
the next stage in turn, fetches its weights, runs all micro-batches through it, hands the results back and forgets
everything. So there may be any number of stages, and forward and backward may be cut at different layers.

This file runs on any CPU: a device is a thread, and host memory is what it may touch between two stages. Everything
that decides a result is here, and the losses equal those of torchround's engine bit for bit (a test compares them).
What the engine adds is real devices: streams, pinned buffers, copies beside computation, a planner for the stages.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

Weights = dict[str, Tensor]
OnDevice = tuple[int, nn.Module, Weights]  # a layer's number, its code, its weights
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Stage:
    """Consecutive layers `start .. stop - 1` that a device runs in one go; `kind` is forward, fused or backward."""

    kind: str
    start: int
    stop: int

    def __str__(self) -> str:
        letter = {"forward": "F", "fused": "FB", "backward": "B"}[self.kind]
        return (
            f"{letter}{self.start}"
            if self.stop == self.start + 1
            else f"{letter}{self.start}-{self.stop - 1}"
        )


def stages_of(forward: list[int], fused: int, backward: list[int]) -> list[Stage]:
    """List the stages of a step in dispatch order, from numbers of layers.

    A backward recomputes its layers, because their activations would fill the host: it takes 1 + 2 times as long as a
    forward. So a forward stage of three layers takes as long as a backward stage of one. Devices wait for the slowest
    stage, and stages of equal time leave no device waiting. The last layers are fused: their forward and backward run at
    once, so they are computed once.
    """
    stages, layer = [], 0
    for count in forward:
        stages.append(Stage("forward", layer, layer + count))
        layer += count
    stages.append(Stage("fused", layer, layer + fused))
    for count in backward:
        stages.append(Stage("backward", layer - count, layer))
        layer -= count
    return stages


class Worker:
    """A thread that runs its tasks one after the other, in the order in which they were given."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def run(self, task: Callable[[], Any]) -> Future[Any]:
        """Put a task at the end of the line; the future gets its result, or its error."""
        done: Future[Any] = Future()
        self._tasks.put((task, done))
        return done

    def close(self) -> None:
        self._tasks.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (item := self._tasks.get()) is not None:
            task, done = item
            try:
                done.set_result(task())
            except Exception as error:  # noqa: BLE001  (raised where the result is asked for)
                done.set_exception(error)


class Host:
    """Host memory: the weights and their optimizer, which updates them beside the devices.

    `versions[t]` are the weights after t updates, one future for each layer. A device that is early waits for it.
    """

    def __init__(self, layers: nn.Sequential, lr: float) -> None:
        self.layers = layers
        self.optimizer = torch.optim.AdamW(layers.parameters(), lr=lr, weight_decay=0.0)
        self.worker = Worker("optimizer")
        # The engine has one or two buffers and lets an update wait until no device reads the old weights any more. Copies
        # that are never written again show the same values and need no such rule.
        self.versions: list[Future[list[Weights]]] = [self.worker.run(self._copy)]

    def update(self, gradients: list[Future[dict[str, Any]]]) -> None:
        """Update all layers once their gradients have come down; devices run on meanwhile."""

        def run() -> list[Weights]:
            for layer, landed in zip(self.layers, gradients, strict=True):
                for name, parameter in layer.named_parameters():
                    parameter.grad = landed.result()[name]
            self.optimizer.step()
            return self._copy()

        self.versions.append(self.worker.run(run))

    def _copy(self) -> list[Weights]:
        return [
            {name: value.detach().clone() for name, value in layer.named_parameters()}
            for layer in self.layers
        ]


class Step:
    """The values of one training step that wait on the host, each made once: who needs one waits for its future."""

    def __init__(self, inputs: list[Tensor], labels: list[Tensor], num_layers: int) -> None:
        self.labels = labels
        self.jobs: list[Future[None]] = []
        self.losses: list[Future[Tensor]] = [Future() for _ in inputs]
        # By layer and micro-batch: the layer's input, and the gradient of that input.
        self.hidden: list[list[Future[Tensor]]] = [[Future() for _ in inputs] for _ in range(num_layers)]
        self.slopes: list[list[Future[Any]]] = [[Future() for _ in inputs] for _ in range(num_layers)]
        self.gradients: list[Future[dict[str, Any]]] = [Future() for _ in range(num_layers)]
        for waiting, value in zip(self.hidden[0], inputs, strict=True):
            waiting.set_result(value)

    def loss(self) -> float:
        """Wait for the step, and return the sum of its losses. Raises the first error of a device."""
        # Tasks wait only for earlier ones, so in this order no wait is for a task that an error has left unfinished.
        for job in self.jobs:
            job.result()
        return sum(loss.result().item() for loss in self.losses)


class RoundPipe:
    """Training of a net on stateless devices.

    With `is_async` the next step begins before the update of this one is finished: step t + 1 computes with the weights
    that step t had, too. Weights are one step old, and no device ever waits for the optimizer.
    """

    def __init__(
        self,
        net: nn.Sequential,
        stages: list[Stage],
        num_devices: int,
        lr: float,
        loss_fn: Loss,
        is_async: bool = False,
    ) -> None:
        self.stages, self.loss_fn, self.is_async = stages, loss_fn, is_async
        self.host = Host(net, lr)
        # All that a device owns: layers without weights. Two devices may run the same layer at once.
        self.shells = [deepcopy(net).to("meta") for _ in range(num_devices)]
        self.devices = [Worker(f"device {number}") for number in range(num_devices)]
        self.slot = 0  # counts on from step to step: no device rests between two steps
        self.dispatched: list[tuple[int, int, Stage]] = []  # slot, step, stage: for the picture
        # A forward stage leaves on the host what backward stages will recompute from, and what the next stage needs.
        self.kept = {stage.start for stage in stages}

    def train(self, inputs: Tensor, labels: Tensor, num_micro_batches: int) -> Step:
        """Dispatch one step, and return at once."""
        number = len(self.host.versions) - 1
        weights = self.host.versions[max(number - 1, 0) if self.is_async else number]
        parts = list(inputs.chunk(num_micro_batches)), list(labels.chunk(num_micro_batches))
        step = Step(*parts, len(self.host.layers))
        for stage in self.stages:
            # This line is RoundPipe: the next stage goes to the next device, with any layers.
            device = self.slot % len(self.devices)
            run = partial(self._run, stage, step, weights, self.shells[device])
            step.jobs.append(self.devices[device].run(run))
            self.dispatched.append((self.slot, number, stage))
            self.slot += 1
        self.host.update(step.gradients)
        return step

    def close(self) -> None:
        for worker in (*self.devices, self.host.worker):
            worker.close()

    def _run(self, stage: Stage, step: Step, weights: Future[list[Weights]], shells: nn.Sequential) -> None:
        """Run all micro-batches of a stage on a device, whose layers are `shells`."""
        # Weights go up once for all micro-batches of the stage: enough of these hide the copy.
        on_device = [
            (layer, shells[layer], {name: value.clone() for name, value in weights.result()[layer].items()})
            for layer in range(stage.start, stage.stop)
        ]
        if stage.kind == "forward":
            for micro_batch in range(len(step.labels)):
                self._forward(stage, step, micro_batch, on_device)
            return
        for _, _, values in on_device:
            for value in values.values():
                value.requires_grad_()
        for micro_batch in range(len(step.labels)):
            self._backward(stage, step, micro_batch, on_device)
        # The sums over all micro-batches go down once. Nothing stays here.
        for layer, _, values in on_device:
            step.gradients[layer].set_result({name: value.grad for name, value in values.items()})

    def _forward(self, stage: Stage, step: Step, micro_batch: int, on_device: list[OnDevice]) -> None:
        value = step.hidden[stage.start][micro_batch].result()
        with torch.no_grad():
            for layer, shell, values in on_device:
                value = functional_call(shell, values, value)
                if layer + 1 in self.kept:
                    step.hidden[layer + 1][micro_batch].set_result(value)

    def _backward(self, stage: Stage, step: Step, micro_batch: int, on_device: list[OnDevice]) -> None:
        """Compute the layers from the stage's input with a graph, and go back through it."""
        start = step.hidden[stage.start][micro_batch].result().detach().requires_grad_(stage.start > 0)
        value = start
        for _, shell, values in on_device:
            value = functional_call(shell, values, value)
        if stage.kind == "fused":
            loss = self.loss_fn(value, step.labels[micro_batch])
            loss.backward()
            step.losses[micro_batch].set_result(loss.detach())
        else:
            # Only here the stage waits for the gradient: it has recomputed while that was on its way.
            value.backward(step.slopes[stage.stop][micro_batch].result())
        if stage.start > 0:
            step.slopes[stage.start][micro_batch].set_result(start.grad)


def net_of(num_blocks: int, width: int, classes: int) -> nn.Sequential:
    """Build a net of equal blocks and a head."""
    blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(num_blocks)]
    return nn.Sequential(*blocks, nn.Linear(width, classes))


def batches(number: int, size: int, width: int, classes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random inputs, labelled by a rule that the net can learn."""
    rule = torch.randn(width, classes)
    for _ in range(number):
        inputs = torch.randn(size, width)
        yield inputs, (inputs @ rule).argmax(dim=1)


def picture(dispatched: list[tuple[int, int, Stage]], num_devices: int) -> str:
    """Draw which device takes which stage: a row for each device, a column for each turn."""
    rows = [f"device {device} " for device in range(num_devices)]
    for slot, step, stage in dispatched:
        rows[slot % num_devices] += f"| {step}:{stage} ".ljust(11)
    return "\n".join(rows)


def main() -> None:
    # Six blocks and a head. Forward stages of three layers and backward stages of one take the same time: 3 of a
    # block's forwards. Nine stages on four devices: no device has the same layers twice in a row.
    stages = stages_of(forward=[3, 3], fused=1, backward=[1] * 6)
    for is_async in (False, True):
        torch.manual_seed(0)
        net = net_of(num_blocks=6, width=32, classes=4)
        pipe = RoundPipe(net, stages, 4, 1e-2, nn.CrossEntropyLoss(reduction="sum"), is_async)
        steps = [pipe.train(*batch, num_micro_batches=4) for batch in batches(40, 64, 32, 4)]
        losses = [step.loss() / 64 for step in steps]
        pipe.close()
        print("async: weights one step old" if is_async else "sync: weights of the newest step")
        print("loss", " ".join(f"{loss:.3f}" for loss in losses[::8]), f"{losses[-1]:.3f}")
        if not is_async:
            print("\nstep:stage, F forward, B backward, FB both, with their layers; time goes to the right")
            print(picture(pipe.dispatched[:27], 4), end="\n\n")


if __name__ == "__main__":
    main()
