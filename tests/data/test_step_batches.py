"""The batches of a step on several machines, against the same batches on one, with documents dealt to one or more streams."""

import json
from collections import Counter
from functools import partial
from itertools import chain, islice

import pytest
import torch

from tests.support.batch_contents import content, loader_of, write_lines
from tests.support.joint_teams import run_agreeing
from torchround.data import DataError, cut, joined_positions, num_tokens
from torchround.data.step_batches import StepBatches
from torchround.layer import IGNORED_LABEL, with_dropout_seeds

PAD = 258
SIZES = {"seq_len": 512, "global_batch_size": 24}


def steps_of(batches, most=1000):
    """Return the steps up to the end of the data."""
    return [step for step in islice(iter(lambda: batches.next()[0], None), most) if step is not None]


def whole_steps(machines):
    """Return the micro-batches of each step in their order with their facts, and the counts of the step."""
    found = []
    for number, parts in enumerate(zip(*machines, strict=True)):
        numbered = {
            index: (content([micro_batch]), micro_batch.facts())
            for part in parts
            for index, micro_batch in zip(part.share.micro_batches, part.with_seeds(3, number), strict=True)
        }
        assert sum(len(part.micro_batches) for part in parts) == len(numbered)
        found.append((sorted(numbered.items()), {(part.num_labels, part.num_tokens) for part in parts}))
    return found


def rows_of(steps):
    """Leave out the facts, whose seeds depend on the number of the step."""
    return [([rows for _, (rows, _) in step], counts) for step, counts in steps]


def train(make, num_machines, rounds=1, state=None, most=1000, size=2):
    """Run up to `most` steps from a position. Return their contents, the position after them, and the bad records."""

    def work(machine, gather):
        loader = make()
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        agree = gather if num_machines > 1 else None
        steps = steps_of(StepBatches(loader, size, rounds, agree, machine, num_machines), most)
        return steps, json.loads(json.dumps(loader.state_dict())), loader.num_bad_records()

    found = run_agreeing(num_machines, work)
    (bad,) = {count for _, _, count in found}
    return whole_steps([steps for steps, _, _ in found]), joined_positions([position for _, position, _ in found]), bad


def test_one_machine_gets_the_micro_batches_of_the_batch_with_their_seeds(make_loader):
    batches = list(islice(make_loader(epochs=1), 5))
    steps = steps_of(StepBatches(make_loader(epochs=1), 4, 1), 5)
    for number, (batch, step) in enumerate(zip(batches, steps, strict=True)):
        expected, found = with_dropout_seeds(cut(batch, 4), 7, number), step.with_seeds(7, number)
        assert [part.facts() for part in found] == [part.facts() for part in expected]
        assert content(found) == content(expected)
        assert (step.num_labels, step.num_tokens) == (batch.num_labels(), num_tokens(batch, PAD))


@pytest.mark.parametrize(
    ("num_machines", "rounds", "size", "packing", "streams"),
    [
        (2, 1, 7, "contiguous", 1),  # the last step is short
        (3, 2, 1, "best_fit", 1),
        (4, 1, 2, "contiguous", 4),
        (2, 3, 5, "best_fit", 3),
        (3, 1, 4, "contiguous", 2),  # some machines share a stream
        (4, 3, 3, "best_fit", 12),
    ],
)
def test_machines_share_the_micro_batches_and_seeds_of_one_machine_up_to_the_short_last_step(
    make_loader, num_machines, rounds, size, packing, streams
):
    make = partial(make_loader, epochs=1, streams=streams, packing=packing, long_documents="split", **SIZES)
    one, end, _ = train(make, 1, rounds, size=size)
    several, same_end, _ = train(make, num_machines, rounds, size=size)
    assert several == one and same_end == end
    first, last = (sum(len(rows[0][0]) for _, (rows, _) in step[0]) for step in (one[0], one[-1]))
    assert (last < first) == (streams == 1)


