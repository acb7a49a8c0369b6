"""Checkpoints that earlier code wrote, kept as fixtures, load with their exact values, and runs resume from them.

The runs trained a Llama of one block, two wide, in bfloat16. All have fp32 weights and both moments. The first one is
from before version 1, with async updates and the older bfloat16 weights. The others are from the last code that kept
whole fp32 weights in every run: one sync, one async with predicted device weights, one bounded with a stale layer.
"""

import shutil
import signal
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.small_run import fp32_weights, small_runs, stop_before_the_first_step, use_family
from torchround.models import FAMILIES

__all__ = ["small_runs"]

FIXTURES = Path(__file__).parent
FIXTURE = FIXTURES / "written_before_version_1"
CHECKPOINT = FIXTURE / "step-2"
SPLIT_LATER = FIXTURES / "written_before_split_weights"


@dataclass(frozen=True)
class EarlierRun:
    """A fixture: its checkpoint of step 2, the keys of its run, and what the code that wrote it logged in later steps."""

    checkpoint: Path
    overrides: tuple[str, ...]
    ran_on: dict[int, tuple[float, float]]  # loss and gradient norm


EARLIER = {
    "async, before version 1": EarlierRun(
        CHECKPOINT, (), {3: (5.535650784852074, 0.6277746148425002), 4: (5.517587630475154, 0.6433600012985939)}
    ),
    "sync": EarlierRun(
        SPLIT_LATER / "sync" / "step-2",
        ("--engine.update=sync",),
        {3: (5.536888769117453, 0.5470543026000461), 4: (5.529998270670573, 0.6382425617885863)},
    ),
    "async, predict": EarlierRun(
        SPLIT_LATER / "predict" / "step-2",
        ("--engine.update=async", "--engine.delay_correction=predict"),
        {3: (5.539019051244703, 0.47764973183322396), 4: (5.529578145345052, 0.6433715387535086)},
    ),
    "bounded": EarlierRun(
        SPLIT_LATER / "bounded" / "step-2",
        ("--engine.update=bounded", "--training.clip=layer", "--engine.stale_layers=1"),
        {3: (5.540427773685779, 0.6165979275151569), 4: (5.532054646809896, 0.6335533766219595)},
    ),
}
# Another processor adds bfloat16 products in another order, and one rounding of bfloat16 is 2^-9 of a value.
BFLOAT16_ROUNDING = 2**-9
ALWAYS = ("async, before version 1", "bounded")


@pytest.fixture
def tiny_runs(small_runs, monkeypatch):
    """The folder of runs with `tiny.toml`, its text, and the family of its model."""
    llama3 = FAMILIES["llama3"]
    flavor = llama3.config_from_flavor(
        "debug", num_layers=1, hidden_size=2, num_heads=1, num_kv_heads=1, head_dim=2, ffn_size=2
    )
    # The run's model had the tokens of its tokenizer, fewer than the flavor's.
    tied = replace(flavor, tied_embeddings=True, vocab_size=259)
    use_family(monkeypatch, "tiny", replace(llama3, flavors={"tied": tied}))
    shutil.copytree(FIXTURE, small_runs.folder, dirs_exist_ok=True)
    return small_runs


@pytest.mark.parametrize("kind", EARLIER)
def test_a_run_has_the_very_state_of_an_earlier_checkpoint_before_its_first_step(tiny_runs, monkeypatch, kind):
    """The fp32 weights have the same bits, whether this version splits them or not; so do all other tensors."""
    earlier = EARLIER[kind]
    uncorrected = ("--engine.delay_correction=none",) if kind == "async, before version 1" else ()
    stop_before_the_first_step(monkeypatch)
    load = f"--checkpoint.load_path={earlier.checkpoint}"
    code = tiny_runs("tiny", load, *earlier.overrides, *uncorrected, config="tiny.toml")
    assert code == 128 + signal.SIGTERM and tiny_runs.saved("tiny") == [2]
    found, stored = tiny_runs.state("tiny", 2), load_file(earlier.checkpoint / "tensors-00000.safetensors")
    is_split = kind in ("async, before version 1", "sync")
    assert any(name.startswith("residual/") for name in found) == is_split
    found = {name: tensor for name, tensor in found.items() if not name.startswith("residual/")} | fp32_weights(found)
    assert found.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name


@pytest.mark.parametrize(
    "kind", [kind if kind in ALWAYS else pytest.param(kind, marks=pytest.mark.nightly) for kind in EARLIER]
)
def test_a_run_resumes_from_an_earlier_checkpoint(tiny_runs, kind):
    earlier = EARLIER[kind]
    shutil.copytree(earlier.checkpoint, tiny_runs.checkpoint("tiny", 2))
    assert tiny_runs("tiny", *earlier.overrides, config="tiny.toml") == 0
    found = {int(line["step"]): (line["loss"], line["grad_norm"]) for line in tiny_runs.steps("tiny")}
    assert found.keys() == earlier.ran_on.keys(), "the run did not continue after step 2"
    for step, expected in earlier.ran_on.items():
        assert found[step] == pytest.approx(expected, rel=BFLOAT16_ROUNDING)
