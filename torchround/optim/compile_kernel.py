"""The program that compiles AdamW's update: `python -m torchround.optim.compile_kernel bfloat16 bfloat16 plain out.so`.

A run starts it as a child process (`kernel.py`): a quarter of a minute of Python beside the device workers would
hold them up, and importing the compiler into a training run would cost it 200 MB. The text of this file is part
of the key of a compiled kernel.
"""

import os
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from torch import Tensor, nn

from torchround.optim.adamw import commit_, new_values

# Any length that is not special to the compiler; the kernel takes every other length too.
EXAMPLE_ELEMENTS = 100_001
NUM_FACTORS = 8

# The two kinds of device weight by their names on the command line.
PLAIN, PREDICT = "plain", "predict"


class InPlaceUpdate(nn.Module):
    """`adamw.new_values` and its commit, over five flat buffers of equal length and the eight factors."""

    def __init__(self, predicts: bool) -> None:
        super().__init__()
        self.predicts = predicts

    def forward(
        self,
        weight: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        gradient: Tensor,
        device_weight: Tensor,
        *factors: Tensor,
    ) -> None:
        # As one vector instruction the square root is exactly rounded, like `adamw.exact_root`.
        new = new_values(weight, exp_avg, exp_avg_sq, gradient, factors, torch.sqrt, self.predicts)
        commit_((weight, exp_avg, exp_avg_sq), device_weight, new)


def compile_kernel(gradient: torch.dtype, device_weight: torch.dtype, predicts: bool, library: Path) -> None:
    """Compile for these dtypes and this kind of device weight, and put the shared library at `library`, whole or not at all."""
    import torch._inductor  # imported late: it costs 200 MB

    buffers = [torch.ones(EXAMPLE_ELEMENTS) for _ in range(3)]
    buffers += [torch.ones(EXAMPLE_ELEMENTS, dtype=dtype) for dtype in (gradient, device_weight)]
    factors = [torch.ones(()) for _ in range(NUM_FACTORS)]
    length = torch.export.Dim("length", min=2, max=2**48)
    program = torch.export.export(
        InPlaceUpdate(predicts),
        (*buffers, *factors),
        dynamic_shapes=(*({0: length} for _ in buffers), tuple({} for _ in factors)),
    )
    options = {
        # One kernel for any number of threads: the caller's.
        "cpp.dynamic_threads": True,
        # Each rounding where the source has it: no fused multiply-add, no reordering.
        "cpp.enable_floating_point_contract_flag": "off",
        "cpp.enable_unsafe_math_opt_flag": False,
    }
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        package = os.path.join(folder, "package.pt2")
        torch._inductor.aoti_compile_and_package(program, package_path=package, inductor_configs=options)
        with zipfile.ZipFile(package) as archive:
            [member] = [name for name in archive.namelist() if name.endswith(".so")]
            os.replace(archive.extract(member, folder), library)


def main(arguments: list[str]) -> None:
    """Read both dtypes (gradient, device weight), `plain` or `predict`, and the path of the library, and compile."""
    os.nice(10)  # training has priority
    gradient, device_weight, rule, library = arguments
    Path(library).parent.mkdir(parents=True, exist_ok=True)
    compile_kernel(getattr(torch, gradient), getattr(torch, device_weight), rule == PREDICT, Path(library))


if __name__ == "__main__":
    main(sys.argv[1:])
