"""Triton kernels compiled for cards that are not here, down to machine code, which is not run.

Triton's interpreter runs a kernel as Python and accepts much that its compiler refuses. The compiler needs the name of
a card, not the card. It works in a process of its own, because a process has one target.
"""

import importlib
import json
from dataclasses import replace

import torch

from tests.support.processes import run_program
from torchround.packed_formats import FORMATS, PackedPlace

MODULES = ("grouped", "sink_scores", "softmax_loss")
MOST_PROGRAMS = 65535  # that CUDA allows in the second and third direction of a grid

PROGRAM = """
import json, sys
from tests.support.compiled_kernels import compile_all
print(json.dumps(compile_all(sys.argv[1])))
"""


def compiled(card, cache):
    """Compile all kernels for a card, such as `cuda-90`. Return the compiler's first form of each, by name."""
    done = run_program("-c", PROGRAM, card, TRITON_INTERPRET="0", TRITON_CACHE_DIR=cache)
    return json.loads(done.stdout.splitlines()[-1])


class NamedCard:
    """What Triton asks its driver when it compiles. Nothing can be launched."""

    def __init__(self, target):
        self.target = target

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_all(card):
    """Do what `compiled` promises, in this process. The text of a kernel that is not launched is empty."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    backend, _, model = card.partition("-")
    driver.set_active(
        NamedCard(GPUTarget(backend, int(model), 32) if backend == "cuda" else GPUTarget(backend, model, 64))
    )
    modules = [importlib.import_module(f"torchround.models.kernels.{name}_triton") for name in MODULES]
    found = {
        name: ""
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and value.fn.__annotations__["return"] is None
    }

    def launcher(kernel, grid):
        def launch(*arguments, **settings):
            assert all(0 < size <= MOST_PROGRAMS for size in grid[1:]), (kernel.__name__, grid)
            found[kernel.__name__] += kernel.run(*arguments, grid=grid, warmup=True, **settings).asm["ttir"]

        return launch

    JITFunction.__getitem__ = launcher
    for dtype in (torch.bfloat16, torch.float32):
        launch_all(*modules, dtype)
    return found


def launch_all(grouped, sinks, losses, dtype):
    def make(*shape, kind=dtype):
        return torch.empty(shape, dtype=kind, device="meta")

    def numbers(*shape):
        return make(*shape, kind=torch.float32)

    def integers(*shape):
        return make(*shape, kind=torch.int64)

    tokens, width, experts, inner = 8192, 2880, 128, 768
    heads, ends = make(tokens, 16, 128), make(experts, kind=torch.int32)
    stack, rows = make(experts, inner, width), 8 * tokens
    grouped.launch_rows(make(rows, width), stack.transpose(1, 2), ends)
    grouped.launch_rows(make(rows, inner), stack, ends)
    for packed in (*FORMATS.values(), replace(FORMATS["mxfp4"], inner=width)):
        place = PackedPlace(packed, make(1, kind=torch.uint8), make(1, kind=packed.scale_dtype))
        for is_transposed in (False, True):
            grouped.launch_packed(make(rows, width), place, torch.Size((width, inner)), ends, is_transposed)
    for kind in (torch.float32, dtype):
        total = make(experts, inner, width, kind=kind).transpose(1, 2)
        grouped.launch_gradient(make(rows, width), make(rows, inner), ends, total)
    sinks.launch_join_sinks(heads, numbers(16, tokens), make(16))
    sinks.launch_join_sinks_backward(heads, heads, numbers(16, tokens), make(16))
    for differentiate in (False, True):
        losses.launch_softmax_loss(make(4352, 151936), integers(4352), numbers(4352), 0.1, differentiate)
