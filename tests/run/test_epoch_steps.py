"""Steps from epochs: the number is exact, shown, kept for a resume, and right after a change of the batch size."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.small_run import SmallRuns, before_step, files_of, interrupt, small_runs, write_text
from torchround.config import load_config
from torchround.data import build_loader, build_tokenizer
from torchround.run import epoch_steps
from torchround.run.epoch_steps import KEPT_FILE, EpochSteps, count_epochs
from torchround.run.run_folder import RunFolder

__all__ = ["small_runs"]

DERIVED = "--training.steps=none"
TWO_EPOCHS = (DERIVED, "--data.epochs=2")
FLOOR = 1e-3  # learning rate at the end of the schedule: a tenth of optimizer.lr


@pytest.fixture(autouse=True)
def few_documents(small_runs: SmallRuns) -> Iterator[None]:
    """Four lines of text, which make a handful of steps."""
    write_text(small_runs.folder / "text.jsonl", lines=4)
    yield


def expected_steps(folder: Path, epochs: int, batch: int = 7, seq_len: int = 16) -> int:
    """Count by hand: a document is its bytes between BOS and EOS, and sequences are cut from one stream."""
    texts = [json.loads(line)["text"] for line in (folder / "text.jsonl").read_text().splitlines()]
    tokens = epochs * sum(len(text.encode()) + 2 for text in texts)
    sequences = -(-tokens // seq_len)
    return -(-sequences // batch)


def test_steps_that_are_left_out_are_those_of_the_epochs(
    small_runs: SmallRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = expected_steps(small_runs.folder, epochs=2)
    assert small_runs("run", *TWO_EPOCHS) == 0
    printed = capsys.readouterr().out
    assert f"steps    2 epochs are {expected} steps\n" in printed
    assert printed.splitlines()[-1].endswith(f"saved after step {expected} of {expected}; the run is complete")
    assert [line["step"] for line in small_runs.steps("run")] == list(range(1, expected + 1))
    assert small_runs.steps("run")[-1]["lr"] == pytest.approx(FLOOR)
    assert load_config(small_runs.path("run") / "config.toml").training.steps == expected
    assert small_runs("given", f"--training.steps={expected}", "--data.epochs=2") == 0
    small_runs.assert_same("run", "given", step=expected)


@pytest.mark.parametrize(("batch", "warns"), [(8, True), (1, False)])
@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_epochs_of_few_steps_are_a_warning_that_names_the_keys_to_lower(
    small_runs: SmallRuns, caplog: pytest.LogCaptureFixture, batch: int, warns: bool, dry: tuple[str, ...]
) -> None:
    overrides = (DERIVED, "--data.epochs=7", f"--training.global_batch_size={batch}", "--engine.plan=none")
    assert (expected_steps(small_runs.folder, 7, batch) < 50) == warns
    assert small_runs("run", *overrides, "--training.micro_batch_size=1", *dry) == 0
    told = [line for line in caplog.messages if "training.global_batch_size" in line and "data.epochs" in line]
    assert len(told) == warns


@pytest.mark.parametrize(
    "overrides",
    [
        ["--data.packing=best_fit", "--training.seq_len=64"],
        ["--data.packing=best_fit", "--training.seq_len=64", "--data.long_documents=split"],
        ["--data.shuffle_sequences=8"],
        ["--data.validation_fraction=0.3", "--data.num_workers=2"],
        ["--data.streams=4", "--training.global_batch_size=8"],
    ],
    ids=["best fit", "split", "shuffled", "held out", "streams"],
)
def test_the_count_is_the_number_of_batches_that_a_run_draws(small_runs: SmallRuns, overrides: list[str]) -> None:
    write_text(small_runs.folder / "text.jsonl", lines=60)
    config = load_config("small.toml", [DERIVED, "--data.epochs=3", *overrides])
    tokenizer = build_tokenizer(config.tokenizer, None)
    sizes = config.training.seq_len, config.training.global_batch_size
    drawn = len(list(build_loader(config.data, tokenizer, *sizes, config.run.seed)))
    loader = build_loader(config.data, tokenizer, *sizes, config.run.seed)
    assert count_epochs(config, loader, RunFolder(config.run)).steps == drawn > 1
    assert loader.epochs_read() == 0  # at the start of the data again
    assert len(list(loader)) == drawn and loader.epochs_read() == 3
    loader.close()


def test_a_resume_takes_the_kept_number_and_counts_nothing(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert small_runs("whole", *TWO_EPOCHS) == 0
    with monkeypatch.context() as patch:
        before_step(patch, 2, interrupt)
        assert small_runs("run", *TWO_EPOCHS) == 128 + signal.SIGTERM
    monkeypatch.setattr(epoch_steps, "_count_batches", lambda *_: pytest.fail("the data is read again"))
    assert small_runs("run", *TWO_EPOCHS) == 0
    steps = expected_steps(small_runs.folder, epochs=2)
    small_runs.assert_same("run", "whole", step=steps)
    before = files_of(small_runs.path("run"))
    assert small_runs("run", *TWO_EPOCHS) == 0  # complete
    assert files_of(small_runs.path("run")) == before


def test_a_run_of_several_streams_trains_through_the_padding_at_their_ends_and_resumes(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stream in four gets a long document: in the last steps, the others are padding without labels."""
    texts = ["a b c " * (60 if number == 6 else 5) for number in range(16)]
    (small_runs.folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    streams = (DERIVED, "--data.epochs=1", "--data.streams=4", "--training.global_batch_size=8")
    assert small_runs("whole", *streams) == 0
    steps = small_runs.steps("whole")[-1]["step"]
    with monkeypatch.context() as patch:
        before_step(patch, int(steps) - 1, interrupt)
        assert small_runs("run", *streams) == 128 + signal.SIGTERM
    assert small_runs("run", *streams) == 0
    small_runs.assert_same("run", "whole", step=int(steps))
    labels = [line["tokens"] for line in small_runs.steps("whole")]
    assert labels[-1] - labels[-2] <= 2 * 16 < labels[0]


def test_a_run_of_another_batch_size_counts_what_is_left(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(small_runs.folder / "text.jsonl", lines=12)
    with monkeypatch.context() as patch:
        before_step(patch, 3, interrupt)
        assert small_runs("run", *TWO_EPOCHS) == 128 + signal.SIGTERM
    sequences_left = expected_steps(small_runs.folder, epochs=2, batch=1) - 3 * 7
    assert sequences_left > 14
    expected = 3 + -(-sequences_left // 14)
    assert small_runs("run", *TWO_EPOCHS, "--training.global_batch_size=14") == 0
    assert small_runs.steps("run")[-1]["step"] == expected
    assert small_runs.steps("run")[-1]["lr"] == pytest.approx(FLOOR)


def test_more_epochs_continue_a_complete_run(small_runs: SmallRuns, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert small_runs("run", DERIVED, "--data.epochs=1") == 0
    assert "nothing to do (raise data.epochs to continue)" in capsys.readouterr().out
    done = small_runs.steps("run")[-1]["step"]
    assert small_runs("run", DERIVED, "--data.epochs=3") == 0
    assert "the run is complete" in capsys.readouterr().out
    assert small_runs.steps("run")[-1]["step"] > done
    assert small_runs.steps("run")[-1]["lr"] == pytest.approx(FLOOR)


def test_steps_that_end_before_the_epochs_are_said_at_the_start_and_at_the_end(
    small_runs: SmallRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    write_text(small_runs.folder / "text.jsonl", lines=100)
    steps = expected_steps(small_runs.folder, epochs=3)
    assert steps > 60
    assert small_runs("run", "--training.steps=4", "--data.epochs=3") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (f"steps    3 epochs are {steps} steps; training.steps = 4 ends the run after 0.05 of 3 epochs")
    assert lines[-1].endswith("the run is complete; 0.05 of 3 epochs of its data are read")


def test_data_that_ends_before_the_steps_says_at_which_learning_rate(
    small_runs: SmallRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = expected_steps(small_runs.folder, epochs=1)
    assert small_runs("run", "--training.steps=100", "--data.epochs=1") == 0
    lines = capsys.readouterr().out.splitlines()
    lr = small_runs.steps("run")[-1]["lr"]
    rates = f"at a learning rate of {lr:.2e} instead of 1.00e-03 at step 100"
    assert lr > 9e-3
    assert f"training.steps = 100 will not be reached, {rates}" in lines[0]
    assert f"saved after step {steps} of 100; the data has come to its end, {rates}" in lines[-1]


def test_a_warm_up_that_takes_all_counted_steps_is_refused(
    small_runs: SmallRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = expected_steps(small_runs.folder, epochs=2)
    assert small_runs("run", *TWO_EPOCHS, f"--lr_schedule.warmup_steps={steps}") == 2
    [message] = capsys.readouterr().err.splitlines()
    assert f"lr_schedule.warmup_steps: given {steps}, and steps    2 epochs" not in message
    assert f"given {steps}, and 2 epochs are {steps} steps; legal: at most {steps - 1}" in message
    assert not small_runs.path("run").exists()


def test_a_record_that_stops_the_count_is_a_mistake_that_names_its_line(
    small_runs: SmallRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(small_runs.folder / "text.jsonl", "a") as text:
        text.write("no JSON\n")
    assert small_runs("run", *TWO_EPOCHS) == 2
    [message] = capsys.readouterr().err.splitlines()
    assert "data.sources" in message and "text.jsonl, line 5" in message
    assert not small_runs.path("run").exists()


def test_records_that_are_skipped_are_not_counted_and_warned_of_once(
    small_runs: SmallRuns, caplog: pytest.LogCaptureFixture
) -> None:
    write_text(small_runs.folder / "text.jsonl", lines=12)
    expected = expected_steps(small_runs.folder, epochs=1)
    with open(small_runs.folder / "text.jsonl", "a") as text:
        text.write("no JSON\n")
    assert small_runs("run", DERIVED, "--data.epochs=1", "--data.on_bad_record=skip") == 0
    assert small_runs.saved("run") == [expected]
    assert caplog.text.count("text.jsonl, line 13") == 1


def test_a_dry_run_counts_small_data_and_says_when_large_data_is_counted(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = expected_steps(small_runs.folder, epochs=2)
    assert small_runs("run", "--dry-run", *TWO_EPOCHS) == 0
    assert f"steps    2 epochs are {steps} steps\n" in capsys.readouterr().out
    monkeypatch.setattr(epoch_steps, "CHEAP_BYTES", 100)
    monkeypatch.setattr(epoch_steps, "_count_batches", lambda *_: pytest.fail("the data is read"))
    assert small_runs("run", "--dry-run", *TWO_EPOCHS) == 0
    assert "steps    of 2 epochs, counted when the run starts\n" in capsys.readouterr().out
    assert small_runs("run", "--training.steps=5", "--data.epochs=2") == 0  # nothing is counted for a message
    assert not small_runs.path("run").joinpath(KEPT_FILE).exists()


def test_a_long_count_says_now_and_then_how_far_it_is(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config("small.toml", TWO_EPOCHS)
    loader = build_loader(config.data, build_tokenizer(config.tokenizer, None), 16, 7, 0)
    seconds = iter(range(0, 1000, 4))
    count_epochs(config, loader, RunFolder(config.run), clock=lambda: float(next(seconds)))
    told = capsys.readouterr().out.splitlines()
    assert len(told) == expected_steps(small_runs.folder, epochs=2) // 3
    assert told[0].startswith("steps    counting them: 3 in ") and " of 2 epochs (" in told[0]
    given = config.with_steps(5)  # then the count is for a message alone
    count_epochs(given, loader, RunFolder(config.run), clock=lambda: float(next(seconds)))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("window", ["0", "16", "'auto'"])
def test_a_large_run_that_ends_before_its_epochs_says_about_how_much_it_read(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], window: str
) -> None:
    write_text(small_runs.folder / "text.jsonl", lines=100)
    monkeypatch.setattr(epoch_steps, "CHEAP_BYTES", 100)
    monkeypatch.setattr(epoch_steps, "_count_batches", lambda *_: pytest.fail("the data is read"))
    assert small_runs("run", "--training.steps=4", "--data.epochs=3", f"--data.shuffle_sequences={window}") == 0
    [read] = re.findall(
        r"the run is complete; (\S+) of 3 epochs of its data are read$", capsys.readouterr().out.strip()
    )
    # The reader may be a few documents ahead of the batches.
    exact = 3 * 4 / expected_steps(small_runs.folder, epochs=3)
    assert 0 < float(read) < 2 * exact + 0.05


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"steps": 3}',
        '{"steps": "3", "digest": "x"}',
        '{"steps": 0, "digest": "x"}',
        '{"steps": true, "digest": "x"}',
    ],
)
def test_a_kept_number_that_no_run_wrote_is_none(tmp_path: Path, content: str) -> None:
    assert EpochSteps.kept(tmp_path) is None
    (tmp_path / KEPT_FILE).write_text(content)
    assert EpochSteps.kept(tmp_path) is None
    EpochSteps(3, "x").keep(tmp_path)
    assert EpochSteps.kept(tmp_path) == EpochSteps(3, "x")
