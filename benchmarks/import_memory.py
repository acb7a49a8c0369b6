"""Peak host memory of reading a Hugging Face folder into the host store, over what the store itself holds.

    python benchmarks/import_memory.py --parameters 500e6

Writes a random Llama-shaped model in bf16 to a temporary folder (2 bytes per parameter), reads it in a process of
its own and prints JSON. `beyond_store_bytes` is the stricter figure: the whole file would be 2 bytes per parameter.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
import torch
from safetensors.torch import save_file

from torchround.engine.store.host_store import HostStore
from torchround.hf import PretrainedWeights
from torchround.models import FAMILIES
from torchround.models.common.config import TransformerConfig

FAMILY = FAMILIES["llama3"]
SHARD_BYTES = 200_000_000


def model_config(num_layers: int) -> TransformerConfig:
    """About 16.8 M parameters a block."""
    config = FAMILY.config_from_flavor("debug", num_layers=num_layers, vocab_size=8000)
    return replace(config, hidden_size=1024, num_heads=16, num_kv_heads=8, head_dim=64, ffn_size=4437)


def write_folder(folder: Path, config: TransformerConfig) -> None:
    """Random weights, in files of `SHARD_BYTES`."""
    shapes = FAMILY.build(config).stored_shapes()
    where: dict[str, str] = {}
    for number, tensors in enumerate(shards(FAMILY.hf_names(config), shapes)):
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / file)
        where |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def shards(names: dict, shapes: dict[str, torch.Size]) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors file by file."""
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        tensors[names[name]] = torch.randn(shape, dtype=torch.bfloat16)
        if sum(tensor.nbytes for tensor in tensors.values()) > SHARD_BYTES:
            yield tensors
            tensors = {}
    if tensors:
        yield tensors


def resident_bytes(peak: bool) -> int:
    """Resident set of this process, now or at its highest since `reset_peak`."""
    key = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def measure(folder: Path, config: TransformerConfig) -> dict[str, float]:
    """In a fresh process: read the folder into a store."""
    torch.zeros(1).to(torch.bfloat16)  # what torch allocates once is not the import's
    model = FAMILY.build(config)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = resident_bytes(peak=False)
    store = HostStore(model, torch.bfloat16)
    start_s = time.perf_counter()
    pretrained = PretrainedWeights(folder, FAMILY.hf_names(config), model.stored_shapes())
    store.initialize(model, 0, pretrained.load)
    seconds = time.perf_counter() - start_s
    grown = resident_bytes(peak=True) - before
    return {
        "parameters": store.num_parameters(),
        "store_bytes": store.nbytes(),
        "file_bytes": pretrained.total_bytes,
        "peak_over_store": round(grown / store.nbytes(), 4),
        "beyond_store_bytes": grown - store.nbytes(),
        "seconds": round(seconds, 2),
        "read_gb_per_s": round(pretrained.total_bytes / seconds / 1e9, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parameters", type=float, default=500e6)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    config = model_config(max(1, round((arguments.parameters - 16.4e6) / 16.8e6)))
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, config), indent=1))
        return
    needed = 16 * arguments.parameters
    if psutil.virtual_memory().available < needed:
        sys.exit(f"{needed / 2**30:.1f} GiB of free memory are needed")
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), config)
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--measure", folder], check=True)


if __name__ == "__main__":
    main()
