"""Triton kernels run by Triton's interpreter on the CPU, in a process of their own.

Triton decides when a kernel is defined whether it will be interpreted, so the whole process is for that. A module of
cases has functions `case_*` without arguments; each raises if a kernel does not compute what it should.
"""

import json

import numpy as np
import torch

from tests.support.processes import run_program
from tests.support.rounding import BF16, FP16, FP32

UNITS = {torch.float32: FP32, torch.float16: FP16, torch.bfloat16: BF16}

PROGRAM = """
import importlib, json, sys, traceback
import torch
torch.set_num_threads(1)
from tests.support.interpreted import widen_products
widen_products()
from torchround.models.kernels import operation
operation.has_triton = lambda kind: True
module = importlib.import_module(sys.argv[1])
found = {}
for name in json.loads(sys.argv[2]):
    try:
        getattr(module, name)()
        found[name] = ""
    except Exception:
        found[name] = traceback.format_exc()
print(json.dumps(found))
"""


def case_names(module):
    return [name for name in vars(module) if name.startswith("case_")]


def outcomes(module):
    arguments = [module.__name__, json.dumps(case_names(module))]
    done = run_program("-c", PROGRAM, *arguments, TRITON_INTERPRET="1")
    return json.loads(done.stdout.splitlines()[-1])


def widen_products():
    """Let the interpreter multiply bf16 matrices: numpy has no bf16, and it would take their bits for integers."""
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def widened(handle):
        if handle.dtype.scalar != bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), float32)

    plain = InterpreterBuilder.create_dot
    InterpreterBuilder.create_dot = lambda self, a, b, *rest: plain(self, widened(a), widened(b), *rest)


def random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def assert_rounded(found, exact, terms, scale=None, what=""):
    """Check a result that was computed in fp32 and rounded to its dtype once, against the exact one in fp64.

    `terms` fp32 roundings are on the way, of terms no larger than `scale` (by default, the largest element). The
    interpreter cuts bits off when it writes bf16, so the last rounding may be of a whole unit in the last place.
    """
    assert exact.dtype == torch.float64, "the exact result is fp64"
    assert found.shape == exact.shape, f"{what}: {tuple(found.shape)} for {tuple(exact.shape)}"
    size = exact.abs().max().item()
    bound = terms * FP32 * (size if scale is None else scale) + 2 * UNITS[found.dtype] * size
    error = (found.double() - exact).abs().max().item()
    assert error <= bound, f"{what}: differs by {error:.3g}, roundings explain {bound:.3g}"
