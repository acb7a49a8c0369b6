"""Which parameters weight decay applies to."""

from collections.abc import Sequence


def decays(shape: Sequence[int]) -> bool:
    """Matrices and larger decay (projections, embeddings, experts); vectors do not (norms, biases).

    A norm's scale or a bias does not shrink what the layer can express, so the custom since GPT-2 is to
    leave them alone.
    """
    return len(shape) >= 2
