"""Plan a run without running it: does it fit, where the memory goes, how fast, and what to change.

    python scripts/plan.py --config qwen3_32b.toml --device rtx4090 --num-devices 8 --host-memory-gib 800

Any key of the config can follow, as for train.py: `--training.seq_len 8192`. A card that is not in the table is
given by numbers: `--device-memory-gib 24 --device-tflops 165 --pcie-gb-per-s 32`. Nothing is allocated.
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import json

from rich.console import Console

from torchround.config import Config, ConfigError, load_config
from torchround.engine.build import DTYPES, USABLE_CUDA_FRACTION
from torchround.engine.errors import EngineUsageError
from torchround.hf import HFError, PretrainedWeights
from torchround.layer import LayeredModel
from torchround.models import FAMILIES, Family, LoraShape, ModelConfigError, TransformerConfig, add_adapters
from torchround.pipeline.devices import DeviceSpec, UnknownPeakError, device_names, find_device
from torchround.pipeline.memory import GIB
from torchround.pipeline.partition import PlanError
from torchround.pipeline.plan_report import report_plan
from torchround.run.dry_run import Hardware, rendered, run_question
from torchround.run.mapped_base import Mapped, map_base

WIDTH = 110  # of the tables where the output is no terminal


class UsageError(ValueError):
    """A question that cannot be answered; the message says what is missing."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 where the run fits, 1 where not, 2 for a mistake in what was given."""
    options, overrides = parser().parse_known_args(arguments)
    try:
        config = load_config(options.config, overrides)
        if options.lora_rank:
            lora = config.lora.model_copy(update={"rank": options.lora_rank})
            config = config.model_copy(update={"lora": lora})
        model, mapped = build_model(config)
        answer = report_plan(run_question(config, model, hardware(options, config), mapped))
    except (
        ConfigError,
        ModelConfigError,
        UsageError,
        EngineUsageError,
        HFError,
        PlanError,
        UnknownPeakError,
    ) as error:
        print(f"plan.py: {error}", file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(rendered(answer), highlight=False, soft_wrap=not sys.stdout.isatty())
    return 0 if answer.plan is not None else 1


def parser() -> argparse.ArgumentParser:
    """All options; what it does not know is an override of the config."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = result.add_argument
    add("--config", required=True, help="TOML file, looked up as given, then in configs/")
    add("--device", help=f"card: {', '.join(device_names())}")
    add("--num-devices", type=count, help="default: engine.num_devices, else 1")
    add("--host-memory-gib", type=positive, help="host memory that the run may use; default: no limit")
    add("--device-memory-gib", type=positive, help="of each device; default: the card's")
    add("--device-tflops", type=positive, help="dense peak in the run's dtype, instead of the card's")
    add("--pcie-gb-per-s", type=positive, help="nominal, one direction, instead of the card's")
    add("--lora-rank", type=count, default=0, help="plan adapters of this rank on lora.targets")
    return result


def count(text: str) -> int:
    """A number of things from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"given {text}; legal: an integer of at least 1")
    return int(text)


def positive(text: str) -> float:
    """An amount from the command line."""
    try:
        amount = float(text)
    except ValueError:
        amount = 0.0
    if not 0 < amount < math.inf:
        raise argparse.ArgumentTypeError(f"given {text}; legal: a number above 0")
    return amount


def build_model(config: Config) -> tuple[LayeredModel, Mapped]:
    """The model on `meta`, with its adapters, and its weights that stay in files."""
    family, shape = model_config(config)
    model, names, lora = family.build(shape), family.hf_names(shape), config.lora
    if lora.rank:
        add_adapters(model, names, LoraShape(lora.rank, lora.alpha, lora.dropout, tuple(lora.targets)))
    if not lora.map_base:
        return model, {}
    folder = Path(os.path.expanduser(config.model.hf_path or ""))
    weights = PretrainedWeights(folder, names, model.stored_shapes(), family.hf_redundant(shape))
    return model, map_base(weights, model, DTYPES[config.training.dtype])


def model_config(config: Config) -> tuple[Family[Any], TransformerConfig]:
    """The family, and a config of it, with the vocabulary that the flavor or the folder's config.json gives."""
    table = config.model
    if table.family not in FAMILIES:
        raise UsageError(f"model.family = {table.family!r} must be one of {', '.join(FAMILIES)}")
    family = FAMILIES[table.family]
    if table.flavor is not None:
        return family, family.config_from_flavor(table.flavor)
    path = Path(os.path.expanduser(table.hf_path or "")) / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"model.hf_path: {path} cannot be read: {error}") from error
    return family, family.config_from_hf(content)


def hardware(options: argparse.Namespace, config: Config) -> Hardware:
    """The card of the table with what was given by number put in its place."""
    card = find_device(options.device) if options.device else None
    if options.device and card is None:
        raise UsageError(
            f"--device {options.device} is not in the table: {', '.join(device_names())}; any other card is given "
            "by --device-memory-gib, --device-tflops and --pcie-gb-per-s"
        )
    numbers = (options.device_memory_gib, options.device_tflops, options.pcie_gb_per_s)
    if card is None and any(number is None for number in numbers):
        raise UsageError("give --device, or --device-memory-gib, --device-tflops and --pcie-gb-per-s")
    memory_gib, tflops, pcie = numbers
    dtype = config.training.dtype
    peaks = {dtype: tflops * 1e12} if tflops else (card.peak_flops if card else {})
    spec = DeviceSpec(
        card.name if card else "given by numbers",
        memory_gib or (card.memory_gib if card else 0.0),
        pcie or (card.pcie_gb_per_s if card else 0.0),
        peaks,
    )
    usable = config.engine.device_memory_gib or USABLE_CUDA_FRACTION * spec.memory_gib
    return Hardware(
        num_devices=options.num_devices or config.engine.num_devices or 1,
        spec=spec,
        device_bytes=int(usable * GIB),
        host_bytes=None if options.host_memory_gib is None else int(options.host_memory_gib * GIB),
    )


if __name__ == "__main__":
    sys.exit(main())
