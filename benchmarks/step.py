"""Engine against a plain PyTorch loop on the same model, data and optimizer arithmetic, one device, real compute.

    python benchmarks/step.py --flavor debug_25m --steps 8

The two take turns, step by step, so that a noisy machine disturbs both alike. Prints JSON with median seconds
per step and their ratio (engine tokens/s over the plain loop's).
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor, nn

from torchround.config import EngineTable, OptimizerTable, TrainingTable
from torchround.engine.store.bundles import owner_of
from torchround.engine.store.host_store import HostStore
from torchround.layer import LayeredModel, MicroBatch
from torchround.models import FAMILIES
from torchround.optim import adamw_update_, clip_scale, decayed_names, sum_of_squares
from torchround.pipeline.plan_report import plan_for
from torchround.run.engine_parts import build_engine, build_store
from torchround.run.hardware import find_hardware
from torchround.run.numbers import RunNumbers, run_question

LR = 1e-4
MAX_NORM = 1.0
LEAST_RATIO = 0.9


class PlainLoop:
    """One `nn.Module`, ordinary autograd without recomputation, the same AdamW; everything in one memory."""

    def __init__(self, model: LayeredModel, store: HostStore, optimizer: OptimizerTable) -> None:
        self._layers = model.layers
        self._optimizer = optimizer
        self._parameters = materialise(model, store.weights())
        self._decayed = decayed_names(model)
        self._moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self._parameters.values()]
        self._updates = 0

    def step(self, micro_batches: list[MicroBatch]) -> float:
        """Loss of one step, after its update."""
        num_labels = sum(micro_batch.num_labels() for micro_batch in micro_batches)
        total = 0.0
        for micro_batch in micro_batches:
            hidden: Tensor | None = None
            for layer in self._layers:
                hidden = layer(hidden, micro_batch)
            assert hidden is not None, "the model has no layers"
            hidden.backward(torch.full_like(hidden, 1.0 / num_labels))
            total += hidden.item()
        self._update()
        return total / num_labels

    def _update(self) -> None:
        squares = (float(sum_of_squares(_gradient(p).reshape(-1))) for p in self._parameters.values())
        scale = clip_scale(math.sqrt(math.fsum(squares)), MAX_NORM)
        self._updates += 1
        for (name, parameter), (first, second) in zip(self._parameters.items(), self._moments, strict=True):
            adamw_update_(
                parameter.data.view(-1),
                first.view(-1),
                second.view(-1),
                _gradient(parameter).reshape(-1),
                parameter.data.view(-1),
                lr=LR,
                betas=self._optimizer.betas,
                eps=self._optimizer.eps,
                weight_decay=self._optimizer.weight_decay if name in self._decayed else 0.0,
                bias_correction_step=self._updates,
                gradient_scale=scale,
            )
            parameter.grad = None


def materialise(model: LayeredModel, weights: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """Give the model memory of its own with these weights, by stored name; a tied parameter stays one."""
    real: dict[nn.Parameter, nn.Parameter] = {}
    stored: dict[str, nn.Parameter] = {}
    for name, layer in zip(model.names, model.layers, strict=True):
        for path, parameter in list(layer.named_parameters()):
            if parameter not in real:
                real[parameter] = stored[f"{name}.{path}"] = nn.Parameter(weights[f"{name}.{path}"].clone())
            module, attribute = owner_of(layer, path)
            setattr(module, attribute, real[parameter])
    return stored


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "backward has not run"
    return parameter.grad


def random_step(training: TrainingTable, vocab_size: int, generator: torch.Generator) -> list[MicroBatch]:
    """Random tokens, one document a sequence."""
    positions = torch.arange(training.seq_len).expand(training.micro_batch_size, -1).contiguous()
    micro_batches = []
    for _ in range(training.global_batch_size // training.micro_batch_size):
        drawn = torch.randint(
            vocab_size, (training.micro_batch_size, training.seq_len + 1), generator=generator
        )
        micro_batches.append(
            MicroBatch(
                drawn[:, :-1].contiguous(),
                drawn[:, 1:].contiguous(),
                positions,
                torch.zeros_like(positions),
                max_documents=1,
            )
        )
    return micro_batches


def main() -> int:
    """Run both and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flavor", default="debug_25m", help="Llama 3 flavor")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens per sequence")
    parser.add_argument("--global-batch-size", type=int, default=8, help="sequences per step")
    parser.add_argument("--micro-batch-size", type=int, default=2, help="sequences per micro-batch")
    parser.add_argument(
        "--check", action="store_true", help="end with 1 where a loss differs or the ratio is below 0.9"
    )
    options = parser.parse_args()
    training = TrainingTable(
        seq_len=options.seq_len,
        global_batch_size=options.global_batch_size,
        micro_batch_size=options.micro_batch_size,
        dtype="float32",
        max_norm=MAX_NORM,
    )
    engine_table, optimizer = EngineTable(devices="cpu", num_devices=1), OptimizerTable()
    family = FAMILIES["llama3"]
    model_config = family.config_from_flavor(options.flavor)
    model, hardware = family.build(model_config), find_hardware(engine_table)
    numbers = RunNumbers(training, engine_table)
    store = build_store(model, numbers, hardware)
    store.initialize(model, seed=0)
    plain = PlainLoop(family.build(model_config), store, optimizer)
    plan = plan_for(run_question(model, numbers, hardware))
    generator = torch.Generator().manual_seed(0)
    plain_s, engine_s, losses_differ = [], [], 0
    with build_engine(model, store, hardware.make_devices(), plan, numbers, optimizer) as engine:
        for step in range(options.steps + 1):
            micro_batches = random_step(training, model_config.vocab_size, generator)
            start = time.perf_counter()
            expected = plain.step(micro_batches)
            middle = time.perf_counter()
            result = engine.forward_backward(micro_batches)
            engine.step(LR)
            engine.drain()  # so that the two never run at the same time
            end = time.perf_counter()
            losses_differ += result.loss() != expected
            if step > 0:  # the first allocates
                plain_s.append(middle - start)
                engine_s.append(end - middle)
    ratio = statistics.median(a / b for a, b in zip(plain_s, engine_s, strict=True))
    report = {
        "model": options.flavor,
        "parameters": store.num_parameters(),
        "tokens_per_step": training.global_batch_size * training.seq_len,
        "partition": [plan.partition.forward, plan.partition.fused, plan.partition.backward],
        "plain_step_s": statistics.median(plain_s),
        "engine_step_s": statistics.median(engine_s),
        "engine_over_plain_tokens_per_s": ratio,
        "steps_with_another_loss": losses_differ,
    }
    print(json.dumps(report, indent=2))
    return 1 if options.check and (ratio < LEAST_RATIO or losses_differ) else 0


if __name__ == "__main__":
    sys.exit(main())
