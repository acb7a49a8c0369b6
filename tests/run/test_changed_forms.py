"""Runs that resume from, or begin with, checkpoints whose weights and optimizer state are kept in another form."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.small_run import (
    ASYNC,
    BOUNDED,
    COMPACT,
    PREDICT,
    STEPS,
    UNCORRECTED,
    SmallRuns,
    fp32_weights,
    small_family,
    small_runs,
    stop_before_the_first_step,
    use_family,
)
from torchround.commands import train_model
from torchround.config import Config
from torchround.optim.formats import COMPACT as COMPACT_FORMAT
from torchround.optim.formats import StateValue

__all__ = ["small_runs"]

BFLOAT16 = "--training.dtype=bfloat16"
MUON = "--optimizer.name=muon"
REFUSED = f"step-{STEPS} holds the state of another optimizer (optimizer.name '{{}}' -> 'adamw')"
VALUES = (StateValue("exp_avg"), StateValue("exp_avg_sq", is_signed=False))
# The forms of checkpoints: fp32 and split weights, with exact and compact state. fp16 keeps fp32 weights.
FORMS = {
    "fp32": (),
    "fp32-async": (ASYNC, UNCORRECTED),
    "fp16": ("--training.dtype=float16",),
    "split": (BFLOAT16,),
    "split-async": (BFLOAT16, ASYNC, UNCORRECTED),
    "predicted": (BFLOAT16, ASYNC, PREDICT),
    "bounded": (BFLOAT16, *BOUNDED),
    "compact": (COMPACT,),
    "compact-split": (COMPACT, BFLOAT16),
    "compact-split-async": (COMPACT, BFLOAT16, ASYNC, UNCORRECTED),
}
ROUNDED = 'the optimizer\'s state (exp_avg, exp_avg_sq) is rounded to 8 bits (optimizer.state = "compact")'
CONTINUED = "the optimizer's state (exp_avg, exp_avg_sq) continues in float32 from values that were rounded to 8 bits"


def as_compact(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the exact values of a checkpoint as compact ones."""
    found = {}
    for value in VALUES:
        for name, tensor in state.items():
            kind, _, parameter = name.partition("/")
            if kind == value.name:
                codes, scales = COMPACT_FORMAT.encode(value, tensor.reshape(-1))
                found |= {name: codes.view(tensor.shape), f"{kind}_scale/{parameter}": scales}
    return found


