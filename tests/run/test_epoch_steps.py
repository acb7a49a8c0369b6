"""Steps from epochs: the number is exact, shown, and right after a resume and a change of the batch size."""

import json

import pytest

from tests.support.small_run import SEQUENCES, files_of, stop_after, write_text
from torchround.commands.train_model import steps_of_epochs
from torchround.config import load_config, parse_command_line
from torchround.data import Loader, build_tokenizer
from torchround.run.run_folder import RunFolder

DERIVED = "--training.steps=none"
TWO_EPOCHS = (DERIVED, "--data.epochs=2")
FLOOR = 1e-3  # learning rate at the end of the schedule: a tenth of optimizer.lr


@pytest.fixture(autouse=True)
def few_documents(small_runs):
    write_text(small_runs.folder / "text.jsonl", lines=4)


def expected_steps(folder, epochs, batch=SEQUENCES, seq_len=16):
    texts = [json.loads(line)["text"] for line in (folder / "text.jsonl").read_text().splitlines()]
    tokens = epochs * sum(len(text.encode()) + 2 for text in texts)
    sequences = -(-tokens // seq_len)
    return -(-sequences // batch)


def test_steps_that_are_left_out_are_those_of_the_epochs(small_runs, capsys):
    expected = expected_steps(small_runs.folder, epochs=2)
    assert small_runs("given", f"--training.steps={expected}", "--data.epochs=2") == 0
    assert small_runs("run", "--dry-run", *TWO_EPOCHS) == 0
    assert f"data.epochs = 2 makes {expected} steps\n" in capsys.readouterr().out
    stop_after(2, small_runs, "run", *TWO_EPOCHS)
    assert small_runs("run", *TWO_EPOCHS) == 0
    assert f"data.epochs = 2 makes {expected} steps\n" in capsys.readouterr().out
    small_runs.assert_same("run", "given", step=expected)
    assert small_runs.steps("run")[-1]["lr"] == pytest.approx(FLOOR)
    assert load_config(small_runs.path("run") / "config.toml").training.steps == expected
    before = files_of(small_runs.path("run"))
    assert small_runs("run", *TWO_EPOCHS) == 0  # complete
    assert "raise training.steps or data.epochs" in capsys.readouterr().out
    assert files_of(small_runs.path("run")) | {".lock": before[".lock"]} == before
    assert small_runs("run", DERIVED, "--data.epochs=3") == 0
    last = small_runs.steps("run")[-1]
    assert last["step"] > expected and last["lr"] == pytest.approx(FLOOR)


@pytest.mark.parametrize(
    "overrides",
    [
        ["--data.packing=best_fit", "--training.seq_len=64"],
        ["--data.packing=best_fit", "--training.seq_len=64", "--data.long_documents=split"],
        ["--data.shuffle_sequences=8"],
        ["--data.validation_fraction=0.3", "--data.num_workers=2"],
    ],
    ids=["best fit", "split", "shuffled", "held out"],
)
def test_the_count_is_the_number_of_batches_that_a_run_draws(small_runs, overrides):
    write_text(small_runs.folder / "text.jsonl", lines=60)
    options = parse_command_line(["--config=small.toml", DERIVED, "--data.epochs=3", *overrides])
    config = options.config
    tokenizer = build_tokenizer(config.tokenizer, None)
    sizes = config.training.seq_len, config.training.global_batch_size
    drawn = len(list(Loader(config.data, tokenizer, *sizes, config.run.seed)))
    loader = Loader(config.data, tokenizer, *sizes, config.run.seed)
    assert steps_of_epochs(options, loader, RunFolder(config.run)) == drawn > 1
    assert len(list(loader)) == drawn, "it is at the start of the data again"
    loader.close()


@pytest.mark.parametrize("window", [4, 5, 6, 7, 8])
def test_a_complete_run_of_windows_goes_on_with_more_epochs(small_runs, window):
    def loader(epochs):
        config = load_config("small.toml", [f"--data.epochs={epochs}", f"--data.shuffle_sequences={window}"])
        tokenizer = build_tokenizer(config.tokenizer, None)
        return Loader(config.data, tokenizer, 16, 1, config.run.seed)

    first, second = loader(1), loader(3)
    assert len(list(first)) > window
    second.load_state_dict(first.state_dict())
    assert len(list(second)) > window


def test_a_run_of_another_batch_size_counts_what_is_left(small_runs):
    write_text(small_runs.folder / "text.jsonl", lines=6)
    stop_after(3, small_runs, "run", *TWO_EPOCHS)
    sequences_left = expected_steps(small_runs.folder, epochs=2, batch=1) - 3 * SEQUENCES
    assert sequences_left > 14
    assert small_runs("run", *TWO_EPOCHS, "--training.global_batch_size=14") == 0
    last = small_runs.steps("run")[-1]
    assert last["step"] == 3 + -(-sequences_left // 14) and last["lr"] == pytest.approx(FLOOR)


def test_data_that_end_before_the_given_steps_end_the_run_and_say_so(small_runs, capsys):
    short = expected_steps(small_runs.folder, epochs=1)
    assert small_runs("run", "--training.steps=100", "--data.epochs=1") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert f"after step {short} of 100; the data has come to its end" in last


def test_data_that_cannot_be_counted_is_refused(small_runs, capsys, caplog):
    """A record that stops the count is a mistake that names its line; one that is skipped is no step."""
    steps = expected_steps(small_runs.folder, epochs=2)
    assert small_runs("run", *TWO_EPOCHS, f"--lr_schedule.warmup_steps={steps}") == 2
    assert f"legal: at most {steps - 1}" in capsys.readouterr().err
    with open(small_runs.folder / "text.jsonl", "a") as text:
        text.write("no JSON\n")
    assert small_runs("run", *TWO_EPOCHS) == 2
    [message] = capsys.readouterr().err.splitlines()
    assert "data.sources" in message and "text.jsonl, line 5" in message
    assert not small_runs.path("run").exists()
    assert small_runs("run", *TWO_EPOCHS, "--data.on_bad_record=skip") == 0
    assert small_runs.saved("run") == [steps] and caplog.text.count("text.jsonl, line 5") == 2, "once an epoch"
