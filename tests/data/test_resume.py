"""A position means the same remaining batches, byte for byte, in a new process with another number of workers.

This holds for all kinds of source, weights, packing and handling of records, and any batch to stop at.
"""

import json
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import record_files
from tests.support.batch_contents import content, loader_of
from torchround.config import SourceTable

FILES = ["notes", "plain", "gzip", "zstd", "parquet", "tokens", "chats"]
MORE = [{}, {"shuffle_sequences": 0}, {"shuffle_sequences": 5}, {"validation_fraction": 0.3}, {"loss_on": "all"}]
PACKINGS = [("contiguous", "cut"), ("best_fit", "cut"), ("best_fit", "split")]
pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    texts = [f"document {n} " + "and on " * (n * 7 % 31) for n in range(30)]
    records = [{"text": text} for text in texts]
    broken = [*records[:11], "broken", *records[12:]]
    for number, text in enumerate(texts[:9]):
        (folder / f"note-{number}.txt").write_text(text)
    ids = record_files.write_plain(folder, [{"tokens": list(text.encode())} for text in texts], "ids")
    pairs = [{"instruction": text, "output": text[::-1]} for text in texts]
    return {
        "notes": SourceTable(path=str(folder / "note-*.txt")),
        "plain": record_files.write_plain(folder, broken),
        "gzip": record_files.write_gzip(folder, broken),
        "zstd": record_files.write_zstd(folder, broken),
        "parquet": record_files.write_parquet(folder, records),
        "tokens": ids.model_copy(update={"content": "tokens"}),
        "chats": record_files.write_gzip(folder, pairs, "chats").model_copy(update={"content": "alpaca"}),
        "streamed": record_files.write_dataset(folder, records[:10]),
        "saved": record_files.write_saved_dataset(folder, records),
    }


def assert_continues(tables, tokenizer, packing, stop, workers, **keys):
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


@settings(max_examples=15, deadline=None)
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
    [("streamed", PACKINGS[0], 9, (0, 2)), ("streamed", PACKINGS[2], 4, (2, 0))]
    + [("saved", PACKINGS[1], 13, (1, 0)), ("saved", PACKINGS[0], 5, (0, 3))],
)
def test_a_dataset_continues_from_any_batch(sources, chat_tokenizer, kind, packing, stop, workers):
    assert_continues((sources[kind], sources["gzip"]), chat_tokenizer, packing, stop, workers, epochs=2)
