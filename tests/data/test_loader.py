"""The whole pipeline on real files: order, position, shuffled windows, end of data, errors, threads, fingerprints."""

import gc
import json
import random
import shutil
import threading
import time
from functools import partial
from itertools import islice

import pytest
import torch

from tests.support.batch_contents import content, loader_of, write_lines
from torchround.config import DataTable, SourceTable, ValidationTable
from torchround.data import DataError, build_validation_loader
from torchround.data.shuffling import auto_window

SEQ_LEN = 64
WINDOW = 8
# Groups are so small that a window has several, and some windows end inside a group.
pytestmark = pytest.mark.usefixtures("small_groups")


def take(loader, count):
    return content(islice(loader, count))


def test_documents_stay_whole_and_framed_and_nothing_is_lost_at_the_end(corpus, make_loader, tokenizer):
    batches = list(make_loader(epochs=1, shuffle=False))
    assert all(tensor.dtype == torch.int64 and tensor.is_contiguous() for tensor in batches[0].tensors())
    sizes = [batch.tokens.shape for batch in batches]
    assert set(sizes[:-1]) == {(6, 512)} and 0 < sizes[-1][0] <= 6
    text = tokenizer.decode([token for batch in batches for token in batch.tokens.flatten().tolist()])
    documents = text.replace("<|pad|>", "").split("<|bos|>")[1:]
    records = [json.loads(line) for line in (corpus / "records.jsonl").read_text().split("\n") if line.strip()]
    expected = [path.read_text() for path in corpus.glob("*.txt")] + [record["text"] for record in records]
    assert all(document.endswith("<|eos|>") for document in documents)
    assert sorted(document[: -len("<|eos|>")] for document in documents) == sorted(filter(None, expected))


def test_an_endless_loader_resumes_across_epochs_and_continues_after_a_close_or_from_an_earlier_position(make_loader):
    loader = make_loader(num_workers=2)
    take(loader, 200)  # more than two passes over the records
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["position"]["reader"]["sources"][1]["epoch"] >= 2
    loader.close()
    rest = take(loader, 20)
    assert len(rest) == 20
    for resumed in (make_loader(), loader):
        resumed.load_state_dict(state)
        assert take(resumed, 20) == rest
    assert take(make_loader(seed=1), 5) != take(make_loader(), 5)


def test_a_position_may_continue_with_another_shape_and_loses_no_token(make_loader):
    loader = make_loader(seq_len=100, global_batch_size=3)
    before = [batch.tokens.flatten() for batch in islice(loader, 4)]
    resumed = make_loader(seq_len=64, global_batch_size=5)
    resumed.load_state_dict(loader.state_dict())
    stream = torch.cat([*before, *(batch.tokens.flatten() for batch in islice(resumed, 10))])
    assert torch.equal(stream, next(make_loader(seq_len=len(stream), global_batch_size=1)).tokens[0])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_end_of_the_data_stays_the_end(make_loader, num_workers):
    loader, resumed = (make_loader(num_workers=num_workers, epochs=1, seq_len=4096) for _ in range(2))
    assert list(loader) and list(loader) == []
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_bad_record_stops_the_batch_that_would_hold_it_and_every_later_one(tmp_path, tokenizer, num_workers):
    good = {"text": "0123456789"}  # 12 tokens with BOS and EOS
    path = write_lines(tmp_path / "x.jsonl", [good, good, good, "broken", good])
    loader = loader_of(path, tokenizer, 8, shuffle=False, num_workers=num_workers)
    assert len(take(loader, 2)) == 2  # 32 of the 36 good tokens
    state = loader.state_dict()
    for _ in range(2):
        with pytest.raises(DataError, match=r"^.*x.jsonl, line 4: not valid JSON: [^\n]*$"):
            next(loader)
    assert loader.state_dict() == state


WHOLE = {"packing": "best_fit"}
WINDOWED = {"shuffle_sequences": 8}
CHANGES = [
    ({}, {"seed": 1}, "seed was 0, is 1"),
    ({}, {"shuffle": False, "weights": (1.0, 1.0)}, r"shuffle was True, is False; weights was \[1.0, 2.5\], is"),
    (WHOLE, {"packing": "contiguous"}, "packing was"),
    (WHOLE, {"long_documents": "split"}, "long_documents was"),
    (WHOLE, {"seq_len": 64}, "seq_len was 512, is 64"),
    (WINDOWED, {"seq_len": 64}, "seq_len was 512, is 64"),
    (WINDOWED, {"shuffle_sequences": 0}, "shuffle_sequences was 8, is not set"),
    (WINDOWED, {"shuffle_sequences": 9}, "shuffle_sequences was 8, is 9"),
    ({}, WINDOWED, "shuffle_sequences was not set, is 8"),
]


