"""The whole pipeline on real files: order, position, end of data, errors, threads."""

import gc
import json
import random
import shutil
import threading
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.batch_contents import content
from torchround.config import DataTable, SourceTable, ValidationTable
from torchround.data import DataError, Loader, Tokenizer, build_loader, build_validation_loader
from torchround.layer import IGNORED_LABEL

MakeLoader = Callable[..., Loader]


def take(loader: Loader, count: int) -> list[list[Any]]:
    return content(islice(loader, count))


def threads_of_torchround(before: set[threading.Thread], patience_s: float = 30.0) -> set[threading.Thread]:
    """Return the threads that the loader started and that do not end by themselves."""
    deadline = time.monotonic() + patience_s
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def test_batches_are_int64_on_the_cpu_with_the_asked_shape(make_loader: MakeLoader) -> None:
    batch = next(make_loader(seq_len=64, global_batch_size=3))
    assert all(tensor.shape == (3, 64) and tensor.dtype == torch.int64 for tensor in batch.tensors())
    assert all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in batch.tensors())


def test_documents_stay_whole_and_framed_and_nothing_is_lost_at_the_end(
    corpus: Path, make_loader: MakeLoader, tokenizer: Tokenizer
) -> None:
    batches = list(make_loader(epochs=1, shuffle=False, seq_len=512, global_batch_size=6))
    sizes = [batch.tokens.shape[0] for batch in batches]
    assert set(sizes[:-1]) == {6}
    assert 0 < sizes[-1] <= 6
    text = tokenizer.decode([token for batch in batches for token in batch.tokens.flatten().tolist()])
    documents = text.replace("<|pad|>", "").split("<|bos|>")[1:]
    records = [json.loads(line) for line in (corpus / "records.jsonl").read_text().split("\n") if line.strip()]
    expected = [path.read_text() for path in corpus.glob("*.txt")] + [record["text"] for record in records]
    assert all(document.endswith("<|eos|>") for document in documents)
    assert sorted(document[: -len("<|eos|>")] for document in documents) == sorted(filter(None, expected))


def test_labels_are_the_next_token_except_after_eos_and_in_padding(
    make_loader: MakeLoader, tokenizer: Tokenizer
) -> None:
    batches = list(make_loader(epochs=1))
    tokens = torch.cat([batch.tokens.flatten() for batch in batches])
    labels = torch.cat([batch.labels.flatten() for batch in batches])
    ends = (tokens == tokenizer.eos_id) | (tokens == tokenizer.pad_id)
    assert torch.equal(labels == IGNORED_LABEL, ends)
    assert torch.equal(labels[:-1][~ends[:-1]], tokens[1:][~ends[:-1]])


@settings(max_examples=25, deadline=None)
@given(
    stop=st.integers(0, 60),
    workers=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    shape=st.sampled_from([(512, 6), (4096, 1), (37, 50)]),
)
def test_resuming_at_any_batch_with_other_workers_gives_the_same_remaining_batches(
    make_loader: MakeLoader, stop: int, workers: tuple[int, int], shape: tuple[int, int]
) -> None:
    seq_len, global_batch_size = shape
    loader = make_loader(num_workers=workers[0], epochs=1, seq_len=seq_len, global_batch_size=global_batch_size)
    take(loader, stop)
    state = json.loads(json.dumps(loader.state_dict()))
    rest = content(loader)
    resumed = make_loader(num_workers=workers[1], epochs=1, seq_len=seq_len, global_batch_size=global_batch_size)
    resumed.load_state_dict(state)
    assert content(resumed) == rest


def test_an_endless_loader_resumes_across_epochs(make_loader: MakeLoader) -> None:
    loader = make_loader(num_workers=2)
    take(loader, 200)  # more than two passes over the records
    state = loader.state_dict()
    assert state["position"]["reader"]["sources"][1]["epoch"] >= 2
    rest = take(loader, 20)
    resumed = make_loader()
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert take(resumed, 20) == rest


def test_a_loader_can_go_back_to_its_own_earlier_position(make_loader: MakeLoader) -> None:
    loader = make_loader(num_workers=2)
    take(loader, 3)
    state = loader.state_dict()
    rest = take(loader, 4)
    loader.load_state_dict(state)
    assert take(loader, 4) == rest


def test_the_number_of_workers_changes_nothing(make_loader: MakeLoader) -> None:
    alone = take(make_loader(), 40)
    assert take(make_loader(num_workers=1), 40) == alone
    assert take(make_loader(num_workers=3), 40) == alone


def test_another_seed_gives_other_batches_and_the_same_seed_the_same(make_loader: MakeLoader) -> None:
    assert take(make_loader(seed=1), 5) == take(make_loader(seed=1), 5)
    assert take(make_loader(seed=1), 5) != take(make_loader(seed=2), 5)


