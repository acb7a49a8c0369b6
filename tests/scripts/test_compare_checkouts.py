"""The comparison of two checkouts: equal ones are called equal, and a changed learning rule is found."""

import shutil

import pytest
import torch

from scripts.check_tree import ROOT
from scripts.compare_checkouts import RUNS, differences, joined, main
from tests.support.reference import halves


@pytest.mark.nightly
def test_a_checkout_equals_itself(capsys):
    assert main([str(ROOT), str(ROOT)]) == 0
    verdicts = capsys.readouterr().out.splitlines()
    assert len(verdicts) == len(RUNS) and all(line.endswith("values, equal") for line in verdicts)


@pytest.mark.nightly
def test_a_change_of_the_last_bits_is_found(tmp_path, capsys):
    shutil.copytree(ROOT / "torchround", tmp_path / "torchround")
    shutil.copy(ROOT / "train.py", tmp_path)
    changed = tmp_path / "torchround/optim/lr_schedule.py"
    text = changed.read_text()
    assert text.count("self.lr = lr") == 1, "the line to change is another one now"
    changed.write_text(text.replace("self.lr = lr", "self.lr = lr * (1 + 1e-6)"))
    assert main([str(ROOT), str(tmp_path), "--only", "llama3-sync"]) == 1
    printed = capsys.readouterr().out
    assert "differ" in printed and "grad_norm" in printed


def test_a_value_that_one_side_lacks_is_a_difference():
    assert list(differences({"a": 1, "b": 2}, {"a": 1})) == ["b: 2 before, not there after"]


def test_a_weight_in_two_halves_is_compared_as_the_value_that_they_make():
    weight = torch.tensor([1.0, -1.0 - 2.0**-8, 1.0 + 2.0**-8, 3e38, -1e-42, 0.1, -0.0])
    tensors = dict(zip(("weights/w", "residual/w"), halves(weight), strict=True))
    found = joined("weights/w", tensors["weights/w"], tensors)
    assert torch.equal(found.view(torch.int32), weight.view(torch.int32))
    assert joined("weights/other", weight, tensors) is weight
