"""Blocks of every family, run with and without kept activations."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.small_decoders import decoder
from torchround.keeping import recording, replaying
from torchround.layer import KEEPABLE

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
DENSE = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
STACKED = (*ATTENTION, "gate_up_proj", "down_proj")
# Family, flavor, and the modules with adapters. GPT-OSS has sinks, windows and biases; some adapt a few modules alone.
CASES = (
    ("llama3", "debug", ()),
    ("qwen3", "debug", ()),
    ("qwen3", "debug_moe", ()),
    ("gpt_oss", "debug", ()),
    ("llama3", "debug", DENSE),
    ("qwen3", "debug_moe", DENSE),
    ("gpt_oss", "debug", ("v_proj", "down_proj")),
    ("gpt_oss", "debug", STACKED),
    ("llama3", "debug", DENSE, {"dora": True}),
    ("gpt_oss", "debug", ATTENTION, {"dora": True, "rank_pattern": {"q_proj": 3}}),
)
IDS = ["-".join((name, flavor, f"{len(targets)}adapted", *map(str, more))) for name, flavor, targets, *more in CASES]
# Nothing, each part, all; and each pair.
CHOICES = tuple(choice for size in (0, 1, 5) for choice in combinations(KEEPABLE, size))
PAIRS = tuple(combinations(KEEPABLE, 2))
RANK = 8


def model_with_adapters(name, flavor, targets, settings=()):
    return decoder(name, flavor, targets, (RANK, 12.0, 0.1), settings, vocab_size=50, num_layers=2)


def as_the_engine_binds(layer, dtype, device="cpu"):
    """Give a layer weights on a device, none of them 0 or 1, and fp32 gradients; a frozen one stays frozen."""
    trained = {name for name, parameter in layer.named_parameters() if parameter.requires_grad}
    layer.to_empty(device=device).to(dtype).requires_grad_(False)
    torch.manual_seed(3)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape).mul_(0.1))
    for name in trained:
        parameter = layer.get_parameter(name).requires_grad_()
        parameter.grad_dtype = torch.float32
        parameter.grad = torch.zeros(parameter.shape, device=device)
    return layer


def an_input(layer, batch, dtype):
    torch.manual_seed(4)
    stream = torch.randn(*batch.tokens.shape, layer.hidden_size)
    return stream.to(batch.tokens.device, dtype)


def as_tuple(hidden):
    return (hidden,) if isinstance(hidden, Tensor) else hidden


def kept_by(layer, hidden, batch, names):
    with torch.no_grad(), recording(names) as record:
        layer(hidden, batch)
    return copies(record.tensors)


def copies(tensors):
    return [torch.empty(one.shape, dtype=one.dtype, device=one.device).copy_(one) for one in tensors]


def forward_and_backward(layer, hidden, batch, replay=None):
    leaves = tuple(one.detach().requires_grad_(one.is_floating_point()) for one in as_tuple(hidden))
    for parameter in layer.parameters():
        if parameter.requires_grad:
            parameter.grad.zero_()
    with replay or nullcontext():
        outputs = as_tuple(layer(leaves[0] if isinstance(hidden, Tensor) else leaves, batch))
    torch.manual_seed(5)
    gradients = [torch.randn(output.shape).to(output) for output in outputs]
    torch.autograd.backward(outputs, gradients)
    found = [*outputs, *(leaf.grad for leaf in leaves)]
    found += [parameter.grad.clone() for parameter in layer.parameters() if parameter.requires_grad]
    return [tensor.detach() for tensor in found]


def differing_choices(layer, hidden, batch, choices=CHOICES):
    plain = forward_and_backward(layer, hidden, batch)
    wrong = []
    for names in choices:
        with torch.no_grad(), recording(names) as record:
            forward = as_tuple(layer(hidden, batch))
        same = all(map(torch.equal, forward, plain)) and not any(one.requires_grad for one in forward)
        replay = replaying(names, copies(record.tensors))
        found = forward_and_backward(layer, hidden, batch, replay)
        if not same or not all(map(torch.equal, found, plain)):
            wrong.append(names)
    return wrong


class _Kernels(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if any(word in name for word in ("mm", "attention", "grouped_rows")):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def kernels():
    with _Kernels() as counter:
        yield counter.names


def with_dropout(batch):
    """Return the micro-batch with a seed, without which there is no dropout."""
    return replace(batch, dropout_seed=7)
