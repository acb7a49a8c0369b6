"""Runs that continue in files with a changed record, when half of a group of whole documents is used up."""

import json
from collections import Counter
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.batch_contents import documents, loader_of, write_lines
from tests.support.record_files import write_gzip, write_parquet, write_plain
from torchround.config import SourceTable
from torchround.data.errors import DataError

SEQ_LEN = 64
pytestmark = pytest.mark.usefixtures("small_groups")


def text_of(number):
    return f"record {number:02} " + "x" * (number * 7 % 40)


class Run:
    """A run over two sources that stops, is saved as JSON, and continues after `change`."""

    def __init__(self, folder, tokenizer, **keys):
        self.texts = {name: [text_of(number) + name for number in range(40)] for name in ("a", "b")}
        self.folder, self.tokenizer, self.state, self.batches = folder, tokenizer, None, []
        self.keys = {"epochs": 1, "packing": "best_fit", "on_changed_files": "go_on", **keys}
        for name in self.texts:
            self.write(name)

    def write(self, name):
        write_lines(self.folder / f"{name}.jsonl", [{"text": text} for text in self.texts[name]])

    def loader(self):
        weights = {"a": 1.0, "b": 1.7}
        tables = tuple(SourceTable(path=str(self.folder / f"{n}.jsonl"), weight=w) for n, w in weights.items())
        return loader_of(tables, self.tokenizer, SEQ_LEN, 2, 3, **self.keys)

    def resume(self, count):
        loader = self.loader()
        if self.state is not None:
            loader.load_state_dict(self.state)
        self.batches += islice(loader, count)
        self.state = json.loads(json.dumps(loader.state_dict()))
        loader.close()

    def change(self, name, number, text):
        self.texts[name][number] = text
        self.write(name)

    def trained_on(self):
        return Counter(
            text.removeprefix("<|bos|>").removesuffix("<|eos|>") for text, _ in documents(self.batches, self.tokenizer)
        )


changes = st.tuples(st.integers(0, 25), st.sampled_from("ab"), st.integers(0, 39), st.sampled_from(["", "y", "y" * 50]))


@settings(max_examples=25, deadline=None)
@given(stops=st.lists(changes, min_size=1, max_size=3), workers=st.integers(0, 2), shuffle=st.booleans())
def test_every_document_is_trained_on_once_for_any_changed_record_and_any_stop(
    tmp_path_factory, tokenizer, stops, workers, shuffle
):
    """A changed record is read in its old or its new form, not in both. An empty record is no document."""
    run = Run(tmp_path_factory.mktemp("changed"), tokenizer, num_workers=workers, shuffle=shuffle)
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


def test_a_change_is_refused_or_a_warning_counts_the_documents_that_it_may_cost(tmp_path, tokenizer, caplog):
    run = Run(tmp_path, tokenizer)
    run.resume(2)
    used = sum(run.trained_on().values())
    run.change("b", 39, "longer than it was " * 2)
    run.resume(0)
    assert f"; {used} documents of the group" in caplog.text and "sources was ['40 documents in " in caplog.text
    assert 0 < int(caplog.text.split("at most the ")[1].split()[0]) <= 40  # only of the source that has changed
    run.keys["shuffle"] = False
    with pytest.raises(DataError, match="other data: shuffle was True, is False"):
        run.resume(0)
    del run.keys["on_changed_files"], run.keys["shuffle"]
    run.change("b", 38, "longer, too")
    with pytest.raises(DataError, match="other data: sources was .*--data.on_changed_files go_on"):
        run.resume(0)


def test_a_forged_group_without_an_end_is_an_error_and_not_an_endless_search(tmp_path, tokenizer):
    run = Run(tmp_path, tokenizer)
    run.keys["epochs"] = None
    run.resume(2)
    run.state["position"]["until"] = [2**60, 2**60]
    with pytest.raises(DataError, match=r"end at \[\d+, \d+\], by which there are over 16 times as many tokens"):
        run.resume(1)


@pytest.mark.parametrize("write", [write_gzip, write_parquet, write_plain])
def test_a_file_that_has_lost_records_ends_its_epoch_and_the_next_one_has_what_is_left(tmp_path, tokenizer, write):
    """The position is in a block of records, of which 12 are left."""

    def of(count, shuffle):
        table = write(tmp_path, [{"text": text_of(number)} for number in range(count)])
        keys = {"shuffle": shuffle, "shuffle_sequences": 0, "on_changed_files": "go_on"}
        return loader_of(table, tokenizer, SEQ_LEN, 2, 3, epochs=2, **keys)

    for shuffle in (True, False):
        before = of(60, shuffle)
        list(islice(before, 8))
        loader = of(12, shuffle)
        loader.load_state_dict(json.loads(json.dumps(before.state_dict())))
        read = tokenizer.decode([token for batch in loader for token in batch.tokens.flatten().tolist()])
        assert loader.epochs_read() == 2
        assert all(text_of(number) in read for number in range(12))
