"""A step of one of our own families beside the same model as `transformers` defines it, in one run."""

import argparse
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.frame import Benchmark, Report, median_ratio
from benchmarks.plain_loops import materialise, random_step
from benchmarks.step import TINY, Setup, add_options, engine_step
from torchround.config import AdamWTable
from torchround.engine.engine import Engine
from torchround.engine.store.host_store import HostStore
from torchround.layer import HFNames, LayeredModel, MicroBatch
from torchround.models import FAMILIES
from torchround.run.engine_parts import build_engine, build_store

MOST_DIFFERENCE = 1e-5


def beside_our_own(options: argparse.Namespace) -> Report:
    """Measure steps of both engines: the same weights, tokens, cuts and optimizer."""
    torch.set_num_threads(1)
    setup = Setup(options, compile_update=False)
    family = FAMILIES["transformers"]
    content = setup.family.config_to_hf(setup.config)
    config = family.config_from_hf(content)
    borrowed = family.build(config)
    ours, store = setup.engine()
    theirs, their_store = _engine(setup, borrowed)
    copy_weights(store.weights(), setup.family.hf_names(setup.config), their_store, family.hf_names(config))
    with ours, theirs:
        steps = setup.compare(options.steps, {"borrowed": engine_step(theirs), "own": engine_step(ours)})
    own_s, borrowed_s = ([step.seconds for step in steps[side][1:]] for side in ("own", "borrowed"))
    micro_batch = random_step(setup.training, setup.config.vocab_size, torch.Generator().manual_seed(1))[0]
    weights = {"own": store.weights(), "borrowed": their_store.weights()}
    models = {"own": setup.family.build(setup.config), "borrowed": family.build(config)}
    peaks = {side: peak_bytes_of_pass(models[side], weights[side], micro_batch) for side in models}
    return setup.report(
        parameters=store.num_parameters(),
        own_step_s=statistics.median(own_s),
        borrowed_step_s=statistics.median(borrowed_s),
        own_over_borrowed_tokens_per_s=median_ratio(borrowed_s, own_s),
        own_peak_mib=peaks["own"] / 2**20,
        borrowed_peak_mib=peaks["borrowed"] / 2**20,
        largest_relative_difference_of_losses=max(
            abs(a.loss - b.loss) / a.loss for a, b in zip(steps["own"], steps["borrowed"], strict=True)
        ),
    )


def _engine(setup: Setup, model: LayeredModel) -> tuple[Engine, HostStore]:
    """Build an engine with the cuts of our own model."""
    store = build_store(model, setup.numbers, setup.hardware)
    store.initialize(model, seed=0)
    devices = setup.hardware.make_devices()
    return build_engine(model, store, devices, setup.plan, setup.numbers, AdamWTable()), store


def copy_weights(
    weights: Mapping[str, Tensor], names: HFNames, store: HostStore, their_names: HFNames
) -> None:
    """Fill `store` with the weights of another layer form of the same model, tensor by tensor of its files."""
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        found = names[name]
        tensors |= {found: weight} if isinstance(found, str) else dict(zip(found, weight, strict=True))
    store.write_weights({name: _gather(their_names[name], tensors) for name in store.weights()})


def _gather(names: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    if isinstance(names, str):
        return tensors[names]
    return torch.stack(
        [
            tensors[part] if isinstance(part, str) else torch.cat([tensors[name] for name in part])
            for part in names
        ]
    )


def peak_bytes_of_pass(model: LayeredModel, weights: Mapping[str, Tensor], micro_batch: MicroBatch) -> int:
    """Return the most bytes of tensors alive at once in a forward and backward of all layers, gradients included."""
    materialise(model, weights)

    def run() -> None:
        hidden: Any = None
        for layer in model.layers:
            hidden = layer(hidden, micro_batch)
        hidden.backward()

    run()  # gradients, and whatever is made once
    return peak_of_tensors(run)


def peak_of_tensors(run: Callable[[], object]) -> int:
    """Return the most bytes of tensors on the CPU alive at once during `run`, by the profiler's events."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    assert peak > 0, "the profiler saw no tensor"
    return peak


def missed_bounds(figures: Report) -> list[str]:
    """List the bounds that were missed: the losses must be those of one model."""
    difference = figures["largest_relative_difference_of_losses"]
    return [f"losses differ by {difference:.2g}"] if difference > MOST_DIFFERENCE else []


BORROWED = Benchmark(
    """A step of one of our own families beside the same model of transformers ([model] family = "transformers").

One CPU device each, in fp32, with the same weights, tokens, cuts and optimizer. The peaks are of one micro-batch
through all layers and back. --check asks for losses that are equal to 1e-5.""",
    add_options,
    beside_our_own,
    lambda figures: (
        f"borrowed {figures['borrowed_step_s']:.3f} s per step, peak {figures['borrowed_peak_mib']:.0f} MiB",
        (
            f"own {figures['own_step_s']:.3f} s, {figures['own_peak_mib']:.0f} MiB: "
            f"{figures['own_over_borrowed_tokens_per_s']:.2f} times the tokens/s"
        ),
    ),
    TINY,
    missed_bounds,
)