@pytest.mark.parametrize(("keys", "change", "message"), CHANGES)
def test_a_position_of_other_data_is_refused_and_says_what_changed(make_loader, keys, change, message):
    loader = make_loader(**keys)
    next(loader)
    with pytest.raises(DataError, match=f"of other data: (.*; )?{message}"):
        make_loader(**keys | change).load_state_dict(loader.state_dict())


@pytest.mark.parametrize("end", ["close", "error", "forgotten"])
def test_no_thread_outlives_its_loader(tmp_path, tokenizer, end):
    before = set(threading.enumerate())
    path = write_lines(tmp_path / "x.jsonl", [*[{"text": "x" * 1000}] * 200, "broken"])
    loader = loader_of(path, tokenizer, 128, 4, shuffle=False, num_workers=3)
    next(loader)
    assert len(set(threading.enumerate()) - before) >= 2
    if end == "close":  # threads of loaders that earlier tests dropped may still be ending
        loader.close()
        left = set(threading.enumerate()) - before
        assert not [thread for thread in left if thread.name.startswith("torchround-tokenise")]
    elif end == "error":
        with pytest.raises(DataError):
            list(loader)
    del loader
    gc.collect()
    deadline = time.monotonic() + 30
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


def test_loading_touches_no_global_random_state_and_no_thread_count_of_torch(make_loader):
    threads_before = torch.get_num_threads()
    torch.set_num_threads(2)
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    loader, seen = make_loader(num_workers=2), []
    take(loader, 10)
    later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    later.start()
    later.join()
    counts = [*seen, torch.get_num_threads()]
    torch.set_num_threads(threads_before)
    loader.close()
    assert random.getstate() == python_state and torch.equal(torch.get_rng_state(), torch_state)
    assert counts == [2, 2]


def test_validation_is_one_pass_or_less_and_the_same_each_time_even_if_one_stopped_early(corpus, tokenizer):
    def validation(most, *shape):
        source = SourceTable(path=str(corpus / "*.txt"))
        table = ValidationTable(interval_steps=1, sources=(source,), max_batches=most)
        return build_validation_loader(table, tokenizer, *shape)

    bounded = validation(4, 128, 3)
    first = content(bounded)
    next(iter(bounded))
    assert len(first) == 4 and content(bounded) == first
    tokens = sum(int((batch.tokens != tokenizer.pad_id).sum()) for batch in validation(10_000, 512, 6))
    texts = [text for path in corpus.glob("*.txt") if (text := path.read_bytes())]
    assert tokens == sum(len(text) + 2 for text in texts)


def test_files_of_another_size_are_other_data_and_their_names_do_not_matter(corpus, make_loader, tmp_path):
    copy, loader = tmp_path / "copy", make_loader()
    shutil.copytree(corpus, copy)
    expected, state = loader.fingerprints(), loader.state_dict()
    assert make_loader(folder=copy).fingerprints() == expected
    make_loader(folder=copy).load_state_dict(state)
    assert {*make_loader(seed=1).fingerprints().items()} - {*expected.items()} == {("data: seed", "1")}
    (copy / "new.txt").write_text("one more")
    assert make_loader(folder=copy).fingerprints().keys() == expected.keys()
    with pytest.raises(DataError, match=r"sources was \['9 documents .*\], is \['10 documents"):
        make_loader(folder=copy).load_state_dict(state)


def test_a_position_of_earlier_rules_of_the_order_is_refused(make_loader):
    loader = make_loader()
    state = loader.state_dict()
    del state["data"]["order"]
    with pytest.raises(DataError, match="order was not set, is 2"):
        loader.load_state_dict(state)


@pytest.fixture(scope="module")
def make(make_loader, tmp_path_factory):
    folder = tmp_path_factory.mktemp("few")
    (folder / "note.txt").write_text("a note, " * 99)
    write_lines(folder / "records.jsonl", [{"text": f"record {n} " * (n * 7 % 23)} for n in range(100)])
    return partial(make_loader, folder=folder, seq_len=SEQ_LEN, epochs=1)


def sequences(loader):
    return [row for batch in content(loader) for row in zip(*batch, strict=True)]


def test_a_book_of_300_sequences_is_spread_over_all_batches_by_default(tmp_path, tokenizer):
    """The book is a quarter of 1200 sequences: a random batch has 4 of it, and 11 are four standard deviations more."""
    texts = ["b" * (300 * SEQ_LEN), *(f"other {number:03} " * 32 for number in range(180))]
    path = write_lines(tmp_path / "x.jsonl", [{"text": text} for text in texts])
    mixed, plain = (
        [int((batch.tokens[:, 1:-1] == ord("b")).all(dim=1).sum()) for batch in loader]
        for loader in (
            loader_of(path, tokenizer, SEQ_LEN, 16, epochs=1, **keys) for keys in ({}, {"shuffle_sequences": 0})
        )
    )
    assert sum(mixed) == sum(plain) >= 299 and len(mixed) == len(plain) > 70
    assert max(plain) == 16
    assert max(mixed) <= 11
    assert sum(share > 0 for share in mixed) > 0.9 * len(mixed)


