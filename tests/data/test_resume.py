"""A position means the same remaining batches, byte for byte, in a new process with another number of workers.

This holds for all kinds of source, weights, packing and handling of records, and any batch to stop at.
"""

import gzip
import json
from itertools import islice
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.batch_contents import TEMPLATE, content
from torchround.config import DataTable, SourceTable, TokenizerTable
from torchround.data import Tokenizer, build_loader, build_tokenizer
from torchround.data.formats import sources as sources_module
from torchround.data.packing import best_fit as best_fit_module

FILES = ["notes", "plain", "gzip", "zstd", "parquet", "tokens", "chats"]


@pytest.fixture(autouse=True)
def small_blocks_and_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks and groups so small that a small source has several."""
    monkeypatch.setattr(sources_module, "BLOCK_RECORDS", 8)
    monkeypatch.setattr(best_fit_module, "GROUP_SEQUENCES", 5)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SourceTable]:
    """Write a source of each kind, 30 documents of 2 to 250 tokens each; one record of each kind of line is broken."""
    folder = tmp_path_factory.mktemp("sources")
    texts = [f"document {n} " + "and on " * (n * 7 % 31) for n in range(30)]
    lines = [json.dumps({"text": text}) for text in texts]
    lines[11] = "broken"
    for number, text in enumerate(texts[:9]):
        (folder / f"note-{number}.txt").write_text(text)
    data = "\n".join(lines).encode()
    (folder / "x.jsonl").write_bytes(data)
    (folder / "x.jsonl.gz").write_bytes(gzip.compress(data))
    (folder / "x.jsonl.zst").write_bytes(zstandard.compress(data[:900]) + zstandard.compress(data[900:]))
    rows = pyarrow.Table.from_pylist([{"text": text} for text in texts])
    pyarrow.parquet.write_table(rows, folder / "x.parquet", row_group_size=11)
    (folder / "ids.jsonl").write_text("\n".join(json.dumps({"tokens": list(text.encode())}) for text in texts))
    chats = [{"instruction": text, "output": text[::-1]} for text in texts]
    (folder / "chats.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, chats)).encode()))
    (folder / "set").mkdir()
    for number in (0, 1):
        (folder / "set" / f"train-{number}.jsonl").write_bytes("\n".join(lines[number::2][:5]).encode())
    datasets.Dataset.from_list([{"text": text} for text in texts]).save_to_disk(str(folder / "saved"))
    return {
        "notes": SourceTable(path=str(folder / "note-*.txt")),
        "plain": SourceTable(path=str(folder / "x.jsonl")),
        "gzip": SourceTable(path=str(folder / "x.jsonl.gz")),
        "zstd": SourceTable(path=str(folder / "x.jsonl.zst")),
        "parquet": SourceTable(path=str(folder / "x.parquet")),
        "tokens": SourceTable(path=str(folder / "ids.jsonl"), content="tokens"),
        "chats": SourceTable(path=str(folder / "chats.jsonl.gz"), content="alpaca"),
        "streamed": SourceTable(path=str(folder / "set"), format="dataset"),
        "saved": SourceTable(path=str(folder / "saved"), format="dataset"),
    }


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    return build_tokenizer(TokenizerTable(name="bytes", chat_template=str(template)))


def assert_continues(data: dict[str, Any], tokenizer: Tokenizer, stop: int, workers: tuple[int, int]) -> None:
    """Compare an uninterrupted loader with one that stops after `stop` batches, is saved as JSON, and resumed."""
    whole = content(build_loader(DataTable(**data), tokenizer, 64, 3, 7))
    first = build_loader(DataTable(**data, num_workers=workers[0]), tokenizer, 64, 3, 7)
    before = content(islice(first, stop % (len(whole) + 1)))
    state = json.loads(json.dumps(first.state_dict()))
    first.close()
    second = build_loader(DataTable(**data, num_workers=workers[1]), tokenizer, 64, 3, 7)
    second.load_state_dict(state)
    assert before + content(second) == whole


EACH_PACKING = st.sampled_from(
    [("contiguous", "cut"), ("best_fit", "cut"), ("best_fit", "skip"), ("best_fit", "split")]
)
WORKERS = st.tuples(st.integers(0, 3), st.integers(0, 3))


@settings(max_examples=30, deadline=None)
@given(
    mix=st.lists(st.tuples(st.sampled_from(FILES), st.sampled_from([0.3, 1.0, 4.0])), min_size=1, max_size=4),
    packing=EACH_PACKING,
    shuffle=st.booleans(),
    epochs=st.integers(1, 2),
    more=st.sampled_from(
        [
            {},
            {"shuffle_sequences": 0},
            {"shuffle_sequences": 5},
            {"validation_fraction": 0.3},
            {"weight_by": "size"},
            {"loss_on": "all"},
        ]
    ),
    stop=st.integers(0, 10_000),
    workers=WORKERS,
)
def test_any_mix_of_files_continues_from_any_batch(
    sources: dict[str, SourceTable],
    chat_tokenizer: Tokenizer,
    mix: list[tuple[str, float]],
    packing: tuple[str, str],
    shuffle: bool,
    epochs: int,
    more: dict[str, Any],
    stop: int,
    workers: tuple[int, int],
) -> None:
    tables = tuple(sources[name].model_copy(update={"weight": weight}) for name, weight in mix)
    keys = {"packing": packing[0], "long_documents": packing[1], "shuffle": shuffle, "epochs": epochs, **more}
    data = {"sources": tables, "on_bad_record": "skip", **keys}
    assert_continues(data, chat_tokenizer, stop, workers)


@settings(max_examples=4, deadline=None)
@given(packing=EACH_PACKING, stop=st.integers(0, 10_000), workers=WORKERS)
@pytest.mark.parametrize("kind", ["streamed", "saved"])
def test_a_dataset_continues_from_any_batch(
    sources: dict[str, SourceTable],
    chat_tokenizer: Tokenizer,
    kind: str,
    packing: tuple[str, str],
    stop: int,
    workers: tuple[int, int],
) -> None:
    data = {"sources": (sources[kind], sources["gzip"]), "on_bad_record": "skip", "epochs": 2}
    assert_continues({**data, "packing": packing[0], "long_documents": packing[1]}, chat_tokenizer, stop, workers)
