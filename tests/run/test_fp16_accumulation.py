"""`training.fp16_accumulation`: switched on for the run alone, refused where it cannot be, counted by plan and MFU."""

import pytest
import torch

from tests.support.small_run import before_step, small_runs
from torchround import accelerators
from torchround.accelerators import AcceleratorKind, CudaKind, accumulating_in_fp16

__all__ = ["small_runs"]  # the fixture

ON = ("--training.dtype=float16", "--training.fp16_accumulation=true")


class WithSwitch(AcceleratorKind):
    """The host as a kind with a switch, which notes how it was set."""

    def __init__(self):
        super().__init__("cpu")
        self.settings = [False]

    def fp16_accumulation(self):
        return self.settings[-1]

    def set_fp16_accumulation(self, wanted):
        self.settings.append(wanted)


@pytest.fixture
def switch(monkeypatch):
    kind = WithSwitch()
    monkeypatch.setitem(accelerators._registered(), "cpu", kind)
    return kind


def test_a_run_switches_it_on_for_its_steps_and_restores_it(small_runs, switch, monkeypatch):
    seen = []
    before_step(monkeypatch, 2, lambda: seen.append(switch.fp16_accumulation()))
    assert small_runs("on", *ON, "--training.steps=2") == 0
    assert seen == [True] and switch.settings == [False, True, False]
    with pytest.raises(KeyError), accumulating_in_fp16("cpu"):
        raise KeyError
    assert switch.settings[3:] == [True, False]
    switch.settings = [True]  # as a program set it that calls the library
    assert small_runs("off", "--training.dtype=float16", "--training.steps=2") == 0
    assert switch.settings == [True], "a run that does not ask for it leaves it alone"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (ON, "training.fp16_accumulation = true: cpu devices"),
        (("--training.dtype=bfloat16", "--training.fp16_accumulation=true"), "fp16_accumulation, training.dtype"),
    ],
)
def test_devices_without_the_switch_and_other_dtypes_are_refused_before_anything_is_made(
    small_runs, capfd, given, said
):
    assert small_runs("refused", *given) == 2
    assert capfd.readouterr().err.count(said) == 1
    assert not small_runs.path("refused").exists()


def test_a_card_with_sums_in_float16_gives_no_products_in_float32():
    """Its libraries refuse that combination, so gradients are added block by block then."""
    kind, before = CudaKind((8, 9)), torch.backends.cuda.matmul.allow_fp16_accumulation
    assert before is False and kind.has_float32_products(torch.float16)
    with accumulating_in_fp16("cuda"):
        assert torch.backends.cuda.matmul.allow_fp16_accumulation is True
        assert not kind.has_float32_products(torch.float16)
        assert kind.has_float32_products(torch.bfloat16)
    assert torch.backends.cuda.matmul.allow_fp16_accumulation is False
