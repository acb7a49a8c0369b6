"""The table of `host_store.py` has every writer of weights: between the calls of these methods no weight changes."""

import re
import threading
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps

import pytest
import torch
import xxhash

from tests.support.engine_rows import Row, validate_true_weights
from tests.support.machines import run_machines
from torchround.engine.store import host_store
from torchround.engine.store.host_store import HostStore

WRITERS = {
    name
    for line in re.findall(r"(?m)^    ([a-z_, ]+?)  +[DS][DS ]*  ", host_store.__doc__)
    for name in line.split(", ")
}
OF_A_BUNDLE = {"receive", "update", "derive_device_weights", "copy_version"}


def digest(bundle):
    found = xxhash.xxh3_128()
    for tensor in (*bundle.device_weights, *bundle.state()):
        found.update(tensor.view(torch.uint8).numpy().data)
    return found.digest()


class Witness:
    """Compares each bundle's weights at a writer's beginning with those after the writer before."""

    def __init__(self):
        self.before, self.others, self.inside = {}, [], threading.local()

    @contextmanager
    def writer(self, bundles, name):
        if getattr(self.inside, "depth", 0) == 0:
            self.look(bundles, name)
        self.inside.depth = getattr(self.inside, "depth", 0) + 1
        try:
            yield
        finally:
            self.inside.depth -= 1
            self.before |= {bundle.index: digest(bundle) for bundle in bundles}
            if name == "loadable_views":  # filled by the reader of a checkpoint, until `resume`
                self.before.clear()

    def look(self, bundles, name):
        self.others += [f"{b.name} before {name}" for b in bundles if self.before.get(b.index, digest(b)) != digest(b)]


def watched(name, witnesses, called):
    method = getattr(HostStore, name)

    @wraps(method)
    def watching(store, *arguments, **options):
        called.add(name)
        bundles = [arguments[0]] if name in OF_A_BUNDLE else [b for b in store.bundles if not b.mapped]
        with witnesses[store].writer(bundles, name):
            return method(store, *arguments, **options)

    @wraps(method)
    @contextmanager
    def watching_block(store):
        called.add(name)
        with witnesses[store].writer(store.bundles, name), method(store) as values:
            yield values

    return watching_block if name == "writing" else watching


def poisoned(store):
    store.write_weights({name: torch.full_like(value, torch.inf) for name, value in store.weights().items()})


STALE = {"clip": "layer", "after_step": validate_true_weights}
FIRST = {"initialize", "writing", "set_stale_layers", "derive_device_weights"}
TRUE, LOADED = {"write_true_weights", "restore_device_weights"}, {"loadable_views", "resume"}
RUNS = {
    "split": (Row(2, 1, "forward", "sync", "adamw8", "bf16", tied=True), {"update"}),
    "muon": (Row(3, 1, "forward", "async", "muon"), {"update"}),
    "skipped": (Row(1, 1, "backward", "async", before=poisoned), {"write_weights", "copy_version"}),
    "predict": (
        Row(2, 1, "each", "predict", stopped=True, after_step=validate_true_weights),
        {"update"} | TRUE | LOADED,
    ),
    "stale": (Row(3, 1, "backward", "stale", stopped=True, **STALE), {"update"} | TRUE | LOADED),
    "torch": (Row(2, 1, "forward", "async", "torch", "bf16"), {"step_host_optimizer"}),
    "machines": (Row(2, 3, "forward", "async", evaluates=True), {"update", "receive"}),
    "machines, stale": (Row(2, 2, "backward", "stale", tied=True, **STALE), {"update", "receive"} | TRUE),
}


@pytest.mark.parametrize("name", RUNS)
def test_no_weight_changes_outside_the_writers(monkeypatch, name):
    row, expected = RUNS[name]
    witnesses, called = defaultdict(Witness), set()
    for writer in WRITERS:
        monkeypatch.setattr(HostStore, writer, watched(writer, witnesses, called))

    def before(store):
        row.before(store)
        assert witnesses[store].before.keys() == {bundle.index for bundle in store.bundles}

    watching = replace(row, before=before)
    watching.run() if row.machines == 1 else run_machines(row.machines, watching.run)
    for store, witness in witnesses.items():
        witness.look(store.bundles, "the end")
        assert not witness.others
    assert called == FIRST | expected


def test_the_table_has_no_writer_that_these_runs_do_not_show():
    assert set().union(FIRST, *(expected for _, expected in RUNS.values())) == WRITERS