def test_the_default_shuffles_text_and_neither_whole_documents_nor_data_in_their_listed_order(make):
    for keys, is_shuffled in (({}, True), ({"packing": "best_fit"}, False), ({"shuffle": False}, False)):
        loader = make(shuffle_sequences="auto", **keys)
        next(loader)
        assert ("window" in loader.state_dict()["position"]) == is_shuffled


def test_a_default_window_has_16_mi_tokens_and_at_most_4096_sequences():
    windows = {1: 4096, 2048: 4096, 8192: 2048, 131072: 128, 10**6: 128}
    assert {seq_len: auto_window(seq_len) for seq_len in windows} == windows


def test_a_window_ends_with_an_epoch_of_small_data(tmp_path, tokenizer):
    """Each document fills one sequence, so that the documents of a window can be told."""
    texts = [{"text": f"{number:02}".ljust(SEQ_LEN - 2, ".")} for number in range(20)]
    loader = loader_of(write_lines(tmp_path / "x.jsonl", texts), tokenizer, SEQ_LEN, 1)
    numbers = [tokenizer.decode(next(loader).tokens[0, 1:3].tolist()) for _ in range(100)]
    for start in range(0, 100, 20):
        assert sorted(numbers[start : start + 20]) == [f"{number:02}" for number in range(20)]
    assert loader.state_dict()["position"]["window"] == 5


@pytest.mark.parametrize(
    ("packing", "window"), [("contiguous", 1), ("best_fit", 7), ("contiguous", 64), ("best_fit", 65536)]
)
def test_each_window_has_the_sequences_that_it_has_without_shuffling(make, packing, window):
    plain = sequences(make(packing=packing))
    mixed = sequences(make(packing=packing, shuffle_sequences=window))
    assert len(plain) == len(mixed) > 64
    for start in range(0, len(plain), window):
        assert sorted(plain[start : start + window]) == sorted(mixed[start : start + window])
    assert (plain == mixed) == (window == 1)


def test_the_seed_and_the_window_fix_the_order(make):
    """Documents are not shuffled here, so only the shuffle of sequences can change the order."""
    plain, orders = sequences(make(shuffle=False)), []
    for seed in (0, 0, 1):
        mixed = sequences(make(shuffle=False, seed=seed, shuffle_sequences=WINDOW))
        orders.append([plain.index(row) for row in mixed])
    assert orders[0] == orders[1] != orders[2]
    first, second = ([number % WINDOW for number in orders[0][start : start + WINDOW]] for start in (0, WINDOW))
    assert first != second


def test_the_batch_size_may_change_in_the_middle_of_a_window(make):
    first, second = (make(shuffle_sequences=WINDOW, global_batch_size=size) for size in (3, 5))
    list(islice(first, 4))
    second.load_state_dict(first.state_dict())
    assert sequences(second) == sequences(make(shuffle_sequences=WINDOW))[12:]


def test_a_bad_record_stops_a_run_where_its_window_began(make_loader, corpus, tmp_path):
    records = (corpus / "records.jsonl").read_text().splitlines()
    (tmp_path / "note.txt").write_text("note")
    make = partial(make_loader, folder=tmp_path, seq_len=SEQ_LEN, epochs=1, shuffle=False, global_batch_size=4)
    repaired, broken = records, [*records[:30], "x" * len(records[30]), *records[31:]]
    write_lines(tmp_path / "records.jsonl", repaired)
    whole = content(make(shuffle_sequences=WINDOW))
    write_lines(tmp_path / "records.jsonl", broken)
    loader, before = make(shuffle_sequences=WINDOW), []
    with pytest.raises(DataError, match="not valid JSON"):
        before.extend(content([batch])[0] for batch in loader)
    assert before == whole[: len(before)] and len(before) * 4 % WINDOW == 0
    write_lines(tmp_path / "records.jsonl", repaired)
    resumed = make(shuffle_sequences=WINDOW)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert before + content(resumed) == whole


def test_validation_is_not_shuffled(corpus, tokenizer):
    """Its losses can be compared between runs with and without shuffling."""
    found = []
    for window in (0, WINDOW):
        source = SourceTable(path=str(corpus / "records.jsonl"))
        data = DataTable(sources=(source,), shuffle_sequences=window, validation_fraction=0.3)
        table = ValidationTable(interval_steps=1, max_batches=3)
        found.append(content(build_validation_loader(table, tokenizer, SEQ_LEN, 2, data)))
    assert found[0] == found[1]
