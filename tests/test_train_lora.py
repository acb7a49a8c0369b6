"""`[lora]` through train.py: only adapters are trained, and a resumed run has the same bits."""

import pytest

from tests.support.small_run import small_runs

__all__ = ["small_runs"]  # the fixture

LORA = ("--lora.rank=2", "--lora.dropout=0.2", '--lora.targets=["q_proj", "down_proj"]')


def test_a_run_with_adapters_trains_them_alone_and_random_weights_below_them_are_a_warning(small_runs, caplog):
    assert small_runs("full", "--training.steps=1") == 0
    assert "random" not in caplog.text and "optimizer.lr" not in caplog.text
    assert small_runs("lora", *LORA, "--optimizer.lr=1") == 0
    start, end = small_runs.state("full", 1), small_runs.state("lora")
    moments = [name for name in end if name.startswith("exp_avg")]
    assert len(moments) == 2 * 2 * 2 * 3  # two moments of A and B on two targets in three blocks
    assert all("lora_" in name for name in moments)
    assert all(end[name].any() for name in moments)
    assert {name for name in end if "lora_" not in name} == {name for name in start if "weights/" in name}
    (warning,) = [text for text in caplog.messages if "random" in text]
    assert "lora.rank" in warning and "model.hf_path" in warning
    assert "optimizer.lr = 1 is far above" in caplog.text


@pytest.mark.parametrize("update", ["async", pytest.param("sync", marks=pytest.mark.nightly)])
def test_validation_changes_neither_training_nor_its_dropout(small_runs, update):
    settings = (*LORA, f"--engine.update={update}", "--data.validation_fraction=0.1")
    assert small_runs("held-out", *settings) == 0
    assert small_runs("validated", *settings, "--validation.interval_steps=2") == 0
    validated = [line["step"] for line in small_runs.steps("validated") if "validation_loss" in line]
    assert validated == [2, 4, 5]  # the last step too
    small_runs.assert_same("validated", "held-out")
