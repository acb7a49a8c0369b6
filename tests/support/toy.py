"""A small layered model for engine tests.

Shapes: B sequences, T tokens, D width, V vocabulary, L layers (embedding, blocks, head).
"""

import torch
from torch import nn
from torch.nn import functional as F

from torchround.config import AdamWTable
from torchround.engine.device import CpuDevice
from torchround.engine.engine import Engine
from torchround.engine.settings import EngineSettings
from torchround.engine.store.host_store import HostStore
from torchround.keeping import keep
from torchround.layer import IGNORED_LABEL, KeptWork, LayeredModel, LayerWork, MicroBatch, aligned
from torchround.planning.partition import Partition
from torchround.planning.update_modes import BOUNDED, SYNC

WIDTH, VOCABULARY, BLOCKS = 16, 37, 5
# eps is well above the rounding of a gradient, see `rounding.py`: weights can be compared between computations that
# round differently.
OPTIMIZER = AdamWTable(lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)
MAX_NORM = 0.5

# L = 7 layers each: one stage, the finest cut, and asymmetric cuts.
PARTITIONS = {
    "one stage": Partition((), 7, ()),
    "one layer a stage": Partition((1,) * 6, 1, (1,) * 6),
    "forward coarser": Partition((3, 3), 1, (1, 1, 2, 2)),
    "backward coarser": Partition((1, 2, 2), 2, (4, 1)),
}

# What each layer keeps, in several choices.
KEPT = {
    "all": ((), *(("gate_up", "down"),) * BLOCKS, ()),
    "half": ((), *(("gate_up", "down"), ()) * (BLOCKS // 2), ("gate_up", "down"), ()),
    "one part": ((), *(("down",),) * BLOCKS, ()),
    "mixed": ((), ("gate_up",), (), ("down", "gate_up"), ("down",), (), ()),
}


class ToyLayer(nn.Module):
    """`keepable` gives the width of the result of each part that can be kept."""

    keepable: dict[str, int] = {}  # noqa: RUF012  (no test changes it)

    def work(self, batch, tokens, element_bytes, device="cpu"):
        rows = batch * tokens
        parts = tuple(
            KeptWork(name, aligned(rows * width * element_bytes), 0.0) for name, width in self.keepable.items()
        )
        return LayerWork((), 0, rows * WIDTH * element_bytes, keepable=parts)


class ToyEmbedding(ToyLayer):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY, WIDTH, device="meta"))

    def forward(self, hidden, micro_batch):
        return F.embedding(micro_batch.tokens, self.weight)

    def init_weights(self, generator):
        self.weight.normal_(generator=generator)


class ToyBlock(ToyLayer):
    """A gated residual block that can keep its two products."""

    keepable = {"gate_up": 3 * WIDTH, "down": WIDTH}  # noqa: RUF012  (no test changes it)

    def __init__(self):
        super().__init__()
        self.norm = nn.Parameter(torch.empty(WIDTH, device="meta"))
        self.up = nn.Linear(WIDTH, 3 * WIDTH, device="meta")
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False, device="meta")

    def forward(self, hidden, micro_batch):
        scaled = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-5) * self.norm
        return hidden + keep("down", self.down, F.silu(keep("gate_up", self.up, scaled)))

    def init_weights(self, generator):
        self.norm.fill_(1.0)
        for weight in (self.up.weight, self.up.bias, self.down.weight):
            weight.normal_(std=0.2, generator=generator)


class PlantedBlock(ToyBlock):
    """A block that takes `plant(hidden, micro_batch)` for its input. The function may also raise or wait."""

    def __init__(self, plant):
        super().__init__()
        self.plant = plant

    def forward(self, hidden, micro_batch):
        return super().forward(self.plant(hidden, micro_batch), micro_batch)


class ToyHead(nn.Module):
    def __init__(self, tied_to):
        super().__init__()
        self.norm = nn.Parameter(torch.empty(WIDTH, device="meta"))
        self.weight = nn.Parameter(torch.empty(VOCABULARY, WIDTH, device="meta")) if tied_to is None else tied_to.weight
        self.tied = tied_to is not None

    def forward(self, hidden, micro_batch):
        logits = F.linear(hidden * self.norm, self.weight).float()
        return F.cross_entropy(
            logits.flatten(0, 1), micro_batch.labels.flatten(), reduction="sum", ignore_index=IGNORED_LABEL
        )

    def init_weights(self, generator):
        self.norm.fill_(1.0)
        if not self.tied:
            self.weight.normal_(std=0.2, generator=generator)


def toy_model(tied=False):
    embedding = ToyEmbedding()
    blocks = [ToyBlock() for _ in range(BLOCKS)]
    head = ToyHead(embedding if tied else None)
    names = ("embedding", *(f"block.{index}" for index in range(BLOCKS)), "head")
    return LayeredModel(names, (embedding, *blocks, head))


def planted_model(plant):
    model = toy_model()
    first, *blocks, last = model.layers
    return LayeredModel(model.names, (first, *(PlantedBlock(plant) for _ in blocks), last))


def toy_batches(steps, micro_batches, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        [_toy_micro_batch(3 if index == 0 else 2, 8, generator) for index in range(micro_batches)] for _ in range(steps)
    ]


def _toy_micro_batch(batch, tokens, generator):
    drawn = torch.randint(VOCABULARY, (batch, tokens + 1), generator=generator)
    labels = drawn[:, 1:].masked_fill(torch.rand(batch, tokens, generator=generator) < 0.2, IGNORED_LABEL)
    positions = torch.arange(tokens).expand(batch, tokens).contiguous()
    return MicroBatch(drawn[:, :-1].contiguous(), labels, positions, torch.zeros_like(positions))


def toy_store(model, dtype=torch.float32, seed=0, **options):
    store = HostStore(model, dtype, **options)
    store.initialize(model, seed)
    return store


def watched(device, watcher):
    device.watchers.append(watcher)
    return device


def linked(device):
    """Return the device, which from now on sends each layer's gradients early, as an accelerator does."""
    device.has_link = True
    return device


def toy_engine(
    partition,
    num_devices,
    *,
    model=None,
    store=None,
    dtype=torch.float32,
    mode=SYNC,
    observer=None,
    wrap=lambda device: device,
    machines=None,
    optimizer=OPTIMIZER,
    **settings,
):
    model = model or toy_model()
    store = store or toy_store(model, dtype, mode=mode)
    devices = [wrap(CpuDevice(index)) for index in range(num_devices)]
    if store.mode is BOUNDED:
        settings = {"clip": "layer", **settings}
    settings = EngineSettings(**{"max_norm": MAX_NORM, "hang_timeout_s": 300.0, **settings})
    return Engine(
        model, store, devices, partition, optimizer=optimizer, settings=settings, observer=observer, machines=machines
    )


def train(engine, batches, lr=1e-2, after=lambda: None):
    results = []
    for micro_batches in batches:
        results.append(engine.forward_backward(micro_batches))
        engine.step(lr)
        after()
    engine.drain()
    return [result.loss() for result in results]


def assert_same_state(actual, expected):
    assert actual.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not different, f"{len(different)} of {len(expected)} tensors differ: {different[:5]}"
