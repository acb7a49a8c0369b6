"""What differs by kind of accelerator: what each kind claims, what models on `meta` choose, and who is asked."""

import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from torchround import accelerators
from torchround.accelerators import (
    PLANNED_KIND,
    AcceleratorKind,
    CudaKind,
    as_if_on,
    has_float32_products,
    has_grouped_products,
    has_offset_attention,
    has_triton,
    is_accelerator,
    kind_of,
    kinds,
    missing_for_triton,
    present_kind,
    shares_kv_heads_under_mask,
)

BF16 = torch.bfloat16


def test_the_host_has_no_special_kernel():
    for device in ("cpu", "meta", "a kind that is not registered"):
        assert not has_offset_attention(device, BF16, 64)
        assert not has_grouped_products(device, BF16)
        assert not has_float32_products(device, BF16)
        assert not has_triton(device) and not is_accelerator(device)
        assert shares_kv_heads_under_mask(device)


def test_a_kind_that_was_not_measured_gets_the_plain_way():
    assert not any(map(shares_kv_heads_under_mask, kinds()))


def test_models_on_meta_choose_as_on_another_kind_inside_the_context_only():
    with as_if_on(PLANNED_KIND):
        assert is_accelerator("meta") and not is_accelerator("cpu")
        assert has_offset_attention("meta", BF16, 64) and has_triton("meta")
        with as_if_on(CudaKind(capability=(7, 5))):
            assert not has_offset_attention("meta", BF16, 64)
        assert has_offset_attention("meta", BF16, 64)
        assert not has_offset_attention("cpu", BF16, 64)
    assert not has_offset_attention("meta", BF16, 64)


@pytest.mark.parametrize(
    ("capability", "attention", "grouped"),
    [
        ((7, 5), False, False),
        ((8, 0), True, False),
        ((8, 9), True, False),
        ((9, 0), True, True),
        ((10, 3), True, True),
        ((12, 0), True, False),
    ],
)
def test_a_card_has_the_kernels_of_its_generation(capability, attention, grouped):
    kind = CudaKind(capability)
    assert kind.has_offset_attention(BF16, 128) is attention
    assert kind.has_grouped_products(BF16) is grouped
    assert kind.has_triton() is (capability >= (8, 0)), "bfloat16 does not compile for older cards"
    assert not kind.has_offset_attention(torch.float32, 128) and not kind.has_grouped_products(torch.float32)
    assert kind.has_float32_products(torch.float16) and not kind.has_float32_products(torch.float32)


def test_amds_numbers_choose_no_kernel_that_was_not_tried_there(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    kind = CudaKind((9, 4))  # an MI300
    assert not kind.has_offset_attention(BF16, 128) and not kind.has_grouped_products(BF16)


@pytest.mark.parametrize("lacks", ["compiler", "headers", "driver", None])
def test_triton_without_a_c_compiler_headers_or_driver_is_a_missing_compiler(monkeypatch, tmp_path, lacks):
    class Found:
        @property
        def active(self):
            if lacks == "driver":
                raise RuntimeError("0 active drivers")

    monkeypatch.setitem(sys.modules, "triton.runtime.driver", SimpleNamespace(driver=Found()))
    monkeypatch.setenv("CC", "no-such-compiler" if lacks == "compiler" else sys.executable)
    if lacks != "headers":
        (tmp_path / "Python.h").touch()
    missing = missing_for_triton(tmp_path)
    expected = lacks if find_spec("triton") else "not installed"
    assert missing is None if expected is None else expected in missing


def test_segments_grow_unless_the_user_sets_the_allocator(monkeypatch):
    asked = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", asked.append)
    for variable in accelerators.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    CudaKind().prepare_allocator()
    assert asked == ["expandable_segments:True"]
    for variable in accelerators.ALLOCATOR_VARIABLES:
        with monkeypatch.context() as patch:
            patch.setenv(variable, "max_split_size_mb:64")
            CudaKind().prepare_allocator()
    assert len(asked) == 1


class Counted(AcceleratorKind):
    number = 0

    def count(self):
        return self.number


def test_the_least_of_several_cards_decides_and_layers_that_ask_again_cost_no_question_to_the_driver(monkeypatch):
    """Every worker must choose alike. Layers ask in every micro-batch, in the threads that launch kernels."""

    class Cards(CudaKind):
        def count(self):
            asked.append("count")
            return len(cards)

    asked, cards = [], [(9, 0), (7, 5)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: asked.append(index) or cards[index])
    kind = Cards()
    assert not any(kind.has_offset_attention(BF16, 64) or kind.has_grouped_products(BF16) for _ in range(9))
    assert asked == ["count", 0, 1]
    cards.pop()
    assert Cards().has_grouped_products(BF16)


def test_a_registered_kind_is_known_and_the_machines_accelerator_is_found(monkeypatch):
    kind = Counted("mps")  # of all types that PyTorch knows, one that nothing here is registered for
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps"))
    assert present_kind() is None
    monkeypatch.setitem(kinds(), "mps", None)  # restored after the test
    kinds()[kind.name] = kind
    assert kind_of("mps") is kind
    assert present_kind() is None, "there are no devices of it"
    kind.number = 2
    assert present_kind() is kind


def test_a_kind_without_a_driver_refuses_to_lock_pages():
    kind = AcceleratorKind("npu")
    assert not kind.locks_pages and kind.lock_pages(4096, 4096) != 0 and kind.unlock_pages(4096) != 0
