"""The data of a run on several machines that talk to each other through real connections."""

import json
from functools import partial
from itertools import islice

import pytest

from tests.support.machines import run_machines
from torchround.config import DataTable, SourceTable, TokenizerTable
from torchround.data import DataError, Loader, build_tokenizer
from torchround.data.step_batches import StepBatches
from torchround.machines.group import LaunchError
from torchround.run.several_machines import RunMachines


def loader_of(folder, letter="a", bad=None, **keys):
    folder.mkdir(exist_ok=True)
    path = folder / "records.jsonl"
    if not path.exists():
        fields = ["body" if number == bad else "text" for number in range(60)]
        records = [{field: f"{number} {letter * 62}"} for number, field in enumerate(fields)]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer = build_tokenizer(TokenizerTable(name="bytes"))
    return Loader(DataTable(sources=(SourceTable(path=str(path)),), **keys), tokenizer, 64, 4, 0)


def steps_on(group, loader, count):
    machines = RunMachines(group)
    agree = partial(machines.agree, "batches", what="the batch of the next step")
    batches = StepBatches(loader, 1, 1, agree, machines.rank, machines.size, names=machines.names)
    return [step for step in islice(iter(lambda: batches.next()[0], None), count) if step is not None]


def test_an_error_in_the_data_of_one_machine_names_it_on_all(tmp_path):
    folders = [tmp_path / "good", tmp_path / "bad"]
    loader_of(folders[0]), loader_of(folders[1], bad=31)

    def work(group):
        loader = loader_of(folders[group.rank], shuffle=False, shuffle_sequences=0)
        with pytest.raises(DataError) as caught:
            steps_on(group, loader, 100)
        return str(caught.value)

    (text, same) = run_machines(2, work)
    assert text == same
    assert text.startswith("machine 1 (node1): ")
    assert "records.jsonl, line 32: no field 'text'" in text


def test_files_of_other_sizes_on_a_machine_refuse_the_launch(tmp_path):
    def work(group):
        loader = loader_of(tmp_path / str(group.rank), letter=("a", "bb")[group.rank])
        with pytest.raises(LaunchError) as caught:
            RunMachines(group).require_same(loader.fingerprints)
        return str(caught.value)

    text, same = run_machines(2, work)
    assert text == same
    assert "data: sources: ['60 documents in " in text
    assert "on machine 0 (node0); " in text