def test_a_position_may_continue_with_another_shape_and_loses_no_token(make_loader: MakeLoader) -> None:
    loader = make_loader(seq_len=100, global_batch_size=3)
    before = [batch.tokens.flatten() for batch in islice(loader, 4)]
    resumed = make_loader(seq_len=64, global_batch_size=5)
    resumed.load_state_dict(loader.state_dict())
    after = [batch.tokens.flatten() for batch in islice(resumed, 10)]
    stream = torch.cat([*before, *after])
    uncut = next(make_loader(seq_len=len(stream), global_batch_size=1)).tokens[0]
    assert torch.equal(stream, uncut)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_end_of_the_data_stays_the_end(make_loader: MakeLoader, num_workers: int) -> None:
    loader = make_loader(num_workers=num_workers, epochs=1, seq_len=4096)
    assert list(loader)
    with pytest.raises(StopIteration):
        next(loader)
    resumed = make_loader(num_workers=num_workers, epochs=1, seq_len=4096)
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_bad_record_stops_the_batch_that_would_hold_it_and_every_later_one(
    tmp_path: Path, tokenizer: Tokenizer, num_workers: int
) -> None:
    good = json.dumps({"text": "0123456789"})  # 12 tokens with BOS and EOS
    (tmp_path / "x.jsonl").write_text(f"{good}\n{good}\n{good}\nbroken\n{good}\n")
    data = DataTable(sources=(SourceTable(path=str(tmp_path / "x.jsonl")),), shuffle=False, num_workers=num_workers)
    loader = build_loader(data, tokenizer, seq_len=8, global_batch_size=2, seed=0)
    assert len(take(loader, 2)) == 2  # 32 of the 36 good tokens
    state = loader.state_dict()
    for _ in range(2):
        with pytest.raises(DataError, match=r"^.*x.jsonl, line 4: not valid JSON: [^\n]*$"):
            next(loader)
    assert loader.state_dict() == state


def test_a_missing_source_is_an_error_before_the_first_batch(tmp_path: Path, tokenizer: Tokenizer) -> None:
    data = DataTable(sources=(SourceTable(path=str(tmp_path / "*.txt")),))
    with pytest.raises(DataError, match="no file matches"):
        build_loader(data, tokenizer, seq_len=8, global_batch_size=2, seed=0)


def test_a_position_of_other_data_is_refused_and_says_what_changed(
    make_loader: MakeLoader, corpus: Path, tmp_path: Path
) -> None:
    state = make_loader().state_dict()
    shutil.copytree(corpus, tmp_path / "moved")
    make_loader(folder=tmp_path / "moved").load_state_dict(state)
    (tmp_path / "moved" / "new.txt").write_text("one more")
    with pytest.raises(DataError, match=r"other data: sources was \['9 documents .* is \['10 documents"):
        make_loader(folder=tmp_path / "moved").load_state_dict(state)
    with pytest.raises(DataError, match=r"other data: seed was 0, is 1"):
        make_loader(seed=1).load_state_dict(state)
    with pytest.raises(DataError, match=r"shuffle was True, is False; weights was \[1.0, 2.5\], is \[1.0, 1.0\]"):
        make_loader(shuffle=False, weights=(1.0, 1.0)).load_state_dict(state)


def end_by_close(loader: Loader, before: set[threading.Thread]) -> None:
    """Check that the tokenising threads end. Threads of loaders that earlier tests dropped may still be ending."""
    loader.close()
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name.startswith("torchround-tokenise")]


def end_by_error(loader: Loader, before: set[threading.Thread]) -> None:
    with pytest.raises(DataError):
        for _ in loader:
            pass


def end_by_forgetting(loader: Loader, before: set[threading.Thread]) -> None:
    pass


@pytest.mark.parametrize("end", [end_by_close, end_by_error, end_by_forgetting])
def test_no_thread_outlives_its_loader(
    tmp_path: Path, tokenizer: Tokenizer, end: Callable[[Loader, set[threading.Thread]], None]
) -> None:
    before = set(threading.enumerate())
    lines = [json.dumps({"text": "x" * 1000})] * 200
    (tmp_path / "x.jsonl").write_text("\n".join([*lines, "broken"]))
    data = DataTable(sources=(SourceTable(path=str(tmp_path / "x.jsonl")),), shuffle=False, num_workers=3)
    loader = build_loader(data, tokenizer, seq_len=128, global_batch_size=4, seed=0)
    next(loader)
    assert len(set(threading.enumerate()) - before) >= 2
    end(loader, before)
    del loader
    gc.collect()
    assert threads_of_torchround(before) == set()


def test_a_closed_loader_continues_at_its_position(make_loader: MakeLoader) -> None:
    loader = make_loader(num_workers=2)
    expected = take(make_loader(), 6)
    first = take(loader, 3)
    loader.close()
    assert first + take(loader, 3) == expected


def test_loading_touches_no_global_random_state_and_no_thread_count_of_torch(make_loader: MakeLoader) -> None:
    threads_before = torch.get_num_threads()
    torch.set_num_threads(2)
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    loader = make_loader(num_workers=2)
    take(loader, 10)
    seen: list[int] = []
    later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    later.start()
    later.join()
    counts = [*seen, torch.get_num_threads()]
    torch.set_num_threads(threads_before)
    loader.close()
    assert random.getstate() == python_state
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert counts == [2, 2]


def validation_table(corpus: Path, max_batches: int) -> ValidationTable:
    source = SourceTable(path=str(corpus / "*.txt"))
    return ValidationTable(interval_steps=1, sources=(source,), max_batches=max_batches)


def test_validation_is_bounded_and_the_same_each_time_even_if_one_stopped_early(
    corpus: Path, tokenizer: Tokenizer
) -> None:
    validation = build_validation_loader(validation_table(corpus, 4), tokenizer, 128, 3)
    first = content(validation)
    assert len(first) == 4
    next(iter(validation))
    assert content(validation) == first


def test_validation_ends_with_its_data_after_one_pass(
    corpus: Path, tokenizer: Tokenizer, make_loader: MakeLoader
) -> None:
    batches = list(build_validation_loader(validation_table(corpus, 10_000), tokenizer, 512, 6))
    tokens = sum(int((batch.tokens != tokenizer.pad_id).sum()) for batch in batches)
    texts = [text for path in corpus.glob("*.txt") if (text := path.read_bytes())]
    assert tokens == sum(len(text) + 2 for text in texts)
