"""Documents that are dealt to several streams: nothing is lost, each machine reads its own, and positions move."""

import json
import threading
from collections import Counter, defaultdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.conftest import MakeLoader
from tests.support.agreeing_threads import Gather, run_agreeing
from tests.support.batch_contents import content
from torchround.config import DataTable, SourceTable
from torchround.data import DataError, Loader, Tokenizer, build_loader, joined_positions
from torchround.data.document_types import Document
from torchround.data.formats.sources import Source
from torchround.data.step_batches import StepBatch, StepBatches
from torchround.layer import IGNORED_LABEL, MicroBatch

PAD = 258
SIZES = {"seq_len": 2048, "global_batch_size": 24}


def texts_of(batches: list[MicroBatch], streams: int, tokenizer: Tokenizer) -> Counter[str]:
    """Count the documents in batches of contiguous sequences, each stream's sequences one after the other."""
    found: Counter[str] = Counter()
    for number in range(streams):
        parts = [batch.tokens.chunk(streams)[number] for batch in batches]
        text = tokenizer.decode(torch.cat([part.flatten() for part in parts]).tolist())
        found.update(text.replace("<|pad|>", "").split("<|bos|>")[1:])
    return found


@pytest.mark.parametrize("workers", [0, 3])
def test_several_streams_hold_each_document_of_one_stream_once(
    make_loader: MakeLoader, tokenizer: Tokenizer, workers: int
) -> None:
    make = partial(make_loader, epochs=2, num_workers=workers, shuffle_sequences=0, **SIZES)
    whole = texts_of(list(make()), 1, tokenizer)
    batches = list(make(streams=4))
    assert texts_of(batches, 4, tokenizer) == whole
    assert {batch.tokens.shape for batch in batches} == {(24, 2048)}
    assert content(make(streams=4, num_workers=3 - workers)) == content(batches)


def test_a_stream_that_has_ended_leaves_padding_without_labels_and_tokens(make_loader: MakeLoader) -> None:
    make = partial(make_loader, epochs=1, packing="best_fit", long_documents="split", **SIZES)
    one, several = make(), make(streams=12)
    tokens = [sum(map(loader.num_tokens, loader)) for loader in (one, several)]
    assert tokens[0] == tokens[1]
    last = list(make(streams=12))[-1]
    empty = (last.labels == IGNORED_LABEL).all(dim=1)
    assert empty.any()
    assert (last.tokens[empty] == PAD).all()
    assert one.num_long_documents() == several.num_long_documents() > 0


# Several machines.


def steps_of(batches: StepBatches, most: int) -> list[StepBatch]:
    return [step for step in islice(iter(lambda: batches.next()[0], None), most) if step is not None]


def one_after_the_other(machines: list[list[StepBatch]]) -> list[Any]:
    """Return all micro-batches of each step in their order, with the counts of the step."""
    found = []
    for parts in zip(*machines, strict=True):
        numbered = {
            number: content([micro_batch])
            for part in parts
            for number, micro_batch in zip(part.share.micro_batches, part.micro_batches, strict=True)
        }
        counts = {(part.num_labels, part.num_tokens) for part in parts}
        found.append(([numbered[number] for number in sorted(numbered)], counts))
    return found


def train(
    make: Any, num_machines: int, rounds: int = 1, state: Any = None, most: int = 1000
) -> tuple[list[Any], dict[str, Any], int]:
    """Run up to `most` steps from a position. Return their contents, the position after them, and the bad records."""

    def work(machine: int, gather: Gather) -> tuple[list[StepBatch], Any, int]:
        loader: Loader = make()
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        agree = gather if num_machines > 1 else None
        steps = steps_of(StepBatches(loader, 2, rounds, agree, machine, num_machines), most)
        return steps, json.loads(json.dumps(loader.state_dict())), loader.num_bad_records()

    found = run_agreeing(num_machines, work)
    bad = {count for _, _, count in found}
    assert len(bad) == 1
    position = joined_positions([position for _, position, _ in found])
    return one_after_the_other([steps for steps, _, _ in found]), position, bad.pop()


