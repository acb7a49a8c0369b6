"""A position means the same remaining batches, byte for byte, in a new process with another number of workers.

This holds for all kinds of source, weights, packing and handling of records, and any batch to stop at.
"""

import gzip
import json
from itertools import islice

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.batch_contents import content, loader_of, write_lines
from torchround.config import SourceTable

FILES = ["notes", "plain", "gzip", "zstd", "parquet", "tokens", "chats"]
MORE = [{}, {"shuffle_sequences": 0}, {"shuffle_sequences": 5}, {"validation_fraction": 0.3}]
MORE += [{"weight_by": "size"}, {"loss_on": "all"}]
PACKINGS = [("contiguous", "cut"), ("best_fit", "cut"), ("best_fit", "skip"), ("best_fit", "split")]
pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Write a source of each kind, 30 documents of 2 to 250 tokens each; one record of each kind of line is broken."""
    folder = tmp_path_factory.mktemp("sources")
    texts = [f"document {n} " + "and on " * (n * 7 % 31) for n in range(30)]
    lines = [json.dumps({"text": text}) for text in texts]
    lines[11] = "broken"
    for number, text in enumerate(texts[:9]):
        (folder / f"note-{number}.txt").write_text(text)
    data = write_lines(folder / "x.jsonl", lines).read_bytes()
    (folder / "x.jsonl.gz").write_bytes(gzip.compress(data))
    (folder / "x.jsonl.zst").write_bytes(zstandard.compress(data[:900]) + zstandard.compress(data[900:]))
    rows = pyarrow.Table.from_pylist([{"text": text} for text in texts])
    pyarrow.parquet.write_table(rows, folder / "x.parquet", row_group_size=11)
    write_lines(folder / "ids.jsonl", [{"tokens": list(text.encode())} for text in texts])
    chats = write_lines(folder / "chats", [{"instruction": text, "output": text[::-1]} for text in texts])
    (folder / "chats.jsonl.gz").write_bytes(gzip.compress(chats.read_bytes()))
    (folder / "set").mkdir()
    for number in (0, 1):
        write_lines(folder / "set" / f"train-{number}.jsonl", lines[number::2][:5])
    datasets.Dataset.from_list([{"text": text} for text in texts]).save_to_disk(str(folder / "saved"))
    names = {"notes": "note-*.txt", "plain": "x.jsonl", "gzip": "x.jsonl.gz", "zstd": "x.jsonl.zst"}
    names |= {"parquet": "x.parquet", "tokens": "ids.jsonl", "chats": "chats.jsonl.gz"}
    contents = {"tokens": "tokens", "chats": "alpaca"}
    found = {n: SourceTable(path=str(folder / path), content=contents.get(n, "text")) for n, path in names.items()}
    return found | {
        "streamed": SourceTable(path=str(folder / "set"), format="dataset"),
        "saved": SourceTable(path=str(folder / "saved"), format="dataset"),
    }


def assert_continues(tables, tokenizer, packing, stop, workers, **keys):
    """Compare an uninterrupted loader with one that stops after `stop` batches, is saved as JSON, and resumed."""

    def made(num_workers):
        shape = {"packing": packing[0], "long_documents": packing[1], "on_bad_record": "skip"}
        return loader_of(tables, tokenizer, 64, 3, 7, num_workers=num_workers, **shape, **keys)

    whole = content(made(0))
    first, second = map(made, workers)
    before = content(islice(first, stop % (len(whole) + 1)))
    state = json.loads(json.dumps(first.state_dict()))
    first.close()
    second.load_state_dict(state)
    assert before + content(second) == whole


@settings(max_examples=20, deadline=None)
@given(
    mix=st.lists(st.tuples(st.sampled_from(FILES), st.sampled_from([0.3, 1.0, 4.0])), min_size=1, max_size=4),
    packing=st.sampled_from(PACKINGS),
    shuffle=st.booleans(),
    epochs=st.integers(1, 2),
    more=st.sampled_from(MORE),
    stop=st.integers(0, 10_000),
    workers=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_any_mix_of_files_continues_from_any_batch(
    sources, chat_tokenizer, mix, packing, shuffle, epochs, more, stop, workers
):
    tables = tuple(sources[name].model_copy(update={"weight": weight}) for name, weight in mix)
    assert_continues(tables, chat_tokenizer, packing, stop, workers, shuffle=shuffle, epochs=epochs, **more)


@pytest.mark.parametrize(
    ("kind", "packing", "stop", "workers"),
    [("streamed", PACKINGS[0], 9, (0, 2)), ("streamed", PACKINGS[3], 4, (2, 0))]
    + [("saved", PACKINGS[1], 13, (1, 0)), ("saved", PACKINGS[0], 5, (0, 3))],
)
def test_a_dataset_continues_from_any_batch(sources, chat_tokenizer, kind, packing, stop, workers):
    assert_continues((sources[kind], sources["gzip"]), chat_tokenizer, packing, stop, workers, epochs=2)
