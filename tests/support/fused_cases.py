"""Cases for the Triton kernels: each one and its gradients give what float64 gives.

They run in Triton's interpreter, those of the loss also by its plain code. Sizes are powers of two and not,
single rows, more than a tile or a program takes, and none at all.
"""

from dataclasses import replace
from itertools import pairwise, product
from unittest import mock

import torch
from torch.nn import functional as F

from tests.support import model_tools
from tests.support.interpreted import UNITS, assert_rounded, random
from tests.support.rounding import FP32, assert_close_in_sums
from tests.support.small_decoders import decoder
from torchround.layer import IGNORED_LABEL
from torchround.models.common.loss import softmax_loss_
from torchround.models.common.sinks import join_sinks, sinks_gradient, tokens_each
from torchround.models.kernels import operation
from torchround.models.kernels.grouped import PackedStack, RowGroups, packed_product
from torchround.packed_formats import FORMATS

F32, F16, BF16 = UNITS
FACTOR = 0.37


def largest(*tensors):
    return torch.stack([tensor.detach().double().abs().max() for tensor in tensors]).prod().item()


def case_sinks():
    assert tokens_each(515) == 2, "programs with two tokens each, except the last one"
    rows = [((5, 4, 16), F32), ((40, 3, 6), BF16), ((1, 3, 6), F16), ((515, 2, 4), F32), ((0, 2, 4), F32)]
    for (tokens, heads, channels), dtype in rows:
        output, log_sums = random(tokens, heads, channels, dtype=dtype), 3 * random(heads, tokens)
        sinks, grad = 3 * random(heads, dtype=dtype), random(tokens, heads, channels, dtype=dtype, seed=1)
        found, joined = join_sinks(output, log_sums, sinks)
        assert found.shape == output.shape and joined.shape == log_sums.shape
        if tokens == 0:
            continue
        exact = torch.logaddexp(log_sums.double(), sinks.double()[:, None])
        # Exponentials turn the rounding of an argument of up to 20 into as many roundings.
        assert_rounded(joined, exact, 32, 20.0)
        shrunk = output.double() * (log_sums.double() - exact).exp().T[..., None]
        assert_rounded(found, shrunk, 64, largest(output))
        # With the sink's share s, d output / d score = -s output.
        share = (sinks.double()[:, None] - joined.double()).exp()
        expected = -(share.T[..., None] * found.double() * grad.double()).sum(dim=(0, 2))
        size = 20.0 * channels * tokens
        assert_rounded(sinks_gradient(grad, found, joined, sinks), expected, 64 + channels + tokens, size)


def loss_and_gradients(model, batch):
    parameters = model_tools.stored_parameters(model)
    for parameter in parameters.values():
        parameter.grad = None
    loss = model_tools.loss_sum(model, batch)
    loss.backward()
    return {"loss": loss.detach(), **{name: parameter.grad for name, parameter in parameters.items()}}


def case_whole_models():
    for name, flavor in [("qwen3", "debug"), ("qwen3", "debug_moe"), ("gpt_oss", "debug")]:
        model = decoder(name, flavor, vocab_size=50, num_layers=1)
        model_tools.materialise(model)
        for parameter in model_tools.stored_parameters(model).values():
            with torch.no_grad():
                parameter += 0.1 * random(*parameter.shape)  # norms that are not 1, biases that are not 0
        batch = model_tools.micro_batch([[12, 20]], 50)
        found = loss_and_gradients(model, batch)
        with mock.patch.object(operation, "has_triton", lambda kind: False):
            plain = loss_and_gradients(model, batch)
        weights = [parameter for layer in model.layers for parameter in layer.parameters() if parameter.ndim > 1]
        terms = sum(sum(weight.shape[-2:]) for weight in weights) + 2 * len(model.layers) * (32 + 2 * 32)
        for path, expected in plain.items():
            assert_close_in_sums(found[path], expected, terms, path)


# Ends of the experts' rows. Tiles have 128 rows: one expert; empty ones first, in the middle and last; tiles that are
# just full and one row more; more experts than rows; no rows at all. Inputs and outputs: neither a power of two nor a
# multiple of 8; an adapter's rank; more than a tile.
GROUPS = [
    ([5], 40, 33, F32),
    ([0, 7, 7, 150, 160, 160], 3, 130, BF16),
    ([128, 257], 130, 5, F16),
    ([0, 0], 40, 33, F32),
]
GROUPS += [
    ([0, 0, 1, 1, 1, 2, 2, 2, 2], 40, 33, BF16),
    ([128, 257], 3, 130, F32),
    ([0, 7, 7, 150, 160, 160], 130, 5, F32),
]


def case_rows_times_matrices_in_any_strides():
    for ends, inputs, outputs, dtype in GROUPS:
        num_rows, num_experts, bounds = ends[-1], len(ends), torch.tensor(ends, dtype=torch.int32)
        wide = random(num_rows, inputs + 3, dtype=dtype)
        stack = random(num_experts, outputs, inputs, dtype=dtype)
        adapter = random(outputs, inputs * num_experts, dtype=dtype)
        for rows, weights in (
            (wide[:, :inputs], stack.transpose(1, 2)),
            (wide[:, 1 : 1 + inputs].contiguous(), stack.transpose(1, 2).contiguous()),
            (wide[:, :inputs], adapter.unflatten(1, (inputs, num_experts)).permute(2, 1, 0)),
        ):
            found = torch.ops.torchround.grouped_rows(rows, weights, bounds)
            assert found.dtype == dtype and found.is_contiguous() and found.shape == (num_rows, outputs)
            parts = enumerate(pairwise([0, *ends]))
            exact = torch.cat([rows[a:b].double() @ weights[index].double() for index, (a, b) in parts])
            if num_rows:
                # Normal numbers: no product of two is above 25.
                assert_rounded(found, exact, inputs, 25.0 * inputs)


