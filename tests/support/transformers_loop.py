"""A decoder of `transformers` beside the same decoder in layer form, and the loop in which `transformers` trains it.

Every document of a packed batch runs alone through the reference: it has no masks, positions or states of others that
could be wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.toy_decoders import VOCAB, toy_config, toy_decoder
from torchround.config import AdamWTable
from torchround.engine.device import CpuDevice
from torchround.engine.engine import Engine
from torchround.engine.settings import EngineSettings
from torchround.engine.store.host_store import HostStore
from torchround.layer import IGNORED_LABEL, HFNames, LayeredModel, MicroBatch
from torchround.models import FAMILIES
from torchround.pipeline.partition import Partition

# eps well above the rounding of gradients: AdamW would turn the rounding of a vanishing one into a full step.
ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-3}
DECAY, LR, MAX_NORM = 0.1, 1e-3, 1.0


@dataclass(frozen=True)
class Pair:
    """The reference, ours with the same weights, and the names of the tensors in its files.

    `ours` has memory of its own. `build` makes the same layers anew, on `meta`.
    """

    theirs: nn.Module
    ours: LayeredModel
    names: HFNames
    config: Any
    family: str

    def build(self) -> LayeredModel:
        """Build the layers once more, on `meta`."""
        return FAMILIES[self.family].build(self.config)


def make_pair(tools: Any, model_type: str, family_name: str = "transformers", **overrides: Any) -> Pair:
    """Build both at toy size, with equal weights."""
    return pair_of(tools, toy_decoder(toy_config(model_type, **overrides)), family_name)


def pair_of(tools: Any, theirs: nn.Module, family_name: str = "transformers") -> Pair:
    """Build a model in layer form with the weights of `theirs`."""
    family = FAMILIES[family_name]
    config = family.config_from_hf(theirs.config.to_dict())
    names, ours = family.hf_names(config), tools.materialise(family.build(config))
    tools.load_hf_weights(ours, names, theirs)
    return Pair(theirs, ours, names, config, family_name)


def document_logits(theirs: nn.Module, batch: MicroBatch) -> Tensor:
    """Return the logits `[B, T, V]` of a packed batch, each document by itself."""
    rows = []
    for tokens, ids in zip(batch.tokens, batch.document_ids, strict=True):
        documents = tokens.split(torch.unique_consecutive(ids, return_counts=True)[1].tolist())
        rows.append(torch.cat([theirs(input_ids=one[None], use_cache=False).logits[0] for one in documents]))
    return torch.stack(rows)


def loss_sum(theirs: nn.Module, batch: MicroBatch) -> Tensor:
    """Return the sum of the token losses of a packed batch."""
    logits = document_logits(theirs, batch).float().flatten(0, 1)
    return F.cross_entropy(logits, batch.labels.flatten(), reduction="sum", ignore_index=IGNORED_LABEL)


def reference_training(theirs: nn.Module, steps: Sequence[Sequence[MicroBatch]]) -> list[float]:
    """Train by `torch.optim.AdamW` over the whole model. Return the loss of each step, the mean over its labels."""
    theirs.train()
    groups: list[list[nn.Parameter]] = [[], []]
    for name, parameter in theirs.named_parameters():
        # Matrices decay. A stack of the experts' biases looks like one.
        groups[parameter.ndim > 1 and not name.endswith("_bias")].append(parameter)
    decays = [{"params": group, "weight_decay": decay} for group, decay in zip(groups, (0.0, DECAY), strict=True)]
    optimizer = torch.optim.AdamW(decays, lr=LR, **ADAMW)
    losses = []
    for batches in steps:
        mean = sum(loss_sum(theirs, batch) for batch in batches) / sum(b.num_labels() for b in batches)
        mean.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(mean.detach()))
    return losses


def store_of(model: LayeredModel, weights: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> HostStore:
    """Make a store with these weights, by stored name."""
    store = HostStore(model, dtype)
    store.write_weights({name: weights[name].detach() for name in store.weights()})
    return store


def engine_of(model: LayeredModel, store: HostStore, partition: Partition, num_devices: int) -> Engine:
    """Make an engine with AdamW of the reference loop; every device is a thread."""
    return Engine(
        model,
        store,
        [CpuDevice(index) for index in range(num_devices)],
        partition,
        optimizer=AdamWTable(**ADAMW, weight_decay=DECAY),
        settings=EngineSettings(max_norm=MAX_NORM, hang_timeout_s=60.0),
    )


def train(engine: Engine, steps: Sequence[Sequence[MicroBatch]]) -> list[float]:
    """Train and wait for the last update. Return the loss of each step."""
    results = []
    for batches in steps:
        results.append(engine.forward_backward(batches))
        engine.step(LR)
    engine.drain()
    return [result.loss() for result in results]


def packed_steps(tools: Any, num_steps: int, micro_batches: int = 2, sequences: int = 2) -> list[list[MicroBatch]]:
    """Draw steps of packed micro-batches: documents of one token, of more than a window, and whole sequences.

    The reference runs each document by itself, so one of the two `sequences` takes it little more than half as long.
    """
    cuts = ([[13, 1, 10], [24]], [[5, 19], [12, 12]])
    return [
        [
            replace(
                tools.micro_batch(cuts[index % 2][:sequences], VOCAB, seed=micro_batches * step + index),
                max_documents=3,
            )
            for index in range(micro_batches)
        ]
        for step in range(num_steps)
    ]
