"""The batches of a step on several machines, against the same batches on one."""

import json
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
from torchround.data import DataError, Loader, cut, num_tokens
from torchround.data.step_batches import StepBatch, StepBatches
from torchround.layer import with_dropout_seeds

PAD = 258


def all_steps(batches: StepBatches, most: int = 1000) -> list[StepBatch]:
    """Return the steps up to the end of the data."""
    steps = iter(lambda: batches.next()[0], None)
    return [step for step in islice(steps, most) if step is not None]


def sequences(step: StepBatch) -> int:
    return sum(len(part.tokens) for part in step.micro_batches)


def on_machines(
    make: Any, num_machines: int, micro_batch_size: int = 2, rounds: int = 1, most: int = 1000
) -> list[list[StepBatch]]:
    """Return the steps of each machine, which all have a loader of their own."""

    def work(machine: int, gather: Gather) -> list[StepBatch]:
        agree = gather if num_machines > 1 else None
        return all_steps(StepBatches(make(), micro_batch_size, rounds, agree, machine, num_machines), most)

    return run_agreeing(num_machines, work)


def test_one_machine_gets_the_micro_batches_of_the_batch_with_their_seeds(make_loader: MakeLoader) -> None:
    batches = list(islice(make_loader(epochs=1), 5))
    steps = all_steps(StepBatches(make_loader(epochs=1), 4, 1), 5)
    for number, (batch, step) in enumerate(zip(batches, steps, strict=True)):
        expected = with_dropout_seeds(cut(batch, 4), 7, number)
        found = step.with_seeds(7, number)
        assert [part.facts() for part in found] == [part.facts() for part in expected]
        for mine, other in zip(found, expected, strict=True):
            assert all(map(torch.equal, mine.tensors(), other.tensors()))
        assert step.num_labels == batch.num_labels()
        assert step.num_tokens == num_tokens(batch, PAD)


@settings(max_examples=12, deadline=None)
@given(
    num_machines=st.integers(2, 4),
    rounds=st.integers(1, 3),
    size=st.integers(1, 7),
    packing=st.sampled_from(["contiguous", "best_fit"]),
    streams=st.sampled_from([1, 2, 3, 4, 12]),
)
def test_machines_share_the_micro_batches_and_seeds_of_one_machine_up_to_the_short_last_step(
    make_loader: MakeLoader, num_machines: int, rounds: int, size: int, packing: str, streams: int
) -> None:
    make = partial(
        make_loader,
        epochs=1,
        seq_len=2048,
        global_batch_size=24,
        streams=streams,
        packing=packing,
        long_documents="split",
    )
    (whole,) = on_machines(make, 1, size, rounds)
    shared = on_machines(make, num_machines, size, rounds)
    assert (sequences(whole[-1]) < sequences(whole[0])) == (streams == 1)
    for number, (one, *parts) in enumerate(zip(whole, *shared, strict=True)):
        expected = dict(enumerate(one.with_seeds(3, number)))
        found = {
            index: micro_batch
            for part in parts
            for index, micro_batch in zip(part.share.micro_batches, part.with_seeds(3, number), strict=True)
        }
        assert found.keys() == expected.keys()
        assert sum(len(part.micro_batches) for part in parts) == len(expected)
        for index, micro_batch in expected.items():
            assert found[index].facts() == micro_batch.facts()
            assert all(map(torch.equal, found[index].tensors(), micro_batch.tensors()))
        assert {(part.num_labels, part.num_tokens) for part in parts} == {(one.num_labels, one.num_tokens)}


def test_the_flags_of_all_machines_come_with_each_step_and_with_the_end(make_loader: MakeLoader) -> None:
    def work(machine: int, gather: Gather) -> list[Any]:
        batches = StepBatches(make_loader(epochs=1, seq_len=8192), 2, 1, gather, machine, 3)
        found, step = [], 0
        while True:
            batch, flags = batches.next({"signal": machine * step})
            found.append(flags)
            step += 1
            if batch is None:
                return found

    one, two, three = run_agreeing(3, work)
    assert one == two == three
    assert one == [[{"signal": machine * step} for machine in range(3)] for step in range(len(one))]
    assert len(one) > 2


def loader_of(make_loader: MakeLoader, folder: Path, **keys: Any) -> Loader:
    return make_loader(folder=folder, shuffle=False, weights=(1e-9, 1.0), seq_len=64, global_batch_size=2, **keys)


def write(folder: Path, bad: int | None, letter: str = "a") -> Path:
    """Write 20 records of about a sequence each. Record number `bad` lacks its text."""
    folder.mkdir()
    (folder / "first.txt").write_text("a short text")
    records = [{"body" if number == bad else "text": letter * 62} for number in range(20)]
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_a_record_that_is_bad_on_one_machine_stops_all_at_the_same_step_with_its_name(
    make_loader: MakeLoader, tmp_path: Path
) -> None:
    folders = [write(tmp_path / "good", None), write(tmp_path / "bad", 13)]

    def work(machine: int, gather: Gather) -> tuple[int, str]:
        batches = StepBatches(loader_of(make_loader, folders[machine]), 1, 1, gather, machine, 2)
        for step in range(100):
            try:
                batches.next()
            except DataError as error:
                assert error.__cause__ is None  # the command prints causes too, and the text has it already
                return step, str(error)
        raise AssertionError("no error")

    (first_step, first), (second_step, second) = run_agreeing(2, work)
    assert first_step == second_step > 3
    assert first == second
    assert first.startswith("machine 1: ")
    assert "records.jsonl, line 14: no field 'text'" in first


def test_a_record_that_is_bad_on_all_machines_is_named_as_on_one(make_loader: MakeLoader, tmp_path: Path) -> None:
    folder = write(tmp_path / "bad", 5)
    with pytest.raises(DataError, match="line 6") as alone:
        on_machines(partial(loader_of, make_loader, folder), 1, 1)
    with pytest.raises(DataError, match="line 6") as together:
        on_machines(partial(loader_of, make_loader, folder), 3, 1)
    assert str(alone.value) == str(together.value)


def test_files_of_equal_sizes_and_other_content_are_noticed_at_the_first_step(
    make_loader: MakeLoader, tmp_path: Path
) -> None:
    folders = [write(tmp_path / "one", None, "a"), write(tmp_path / "other", None, "b")]

    def work(machine: int, gather: Gather) -> None:
        StepBatches(loader_of(make_loader, folders[machine]), 1, 1, gather, machine, 2).next()

    with pytest.raises(DataError, match=r"machine 1 reads another batch than machine 0 .*data\.sources differ"):
        run_agreeing(2, work)


def test_one_machine_asks_no_other_and_several_must(make_loader: MakeLoader) -> None:
    with pytest.raises(ValueError, match="2 machines cannot agree"):
        StepBatches(make_loader(), 2, 1, None, 0, 2)
    with pytest.raises(ValueError, match="1 machines need not agree"):
        StepBatches(make_loader(), 2, 1, lambda value: [value], 0, 1)
