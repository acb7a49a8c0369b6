"""Files that vanish, change or cannot be read during a run stop it in both modes, and so do too many bad records."""

import errno
import json
import os
from functools import partial
from itertools import islice

import pytest

from tests.support import batch_contents
from tests.support.batch_contents import content, write_lines
from tests.support.record_files import write_gzip, write_parquet, write_plain
from torchround.config import SourceTable
from torchround.data import DataError
from torchround.data.document_types import DataFileError
from torchround.data.formats import files

RECORDS = [{"text": f"record {number} " * 4} for number in range(60)]
WRITERS = {"x.jsonl": write_plain, "x.jsonl.gz": write_gzip, "x.parquet": write_parquet}


def write(folder, name):
    if name in WRITERS:
        WRITERS[name](folder, RECORDS)
    else:
        (folder / name).write_text(" ".join(record["text"] for record in RECORDS))
    return folder / name


HARMS = {
    "vanished": lambda path: path.unlink(),
    "shorter": lambda path: os.truncate(path, path.stat().st_size // 2),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
}


@pytest.fixture(autouse=True)
def small_pieces_and_blocks(small_blocks):
    """Let every file be read in several parts, so that it can be lost between two of them."""
    with batch_contents.reading_limits(PIECE_SIZE=64):
        yield


@pytest.fixture
def loader_of(tokenizer):
    return partial(batch_contents.loader_of, tokenizer=tokenizer)


@pytest.mark.parametrize("mode", ["stop", "skip"])
@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", ["x.txt", *WRITERS])
def test_a_file_that_is_lost_or_changed_in_mid_run_stops_it_and_the_position_is_kept(
    tmp_path, loader_of, name, harm, mode
):
    """Before, a run that skips bad records went on with what was cached, for as many epochs as it liked."""
    path = write(tmp_path, name)
    whole = content(islice(loader_of(path), 30))
    loader = loader_of(path, on_bad_record=mode)
    batches = list(islice(loader, 2))
    before = path.read_bytes()
    HARMS[harm](path)
    for _ in range(2):  # the second call meets the same file, and must not take its part for ended
        with pytest.raises(DataFileError, match=rf"{name}"):
            batches.extend(islice(loader, 200))
    path.write_bytes(before)
    assert content([*batches, *islice(loader, 30 - len(batches))]) == whole
    assert loader.num_bad_records() == 0


def test_a_lost_file_stops_a_run_at_its_next_record_although_a_window_waits(tmp_path, loader_of):
    """Before, the run read to the end of the window: by default 4096 sequences, which may take hours."""
    path = write_lines(tmp_path / "x.jsonl", RECORDS)
    keys = {"shuffle_sequences": 40, "on_bad_record": "skip"}
    whole = content(islice(loader_of(path, **keys), 30))
    loader = loader_of(path, **keys)
    batches = list(islice(loader, 2))
    path.unlink()
    with pytest.raises(DataFileError, match=r"x.jsonl: cannot be read"):
        batches.extend(loader)  # keeps the ones before the error
    assert len(batches) < 6, "a window has 20 batches"
    write_lines(path, RECORDS)
    assert content([*batches, *islice(loader, 30 - len(batches))]) == whole


def test_a_file_that_is_lost_before_the_first_batch_is_no_bad_record_either(tmp_path, loader_of):
    for name in "abc":
        write(tmp_path, f"{name}.txt")
    loader = loader_of(tmp_path / "*.txt", on_bad_record="skip")
    (tmp_path / "b.txt").unlink()
    with pytest.raises(DataFileError, match=r"b\.txt: cannot be read"):
        loader.check_first_records()


def test_an_error_of_the_disk_is_no_bad_record(tmp_path, loader_of, monkeypatch):
    loader = loader_of(write_lines(tmp_path / "x.jsonl", RECORDS), on_bad_record="skip")
    next(loader)

    def fail(*_):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(files, "refuse_changed", fail)
    with pytest.raises(DataFileError, match="x.jsonl: cannot be read: Stale file handle"):
        list(loader)


def test_a_lost_file_of_a_streamed_dataset_is_no_bad_record(tmp_path, loader_of):
    (tmp_path / "set").mkdir()
    write_lines(tmp_path / "set" / "train.jsonl", RECORDS)
    loader = loader_of(SourceTable(path=str(tmp_path / "set"), format="dataset"), on_bad_record="skip")
    (tmp_path / "set" / "train.jsonl").unlink()
    with pytest.raises(DataFileError, match=r"set, shard 0, row 1: cannot be read from here on: FileNotFoundError"):
        list(loader)


def with_bad(path, bad, count=400):
    return write_lines(path, ["broken" if n in bad else {"text": f"record {n} "} for n in range(count)])


def test_more_bad_records_than_the_fraction_allows_stop_the_run(tmp_path, loader_of):
    """12 of 400 records are 3 %; up to 10 in a pass never stop a run."""
    path = with_bad(tmp_path / "x.jsonl", range(0, 120, 10))
    with pytest.raises(DataError, match=r"line 101: .*11 of 101 records were bad, .* more than 1%"):
        list(loader_of(path, on_bad_record="skip", shuffle=False, epochs=1))
    few = with_bad(tmp_path / "few.jsonl", {2, 3, 5, 7}, count=8)
    loader = loader_of(few, on_bad_record="skip", epochs=4)
    list(loader)
    assert loader.num_bad_records() == 16


@pytest.mark.parametrize(
    ("stop", "workers", "packing"),
    [(0, (0, 2), "contiguous"), (7, (1, 0), "best_fit"), (13, (2, 1), "contiguous"), (3, (0, 1), "best_fit")],
)
def test_the_fraction_stops_at_the_same_record_after_a_resume_and_with_other_workers(
    tmp_path, loader_of, stop, workers, packing
):
    path = with_bad(tmp_path / "x.jsonl", range(0, 400, 25))
    make = partial(loader_of, path, on_bad_record="skip", packing=packing)

    def until_it_stops(loader):
        batches = []
        with pytest.raises(DataError) as caught:
            batches.extend(loader)
        return len(batches), str(caught.value)

    expected = until_it_stops(make())
    assert "records were bad" in expected[1]
    loader, resumed = (make(num_workers=count) for count in workers)
    done = len(list(islice(loader, min(stop, expected[0]))))
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    loader.close()
    count, message = until_it_stops(resumed)
    assert (done + count, message) == expected
    resumed.close()