def case_packed_matrices_have_the_bits_of_their_numbers():
    # Numbers of all sizes, down to denormal ones.
    sizes = 10.0 ** random(3, 128, 1, seed=1)
    ends = torch.tensor([20, 20, 37], dtype=torch.int32)
    # The interpreter does not round to bfloat16, it cuts.
    for name, inner, (dtype, power) in product(FORMATS, (1, 128), ((F16, 0.5), (F32, 8))):
        packed, weights = replace(FORMATS[name], inner=inner), (random(3, 128, 128) * sizes**power).to(dtype)
        memory = torch.empty(packed.nbytes(weights.numel()), dtype=torch.uint8)
        packed.pack(weights.view(-1), memory)
        packed.unpack(memory, weights.view(-1))
        stack, rows = PackedStack(packed, (3, 128, 128)), random(37, 128, dtype=dtype)
        for inputs_first, view in ((True, weights), (False, weights.transpose(1, 2))):
            found = packed_product(rows, memory, stack, RowGroups(ends), inputs_first)
            expected = torch.ops.torchround.grouped_rows(rows, view, ends)
            assert torch.equal(found, expected), (name, inner, dtype, inputs_first)


def case_a_gradient_is_added_in_the_dtype_of_its_sum():
    for ends, inputs, outputs, dtype in GROUPS:
        rows, grad = random(ends[-1], inputs, dtype=dtype), random(ends[-1], outputs, dtype=dtype, seed=1)
        for kind in (F32, BF16) if dtype == BF16 else (F32,):
            before = random(len(ends), outputs, inputs, dtype=kind, seed=2)
            total = before.clone()
            offsets = torch.tensor(ends, dtype=torch.int32)
            torch.ops.torchround.grouped_gradient_(rows, grad, offsets, total.transpose(1, 2))
            for index, (start, stop) in enumerate(pairwise([0, *ends])):
                added = grad[start:stop].double().T @ rows[start:stop].double()
                if start == stop:
                    assert torch.equal(total[index], before[index]), "an expert without rows is left alone"
                else:
                    terms = stop - start + 1
                    assert_rounded(total[index], before[index].double() + added, terms, 25.0 * terms)


def softmax_loss(logits, labels, factor=FACTOR, differentiate=True):
    losses = torch.full((len(logits),), torch.nan)
    softmax_loss_(logits, torch.as_tensor(labels, dtype=torch.int64), losses, factor, differentiate)
    return losses


def case_losses_and_their_gradients():
    # One column; one partial step of 8192, one whole step, and several with a partial last one.
    for tokens, vocab, dtype in [(1, 1, F32), (3, 50, BF16), (3, 8192, F16), (3, 2 * 8192 + 77, F32), (1, 50, F32)]:
        generator = torch.Generator().manual_seed(vocab)
        # With a gap between rows.
        logits = (4 * torch.randn(tokens, vocab + 8, generator=generator)).to(dtype)[:, :vocab]
        labels = torch.randint(0, vocab, (tokens,), generator=generator)
        if tokens > 1:
            labels[tokens // 2] = IGNORED_LABEL
        wide = logits.detach().double().requires_grad_()
        exact = F.cross_entropy(wide, labels, reduction="none", ignore_index=IGNORED_LABEL)
        (gradient,) = torch.autograd.grad(FACTOR * exact.sum(), wide)
        # The copy has no gap between its rows.
        evaluated = softmax_loss(logits.clone(memory_format=torch.contiguous_format), labels, differentiate=False)
        losses = softmax_loss(logits, labels)
        for found in (evaluated, losses):
            assert_close_in_sums(found.double(), exact.detach(), vocab, "losses", scale=20.0)
        # Rounded once, and cut by the interpreter. Exponentials of differences up to 30 have that error in fp32.
        unit = max(UNITS[dtype], 32 * FP32)
        assert_close_in_sums(logits.double(), gradient, 2, "gradients", unit=unit, scale=FACTOR)
        ignored = labels == IGNORED_LABEL
        assert not logits[ignored].any() and not losses[ignored].any()


def case_losses_of_huge_and_bad_logits_and_of_none():
    logits = torch.tensor([[3e4, -3e4, 2.99e4]], dtype=torch.float16)
    expected = 3e4 - float(torch.tensor(2.99e4, dtype=torch.float16))
    assert abs(softmax_loss(logits, [2], 1.0).item() - expected) < 1e-2 and logits.isfinite().all()
    for bad in (torch.nan, torch.inf):
        logits = torch.zeros(2, 9)
        logits[1, 4] = bad
        assert softmax_loss(logits, [1, 1], 1.0).isfinite().tolist() == [True, False]
    assert softmax_loss(torch.empty(0, 9), [], 1.0).shape == (0,)
