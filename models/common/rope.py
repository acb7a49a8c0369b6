"""Rotary position embeddings (RoPE, arXiv 2104.09864), with the frequency scalings of Llama 3 and YaRN.

The tables of cosines and sines are not stored: they are recomputed in fp32 from the micro-batch's positions, in
operations that run on the positions' device and never wait for it. For 8192 tokens that is under 0.1 % of a block's
time.

Shapes: B sequences, T tokens, C channels of a head.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's stretch of long wavelengths.

    Wavelengths above `original_positions / low_freq_factor` tokens grow by `factor`. Wavelengths below
    `original_positions / high_freq_factor` stay. The wavelengths between are interpolated.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192

    def stretched(self, frequencies: Tensor, theta: float) -> Tensor:
        # The share that the unscaled frequency keeps: 0 for long wavelengths, 1 for short ones, linear in turns between.
        turns = self.original_positions * frequencies / (2 * math.pi)
        share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        share = share.clamp(0.0, 1.0)
        return (1 - share) * frequencies / self.factor + share * frequencies


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): slow rotations are stretched by `factor`, fast rotations stay.

    Fast means more than `beta_fast` turns within `original_positions`, slow fewer than `beta_slow`. The pairs between
    are interpolated by their index, with bounds rounded outward if `truncate`. Cosines and sines are multiplied by
    `attention_factor`, which is `0.1 ln(factor) + 1` unless given.
    """

    factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_positions: int = 4096
    truncate: bool = True
    attention_factor: float | None = None

    def stretched(self, frequencies: Tensor, theta: float) -> Tensor:
        head_dim = 2 * len(frequencies)

        def pair_with(turns: float) -> float:
            """Compute the (fractional) index of the pair that turns so often within the original positions."""
            return (
                head_dim * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))
            )

        first, last = pair_with(self.beta_fast), pair_with(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        pairs = torch.arange(head_dim // 2, dtype=torch.float32, device=frequencies.device)
        stretched = ((pairs - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
        return frequencies / self.factor * stretched + frequencies * (1 - stretched)


@dataclass(frozen=True)
class Rope:
    """The rotation of channel pair `i`: by `position * theta^(-2 i / C)` radians, before scaling."""

    theta: float
    scaling: Llama3Scaling | YarnScaling | None = None

    def known_positions(self, stated: int) -> int:
        """Find the longest document, in tokens, of a model whose config states `stated` positions.

        A scaling multiplies the original positions by its factor. Releases of Llama state the product or less. With YaRN,
        some state the original positions, or a little more.
        """
        if self.scaling is None:
            return stated
        original = self.scaling.original_positions
        is_stretched = stated > original and isinstance(self.scaling, Llama3Scaling)
        return stated if is_stretched else max(stated, int(self.scaling.factor * original))

    @property
    def magnitude(self) -> float:
        if not isinstance(self.scaling, YarnScaling):
            return 1.0
        if self.scaling.attention_factor is not None:
            return self.scaling.attention_factor
        return 0.1 * math.log(max(self.scaling.factor, 1.0)) + 1.0


def rotation(rope: Rope, head_dim: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines `[B, T, 1, C / 2]` fp32 for positions `[B, T]`."""
    # [B, T, 1, 1] x [C / 2] -> [B, T, 1, C / 2]; the 1 stands for all heads.
    angles = positions[..., None, None].float() * inverse_frequencies(rope, head_dim, positions.device)
    return angles.cos() * rope.magnitude, angles.sin() * rope.magnitude


def inverse_frequencies(rope: Rope, head_dim: int, device: torch.device) -> Tensor:
    """Compute the radians per token of each channel pair, `[C / 2]` fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    return frequencies if rope.scaling is None else rope.scaling.stretched(frequencies, rope.theta)
