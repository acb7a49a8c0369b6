"""One table of engine runs. Its rows meet each legal pair of values of the axes; the last ones were added for a bug.

`tests/engine/test_rows.py` runs them against `tests/support/reference.py`, and checks that no legal pair is missing.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from tests.support.machines import run_machines
from tests.support.optimizers import OPTIMIZERS
from tests.support.reference import Reference
from tests.support.small_decoders import small_decoder
from tests.support.toy import BLOCKS, MAX_NORM, PARTITIONS, linked, toy_batches, toy_engine, toy_model, toy_store
from torchround.config.optimizer_tables import MuonTable
from torchround.engine.compiled import LayerCompiler
from torchround.engine.exchange import share_weights
from torchround.engine.store.bundles import Ownership
from torchround.layer import LayeredModel, with_dropout_seeds
from torchround.optim import NO_STATE, HostOptimizer, LossScaling, SpikeBounds, make_optimizer
from torchround.planning.machine_shares import step_share
from torchround.planning.partition import Partition
from torchround.planning.update_modes import ASYNC, ASYNC_PREDICT, BOUNDED, SYNC

# The first value of an axis is the default, which the table writes as a dot.
AXES = {
    "devices": ("1", "2", "3", "8"),
    "machines": ("1", "2", "3"),
    "cut": ("one", "each", "forward", "backward"),
    "update": ("sync", "async", "predict", "bounded", "stale"),
    "optimizer": ("adamw", "adamw8", "muon", "muon8", "torch"),
    "dtype": ("fp32", "bf16", "fp16"),
    "gradient": ("own", "narrow"),
    "clip": ("global", "layer", "none"),
    "rounds": ("1", "2"),
    "calls": ("1", "2"),
    "kept": ("none", "all", "upper"),
    "recompute": ("stage", "layer", "timed"),
    "link": ("none", "early"),
    "tied": ("no", "tied"),
    "experts": ("no", "experts"),
    "adapters": ("no", "adapters"),
    "evaluates": ("no", "evaluates"),
    "stopped": ("no", "stopped"),
    "compiled": ("no", "update", "layers"),
}
# A pairwise cover by few and small runs. Without the rows of compiled runs it still meets every pair of the other axes.
TABLE = """
devices  machines  cut       update   optimizer  dtype  gradient  clip   rounds  calls  kept   recompute  link   tied  experts  adapters  evaluates  stopped  compiled
.        .         .         .        .          fp16   .         .      2       2      upper  layer      .      .     .        .         .          .        .
.        .         .         .        adamw8     .      .         none   .       .      all    .          .      .     .        .         .          .        .
.        .         each      .        muon       .      narrow    .      .       .      all    timed      .      tied  experts  adapters  .          stopped  .
8        3         backward  .        muon       bf16   .         layer  2       2      .      .          early  .     .        .         evaluates  .        .
3        .         .         .        muon       fp16   .         none   2       .      upper  layer      early  tied  .        .         evaluates  .        .
2        2         backward  .        muon8      bf16   .         .      2       .      upper  timed      early  .     .        .         .          stopped  .
.        .         forward   .        torch      bf16   .         none   2       .      .      .          .      .     .        .         evaluates  .        .
.        .         .         async    .          .      narrow    none   .       .      .      timed      early  .     .        .         evaluates  .        .
.        .         backward  async    adamw8     fp16   narrow    .      .       .      .      layer      .      .     .        .         .          .        .
2        2         forward   async    muon       .      narrow    none   .       2      upper  .          early  .     .        .         .          .        .
.        3         forward   async    muon8      fp16   .         none   2       .      all    .          .      tied  experts  adapters  evaluates  .        .
3        .         .         async    muon8      bf16   .         .      .       2      .      .          .      tied  .        .         .          .        .
8        .         each      async    muon8      .      narrow    layer  2       .      .      layer      .      tied  .        .         .          .        .
3        .         backward  async    torch      .      narrow    none   .       .      upper  layer      .      .     experts  adapters  .          .        .
2        .         each      async    torch      fp16   narrow    layer  .       2      all    layer      .      tied  .        .         .          .        .
8        .         .         async    torch      fp16   narrow    .      2       2      upper  timed      early  .     .        .         .          stopped  .
2        2         each      predict  .          fp16   .         layer  2       .      upper  .          .      tied  .        .         .          .        .
3        3         forward   predict  .          .      narrow    .      2       2      all    layer      early  .     .        .         evaluates  stopped  .
.        .         backward  predict  adamw8     .      .         .      .       .      .      layer      early  tied  .        .         .          .        .
8        2         .         predict  adamw8     bf16   narrow    none   .       2      .      timed      early  tied  experts  adapters  .          .        .
.        .         forward   bounded  .          .      narrow    layer  .       .      upper  timed      .      .     experts  .         .          .        .
3        2         each      bounded  .          bf16   .         none   .       .      all    layer      .      .     .        adapters  evaluates  .        .
8        .         backward  bounded  .          bf16   narrow    layer  .       .      all    layer      early  tied  .        .         .          .        .
2        3         .         bounded  adamw8     .      .         layer  2       2      .      .          .      tied  .        .         evaluates  stopped  .
8        .         forward   stale    .          .      .         none   2       .      .      .          early  tied  .        .         evaluates  stopped  .
3        3         each      stale    adamw8     bf16   narrow    layer  .       .      upper  timed      early  tied  .        .         .          .        .
.        2         backward  stale    adamw8     bf16   narrow    none   2       2      upper  layer      .      .     .        .         .          .        .
2        .         forward   stale    adamw8     bf16   narrow    layer  2       2      .      layer      .      .     experts  adapters  .          .        .
.        .         .         .        .          .      .         .      .       .      .      .          .      .     .        .         .          .        layers
.        .         backward  .        .          .      .         .      .       .      .      .          .      .     .        .         .          .        update
8        .         each      .        muon       .      .         .      .       2      .      .          .      .     .        .         .          .        update
.        .         .         .        muon8      .      .         .      .       .      .      .          .      .     .        .         .          .        update
8        3         backward  .        muon8      .      .         .      .       .      .      .          .      .     .        .         .          .        layers
.        .         .         .        torch      .      .         .      .       .      .      .          .      .     .        .         .          .        layers
.        .         .         .        torch      .      .         .      .       .      .      .          .      .     .        .         .          .        update
2        2         forward   async    adamw8     bf16   .         layer  2       .      all    layer      early  tied  experts  adapters  evaluates  stopped  update
2        2         each      async    muon       bf16   .         layer  2       .      all    layer      early  tied  experts  adapters  evaluates  stopped  layers
3        3         .         predict  .          fp16   narrow    none   .       .      upper  timed      .      .     .        .         .          .        update
3        .         forward   predict  adamw8     fp16   narrow    none   .       2      upper  timed      .      .     .        .         .          .        layers
.        .         .         bounded  .          .      .         layer  .       .      .      .          .      .     .        .         .          .        layers
.        .         .         bounded  .          .      .         layer  .       .      .      .          .      .     .        .         .          .        update
.        .         each      stale    .          .      .         layer  .       .      .      .          .      .     .        .         .          .        update
.        .         each      stale    .          .      .         layer  .       .      .      .          .      .     .        .         .          .        layers
"""

# Pairs that the engine refuses, and a word of what it says.
REFUSED = (
    ("cut", "one", "update", "stale", "stale_layers"),
    ("kept", "all", "update", "stale", "keep nothing"),
    ("clip", "global", "update", "bounded stale", "global norm"),
    ("dtype", "fp16", "update", "bounded stale", "float16"),
    ("machines", "2 3", "optimizer", "torch", "several machines"),
    ("optimizer", "muon muon8", "update", "bounded stale", "muon.s after it"),
    ("optimizer", "muon muon8", "update", "predict", "predicts the next step"),
    ("optimizer", "torch", "update", "bounded stale", "bounded updates"),
    ("optimizer", "torch", "update", "predict", "predicted device weights"),
)

MODES = {"sync": SYNC, "async": ASYNC, "predict": ASYNC_PREDICT, "bounded": BOUNDED, "stale": BOUNDED}
TABLES = {
    **{name: OPTIMIZERS[name.replace("8", " compact")] for name in ("adamw", "adamw8", "muon", "muon8")},
    # Each setting of Muon that is not the default.
    "muon of others": MuonTable(lr=1e-2, adamw_lr=5e-3, eps=1e-3, momentum=0.5, weight_decay=0.0),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CUTS = dict(zip(AXES["cut"], PARTITIONS.values(), strict=True))
# Layers below 3 are stale. The parts that both the toy and the families can keep.
KEPT = {
    "none": (),
    "all": ((), *(("gate_up", "down"),) * BLOCKS, ()),
    "upper": ((), (), (), ("gate_up",), ("down", "gate_up"), ("down",), ()),
}
# Models of the families cost more, so they have three blocks.
FAMILY_BLOCKS = 3
FAMILY_CUTS = {
    "one": Partition((), 5, ()),
    "each": Partition((1,) * 4, 1, (1,) * 4),
    "forward": Partition((2, 2), 1, (1, 1, 2)),
    "backward": Partition((1, 1, 1), 2, (2, 1)),
}
FAMILY_KEPT = {
    "none": (),
    "all": ((), *(("gate_up", "down"),) * FAMILY_BLOCKS, ()),
    "upper": ((), (), (), ("down", "gate_up"), ()),
}
LR = 1e-2
# Some steps leave machines, rounds or calls without a micro-batch.
STEPS = tuple(
    with_dropout_seeds(batch[:count], seed=7, step=step)
    for step, (batch, count) in enumerate(zip(toy_batches(3, 4), (3, 1, 4), strict=True))
)
[HELD_OUT] = toy_batches(1, 2, seed=1)


def torch_adamw(named):
    return torch.optim.AdamW(named, lr=LR, weight_decay=0.1)


def scaled_adapters():
    settings = {"dora": True, "rslora": True, "rank_pattern": {"up_proj": 3}}
    return small_decoder("llama3", "debug", ("q_proj", "up_proj"), settings=settings, num_layers=FAMILY_BLOCKS)


@dataclass
class Outcome:
    """What a run gave, step by step, and what it left: `state` and `resume` are what a checkpoint holds."""

    losses: list = field(default_factory=list)
    norms: list = field(default_factory=list)
    scales: list = field(default_factory=list)
    skipped: list = field(default_factory=list)
    evaluated: list = field(default_factory=list)
    # The reference loop has none of these.
    updates: list = field(default_factory=list)
    resume: dict = field(default_factory=dict)
    device_weights: list = field(default_factory=list, repr=False)
    torch_state: dict | None = field(default=None, repr=False)
    state: dict = field(default_factory=dict, repr=False)

    def load(self, store):
        views = store.loadable_views()
        for name, value in self.state.items():
            views[name].copy_(value)
        store.resume(len(self.norms), **json.loads(json.dumps(self.resume)))

    def after(self, begun):
        lists = (*FIGURES, "updates")
        return replace(self, **{name: getattr(begun, name) + getattr(self, name) for name in lists})


FIGURES = ("losses", "norms", "scales", "skipped", "evaluated")


def assert_same(found, expected):
    for name in FIGURES:
        assert str(getattr(found, name)) == str(getattr(expected, name)), name
    if expected.updates:
        assert [(str(u.loss), u.fault, u.not_finite) for u in found.updates] == [
            (str(u.loss), u.fault, u.not_finite) for u in expected.updates
        ]
        assert found.resume == expected.resume
        for ours, theirs in zip(found.device_weights, expected.device_weights, strict=True):
            assert all(map(same_bits, ours, theirs))
    assert found.state.keys() == expected.state.keys()
    different = [name for name, value in expected.state.items() if not same_bits(found.state[name], value)]
    assert not different, f"{len(different)} of {len(expected.state)} tensors differ: {different[:5]}"


def same_bits(one, other):
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


def together(outcomes):
    first, *others = outcomes
    state = dict(first.state)
    for other in others:
        assert not state.keys() & other.state.keys(), "two machines save the same tensor"
        assert_same(replace(other, state={}), replace(first, state={}))
        state |= other.state
    return replace(first, state=state)


@dataclass(frozen=True)
class Row:
    """A run of three steps, by the axes, and what no axis has.

    `build` and `partition` are of another model, `spikes` the arguments of its `SpikeBounds`. `before(store)` may change
    the first weights. `after_step(engine)` returns the evaluations that it begins.
    """

    devices: int = 1
    machines: int = 1
    cut: str = "one"
    update: str = "sync"
    optimizer: str = "adamw"
    dtype: str = "fp32"
    gradient: str = "own"
    clip: str = "global"
    rounds: int = 1
    calls: int = 1
    kept: str = "none"
    recompute: str = "stage"
    link: str = "none"
    tied: bool = False
    experts: bool = False
    adapters: bool = False
    evaluates: bool = False
    stopped: bool = False
    compiled: str = "no"
    stale: int = 3
    batches: Sequence[Sequence[Any]] = STEPS
    held_out: Sequence[Any] = tuple(HELD_OUT)
    build: Callable[[], LayeredModel] | None = None
    partition: Partition | None = None
    spikes: tuple[Any, ...] = ()
    experts_by_need: bool | str = "auto"
    before: Callable[[Any], None] = lambda store: None
    after_step: Callable[[Any], list] = lambda engine: []

    @property
    def stale_layers(self):
        return self.stale if self.update == "stale" else 0

    @property
    def of_family(self):
        return self.experts or self.adapters

    def model(self):
        if self.build is not None:
            return self.build()
        if not self.of_family:
            return toy_model(self.tied)
        family = ("qwen3", "debug_moe") if self.experts else ("llama3", "debug")
        targets = ("q_proj", "o_proj", "up_proj") if self.adapters else ()
        return small_decoder(*family, targets, num_layers=FAMILY_BLOCKS, tied_embeddings=self.tied)

    @property
    def loss_scale(self):
        """In float16 some of the first steps overflow with it, and others do not."""
        if self.of_family:
            return 2.0**19
        return 2.0**16 if self.tied else 2.0**18

    @property
    def table(self):
        return TABLES.get(self.optimizer)

    def store(self, model, seed=0, **options):
        options |= {"mode": MODES[self.update], "optimizer": make_optimizer(self.table) if self.table else NO_STATE}
        store = toy_store(model, DTYPES[self.dtype], seed, **options)
        store.spikes = SpikeBounds(*self.spikes)
        store.loss_scaling = LossScaling(self.dtype == "fp16", self.loss_scale)
        return store

    def engine(self, model, store, optimizer, **options):
        kept, cuts = (FAMILY_KEPT, FAMILY_CUTS) if self.of_family else (KEPT, CUTS)
        settings = {
            "rounds": self.rounds, "clip": "global" if self.clip == "none" else self.clip,
            "max_norm": 0.0 if self.clip == "none" else MAX_NORM,
            "kept": kept[self.kept], "layerwise_recompute": self.recompute == "layer",
            "times_layers": self.recompute == "timed",
            "accumulate_dtype": torch.bfloat16 if self.gradient == "narrow" else torch.float32,
            "stale_layers": self.stale_layers, "accumulates": self.calls > 1,
            "compile_update": self.compiled == "update",
            "experts_by_need": self.experts_by_need,
            "compiler": LayerCompiler(model, "aot_eager") if self.compiled == "layers" else None,
            "wrap": linked if self.link == "early" else lambda device: device,
        }  # fmt: skip
        settings |= options
        return toy_engine(
            self.partition or cuts[self.cut], self.devices, model=model, store=store, optimizer=optimizer, **settings
        )

    def calls_of(self, batch):
        size = -(-len(batch) // self.calls)
        return [batch[first : first + size] for first in range(0, len(batch), size)]

    def run(self, group=None, load=None, torch_state=None, pinned=False, **options):
        """Train on this machine of a group, or alone. `load(store)` resumes a run. The state is this machine's part."""
        if self.stopped:
            begun = replace(self, stopped=False, batches=self.batches[:2]).run(group, pinned=pinned, **options)
            rest = replace(self.elsewhere(), stopped=False, batches=self.batches[2:])
            return rest.run(group, begun.load, begun.torch_state, pinned, **options).after(begun)
        model, ownership = self.model(), Ownership(group.rank, group.size) if group is not None else Ownership(0, 1)
        store = self.store(model, seed=0 if load is None else 1, ownership=ownership, pinned=pinned)
        optimizer = self.table or HostOptimizer(torch_adamw)
        self.before(store)
        if load is not None:
            load(store)
        if group is not None:
            share_weights(store, group)
        with self.engine(model, store, optimizer, machines=group, **options) as engine:
            if torch_state is not None:
                optimizer.optimizer.load_state_dict(torch_state)
            outcome = self.train(engine, group)
            outcome.torch_state = None if self.table else optimizer.optimizer.state_dict()
        outcome.state = {name: view.clone() for name, view in store.named_views().items()}
        outcome.resume = store.resume_state()
        outcome.device_weights = [[weights.clone() for weights in bundle.device_weights] for bundle in store.bundles]
        store.close()
        return outcome

    def train(self, engine, group=None):
        results, evaluated, outcome = [], [], Outcome()
        for batch in self.batches:
            if self.evaluates:
                evaluated.append(engine.evaluate(self.held_out))  # not awaited, so that it runs beside the step
            labels = sum(micro_batch.num_labels() for micro_batch in batch)
            of_step = []
            for call in self.calls_of(batch):
                share = None
                if group is not None:
                    share = step_share(len(call), self.rounds, group.rank, group.size)
                    call = [call[index] for index in share.micro_batches]
                of_step.append(engine.forward_backward(call, share, labels))
            engine.step(LR)
            results.append(of_step)
            evaluated += self.after_step(engine)
        engine.drain()
        evaluated.append(engine.evaluate(self.held_out))
        outcome.evaluated = [result.loss() for result in evaluated]
        for of_step in results:
            outcome.losses += [result.loss() for result in of_step]
            update = of_step[0].update()
            outcome.updates.append(update)
            outcome.norms.append(update.grad_norm)
            outcome.scales.append(update.loss_scale)
            outcome.skipped.append(update.skipped)
        return outcome

    def elsewhere(self):
        cuts = AXES["cut"]
        return replace(
            self, devices={1: 3, 2: 1, 3: 2, 8: 2}[self.devices], cut=cuts[1 + (cuts.index(self.cut) + 1) % 3]
        )

    def run_all(self, **options):
        if self.machines == 1:
            return self.run(**options)
        return together(run_machines(self.machines, lambda group: self.run(group, **options)))

    def alone(self):
        return replace(self, machines=1, rounds=self.rounds * self.machines)

    def reference(self, device="cpu", **options):
        model = self.model()
        self.before(store := self.store(model))
        weights = {name: view.clone() for name, view in store.weights().items()}
        loop = Reference(
            model, weights, self.table or torch_adamw, "bounded" if self.update == "stale" else self.update,
            DTYPES[self.dtype], rounds=self.rounds * self.machines, clip=self.clip, device=device,
            max_norm=0.0 if self.clip == "none" else MAX_NORM, stale=self.stale_layers, stale_rounds=self.machines,
            accumulate=torch.bfloat16 if self.gradient == "narrow" else torch.float32, loss_scale=self.loss_scale, **options,
        )  # fmt: skip
        outcome = Outcome()
        for number, batch in enumerate(self.batches):
            if self.evaluates:
                outcome.evaluated.append(loop.evaluate(self.held_out))
            labels = sum(micro_batch.num_labels() for micro_batch in batch)
            for call in self.calls_of(batch):
                loss, gradients = loop.gradients(call, labels)
                outcome.losses.append(loss)
            loop.update(gradients, LR)
            if self.stopped and number == 1:
                outcome.evaluated.append(loop.evaluate(self.held_out))
        outcome.evaluated.append(loop.evaluate(self.held_out))
        # A checkpoint does not hold packed weights.
        state = {name: value for name, value in loop.state().items() if name.split("/")[1] not in model.packed}
        return replace(outcome, norms=loop.norms, scales=loop.scales, skipped=loop.skipped, state=state)


