"""Files that vanish, change or cannot be read during a run stop it in both modes, and so do too many bad records."""

import errno
import gzip
import json
import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.batch_contents import content
from torchround.config import DataTable, SourceTable
from torchround.data import DataError, Loader, Tokenizer, build_loader
from torchround.data.errors import DataFileError
from torchround.data.formats import file_index, source_files
from torchround.data.formats import sources as sources_module

RECORDS = [{"text": f"record {number} " * 4} for number in range(60)]
LINES = "\n".join(map(json.dumps, RECORDS)).encode()


def write_text(path: Path) -> None:
    path.write_text(" ".join(record["text"] for record in RECORDS))


def write_lines(path: Path) -> None:
    path.write_bytes(LINES)


def write_gzip(path: Path) -> None:
    path.write_bytes(gzip.compress(LINES))


def write_parquet(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path, row_group_size=8)


def vanish(path: Path) -> None:
    path.unlink()


def shrink(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\n")


WRITERS: dict[str, Callable[[Path], None]] = {
    "x.txt": write_text,
    "x.jsonl": write_lines,
    "x.jsonl.gz": write_gzip,
    "x.parquet": write_parquet,
}


@pytest.fixture(autouse=True)
def small_pieces_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every file be read in several parts, so that it can be lost between two of them."""
    monkeypatch.setattr(source_files, "PIECE_SIZE", 64)
    monkeypatch.setattr(sources_module, "PIECE_SIZE", 64)
    monkeypatch.setattr(sources_module, "BLOCK_RECORDS", 4)


def loader_of(path: Path, tokenizer: Tokenizer, **keys: Any) -> Loader:
    return build_loader(DataTable(sources=(SourceTable(path=str(path)),), **keys), tokenizer, 64, 2, 0)


@pytest.mark.parametrize("mode", ["stop", "skip"])
@pytest.mark.parametrize("harm", [vanish, shrink, grow])
@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_is_lost_or_changed_in_mid_run_stops_it_and_the_position_is_kept(
    tmp_path: Path, tokenizer: Tokenizer, name: str, harm: Callable[[Path], None], mode: str
) -> None:
    """Before, a run that skips bad records went on with what was cached, for as many epochs as it liked."""
    path = tmp_path / name
    WRITERS[name](path)
    whole = content(islice(loader_of(path, tokenizer), 30))
    loader = loader_of(path, tokenizer, on_bad_record=mode)
    batches = list(islice(loader, 2))
    before = path.read_bytes()
    harm(path)
    for _ in range(2):  # the second call meets the same file, and must not take its part for ended
        with pytest.raises(DataFileError, match=rf"{name}.*stops a run in both modes"):
            batches.extend(islice(loader, 200))
    path.write_bytes(before)
    assert content([*batches, *islice(loader, 30 - len(batches))]) == whole
    assert loader.num_bad_records() == 0


@pytest.mark.parametrize("mode", ["stop", "skip"])
def test_a_lost_file_stops_a_run_at_its_next_record_although_a_window_waits(
    tmp_path: Path, tokenizer: Tokenizer, mode: str
) -> None:
    """Before, the run read to the end of the window: by default 4096 sequences, which may take hours."""
    path = tmp_path / "x.jsonl"
    write_lines(path)
    keys: dict[str, Any] = {"shuffle_sequences": 40, "on_bad_record": mode}
    whole = content(islice(loader_of(path, tokenizer, **keys), 30))
    loader = loader_of(path, tokenizer, **keys)
    batches = list(islice(loader, 2))
    path.unlink()
    with pytest.raises(DataFileError, match=r"x.jsonl: cannot be read"):
        batches.extend(loader)  # keeps the ones before the error
    assert len(batches) < 6, "a window has 20 batches"
    write_lines(path)
    assert content([*batches, *islice(loader, 30 - len(batches))]) == whole


def test_an_open_archive_lives_on_until_it_is_opened_again(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "x.jsonl.gz"
    write_gzip(path)
    keys: dict[str, Any] = {"shuffle": False, "shuffle_sequences": 0, "on_bad_record": "skip"}
    whole = content(loader_of(path, tokenizer, epochs=1, **keys))
    loader = loader_of(path, tokenizer, **keys)
    batches = [next(loader)]
    path.unlink()
    with pytest.raises(DataFileError, match=r"x.jsonl.gz: cannot be read"):
        batches.extend(loader)  # keeps the ones before the error
    assert content(batches)[: len(whole) - 1] == whole[:-1]
    assert len(batches) <= len(whole)


def test_a_file_that_is_lost_before_the_first_batch_is_no_bad_record_either(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    for name in "abc":
        write_text(tmp_path / f"{name}.txt")
    loader = loader_of(tmp_path / "*.txt", tokenizer, on_bad_record="skip")
    (tmp_path / "b.txt").unlink()
    with pytest.raises(DataFileError, match=r"b\.txt: cannot be read"):
        loader.check_first_records()


def test_a_source_of_one_record_is_read_again_in_each_epoch(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "only " * 30}))
    loader = loader_of(tmp_path / "x.jsonl", tokenizer, on_bad_record="skip")
    next(loader)
    (tmp_path / "x.jsonl").unlink()
    with pytest.raises(DataFileError, match=r"x.jsonl: cannot be read: No such file"):
        list(islice(loader, 100))


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_an_error_of_the_disk_is_no_bad_record(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    write_lines(tmp_path / "x.jsonl")
    loader = loader_of(tmp_path / "x.jsonl", tokenizer, on_bad_record="skip")
    next(loader)

    def fail(*_: object) -> bytes:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(file_index, "read_bounded_line", fail)
    with pytest.raises(DataFileError, match=rf"x.jsonl: cannot be read: {os.strerror(number)}"):
        list(loader)


def test_a_streamed_dataset_without_its_network_is_no_bad_record(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    (tmp_path / "set").mkdir()
    write_lines(tmp_path / "set" / "train.jsonl")
    table = SourceTable(path=str(tmp_path / "set"), format="dataset")
    loader = build_loader(DataTable(sources=(table,), on_bad_record="skip"), tokenizer, 64, 2, 0)

    def fail(_: object) -> Iterator[dict[str, Any]]:
        yield RECORDS[0]
        raise ValueError("no rows") from ConnectionResetError("the server has gone")

    monkeypatch.setattr(datasets.IterableDataset, "__iter__", fail)
    with pytest.raises(DataFileError, match=r"set, shard 0, row 2: cannot be read: ValueError: no rows"):
        list(loader)


def with_bad(path: Path, bad: set[int], count: int = 400) -> Path:
    lines = ["broken" if n in bad else json.dumps({"text": f"record {n} "}) for n in range(count)]
    path.write_text("\n".join(lines))
    return path


def test_more_bad_records_than_the_fraction_allows_stop_the_run(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """12 of 400 records are 3 %; up to 10 in a pass never stop a run."""
    path = with_bad(tmp_path / "x.jsonl", set(range(0, 120, 10)))
    with pytest.raises(
        DataError, match=r"x.jsonl, line 101: .*11 of 101 records were bad, .* data.max_bad_fraction = 0.01"
    ):
        list(loader_of(path, tokenizer, on_bad_record="skip", shuffle=False, epochs=1))
    loader = loader_of(path, tokenizer, on_bad_record="skip", max_bad_fraction=0.2, epochs=3)
    list(loader)
    assert loader.num_bad_records() == 36
    path = with_bad(tmp_path / "few.jsonl", {2, 3, 5, 7}, count=8)
    loader = loader_of(path, tokenizer, on_bad_record="skip", epochs=4)
    list(loader)
    assert loader.num_bad_records() == 16


@settings(max_examples=12, deadline=None)
@given(
    stop=st.integers(0, 40),
    workers=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    packing=st.sampled_from(["contiguous", "best_fit"]),
)
def test_the_fraction_stops_at_the_same_record_after_a_resume_and_with_other_workers(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer, stop: int, workers: tuple[int, int], packing: str
) -> None:
    path = with_bad(tmp_path_factory.mktemp("bad") / "x.jsonl", set(range(0, 400, 25)))
    keys: dict[str, Any] = {"on_bad_record": "skip", "max_bad_fraction": 0.03, "packing": packing}

    def until_it_stops(loader: Loader) -> tuple[int, str]:
        count = 0
        with pytest.raises(DataError) as caught:
            for _ in loader:
                count += 1
        return count, str(caught.value)

    expected = until_it_stops(loader_of(path, tokenizer, **keys))
    assert "records were bad" in expected[1]
    loader = loader_of(path, tokenizer, num_workers=workers[0], **keys)
    done = len(list(islice(loader, min(stop, expected[0]))))
    resumed = loader_of(path, tokenizer, num_workers=workers[1], **keys)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    loader.close()
    count, message = until_it_stops(resumed)
    assert (done + count, message) == expected
    resumed.close()
