"""Runs in this process, apart from their losses: files, ends, data, adapters and validation."""

import itertools
import re
import signal
import time
from functools import partial

import pytest

from tests.support.small_run import ASYNC, SEQUENCES, STEPS, TWO_ROUNDS, before_step, interrupt, stop_after, with_model
from torchround.config import load_config
from torchround.data import Loader
from torchround.run.early_end import STOP_SIGNALS

# The keys that docs and scripts rely on.
KEYS = [
    *("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "mfu", "step_s", "elapsed_s", "data_s"),
    *("optimizer_s", "bubble", "device_peak_gib", "host_gib", "skipped_steps", "loss_steps", "engine"),
]


def test_metrics_have_exactly_the_documented_keys_and_add_up(small_runs):
    started_s = time.monotonic()
    assert small_runs("run", ASYNC, TWO_ROUNDS) == 0
    elapsed_s = time.monotonic() - started_s
    steps = small_runs.steps("run")
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    for line in steps:
        figures = line["engine"]
        assert list(line) == KEYS
        assert line["bubble"] < 1 and line["mfu"] is None and line["skipped_steps"] == 0
        assert line["optimizer_s"] > 0 and 0 <= line["data_s"] < line["step_s"]
        assert 0 < line["device_peak_gib"] < line["host_gib"] <= figures["host_peak_gib"] + 0.01
        assert all(len(value) == 2 for value in figures.values() if isinstance(value, list))
        assert line["bubble"] == pytest.approx(max(0, 1 - sum(figures["busy_s"]) / (2 * line["step_s"])))
        assert figures["optimizer_exposed_s"] == pytest.approx(sum(figures["optimizer_wait_s"]) / 2)
        assert min(*figures["busy_s"], *figures["uploaded_gib"], *figures["downloaded_gib"]) > 0
    ends_s = [line["elapsed_s"] for line in steps]
    assert sorted(ends_s) == ends_s and ends_s[-1] < elapsed_s
    counted = [later["tokens"] - earlier["tokens"] for earlier, later in itertools.pairwise(steps)]
    assert all(0 < tokens <= SEQUENCES * 16 for tokens in counted)
    per_second = [line["tokens_per_s"] * line["step_s"] for line in steps[1:]]
    assert per_second == pytest.approx([SEQUENCES * 16] * 4)  # nothing is padding
    first, *later = [line["engine"]["device_allocations"] + line["engine"]["host_allocations"] for line in steps]
    assert first > 0 and later[1:] == [0, 0, 0]


def test_the_rate_counts_masked_tokens_and_no_padding(small_runs):
    """A conversation has 9 tokens before its answer, the answer and an end: 13 of the 16 positions of a sequence."""
    (small_runs.folder / "template.jinja").write_text(
        "{% for m in messages %}<|bos|>{{ m.role[0] }}:{{ m.content }}<|eos|>{% endfor %}"
        "{% if add_generation_prompt %}<|bos|>a:{% endif %}"
    )
    (small_runs.folder / "chats.jsonl").write_text('{"instruction": "qq", "output": "aaa"}\n' * 50)
    source, template = "{path='chats.jsonl', content='alpaca'}", "--tokenizer.chat_template=template.jinja"
    assert small_runs("run", f"--data.sources=[{source}]", template) == 0
    steps = small_runs.steps("run")
    assert [line["tokens"] for line in steps] == [SEQUENCES * 4 * step for step in range(1, 6)]
    assert [line["tokens_per_s"] * line["step_s"] for line in steps] == pytest.approx([SEQUENCES * 13] * 5)


def test_the_resolved_config_can_be_run_again_and_is_the_same_and_a_run_says_where_its_page_is(small_runs, capsys):
    overrides = ["--run.name=run", "--training.max_norm=0.5", ASYNC]
    assert small_runs("run", *overrides) == 0
    page = re.search(r"^time .*; see (.+)$", capsys.readouterr().out, re.MULTILINE)[1]
    assert (small_runs.folder / page).is_file()
    resolved = small_runs.path("run") / "config.toml"
    assert load_config(resolved) == load_config("small.toml", overrides)
    assert small_runs("again", config=str(resolved)) == 0
    small_runs.assert_same("again", "run")


def test_a_signal_in_the_last_step_changes_nothing(small_runs, monkeypatch):
    before_step(monkeypatch, STEPS, partial(interrupt, signal.SIGINT))
    assert small_runs("run") == 0
    assert small_runs.saved("run") == [STEPS]


def test_control_c_before_the_first_step_prints_no_traceback(small_runs, monkeypatch, capsys):
    with_model(monkeypatch, lambda model: interrupt(signal.SIGINT))
    assert small_runs("run") == 128 + signal.SIGINT
    assert capsys.readouterr().err.count("\n") == 1


def test_each_stop_signal_saves_after_the_step_has_an_exit_code_of_its_own_and_its_handler_again(
    small_runs, monkeypatch, capfd
):
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    read, batches = Loader.__next__, []
    monkeypatch.setattr(Loader, "__next__", lambda loader: batches.append(1) or read(loader))
    for number in STOP_SIGNALS:
        del batches[:]
        with pytest.MonkeyPatch.context() as patch:
            before_step(patch, 2, partial(interrupt, number))
            assert small_runs(number.name, "--training.steps=3") == 128 + number
        assert small_runs.saved(number.name) == [2] and len(batches) == 2
        assert capfd.readouterr().err.startswith(number.name)
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_a_signal_while_a_batch_is_read_ends_the_run_before_that_batch(small_runs, monkeypatch):
    read, batches = Loader.__next__, []

    def reading(loader):
        batches.append(len(batches))
        if len(batches) == 3:
            interrupt()
        return read(loader)

    monkeypatch.setattr(Loader, "__next__", reading)
    assert small_runs("run") == 128 + signal.SIGTERM
    assert small_runs.saved("run")[-1] == 2 and len(batches) == 3


def test_a_signal_that_was_ignored_at_the_start_stays_ignored(small_runs, monkeypatch):
    """A shell ignores SIGINT in a background job, and nohup ignores SIGHUP."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        before_step(monkeypatch, 2, partial(interrupt, signal.SIGINT))
        assert small_runs("run") == 0
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(small_runs.steps("run")) == STEPS


def test_the_count_of_skipped_records_survives_a_resume(small_runs, capsys):
    text = small_runs.folder / "text.jsonl"
    lines = text.read_text().splitlines(keepends=True)
    text.write_text("".join(["no JSON\n", *lines[:10], "none either\n", *lines[10:]]))
    overrides = ["--data.shuffle=false", "--data.on_bad_record=skip", "--training.steps=12"]
    stop_after(1, small_runs, "run", *overrides)
    assert "bad records skipped: 1" in capsys.readouterr().out
    assert small_runs("run", *overrides) == 0
    assert "bad records skipped: 2" in capsys.readouterr().out


def test_validation_without_a_label_logs_no_loss_and_warns(small_runs, caplog):
    (small_runs.folder / "held-out.jsonl").write_text('{"tokens": [1]}\n{"tokens": [2]}\n')
    source = '--validation.sources=[{ path = "held-out.jsonl", content = "tokens" }]'
    assert small_runs("run", source, "--validation.interval_steps=2") == 0
    assert not any("validation_loss" in line for line in small_runs.steps("run"))
    assert "there is no loss to log" in caplog.text


LORA = ("--lora.rank=2", "--lora.dropout=0.2", '--lora.targets=["q_proj", "down_proj"]')


def test_a_run_with_adapters_trains_them_alone_and_random_weights_below_them_are_a_warning(small_runs, caplog):
    assert small_runs("full", "--training.steps=1") == 0
    assert "random" not in caplog.text
    assert small_runs("lora", *LORA) == 0
    start, end = small_runs.state("full", 1), small_runs.state("lora")
    moments = [name for name in end if name.startswith("exp_avg")]
    assert len(moments) == 2 * 2 * 2 * 2  # two moments of A and B on two targets in two blocks
    assert all("lora_" in name for name in moments)
    assert all(end[name].any() for name in moments)
    assert {name for name in end if "lora_" not in name} == {name for name in start if "weights/" in name}
    (warning,) = [text for text in caplog.messages if "random" in text]
    assert "lora.rank" in warning and "model.hf_path" in warning


@pytest.mark.parametrize("update", ["async", pytest.param("sync", marks=pytest.mark.nightly)])
def test_validation_changes_neither_training_nor_its_dropout(small_runs, update):
    settings = (*LORA, f"--engine.update={update}", "--data.validation_fraction=0.1")
    assert small_runs("held-out", *settings) == 0
    assert small_runs("validated", *settings, "--validation.interval_steps=2") == 0
    validated = [line["step"] for line in small_runs.steps("validated") if "validation_loss" in line]
    assert validated == [2, 4, 5]  # the last step too
    small_runs.assert_same("validated", "held-out")
