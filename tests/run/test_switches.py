"""`training.fp16_accumulation` and `training.deterministic`: on for the run alone, and refused if they cannot be."""

import pytest
import torch

from tests.support.small_run import before_step
from torchround import accelerators
from torchround.accelerators import AcceleratorKind, CudaKind, accumulating_in_fp16, deterministic_operations
from torchround.models import FAMILIES

ON = ("--training.dtype=float16", "--training.fp16_accumulation=true")


def is_on():
    return torch.backends.cuda.matmul.allow_fp16_accumulation


def test_a_run_switches_it_on_for_its_steps_and_restores_it(small_runs, monkeypatch):
    kind = AcceleratorKind("cpu")
    kind.adds_in_fp16 = True
    monkeypatch.setitem(accelerators.kinds(), "cpu", kind)
    seen = []
    before_step(monkeypatch, 2, lambda: seen.append(is_on()))
    assert small_runs("on", *ON, "--training.steps=2") == 0
    assert seen == [True] and not is_on()
    with pytest.raises(KeyError), accumulating_in_fp16():
        raise KeyError
    assert not is_on()


def test_devices_without_the_switch_are_refused_before_anything_is_made(small_runs, capfd):
    assert small_runs("refused", *ON) == 2
    assert capfd.readouterr().err.count("training.fp16_accumulation = true: cpu devices") == 1
    assert not small_runs.path("refused").exists()


def test_a_card_with_sums_in_float16_gives_no_products_in_float32():
    """Its libraries refuse that combination, so gradients are added block by block then."""
    kind = CudaKind((8, 9))
    assert not is_on() and kind.has_float32_products(torch.float16)
    with accumulating_in_fp16():
        assert is_on() and not kind.has_float32_products(torch.float16)
        assert kind.has_float32_products(torch.bfloat16)
    assert not is_on()


@pytest.mark.parametrize("wanted", [False, True])
def test_operations_have_a_fixed_order_in_the_run_if_asked_for(small_runs, monkeypatch, wanted):
    seen = []

    def note():
        filled = torch.utils.deterministic.fill_uninitialized_memory
        seen.append((torch.are_deterministic_algorithms_enabled(), filled))

    before_step(monkeypatch, 2, note)
    given = ("--training.steps=2", f"--training.deterministic={str(wanted).lower()}")
    assert small_runs(f"wanted_{wanted}", *given) == 0
    assert seen == [(wanted, not wanted)]
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_plan_counts_the_sums_of_each_processor_that_shares_a_head():
    family = FAMILIES["qwen3"]
    config = family.config_from_flavor("debug", num_heads=16, num_kv_heads=8, head_dim=64)
    block = family.build(config).layers[1]
    plain = block.work(1, 8192, 2, "cuda").workspace_bytes
    with deterministic_operations():
        # 160 processors for 16 heads: 10 sums in fp32.
        assert block.work(1, 8192, 2, "cuda").workspace_bytes - plain > 7 * 8192 * 16 * 64 * 4
    assert block.work(1, 8192, 2, "cuda").workspace_bytes == plain