def as_exact(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the compact values of a checkpoint in fp32."""
    found = {}
    for value in VALUES:
        for name, tensor in state.items():
            kind, _, parameter = name.partition("/")
            if kind == value.name:
                kept = (tensor.reshape(-1), state[f"{kind}_scale/{parameter}"])
                found[name] = COMPACT_FORMAT.decode(value, kept).view(tensor.shape)
    return found


def values_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name.startswith("exp_avg")}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


CHANGES = [
    *((before, "split") for before in FORMS if before != "split"),
    *((before, "compact") for before in ("fp32", "split", "predicted", "compact-split-async")),
    *(("split", "fp32"), ("split", "predicted"), ("split", "split-async")),
    *(("compact-split", "fp32"), ("compact-split", "bounded")),
    *(("split-async", "compact-split-async"), ("split-async", "fp32-async"), ("fp32-async", "predicted")),
]
STAGES = [
    *((before, "split") for before in FORMS),
    *(("split", "fp32"), ("compact-split", "predicted"), ("predicted", "compact-split-async")),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallRuns]:
    """One run of two steps in each form, saved at its end."""
    folder, threads = tmp_path_factory.mktemp("forms"), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        use_family(patch, "small", small_family())
        patch.chdir(folder)
        runs = SmallRuns(folder)
        for name, overrides in FORMS.items():
            assert runs(name, "--training.steps=2", *overrides) == 0
        yield runs
    torch.set_num_threads(threads)


def begin_from(written: SmallRuns, monkeypatch: pytest.MonkeyPatch, before: str, name: str, *options: str) -> None:
    """Begin run `name` from the last checkpoint of run `before`, and stop it before its first step."""
    load = f"--checkpoint.load_path={written.path(before)}/checkpoints/step-2"
    stop_before_the_first_step(monkeypatch)
    assert written(name, load, *options) == 128 + signal.SIGTERM


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_a_run_resumes_in_another_form_with_the_same_values_and_says_what_is_lost(
    written: SmallRuns, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, before: str, after: str
) -> None:
    name = f"{before}-to-{after}"
    begin_from(written, monkeypatch, before, name, "--training.steps=4", *FORMS[after])
    assert written.saved(name) == [2]
    found, expected = written.state(name, 2), written.state(before, 2)
    assert_equal(fp32_weights(found), fp32_weights(expected))
    was, is_now = ("compact" in form for form in (before, after))
    values = values_of(expected)
    for key in found.keys() & expected.keys():
        if key.startswith("master_"):
            assert torch.equal(found[key], expected[key].to(found[key].dtype)), key
    assert_equal(values_of(found), values if was == is_now else as_exact(values) if was else as_compact(values))
    assert (ROUNDED in caplog.text) == (is_now and not was)
    assert (CONTINUED in caplog.text) == (was and not is_now)


@pytest.mark.parametrize(("before", "after"), STAGES)
def test_a_new_stage_begins_with_the_weights_of_any_form(
    written: SmallRuns, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, before: str, after: str
) -> None:
    name = f"{before}-for-{after}"
    begin_from(written, monkeypatch, before, name, "--checkpoint.load=weights", *FORMS[after])
    assert written.saved(name) == [0]
    found = written.state(name, 0)
    assert_equal(fp32_weights(found), fp32_weights(written.state(before, 2)))
    assert not any(tensor.float().any() for tensor in values_of(found).values()), "the optimizer is not fresh"
    older = {key: tensor for key, tensor in found.items() if key.startswith("master_")}
    newest = fp32_weights(found)
    assert_equal(older, {key: newest[key.replace("master_1_old", "weights")].bfloat16() for key in older})
    assert ROUNDED not in caplog.text and CONTINUED not in caplog.text


def test_another_optimizer_is_refused_with_the_way_out_and_writes_nothing(
    small_runs: SmallRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    assert small_runs("run", MUON) == 0
    before = sorted(small_runs.path("run").rglob("*"))
    capsys.readouterr()
    path = small_runs.path("run") / "checkpoints" / f"step-{STEPS}"
    load = f"--checkpoint.load_path={path}"
    for arguments in (("run", "--training.steps=9"), ("branch", load, "--training.steps=9")):
        assert small_runs(*arguments) == 2
        [message] = capsys.readouterr().err.splitlines()
        assert REFUSED.format("muon") in message
        assert "--run.name NAME --checkpoint.load weights --checkpoint.load_path " in message
    assert sorted(small_runs.path("run").rglob("*")) == before and not small_runs.path("branch").exists()
    assert small_runs("branch", load, "--checkpoint.load=weights") == 0


@pytest.mark.parametrize("name", ["muon", "another"])
def test_another_optimizer_is_refused_by_the_load_too(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """The state of Muon differs in its tensors. Another one's may have the names and shapes of AdamW's."""
    dumped = Config.model_dump

    def of_another_optimizer(config: Config, **arguments: Any) -> dict[str, Any]:
        found = dumped(config, **arguments)
        found["optimizer"]["name"] = name
        return found

    with monkeypatch.context() as patch:
        if name == "another":
            patch.setattr(Config, "model_dump", of_another_optimizer)
        assert small_runs("run", *([MUON] if name == "muon" else [])) == 0
    monkeypatch.setattr(train_model, "require_same_optimizer", lambda config, checkpointer: None)
    assert small_runs("run", "--training.steps=9") == 2
    assert REFUSED.format(name) in capsys.readouterr().err


def test_a_checkpoint_without_an_optimizer_s_name_is_of_exact_adamw(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Releases before the choice of optimizers wrote neither name nor state format."""
    dumped = Config.model_dump

    def without_the_keys(config: Config, **arguments: Any) -> dict[str, Any]:
        found = dumped(config, **arguments)
        del found["optimizer"]["name"], found["optimizer"]["state"]
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Config, "model_dump", without_the_keys)
        assert small_runs("run") == 0
    assert small_runs("run", COMPACT, "--training.steps=6") == 0
    assert "from now on training.steps 5 -> 6, optimizer.state 'exact' -> 'compact'" in caplog.text
    assert ROUNDED in caplog.text