def read_row(values):
    given = {
        name: choices[0] if value == "." else value for (name, choices), value in zip(AXES.items(), values, strict=True)
    }
    assert all(value in AXES[name] for name, value in given.items()), given
    kinds = {each.name: each.type for each in fields(Row)}
    return Row(**{n: int(v) if kinds[n] is int else v != "no" if kinds[n] is bool else v for n, v in given.items()})


def validate_true_weights(engine):
    engine.drain()
    found = [engine.evaluate(HELD_OUT)]
    with engine.true_device_weights():
        return [*found, engine.evaluate(HELD_OUT)]


LINES = [line.split() for line in TABLE.strip().splitlines()]
assert LINES[0] == list(AXES)
ROWS = {" ".join([f"{i:02}", *(v for v in line if v != ".")]): read_row(line) for i, line in enumerate(LINES[1:], 1)}
# Rows for bugs, and for what takes three values to meet.
BUGS = {
    "Muon clips by layer what AdamW updates alone": Row(2, cut="backward", optimizer="muon", clip="layer", tied=True),
    "Muon has settings of its own": Row(2, cut="each", optimizer="muon of others"),
    "a pass that begins with its fused stage keeps the jobs before it": Row(3, update="async", optimizer="muon"),
    "a tied weight adds up its rounds in fp32": Row(
        2, cut="forward", update="async", dtype="bf16", rounds=2, tied=True
    ),
    "every layer before the last is stale": Row(8, cut="each", update="stale", clip="layer", tied=True, stale=6),
    "calls of three machines in rounds that three does not divide": Row(
        2, machines=3, cut="forward", update="async", optimizer="muon", calls=2, tied=True, evaluates=True
    ),
    "only the first rounds of three machines read older weights": Row(
        3, machines=3, cut="each", update="stale", clip="none", dtype="bf16", rounds=2, calls=2, stopped=True
    ),
    "one layer is stale": Row(3, cut="backward", update="stale", clip="layer", dtype="bf16", stale=1),
    "an expert is a matrix of its own": Row(2, cut="each", optimizer="muon", dtype="bf16", rounds=2, experts=True),
    "an evaluation may be ahead of weights that still arrive": Row(
        2, machines=2, cut="forward", update="async", evaluates=True
    ),
    "a resumed prediction of adapters": Row(2, cut="each", update="predict", dtype="bf16", adapters=True, stopped=True),
    "magnitudes and ranks of adapters": Row(
        3, cut="each", update="async", dtype="bf16", kept="all", adapters=True, stopped=True, build=scaled_adapters
    ),
}
