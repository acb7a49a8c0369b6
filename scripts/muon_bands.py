"""Processor time of a Newton-Schulz step of Muon with symmetric products in bands of rows, beside whole ones: for maintainers.

python scripts/muon_bands.py
"""

import sys
import time
from pathlib import Path
from statistics import median
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.pipeline_tables import markdown
from torchround.engine.worker import orthogonalise

SIDES = ((1024, 1024), (2048, 2048), (4096, 4096))
PAIRS = 5


def bands_table() -> str:
    """Time both ways in turn, in one thread; show the median share of each pair."""
    torch.set_num_threads(1)
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        cells = [f"{median(share(sides, dtype) for _ in range(PAIRS)):.2f}" for sides in SIDES]
        rows.append([str(dtype).removeprefix("torch."), *cells])
    return markdown(["time in bands / whole", *(f"{rows} x {columns}" for rows, columns in SIDES)], rows)


def share(sides: tuple[int, int], dtype: torch.dtype) -> float:
    """Return the processor time of a step in bands, divided by that of whole products."""
    matrix = torch.randn(sides).to(dtype)
    matrix /= matrix.norm()
    with mock.patch.object(orthogonalise, "row_bands", lambda rows: [(0, rows)]):
        whole_s = seconds(matrix)
    return seconds(matrix) / whole_s


def seconds(matrix: torch.Tensor) -> float:
    """Return the processor time of a step on a matrix of norm 1."""
    start_s = time.process_time()
    with mock.patch.object(orthogonalise, "STEPS", 1):
        orthogonalise.iterated(matrix)
    return time.process_time() - start_s


if __name__ == "__main__":
    print(bands_table())
