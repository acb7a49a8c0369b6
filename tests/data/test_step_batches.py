"""The batches of a step on several machines, against the same batches on one."""

import json
from functools import partial
from itertools import islice

import pytest

from tests.support.batch_contents import content, loader_of, write_lines
from tests.support.joint_teams import run_agreeing
from torchround.data import DataError, cut, num_tokens
from torchround.data.step_batches import StepBatches
from torchround.layer import with_dropout_seeds

PAD = 258
SIZES = {"seq_len": 512, "global_batch_size": 24}


def steps_of(batches, most=1000):
    return [step for step in islice(iter(lambda: batches.next()[0], None), most) if step is not None]


def whole_steps(machines):
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
    def work(machine, gather):
        loader = make()
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        agree = gather if num_machines > 1 else None
        steps = steps_of(StepBatches(loader, size, rounds, agree, machine, num_machines), most)
        return steps, json.loads(json.dumps(loader.state_dict())), loader.num_bad_records()

    found = run_agreeing(num_machines, work)
    assert all(one[1:] == found[0][1:] for one in found)
    return whole_steps([steps for steps, _, _ in found]), *found[0][1:]


def test_one_machine_gets_the_micro_batches_of_the_batch_with_their_seeds(make_loader):
    batches = list(islice(make_loader(epochs=1), 5))
    steps = steps_of(StepBatches(make_loader(epochs=1), 4, 1), 5)
    for number, (batch, step) in enumerate(zip(batches, steps, strict=True)):
        expected, found = with_dropout_seeds(cut(batch, 4), 7, number), step.with_seeds(7, number)
        assert [part.facts() for part in found] == [part.facts() for part in expected]
        assert content(found) == content(expected)
        assert (step.num_labels, step.num_tokens) == (batch.num_labels(), num_tokens(batch, PAD))


@pytest.mark.parametrize(
    ("num_machines", "rounds", "size", "packing"),
    [(2, 1, 7, "contiguous"), (3, 2, 1, "best_fit"), (4, 1, 2, "contiguous"), (4, 3, 3, "best_fit")],
)
def test_machines_share_the_micro_batches_and_seeds_of_one_machine_up_to_the_short_last_step(
    make_loader, num_machines, rounds, size, packing
):
    make = partial(make_loader, epochs=1, packing=packing, long_documents="split", **SIZES)
    one, end, _ = train(make, 1, rounds, size=size)
    several, same_end, _ = train(make, num_machines, rounds, size=size)
    assert several == one and same_end == end
    first, last = (sum(len(rows[0][0]) for _, (rows, _) in step[0]) for step in (one[0], one[-1]))
    assert last < first


@pytest.mark.parametrize(
    ("stop", "packing", "window"), [(2, "best_fit", 0), (3, "contiguous", 8), (1, "best_fit", 8), (4, "contiguous", 0)]
)
def test_a_position_of_4_machines_means_the_same_batches_on_2_1_and_3(make_loader, stop, packing, window):
    keys = {"packing": packing, "long_documents": "split", "shuffle_sequences": window}
    make = partial(make_loader, epochs=1, **keys, **SIZES)
    whole, end, _ = train(make, 1)
    first, position, _ = train(make, 4, most=stop)
    assert first == whole[:stop] and len(whole) > stop
    for num_machines, rounds in ((2, 1), (1, 1), (3, 2)):
        rest, same_end, _ = train(make, num_machines, rounds, position)
        assert rows_of(rest) == rows_of(whole[stop:]) and same_end == end


@pytest.mark.parametrize("flagged", [(1, 2), (0,), ()])
def test_a_flag_of_any_machine_ends_the_steps_of_all_and_its_machine_reads_no_more(make_loader, flagged):
    def work(machine, gather):
        loader, steps = make_loader(epochs=1, seq_len=4096), []
        batches = StepBatches(loader, 2, 1, gather, machine, 3)
        flag = lambda: machine if machine in flagged and len(steps) == 2 else None
        while (found := batches.next(flag))[0] is not None:
            steps.append(loader.state_dict())
        return len(steps), found[1], loader.state_dict() == steps[-1]

    done = run_agreeing(3, work)
    flags = [machine if machine in flagged else None for machine in range(3)]
    if flagged:
        assert done == [(2, flags, machine in flagged) for machine in range(3)]
    else:
        assert done[0][0] > 2 and {(steps, *found) for steps, found, _ in done} == {(done[0][0], *flags)}


def until_error(batches, loader):
    for step in range(100):
        before = loader.state_dict()
        try:
            batches.next()
        except DataError as error:
            assert error.__cause__ is None  # the command prints causes too, and the text has it already
            return step, str(error), before
    raise AssertionError("no error")


def test_a_bad_record_of_one_machine_stops_all_before_the_same_step(tmp_path, tokenizer):
    fields = [["body" if number == 30 and machine == 2 else "text" for number in range(60)] for machine in range(4)]
    paths = [write_lines(tmp_path / f"{n}.jsonl", [{field: "a" * 62} for field in own]) for n, own in enumerate(fields)]

    def work(machine, gather):
        loader = loader_of(paths[machine], tokenizer, 64, 4, shuffle=False, shuffle_sequences=0)
        return until_error(StepBatches(loader, 1, 1, gather, machine, 4), loader)

    found = run_agreeing(4, work)
    # Each record is a sequence of 64 tokens, and the label of the last one is the first token of the next.
    assert {(step, text.partition(":")[0]) for step, text, _ in found} == {(7, "machine 2")}
    assert all("2.jsonl, line 31: no field 'text'" in text for _, text, _ in found)
    # Once the record is skipped, the steps continue from the position before the error.
    skipping = partial(loader_of, paths[2], tokenizer, 64, 4, shuffle=False, shuffle_sequences=0, on_bad_record="skip")
    rest, whole = train(skipping, 3, state=found[2][2], most=9)[0], train(skipping, 1, most=16)[0][7:]
    assert rows_of(rest) == rows_of(whole)


def test_files_of_equal_sizes_and_other_content_are_noticed_at_the_first_step(tokenizer, tmp_path):
    paths = [write_lines(tmp_path / f"{letter}.jsonl", [{"text": letter * 62}] * 20) for letter in "ab"]

    def work(machine, gather):
        StepBatches(loader_of(paths[machine], tokenizer), 1, 1, gather, machine, 2).next()

    with pytest.raises(DataError, match=r"machine 1 reads another batch than machine 0 .*data\.sources differ"):
        run_agreeing(2, work)
