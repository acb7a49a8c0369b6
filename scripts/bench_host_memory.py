"""Host bytes per trained parameter: resident memory of a training process over that of the same process before.

    python scripts/bench_host_memory.py --update sync

Builds a Llama-shaped model in bf16 (by default 308 M parameters), trains two short steps, and subtracts what the
virtual devices hold, which on a GPU is not host memory. Prints JSON.
"""

import argparse
import gc
import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
import torch

from models import FAMILIES
from torchround.config import OptimizerTable
from torchround.engine.device import CpuDevice
from torchround.engine.engine import Engine
from torchround.engine.host_store import HostStore
from torchround.engine.measure import one_layer_a_stage
from torchround.engine.update_policy import POLICIES
from torchround.layer import MicroBatch

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


def main() -> None:
    """Train two steps and print the figures."""
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
    model = family.build(shape)
    warm_up = torch.randn(256, 256, dtype=torch.bfloat16)
    _ = warm_up @ warm_up
    before = resident_bytes()
    store = HostStore(model, torch.bfloat16, policy=POLICIES[options.update])
    store.initialize(model, seed=0)
    device = CpuDevice(0)
    with Engine(
        model, store, [device], one_layer_a_stage(len(model.layers)), optimizer=OptimizerTable()
    ) as engine:
        for _ in range(2):
            engine.forward_backward([micro_batch(shape.vocab_size)])
            engine.step(lr=1e-4)
        engine.drain()
        used = resident_bytes() - before - device.peak_bytes()
    print(
        json.dumps(
            {
                "update": options.update,
                "parameters": store.num_parameters(),
                "store_bytes_per_parameter": store.nbytes() / store.num_parameters(),
                "resident_bytes_per_parameter": used / store.num_parameters(),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
