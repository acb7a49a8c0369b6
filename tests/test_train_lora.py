"""`[lora]` through train.py: only adapters are trained, and a resumed run has the same bits."""

from tests.support.small_run import small_runs

__all__ = ["small_runs"]  # the fixture

LORA = ("--lora.rank=2", "--lora.dropout=0.2", '--lora.targets=["q_proj", "down_proj"]')


def test_a_run_with_adapters_trains_them_alone(small_runs):
    assert small_runs("full", "--training.steps=1") == 0
    assert small_runs("lora", *LORA) == 0
    start, end = small_runs.state("full", 1), small_runs.state("lora")
    moments = [name for name in end if name.startswith("exp_avg")]
    assert len(moments) == 2 * 2 * 2 * 3  # two moments of A and B on two targets in three blocks
    assert all("lora_" in name for name in moments)
    assert all(end[name].any() for name in moments)
    assert {name for name in end if "lora_" not in name} == {name for name in start if "weights/" in name}


def test_validation_does_not_change_the_dropout_of_training(small_runs):
    validation = ("--validation.interval_steps=1", "--data.validation_fraction=0.1")
    assert small_runs("held-out", *LORA, *validation[1:]) == 0
    assert small_runs("validated", *LORA, *validation) == 0
    assert all("validation_loss" in line for line in small_runs.steps("validated"))
    small_runs.assert_same("validated", "held-out")


def test_an_unknown_lora_target_is_refused(small_runs, capsys):
    assert small_runs("wrong", "--lora.rank=2", '--lora.targets=["all-linear"]') == 2
    assert "name them all" in capsys.readouterr().err


def test_adapters_on_random_weights_are_a_warning(small_runs, caplog):
    assert small_runs("full") == 0 and "random" not in caplog.text
    assert small_runs("adapters", *LORA) == 0
    (warning,) = [text for text in caplog.messages if "random" in text]
    assert "lora.rank" in warning and "model.hf_path" in warning


def test_a_learning_rate_of_one_is_a_warning(small_runs, caplog):
    assert small_runs("usual", "--training.steps=1") == 0 and "optimizer.lr" not in caplog.text
    assert small_runs("high", "--training.steps=1", "--optimizer.lr=1") == 0
    assert "optimizer.lr = 1 is far above" in caplog.text
