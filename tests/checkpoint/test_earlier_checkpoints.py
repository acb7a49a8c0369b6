"""Checkpoints that an earlier release wrote, kept as fixtures, load with their exact values, and runs resume from them.

The runs trained a Llama of one block, two wide, in bfloat16: with split weights and compact state, with predicted device
weights, and with a stale layer.
"""

import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.small_run import stop_before_the_first_step, tensors_in, use_family
from torchround.models import FAMILIES

FIXTURE = Path(__file__).parent / "written_in_format_3"
# By fixture: the keys of its run, and the loss and gradient norm that the release logged in later steps.
EARLIER = {
    "split_compact": (
        ("--engine.update=sync", "--optimizer.state=compact"),
        {3: (5.536877906928628, 0.5464579242481927), 4: (5.529924519856771, 0.6384365500002844)},
    ),
    "predicting": (
        ("--engine.update=async", "--engine.delay_correction=predict"),
        {3: (5.539019051244703, 0.47764973183322396), 4: (5.529578145345052, 0.6433715387535086)},
    ),
    "bounded": (
        ("--engine.update=bounded", "--training.clip=layer", "--engine.stale_layers=1"),
        {3: (5.540427773685779, 0.6165979275151569), 4: (5.532054646809896, 0.6335533766219595)},
    ),
}
# Another processor adds bfloat16 products in another order, and one rounding of bfloat16 is 2^-9 of a value.
BFLOAT16_ROUNDING = 2**-9


@pytest.fixture
def tiny_runs(small_runs, monkeypatch):
    llama3 = FAMILIES["llama3"]
    flavor = llama3.config_from_flavor(
        "debug", num_layers=1, hidden_size=2, num_heads=1, num_kv_heads=1, head_dim=2, ffn_size=2
    )
    # The run's model had the tokens of its tokenizer, fewer than the flavor's.
    tied = replace(flavor, tied_embeddings=True, vocab_size=259)
    use_family(monkeypatch, "tiny", replace(llama3, flavors={"tied": tied}))
    shutil.copytree(FIXTURE, small_runs.folder, dirs_exist_ok=True)
    return small_runs


@pytest.mark.parametrize("name", EARLIER)
def test_a_run_has_the_very_state_of_an_earlier_checkpoint_before_its_first_step(tiny_runs, monkeypatch, name):
    stop_before_the_first_step(monkeypatch)
    load = f"--checkpoint.load_path={FIXTURE / name}"
    assert tiny_runs("tiny", load, *EARLIER[name][0], config="tiny.toml") == 128 + signal.SIGTERM
    found, stored = tiny_runs.state("tiny", 2), tensors_in(FIXTURE / name)
    assert found.keys() == stored.keys()
    for key, tensor in stored.items():
        assert torch.equal(found[key].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), key


@pytest.mark.parametrize("name", EARLIER)
def test_a_run_resumes_from_an_earlier_checkpoint(tiny_runs, name):
    overrides, logged = EARLIER[name]
    shutil.copytree(FIXTURE / name, tiny_runs.checkpoint("tiny", 2))
    assert tiny_runs("tiny", *overrides, config="tiny.toml") == 0
    found = {int(line["step"]): (line["loss"], line["grad_norm"]) for line in tiny_runs.steps("tiny")}
    assert found.keys() == logged.keys(), "the run did not continue after step 2"
    for step, expected in logged.items():
        assert found[step] == pytest.approx(expected, rel=BFLOAT16_ROUNDING)
