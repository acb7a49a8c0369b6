"""A checkpoint that earlier code wrote, kept as a fixture, loads with its exact values, and a run resumes from it.

The run trained a Llama of one block, two wide, in bfloat16 with async updates: fp32 weights, both moments and the
older bfloat16 weights are all in the file.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.small_run import SmallRuns, small_runs, use_family
from torchround.checkpoint import load_checkpoint, verify_checkpoint
from torchround.models import FAMILIES

__all__ = ["small_runs"]

FIXTURE = Path(__file__).parent / "written_before_version_1"
CHECKPOINT = FIXTURE / "step-2"
# Losses and gradient norms that the same code logged when it ran on to step 4.
RAN_ON = {3: (5.535650784852074, 0.6277746148425002), 4: (5.517587630475154, 0.6433600012985939)}
# Another processor adds bfloat16 products in another order, and one rounding of bfloat16 is 2^-9 of a value.
PARTS = {"weights", "exp_avg", "exp_avg_sq", "master_1_old"}  # names in files, which stay
BFLOAT16_ROUNDING = 2**-9


def test_an_earlier_checkpoint_loads_with_its_exact_values() -> None:
    assert verify_checkpoint(CHECKPOINT) == 2
    stored = load_file(CHECKPOINT / "tensors-00000.safetensors")
    target = {name: torch.full_like(tensor, 9.0) for name, tensor in stored.items()}
    loaded = load_checkpoint(CHECKPOINT, target)
    assert loaded.step == 2 and loaded.state["tokens"] == 124 and loaded.filled == stored.keys()
    assert all(torch.equal(target[name], tensor) for name, tensor in stored.items())
    assert {name.partition("/")[0] for name in stored} == PARTS


def test_a_run_resumes_from_an_earlier_checkpoint(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama3 = FAMILIES["llama3"]
    flavor = llama3.config_from_flavor(
        "debug", num_layers=1, hidden_size=2, num_heads=1, num_kv_heads=1, head_dim=2, ffn_size=2
    )
    # The run's model had the tokens of its tokenizer, fewer than the flavor's.
    tied = replace(flavor, tied_embeddings=True, vocab_size=259)
    use_family(monkeypatch, "tiny", replace(llama3, flavors={"tied": tied}))
    shutil.copytree(FIXTURE, small_runs.folder, dirs_exist_ok=True)
    shutil.copytree(CHECKPOINT, small_runs.path("tiny") / "checkpoints" / "step-2")
    assert small_runs("tiny", config="tiny.toml") == 0
    found = {int(line["step"]): (line["loss"], line["grad_norm"]) for line in small_runs.steps("tiny")}
    assert found.keys() == RAN_ON.keys(), "the run did not continue after step 2"
    for step, expected in RAN_ON.items():
        assert found[step] == pytest.approx(expected, rel=BFLOAT16_ROUNDING)