def test_each_sequence_is_read_on_one_machine_and_with_one_stream_on_all(
    make_loader: MakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: dict[int, Counter[str]] = defaultdict(Counter)
    own_read = Source.read

    def counted(source: Source, document: Document, offset: int) -> Any:
        reads[threading.get_ident()][f"{document} from {offset}"] += 1
        return own_read(source, document, offset)

    monkeypatch.setattr(Source, "read", counted)

    def counts(num_machines: int, **keys: Any) -> list[Counter[str]]:
        reads.clear()
        train(partial(make_loader, epochs=1, **SIZES, **keys), num_machines)
        return list(reads.values())

    (whole,) = counts(1)
    assert counts(4) == [whole] * 4
    for streams in (4, 12):
        parts = counts(4, streams=streams)
        assert len(parts) == 4
        assert sum(parts, Counter()) == whole
    # 3 streams for 4 machines: some are read twice, none by all.
    assert whole.total() < sum(counts(4, streams=3), Counter()).total() < 4 * whole.total()


@settings(max_examples=6, deadline=None)
@given(
    streams=st.sampled_from([1, 2, 4, 12]),
    stop=st.integers(0, 9),
    packing=st.sampled_from(["contiguous", "best_fit"]),
    window=st.sampled_from([0, 40]),
)
def test_a_position_of_4_machines_means_the_same_batches_on_2_1_and_3(
    make_loader: MakeLoader, streams: int, stop: int, packing: str, window: int
) -> None:
    make = partial(
        make_loader,
        epochs=2,
        streams=streams,
        packing=packing,
        long_documents="split",
        shuffle_sequences=window,
        **SIZES,
    )
    whole, end, _ = train(make, 1)
    first, position, _ = train(make, 4, most=stop)
    assert first == whole[:stop]
    for num_machines, rounds in ((2, 1), (1, 1), (3, 2)):
        rest, same_end, _ = train(make, num_machines, rounds, position)
        assert rest == whole[stop:]
        assert same_end == end


def test_the_rounds_may_change_within_a_run(make_loader: MakeLoader) -> None:
    """Other rounds need other streams, whose positions the machines then give to each other."""
    make = partial(make_loader, epochs=1, streams=4, **SIZES)

    def work(machine: int, gather: Gather) -> list[StepBatch]:
        loader = make()
        first = steps_of(StepBatches(loader, 2, 1, gather, machine, 2), 1)
        return first + steps_of(StepBatches(loader, 2, 3, gather, machine, 2), 1000)

    assert one_after_the_other(run_agreeing(2, work)) == train(make, 1)[0]


# What is refused, bad records, and sources that are too small.


def source_of(folder: Path, records: list[dict[str, str]]) -> SourceTable:
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return SourceTable(path=str(path))


def small_loader(source: SourceTable, tokenizer: Tokenizer, **keys: Any) -> Loader:
    return build_loader(DataTable(sources=(source,), **keys), tokenizer, 64, 4, 0)


def test_bad_records_are_counted_over_all_streams_and_machines(tmp_path: Path, tokenizer: Tokenizer) -> None:
    records = [{"body" if number % 9 == 4 else "text": "a" * 62} for number in range(60)]
    make = partial(small_loader, source_of(tmp_path, records), tokenizer, epochs=1, on_bad_record="skip", shuffle=False)
    assert [train(partial(make, streams=streams), 2)[2] for streams in (1, 2, 4)] == [7, 7, 7]


def test_a_bad_record_of_one_stream_stops_all_machines_before_the_same_step(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    records = [{"body" if number == 30 else "text": "a" * 62} for number in range(60)]
    source = source_of(tmp_path, records)

    def work(machine: int, gather: Gather) -> tuple[int, str, Any]:
        loader = small_loader(source, tokenizer, streams=4, shuffle=False)
        batches = StepBatches(loader, 1, 1, gather, machine, 4)
        for step in range(100):
            before = loader.state_dict()
            try:
                batches.next()
            except DataError as error:
                return step, str(error), before
        raise AssertionError("no error")

    found = run_agreeing(4, work)
    # Record 30, from 0, is number 7 of stream 2. A stream gives one sequence a step, with two tokens more each time.
    assert {(step, text.partition(":")[0]) for step, text, _ in found} == {(6, "machine 2")}
    assert all("records.jsonl, line 31: no field 'text'" in text for _, text, _ in found)
    # Once the record is skipped, the steps continue from the position before the error.
    position = joined_positions([before for _, _, before in found])
    skipping = partial(small_loader, source, tokenizer, streams=4, shuffle=False, on_bad_record="skip")
    assert train(skipping, 3, state=position, most=9)[0] == train(skipping, 1, most=15)[0][6:]


def test_another_number_of_streams_is_refused_with_both_numbers(make_loader: MakeLoader) -> None:
    loaders = {streams: make_loader(streams=streams, global_batch_size=6) for streams in (1, 2, 3)}
    for loader in loaders.values():
        next(loader)
    for saved, now, text in ((3, 2, "3, is 2"), (1, 2, "not set, is 2"), (2, 1, "2, is 1")):
        with pytest.raises(DataError, match=f"of other data: streams was {text}$"):
            loaders[now].load_state_dict(loaders[saved].state_dict())


@pytest.mark.parametrize(
    "forged", [{"streams": 3}, {"streams": []}, {}, {"streams": ["elsewhere", None]}, {"streams": [1, 2]}, [1]]
)
def test_a_forged_position_of_streams_is_refused(make_loader: MakeLoader, forged: Any) -> None:
    loader = make_loader(streams=2)
    state = loader.state_dict()
    with pytest.raises(DataError, match="invalid data position in the checkpoint"):
        loader.load_state_dict({**state, "position": forged})


def test_a_position_without_one_of_the_streams_is_refused(make_loader: MakeLoader) -> None:
    states = []
    for _ in range(2):
        loader = make_loader(streams=3)
        loader.read_only([1])
        next(loader)
        states.append(loader.state_dict())
    with pytest.raises(DataError, match="no machine has the position of data stream 0"):
        joined_positions(states)


def test_an_endless_run_deals_fewer_documents_than_streams_and_refuses_empty_ones(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    letters = [{"text": letter * 40} for letter in "abc"]
    loader = small_loader(source_of(tmp_path, letters), tokenizer, streams=4)
    tokens = torch.cat([batch.tokens for batch in islice(loader, 20)])
    assert {ord(letter) for letter in "abc"} <= set(tokens.flatten().tolist())
    with pytest.raises(DataError, match=r"none of its documents holds any text .* data\.streams = 4"):
        next(small_loader(source_of(tmp_path, [{"text": ""}] * 5), tokenizer, streams=4))
