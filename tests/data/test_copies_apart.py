"""Copies of a document from different epochs: not in one batch if an epoch has enough others, said otherwise."""

import gzip
import json
import logging
import random
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchround.config import DataTable, SourceTable
from torchround.data import Loader, Tokenizer, build_loader
from torchround.data.order_rules import OrderRules
from torchround.data.shuffling import EpochKey, epoch_order
from torchround.layer import MicroBatch

# A document begins with its own two numbers below BASE, and only there.
BASE = 100


def write_documents(path: Path, lengths: list[int], first: int = 0) -> SourceTable:
    """Write documents of token ids, numbered from `first`; each can be told by its first two."""
    documents = [
        {"tokens": [number // BASE, number % BASE, *[BASE] * (length - 2)]}
        for number, length in enumerate(lengths, first)
    ]
    path.write_text("\n".join(map(json.dumps, documents)))
    return SourceTable(path=str(path), content="tokens")


def chat_lengths(count: int, shorter: int = 8) -> list[int]:
    """Return lengths as chats have them, for sequences that are `shorter` times as short as in real runs."""
    generator = random.Random(0)
    return [max(4, int(generator.lognormvariate(5.52, 1.07) / shorter)) for _ in range(count)]


def documents_of(batch: MicroBatch) -> list[int]:
    """List the number of each document that begins in a batch."""
    begins = (batch.positions == 0) & (batch.tokens < BASE)
    rows, columns = np.nonzero(begins.numpy())
    return [
        int(batch.tokens[row, column]) * BASE + int(batch.tokens[row, column + 1])
        for row, column in zip(rows, columns, strict=True)
    ]


def share_of_copies(batches: Iterable[MicroBatch]) -> float:
    """Return the share of documents that have a copy in their own batch."""
    copies = total = 0
    for batch in batches:
        counts = Counter(documents_of(batch)).values()
        copies += sum(count for count in counts if count > 1)
        total += sum(counts)
    return copies / total


def whole(source: SourceTable, **keys: Any) -> DataTable:
    return DataTable(sources=(source,), packing="best_fit", **keys)


@pytest.mark.parametrize(
    ("seq_len", "batch", "earlier", "full"),
    [(2048 // 8, 32, 0.25, 0.97), (4096 // 8, 16, 0.6, 0.94)],
    ids=["2048", "4096"],
)
def test_copies_of_300_chats_do_not_meet_in_a_step(
    tmp_path: Path, tokenizer: Tokenizer, seq_len: int, batch: int, earlier: float, full: float
) -> None:
    """An epoch fills about two steps. Under the rules of earlier runs, a quarter to two thirds of the chats met copies.

    The smaller groups cost little: at least the share `full` of the positions holds tokens.
    """
    data = whole(write_documents(tmp_path / "x.jsonl", chat_lengths(300)), epochs=8)
    loader = build_loader(data, tokenizer, seq_len, batch, 0)
    batches = list(loader)
    assert share_of_copies(batches) == 0
    assert sum(map(loader.num_tokens, batches)) > full * sum(found.tokens.numel() for found in batches)
    old = Loader(data, tokenizer, seq_len, batch, 0, rules=OrderRules(1, 0))
    assert share_of_copies(old) > earlier


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 8),
    steps=st.floats(4, 10),
    seed=st.integers(0, 1000),
    shuffle=st.booleans(),
    compressed=st.booleans(),
)
def test_four_steps_per_epoch_are_enough_to_keep_copies_apart(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: Tokenizer,
    batch: int,
    steps: float,
    seed: int,
    shuffle: bool,
    compressed: bool,
) -> None:
    """Each document is a quarter of a sequence. An epoch has at least 24 sequences, six of the smallest groups."""
    sequences = max(24, round(batch * steps))
    folder = tmp_path_factory.mktemp("apart")
    source = write_documents(folder / "x.jsonl", [8] * (4 * sequences))
    if compressed:
        (folder / "x.jsonl.gz").write_bytes(gzip.compress((folder / "x.jsonl").read_bytes()))
        source = source.model_copy(update={"path": str(folder / "x.jsonl.gz")})
    loader = build_loader(whole(source, epochs=4, shuffle=shuffle), tokenizer, 32, batch, seed)
    assert share_of_copies(loader) == 0


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_too_few_documents_for_a_step_are_said_once(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_documents(tmp_path / "eight.jsonl", [8] * 8)
    loader = build_loader(whole(source), tokenizer, 32, 4, 0)
    beginning = loader.state_dict()
    list(islice(loader, 10))
    loader.load_state_dict(beginning)
    list(islice(loader, 10))
    (warning,) = warnings_of(caplog)
    assert "documents more than once, from different epochs of source" in warning
    assert "eight.jsonl" in warning and "a smaller training.global_batch_size or more data" in warning


def test_copies_in_several_streams_are_said_once_and_kept_apart_if_an_epoch_fills_eight_batches(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    enough = write_documents(tmp_path / "enough.jsonl", [8] * 4 * 64)  # 64 sequences
    loader = build_loader(whole(enough, streams=4, epochs=6), tokenizer, 32, 8, 0)
    assert share_of_copies(loader) == 0
    assert not warnings_of(caplog)
    few = write_documents(tmp_path / "few.jsonl", [8] * 8)
    list(islice(build_loader(whole(few, streams=2), tokenizer, 32, 4, 0), 20))
    (warning,) = warnings_of(caplog)
    assert warning.startswith("a data stream's part of a batch, 2 sequences, has ")
    assert "a smaller training.global_batch_size, fewer data.streams or more data" in warning


def test_equal_documents_of_one_epoch_are_no_copies(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """Data may hold a document twice: that is not for the batch size to mend."""
    (tmp_path / "x.jsonl").write_text("\n".join([json.dumps({"tokens": [1] * 8})] * 400))
    source = SourceTable(path=str(tmp_path / "x.jsonl"), content="tokens")
    list(build_loader(whole(source, epochs=1), tokenizer, 32, 4, 0))
    assert not warnings_of(caplog)


def test_a_small_source_in_a_mix_keeps_its_copies_apart_too(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Sixty documents are drawn as often as the 700 of another source: each comes about every ten steps."""
    small = write_documents(tmp_path / "small.jsonl", [8] * 60)
    large = write_documents(tmp_path / "large.jsonl", [8] * 700, first=1000)
    data = DataTable(sources=(small, large), packing="best_fit")
    loader = build_loader(data, tokenizer, 32, 3, 0)
    for batch in islice(loader, 120):
        assert max(Counter(documents_of(batch)).values()) == 1


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(3, 90), min_size=1, max_size=60),
    handling=st.sampled_from(["cut", "split"]),
    epochs=st.integers(1, 3),
    held_out=st.sampled_from([0.0, 0.3]),
    batch=st.integers(1, 5),
)
def test_every_document_is_in_each_epoch_once_and_the_last_batch_has_the_rest(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: Tokenizer,
    lengths: list[int],
    handling: str,
    epochs: int,
    held_out: float,
    batch: int,
) -> None:
    """Two sources with weights: nothing is dropped at the end, and only the last batch may be smaller."""
    folder = tmp_path_factory.mktemp("epochs")
    sources = tuple(
        write_documents(folder / name, part).model_copy(update={"weight": weight})
        for name, part, weight in (("a.jsonl", [*lengths, 5, 6, 7], 3.0), ("b.jsonl", [9] * 17, 1.0))
    )
    data = DataTable(
        sources=sources, packing="best_fit", long_documents=handling, epochs=epochs, validation_fraction=held_out
    )
    batches = list(build_loader(data, tokenizer, 32, batch, 0))
    assert {len(found.tokens) for found in batches[:-1]} <= {batch}
    counts = Counter(number for found in batches for number in documents_of(found))
    everything = Counter(range(len(lengths) + 3)) + Counter(range(17))
    if not held_out:
        assert counts == Counter({number: count * epochs for number, count in everything.items()})
    assert all(count % epochs == 0 for count in counts.values())


@pytest.mark.parametrize("epoch", [1, 5])
def test_a_later_epoch_is_in_another_order_and_no_document_moves_by_more_than_a_quarter(epoch: int) -> None:
    """Ranks of 10 000 random places are off by less than 3 % (Dvoretzky-Kiefer-Wolfowitz: one in 60 million)."""
    count, first = 10_000, EpochKey("0/0/0")
    later = epoch_order(count, EpochKey(f"0/0/{epoch}", first.key))
    assert sorted(later.tolist()) == list(range(count))
    places = np.empty((2, count))
    places[0, epoch_order(count, first)] = np.arange(count) / count
    places[1, later] = np.arange(count) / count
    moved = places[1] - places[0]
    assert np.abs(moved).max() < 0.25 + 0.03
    assert np.abs(moved).mean() > 0.04


def test_later_epochs_put_every_document_in_every_place_equally_often() -> None:
    """4000 orders of 5: each of the 25 counts is 800 +- 25.3 (binomial); 6 of those leave no room for chance."""
    places = Counter(
        (place, document)
        for number in range(4000)
        for place, document in enumerate(epoch_order(5, EpochKey(f"{number}/1", f"{number}/0")).tolist())
    )
    assert len(places) == 25
    assert all(abs(count - 800) < 6 * 25.3 for count in places.values())