@pytest.mark.parametrize(
    ("streams", "stop", "packing", "window"),
    [(1, 2, "best_fit", 0), (4, 3, "contiguous", 8), (12, 1, "best_fit", 8), (2, 4, "contiguous", 0)],
)
def test_a_position_of_4_machines_means_the_same_batches_on_2_1_and_3(make_loader, streams, stop, packing, window):
    keys = {"streams": streams, "packing": packing, "long_documents": "split", "shuffle_sequences": window}
    make = partial(make_loader, epochs=1, **keys, **SIZES)
    whole, end, _ = train(make, 1)
    first, position, _ = train(make, 4, most=stop)
    assert first == whole[:stop] and len(whole) > stop
    for num_machines, rounds in ((2, 1), (1, 1), (3, 2)):
        rest, same_end, _ = train(make, num_machines, rounds, position)
        assert rows_of(rest) == rows_of(whole[stop:]) and same_end == end


def test_the_rounds_may_change_within_a_run(make_loader):
    """Other rounds need other streams, whose positions the machines then give to each other."""
    make = partial(make_loader, epochs=1, streams=4, **SIZES)

    def work(machine, gather):
        loader = make()
        first = steps_of(StepBatches(loader, 2, 1, gather, machine, 2), 1)
        return first + steps_of(StepBatches(loader, 2, 3, gather, machine, 2))

    assert whole_steps(run_agreeing(2, work)) == train(make, 1)[0]


def test_the_flags_of_all_machines_come_with_each_step_and_with_the_end(make_loader):
    def work(machine, gather):
        batches, found, batch = StepBatches(make_loader(epochs=1, seq_len=4096), 2, 1, gather, machine, 3), [], True
        while batch is not None:
            batch, flags = batches.next({"signal": machine * len(found)})
            found.append(flags)
        return found

    one, two, three = run_agreeing(3, work)
    assert one == two == three and len(one) > 2
    assert one == [[{"signal": machine * step} for machine in range(3)] for step in range(len(one))]


# Streams.


def texts_of(batches, streams, tokenizer):
    """Count the documents in batches of contiguous sequences, each stream's sequences one after the other."""
    found = Counter()
    for number in range(streams):
        parts = [batch.tokens.chunk(streams)[number] for batch in batches]
        text = tokenizer.decode(torch.cat([part.flatten() for part in parts]).tolist())
        found.update(text.replace("<|pad|>", "").split("<|bos|>")[1:])
    return found


def test_several_streams_hold_each_document_of_one_stream_once_and_padding_at_the_end(make_loader, tokenizer):
    make = partial(make_loader, epochs=2, **SIZES)
    batches = list(make(streams=4))
    assert texts_of(batches, 4, tokenizer) == texts_of(list(make()), 1, tokenizer)
    assert {batch.tokens.shape for batch in batches} == {(24, 512)}
    assert content(make(streams=4, num_workers=3)) == content(batches)
    make = partial(make_loader, epochs=1, packing="best_fit", long_documents="split", **SIZES)
    one, several = make(), make(streams=12)
    batches = list(several)
    assert sum(map(one.num_tokens, one)) == sum(map(several.num_tokens, batches))
    empty = (batches[-1].labels == IGNORED_LABEL).all(dim=1)
    assert empty.any()
    assert (batches[-1].tokens[empty] == PAD).all()
    assert one.num_long_documents() == several.num_long_documents() > 0


def test_each_stream_is_read_on_one_machine_and_one_stream_on_all(make_loader):
    """A machine has positions of the streams that it reads."""

    def machines_of(streams):
        def work(machine, gather):
            loader = make_loader(epochs=1, streams=streams, **SIZES)
            steps_of(StepBatches(loader, 2, 1, gather, machine, 4), 2)
            position = loader.state_dict()["position"]
            found = position["streams"] if streams > 1 else [position]
            return [number for number, one in enumerate(found) if one != "elsewhere"]

        return run_agreeing(4, work)

    assert machines_of(12) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert machines_of(1) == [[0]] * 4
    shared = machines_of(3)  # some are read twice, none by all
    assert 4 < sum(map(len, shared)) < 12 and set(chain(*shared)) == {0, 1, 2}


