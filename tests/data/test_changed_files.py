"""Runs that continue in files with a changed record, when half of a group of whole documents is used up."""

import gzip
import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.batch_contents import documents
from torchround.config import DataTable, SourceTable
from torchround.data import Loader, Tokenizer, build_loader
from torchround.data.errors import DataError
from torchround.data.packing import best_fit as best_fit_module
from torchround.layer import MicroBatch

SEQ_LEN = 64


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_fit_module, "GROUP_SEQUENCES", 6)


def text_of(number: int) -> str:
    return f"record {number:02} " + "x" * (number * 7 % 40)


def write(path: Path, texts: list[str]) -> None:
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))


class Run:
    """A run over two sources that stops, is saved as JSON, and continues after `change`."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, keys: dict[str, Any]) -> None:
        self.texts = {name: [text_of(number) + name for number in range(40)] for name in ("a", "b")}
        self._paths = {name: folder / f"{name}.jsonl" for name in self.texts}
        for name, texts in self.texts.items():
            write(self._paths[name], texts)
        sources = tuple(
            SourceTable(path=str(path), weight=weight)
            for path, weight in zip(self._paths.values(), (1.0, 1.7), strict=True)
        )
        self._tokenizer = tokenizer
        self.data = DataTable(sources=sources, epochs=1, packing="best_fit", on_changed_files="go_on", **keys)
        self.state: dict[str, Any] | None = None
        self.batches: list[MicroBatch] = []

    def resume(self, count: int | None) -> None:
        loader = build_loader(self.data, self._tokenizer, SEQ_LEN, 2, 3)
        if self.state is not None:
            loader.load_state_dict(self.state)
        self.batches += islice(loader, count)
        self.state = json.loads(json.dumps(loader.state_dict()))
        loader.close()

    def change(self, name: str, number: int, text: str) -> None:
        self.texts[name][number] = text
        write(self._paths[name], self.texts[name])

    def trained_on(self) -> Counter[str]:
        return Counter(
            text.removeprefix("<|bos|>").removesuffix("<|eos|>") for text, _ in documents(self.batches, self._tokenizer)
        )


changes = st.tuples(st.integers(0, 25), st.sampled_from("ab"), st.integers(0, 39), st.sampled_from(["", "y", "y" * 50]))


@settings(max_examples=40, deadline=None)
@given(stops=st.lists(changes, min_size=1, max_size=3), workers=st.integers(0, 2), shuffle=st.booleans())
def test_every_document_is_trained_on_once_for_any_changed_record_and_any_stop(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: Tokenizer,
    stops: list[tuple[int, str, int, str]],
    workers: int,
    shuffle: bool,
) -> None:
    """A changed record is read in its old or its new form, not in both. An empty record is no document."""
    keys = {"num_workers": workers, "shuffle": shuffle}
    run = Run(tmp_path_factory.mktemp("changed"), tokenizer, keys)
    versions = {(name, number): {text} for name in run.texts for number, text in enumerate(run.texts[name])}
    for number_of_change, (batches, name, number, text) in enumerate(stops):
        run.resume(batches)
        text = text and f"{text} {number_of_change}"
        versions[name, number].add(text)
        run.change(name, number, text)
    run.resume(None)
    trained = run.trained_on()
    for (name, number), texts in versions.items():
        times = sum(trained[text] for text in texts if text)
        assert times == 1 or (times == 0 and "" in texts), f"{name} {number} {times} times"
    assert sum(trained.values()) <= len(versions)


def test_the_warning_of_a_change_counts_the_documents_that_it_may_cost(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, tokenizer, {"num_workers": 0})
    run.resume(2)
    used = sum(run.trained_on().values())
    run.change("b", 39, "longer than it was " * 2)
    run.resume(0)
    assert f"; {used} documents of the group being packed are used, its other documents are packed anew" in caplog.text
    assert "sources was ['40 documents in " in caplog.text
    counted = int(caplog.text.split("at most the ")[1].split()[0])
    assert 0 < counted <= 40  # only of the source that has changed


def test_resuming_twice_after_a_change_gives_the_batches_of_resuming_once(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A group of longer documents would end sooner if the position did not keep its end."""
    tokens = []
    for folder, parts in (("once", [None]), ("twice", [0, 1, 2, None])):
        (tmp_path / folder).mkdir()
        run = Run(tmp_path / folder, tokenizer, {"num_workers": 0})
        run.resume(2)
        for number in range(0, 40, 2):
            run.change("a", number, f"another text {number} " * 3)
        for count in parts:
            run.resume(count)
        tokens.append([batch.tokens.tolist() for batch in run.batches])
    assert tokens[0] == tokens[1]


def test_a_forged_group_without_an_end_is_an_error_and_not_an_endless_search(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    run = Run(tmp_path, tokenizer, {"num_workers": 0})
    run.data = run.data.model_copy(update={"epochs": None})
    run.resume(2)
    assert run.state is not None
    run.state["position"]["until"] = [2**60, 2**60]
    with pytest.raises(DataError, match=r"end at \[\d+, \d+\], by which there are over 16 times as many tokens"):
        run.resume(1)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.parquet", "x.jsonl"])
def test_a_file_that_has_lost_records_ends_its_epoch_and_the_next_one_has_what_is_left(
    tmp_path: Path, tokenizer: Tokenizer, name: str, shuffle: bool
) -> None:
    """The position is in a block of 60 records; of these, 12 are left."""

    def loader_of(count: int) -> Loader:
        records = [{"text": text_of(number)} for number in range(count)]
        if name.endswith("parquet"):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / name)
        else:
            data = "\n".join(map(json.dumps, records)).encode()
            (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
        keys: dict[str, Any] = {"shuffle": shuffle, "shuffle_sequences": 0}
        sources = (SourceTable(path=str(tmp_path / name)),)
        return build_loader(
            DataTable(sources=sources, epochs=2, on_changed_files="go_on", **keys), tokenizer, SEQ_LEN, 2, 3
        )

    before = loader_of(60)
    list(islice(before, 8))
    loader = loader_of(12)
    loader.load_state_dict(json.loads(json.dumps(before.state_dict())))
    read = tokenizer.decode([token for batch in loader for token in batch.tokens.flatten().tolist()])
    assert loader.epochs_read() == 2
    assert all(text_of(number) in read for number in range(12))
