"""`torchround plan`, as a program once and otherwise as a function: what fits, what would help, several machines."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.random_costs import short_search
from torchround.commands import plan_run
from torchround.planning import plan_report

ROOT = Path(__file__).parents[2]


@pytest.fixture
def plan(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(plan_report, "LENGTH_STEP", 1 << 20)  # no test here asks for the longest sequence

    def call(*arguments):
        code, printed = plan_run.main(list(arguments)), capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=printed.out, stderr=printed.err)

    with short_search():
        yield call


def test_full_fine_tuning_of_qwen3_14b_fits_128_gib_with_compact_state_alone(plan):
    """14.8e9 parameters take 14 bytes each with exact state, which is 193 GiB, and 8.03 with compact state: 110.5 GiB."""
    arguments = ["--config", "qwen3_32b.toml", "--model.flavor", "14B", "--training.global_batch_size", "32"]
    arguments += ["--num-devices", "1", "--machines.host_memory_gib", "128"]
    done, told = plan(*arguments), '  with optimizer.state = "compact"'
    assert done.returncode == 1 and f"{told}: fits" in done.stdout
    assert "  with lora.rank = 16 (adapters on released weights; finetune: --lora 16): fits" in done.stdout
    compact = plan(*arguments, "--optimizer.state", "compact")
    assert compact.returncode == 0 and "does not fit" not in compact.stdout
    sizes = dict(re.findall(r"^ +(weights|gradients|optimizer state) +([\d.]+) GiB", compact.stdout, re.MULTILINE))
    # Weights of the released model: 14.77e9, in 2 bytes; gradients the same; residual and two values in 4.03.
    taken = sum(map(float, sizes.values())) * 2**30
    assert taken == pytest.approx((2 + 2 + 2 + 2 * (1 + 2 / 128)) * 14.77e9, rel=1e-3)


DEBUG = ("--config", "debug.toml", "--device", "rtx4090")


def test_advice_leaves_out_a_type_that_the_card_lacks(plan):
    done = plan("--config", "llama3_1_8b.toml", "--device=v100", "--training.dtype=float32", "--host-memory-gib=60")
    assert done.returncode == 1 and "bfloat16" not in done.stdout.split("with", 1)[1], done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--config", "debug.toml", "--device", "rtx9999"), ["command line: machines.card", "rtx9999", "rtx4090"]),
        (("--config", "debug.toml"), ["machines.card: no card is named", "rtx4090"]),
        ((*DEBUG, "--num-devices", "2.5"), ["command line: engine.num_devices: given 2.5", "integer"]),
        ((*DEBUG, "--host-memory-gib", "inf"), ["engine.host_memory_gib: given inf", "finite"]),
        (("--config", "none.toml", "--device", "rtx4090"), ["none.toml"]),
        ((*DEBUG, "--training.stepz", "3"), ["training.stepz", "steps"]),
        ((*DEBUG, "--lora.rank", "8", '--lora.targets=["query"]'), ["lora.targets", "'query'"]),
        ((*DEBUG, "--engine.plan", "none.json"), ["none.json"]),
        ((*DEBUG, "--tokenizer.name", "none", "--tokenizer.path", "LICENSE"), ["LICENSE"]),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(plan, arguments, words):
    done = plan(*arguments)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert all(word in done.stderr for word in words), done.stderr


@pytest.mark.nightly
def test_a_run_that_does_not_fit_gets_three_changes_and_the_memory_that_would_do(plan):
    keys = ["--config", "qwen3_32b.toml", "--host-memory-gib"]
    out = plan(*keys, "300").stdout
    changes = re.findall(r"^  with (.*?)(?: \(.*\))?: fits$", out, re.MULTILINE)
    assert changes and len(re.findall("^  with ", out, re.MULTILINE)) <= 3
    for change in changes:  # of one key or several
        assert plan(*keys, "300", *(f"--{pair.replace(' ', '')}" for pair in change.split(" and "))).returncode == 0
    [needed] = re.findall(r"the host needs ([\d.]+) GiB .* and may use 300.00 GiB", out)
    assert plan(*keys, f"{float(needed) + 0.01}").returncode == 0 and float(needed) < 800


def test_a_plan_names_the_machine_of_its_config_and_says_if_it_has_no_limit(plan):
    named = plan("--config", "qwen3_1_7b.toml", "--model.flavor=debug").stdout
    assert named.startswith("planned for 8 x rtx4090 with 21.60 GiB usable of 24 GiB; host memory: 91.20 GiB")
    keys = ["--machines.host_memory_gib=none", "--device=h100", "--num-devices=2", "--model.flavor=debug"]
    other = plan("--config", "qwen3_1_7b.toml", *keys).stdout
    assert other.startswith("planned for 2 x h100 with 72.00 GiB usable of 80 GiB; host memory: no limit was given")
    assert "kept activations" not in other


TWO_CARDS = ["--config", "debug.toml", "--device", "rtx4090", "--num-devices", "2"]
# Little more than the state, which nothing but fewer trained weights or more machines make smaller.
SMALL_HOST = ["--host-memory-gib", "0.008", "--optimizer.state=compact", "--training.dtype=bfloat16"]
SMALL_HOST += ["--training.seq_len=16"]


def test_a_plan_for_four_machines_shows_the_exchange(plan):
    machines = ["--machines.planned", "4", "--machines.gbit_per_s", "0.9"]
    out = plan(*TWO_CARDS, *machines).stdout
    assert "4 machines share each step of 4 micro-batches, at most 1 on each" in out and "no limit was given" in out
    assert re.search(r"(\S+) MiB of gradients out and \1 MiB of weights back per step on the busiest link", out)
    assert re.search(r"\S+ s at 0.81 Gb/s .*, \S+ s of it not hidden by compute; step \S+ s, about", out)


def test_a_run_that_no_change_makes_fit_is_told_how_to_try_more_machines(plan):
    done = plan(*TWO_CARDS, *SMALL_HOST)
    assert done.returncode == 1 and "--machines.planned N says" in done.stdout
    assert "longest sequence" not in done.stdout  # none fits
    assert plan(*TWO_CARDS, *SMALL_HOST, "--machines.planned=2").returncode == 0


def test_a_dry_run_plans_for_the_configured_machines_and_a_run_for_its_own(small_runs, capsys):
    machines = ["--machines.planned=2", "--engine.plan=none", "--engine.measure_steps=0"]
    assert small_runs("run", *machines, "--dry-run") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "2 machines share each step of 3 micro-batches, at most 2 on each" in out
    assert "2 micro-batches in 1 round(s)" in out and "messages of other machines" in out
    assert "of weights back per step on the busiest link" in out
    assert small_runs("run", *machines, "--machines.card=rtx4090", "--engine.num_devices=3", "--dry-run") == 0
    assert "the machine that the config names" in (out := capsys.readouterr().out) and "3 x rtx4090" in out
    assert small_runs("run", *machines) == 0
    assert "3 micro-batches in 1 round(s)" in " ".join(capsys.readouterr().out.split())
