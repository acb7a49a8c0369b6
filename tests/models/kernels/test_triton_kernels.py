"""Triton kernels give what float64 gives in Triton's interpreter, and compile for cards."""

import pytest

from tests.support import fused_cases
from tests.support.compiled_kernels import compiled
from tests.support.interpreted import case_names, outcomes


@pytest.mark.parametrize("name", [name for name in case_names(fused_cases) if "loss" in name])
def test_the_loss_without_triton_passes_its_cases(name):
    getattr(fused_cases, name)()


@pytest.mark.compiles  # Triton takes tens of seconds
def test_the_triton_kernels_pass_every_case():
    found = outcomes(fused_cases)
    assert found and {name: problem for name, problem in found.items() if problem} == {}


# The oldest cards that compute in bfloat16, and Hopper; GeForce of 2022 and of 2025, and a card of AMD's.
CARDS = [
    "cuda-80",
    "cuda-90",
    *(pytest.param(card, marks=pytest.mark.nightly) for card in ("cuda-89", "cuda-120", "hip-gfx942")),
]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    found = {}

    def compile_once(card):
        if card not in found:
            found[card] = compiled(card, str(tmp_path_factory.mktemp(card)))
        return found[card]

    return compile_once


@pytest.mark.thorough
@pytest.mark.compiles
@pytest.mark.parametrize("card", CARDS)
def test_every_kernel_compiles(card, kernels):
    texts = kernels(card)
    assert len(texts) == 5
    assert [name for name, text in texts.items() if not text] == [], "each kernel is launched"
