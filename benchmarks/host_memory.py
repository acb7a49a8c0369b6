"""Host bytes per trained parameter: resident memory of a training process over that of the same process before.

"Before" is after two steps of a model of 80 thousand parameters: what PyTorch imports for a first step, some 110 MB, is
the same for any model. Printed beside it: over the process before any step.

    python benchmarks/host_memory.py --update sync

Builds a Llama-shaped model in bf16 (by default 308 M parameters), trains two short steps, and subtracts what the
virtual devices hold, which on a GPU is not host memory. Prints JSON.
"""

import argparse
import gc
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
import torch

from torchround.config import OptimizerTable
from torchround.engine.device import CpuDevice
from torchround.engine.engine import Engine
from torchround.engine.results import one_layer_a_stage
from torchround.engine.store.bundles import POLICIES
from torchround.engine.store.host_store import HostStore
from torchround.layer import MicroBatch
from torchround.models import FAMILIES, Family

TOKENS = 16


def resident_bytes() -> int:
    """Resident set of this process."""
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def micro_batch(vocab_size: int) -> MicroBatch:
    """One short sequence of random tokens."""
    drawn = torch.randint(vocab_size, (1, TOKENS + 1))
    positions = torch.arange(TOKENS).expand(1, -1).contiguous()
    return MicroBatch(
        drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous(), positions, torch.zeros_like(positions)
    )


def train(family: Family[Any], shape: Any, update: str) -> dict[str, float]:
    """Two steps: resident bytes over those before, devices' own left out, those of the store, and parameters."""
    before = resident_bytes()
    model = family.build(shape)
    store = HostStore(model, torch.bfloat16, policy=POLICIES[update])
    store.initialize(model, seed=0)
    device = CpuDevice(0)
    partition = one_layer_a_stage(len(model.layers))
    with Engine(model, store, [device], partition, optimizer=OptimizerTable()) as engine:
        for _ in range(2):
            engine.forward_backward([micro_batch(shape.vocab_size)])
            engine.step(lr=1e-4)
        engine.drain()
        added = resident_bytes() - before - device.peak_bytes()
    return {"added": added, "store": store.nbytes(), "parameters": store.num_parameters()}


def main() -> None:
    """Train a small model, then the large one, and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--update", choices=sorted(POLICIES), default="sync", help="update policy")
    parser.add_argument("--blocks", type=int, default=20, help="blocks of 12.8 M parameters")
    options = parser.parse_args()
    family = FAMILIES["llama3"]
    shape = replace(
        family.config_from_flavor("debug_25m"),
        num_layers=options.blocks,
        hidden_size=1024,
        num_heads=16,
        num_kv_heads=8,
        head_dim=64,
        ffn_size=3072,
        vocab_size=25600,
    )
    tiny = replace(
        shape, num_layers=1, hidden_size=64, num_heads=2, num_kv_heads=1, ffn_size=128, vocab_size=512
    )
    first_steps = train(family, tiny, options.update)["added"]
    found = train(family, shape, options.update)
    parameters = found["parameters"]
    print(
        json.dumps(
            {
                "update": options.update,
                "parameters": parameters,
                "store_bytes_per_parameter": found["store"] / parameters,
                "resident_bytes_per_parameter": found["added"] / parameters,
                "first_steps_of_any_model_mb": first_steps / 1e6,
                "resident_bytes_per_parameter_with_them": (found["added"] + first_steps) / parameters,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