# What is refused, bad records, and sources that are too small.


def until_error(batches, loader):
    """Return the step before which an error came, its text, and the position before that."""
    for step in range(100):
        before = loader.state_dict()
        try:
            batches.next()
        except DataError as error:
            assert error.__cause__ is None  # the command prints causes too, and the text has it already
            return step, str(error), before
    raise AssertionError("no error")


def test_a_bad_record_of_one_stream_stops_all_machines_before_the_same_step(tmp_path, tokenizer):
    records = [{"body" if number == 30 else "text": "a" * 62} for number in range(60)]
    path = write_lines(tmp_path / "x.jsonl", records)
    make = partial(loader_of, path, tokenizer, 64, 4, streams=4, shuffle=False)

    def work(machine, gather):
        loader = make()
        return until_error(StepBatches(loader, 1, 1, gather, machine, 4), loader)

    found = run_agreeing(4, work)
    # Record 30, from 0, is number 7 of stream 2. A stream gives one sequence a step, with two tokens more each time.
    assert {(step, text.partition(":")[0]) for step, text, _ in found} == {(6, "machine 2")}
    assert all("x.jsonl, line 31: no field 'text'" in text for _, text, _ in found)
    # Once the record is skipped, the steps continue from the position before the error.
    position = joined_positions([before for _, _, before in found])
    skipping = partial(make, on_bad_record="skip")
    rest, whole = train(skipping, 3, state=position, most=9)[0], train(skipping, 1, most=15)[0][6:]
    assert rows_of(rest) == rows_of(whole)


def test_bad_records_are_counted_over_all_streams_and_machines(tmp_path, tokenizer):
    records = [{"body" if number % 9 == 4 else "text": "a" * 62} for number in range(60)]
    path = write_lines(tmp_path / "x.jsonl", records)
    make = partial(loader_of, path, tokenizer, 64, 4, epochs=1, on_bad_record="skip", shuffle=False)
    assert [train(partial(make, streams=streams), 2)[2] for streams in (1, 2, 4)] == [7, 7, 7]


def test_files_of_equal_sizes_and_other_content_are_noticed_at_the_first_step(tokenizer, tmp_path):
    paths = [write_lines(tmp_path / f"{letter}.jsonl", [{"text": letter * 62}] * 20) for letter in "ab"]

    def work(machine, gather):
        StepBatches(loader_of(paths[machine], tokenizer), 1, 1, gather, machine, 2).next()

    with pytest.raises(DataError, match=r"machine 1 reads another batch than machine 0 .*data\.sources differ"):
        run_agreeing(2, work)


def test_forged_and_partial_positions_of_streams_are_refused(make_loader):
    loader = make_loader(streams=2)
    for forged in ({"streams": 3}, {"streams": []}, {}, {"streams": ["elsewhere", None]}, {"streams": [1, 2]}, [1]):
        with pytest.raises(DataError, match="saved data position cannot be used"):
            loader.load_state_dict({**loader.state_dict(), "position": forged})
    states = []
    for _ in range(2):
        loader = make_loader(streams=3)
        loader.read_only([1])
        next(loader)
        states.append(loader.state_dict())
    with pytest.raises(DataError, match="no machine has the position of data stream 0"):
        joined_positions(states)


def test_an_endless_run_deals_fewer_documents_than_streams_and_refuses_empty_ones(tmp_path, tokenizer):
    path = write_lines(tmp_path / "x.jsonl", [{"text": letter * 40} for letter in "abc"])
    batches = islice(loader_of(path, tokenizer, 64, 4, streams=4), 20)
    assert set(b"abc") <= set(torch.cat([batch.tokens for batch in batches]).flatten().tolist())
    write_lines(path, [{"text": ""}] * 5)
    with pytest.raises(DataError, match=r"none of its documents holds any text for stream 0 of data\.streams"):
        next(loader_of(path, tokenizer, 64, 4, streams=4))
