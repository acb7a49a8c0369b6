"""All Triton kernels through Triton's compiler: the interpreter accepts much that no card would run."""

import pytest

from tests.support.compiled_kernels import compiled

# Triton takes tens of seconds, so these are no part of the default tier.
pytestmark = pytest.mark.compiles

# The oldest cards that compute in bfloat16, and Hopper; GeForce of 2022 and of 2025, and a card of AMD's.
CARDS = [
    "cuda-80",
    "cuda-90",
    *(pytest.param(card, marks=pytest.mark.nightly) for card in ("cuda-89", "cuda-120", "hip-gfx942")),
]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Compile for a card by name, each once."""
    found = {}

    def compile_once(card):
        if card not in found:
            found[card] = compiled(card, str(tmp_path_factory.mktemp(card)))
        return found[card]

    return compile_once


@pytest.mark.thorough
@pytest.mark.parametrize("card", CARDS)
def test_every_kernel_compiles(card, kernels):
    texts = kernels(card)
    assert len(texts) > 15
    assert [name for name, text in texts.items() if not text] == [], "each kernel is launched"


@pytest.mark.thorough
def test_no_limit_takes_the_place_of_nan(kernels):
    """The plain minimum of NaN and a limit is the limit on a card. The interpreter gives NaN."""
    texts = kernels("cuda-90")
    assert "arith.minimumf" in texts["_clamped_product"]
    assert [name for name, text in texts.items() if "arith.minnumf" in text] == []
