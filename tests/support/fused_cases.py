"""Cases for the Triton kernels: each one and its gradients give what float64 gives.

They run in Triton's interpreter, those of the loss also by its plain code. Sizes are powers of two and not,
single rows, more than a tile or a program takes, and none at all.
"""

from itertools import pairwise
from unittest import mock

import torch
from torch.nn import functional as F

from tests.support import model_tools
from tests.support.interpreted import UNITS, assert_rounded, random
from tests.support.rounding import FP32, assert_close_in_sums
from tests.support.small_decoders import decoder
from torchround.layer import IGNORED_LABEL
from torchround.models.kernels import operation
from torchround.models.kernels.gated_products import add_expert_bias, clamped_product, fused_gated_product
from torchround.models.kernels.norms import normed_sum, rotate_heads, tokens_each
from torchround.models.kernels.sink_scores import join_sinks, sinks_gradient
from torchround.models.kernels.softmax_loss import softmax_loss_

F32, F16, BF16 = UNITS
EPS, LIMIT, ALPHA, FACTOR = 1e-5, 1.5, 1.7, 0.37
# Rounded terms on the way to an element: an exponential turns the rounding of its argument into as many as that is large.
TERMS = 128


def largest(*tensors):
    """Return the product of the largest magnitudes."""
    return torch.stack([tensor.detach().double().abs().max() for tensor in tensors]).prod().item()


def differentiated(function, exact, inputs, *upstream):
    """Return results and gradients (fp32 where autograd allows it) of `function`, and those of `exact` in float64."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    for leaf in leaves:
        leaf.grad_dtype = torch.float32
    results = function(*leaves)
    torch.autograd.backward(results, [one.to(results[0].dtype) for one in upstream])
    results = [one.detach() for one in results]
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = exact(results, *wide)
    gradients = torch.autograd.grad(expected, wide, [one.double() for one in upstream])
    return results, [leaf.grad for leaf in leaves], [one.detach() for one in expected], gradients


def exact_norm(x, weight):
    return x * (x.square().mean(dim=-1, keepdim=True) + EPS).rsqrt() * weight


def case_norms_and_sums():
    assert tokens_each(515) == 2, "programs with two tokens each, except the last one"
    rows = [((5, 64), F32, False), ((5, 64), BF16, True), ((3, 100), F16, True), ((1, 33), BF16, False)]
    rows += [((2, 1), F32, True), ((515, 6), F32, True), ((0, 16), BF16, True), ((0, 16), F32, False)]
    for (tokens, width), dtype, adds in rows:
        stream, update, upstream, upstream_total = random(4, tokens, width, dtype=dtype)
        weight = random(width, dtype=dtype)
        if tokens == 0:
            assert normed_sum(stream, update if adds else None, weight, EPS)[1].shape == (0, width)
            continue

        def exact(results, *leaves):
            total = sum(leaves[:-1])
            # The norm is of the rounded sum.
            return total, exact_norm(total + (results[0].double() - total).detach(), leaves[-1])

        (total, normed), gradients, wanted, wanted_gradients = differentiated(
            lambda *leaves, adds=adds: normed_sum(leaves[0], leaves[1] if adds else None, leaves[-1], EPS),
            exact,
            [stream, *([update] if adds else []), weight],
            *(upstream_total, upstream),
        )
        assert_rounded(total, wanted[0], 2)
        assert_rounded(normed, wanted[1], width + 8)
        # Terms that cancel are no larger than scale * grad * weight * (1 + normed^2).
        scales = (total.double().square().mean(dim=-1, keepdim=True) + EPS).rsqrt()
        size = largest(scales, upstream, weight) * (1 + width) + largest(upstream_total)
        for found, expected in zip(gradients[:-1], wanted_gradients, strict=False):
            assert_rounded(found.to(dtype), expected, width + 8, size, "input")
        size = largest(upstream, total * scales) * tokens
        assert_rounded(gradients[-1], wanted_gradients[-1], tokens + width + 8, size, "weight")


def case_a_frozen_norm_and_an_unused_one():
    x, weight = random(3, 8).requires_grad_(), random(8)
    normed_sum(x, None, weight, EPS)[1].sum().backward()
    assert weight.grad is None and x.grad is not None
    stream, update = (tensor.requires_grad_() for tensor in random(2, 3, 8).unbind())
    (normed_sum(stream, update, weight, EPS)[0] * 3).sum().backward()
    assert torch.equal(stream.grad, torch.full((3, 8), 3.0)) and torch.equal(update.grad, stream.grad)


def case_rotations():
    positions = torch.tensor([[0, 1, 2, 0, 1], [7, 1000, 100000, 3, 4]])
    rows = [(4, 16, F32, False), (3, 6, BF16, False), (1, 2, F16, False)]
    for heads, channels, dtype, norms in [*rows, (4, 16, BF16, True), (3, 6, F32, True), (3, 6, F16, True)]:
        x, upstream = random(2, 2, 5, heads, channels, dtype=dtype)
        weight, turn = random(channels, dtype=dtype), (positions, torch.linspace(1.0, 0.01, channels // 2), 1.3)

        def exact(results, x, *weight, turn=turn):
            first, second = (exact_norm(x, *weight) if weight else x).chunk(2, dim=-1)
            # The angle is rounded to fp32, as in the kernel: that is a rotation of its own, which is no error here.
            angles = (turn[0][..., None, None].float() * turn[1]).double()
            cos, sin = angles.cos() * turn[2], angles.sin() * turn[2]
            return [torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)]

        [rotated], gradients, [wanted], wanted_gradients = differentiated(
            lambda x, *weight, turn=turn: [rotate_heads(x, *turn, *((*weight, EPS) if weight else ()))],
            exact,
            [x, *([weight] if norms else [])],
            upstream,
        )
        terms, inner = channels + 16 if norms else 8, 3 * largest(upstream)  # a rotated gradient: two terms, times 1.3
        assert_rounded(rotated, wanted, terms, 3 * largest(wanted))
        scales = (x.double().square().mean(dim=-1, keepdim=True) + EPS).rsqrt()
        size = largest(scales, weight) * inner * (1 + channels) if norms else inner
        assert_rounded(gradients[0].to(dtype), wanted_gradients[0], terms, size, "input")
        if norms:
            size = inner * largest(x * scales) * 10 * heads
            assert_rounded(gradients[1], wanted_gradients[1], 10 * heads + 16, size, "weight")


def case_gated_products():
    # 1030 columns are two passes of a program, the second one mostly empty.
    rows = [((3, 64), F32, "silu", False), ((3, 64), BF16, "gelu_tanh", True), ((1, 37), F16, "silu", True)]
    rows += [((2, 1030), BF16, "silu", False), ((2, 1030), F32, "gelu_tanh", True), ((0, 8), F32, "silu", True)]
    for (count, width), dtype, activation, weighs in [*rows, ((1, 37), F32, "gelu_tanh", False)]:
        gate, up, upstream = random(3, count, width, dtype=dtype)
        weights = [random(count)] if weighs else []
        if count == 0:
            assert fused_gated_product(gate, up, *weights, activation).shape == (0, width)
            continue

        def exact(results, gate, up, *weights, activation=activation):
            active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
            return [active * up * (weights[0][:, None] if weights else 1)]

        [found], gradients, [wanted], wanted_gradients = differentiated(
            lambda *leaves, name=activation: [fused_gated_product(*leaves, *[None][: len(leaves) == 2], name)],
            exact,
            [gate, up, *weights],
            upstream,
        )
        assert_rounded(found, wanted, TERMS)
        for name, one, other in zip(("gate", "up"), gradients, wanted_gradients, strict=False):
            assert_rounded(one.to(dtype), other, TERMS, 16 * largest(upstream), name)
        for one, other in zip(gradients[2:], wanted_gradients[2:], strict=True):
            assert_rounded(one, other, TERMS + width, 40.0 * width, "weights")


def routed(rows, experts):
    """Return the sorted expert of each row and the end of each expert's rows. The last but one has none."""
    chosen = torch.randint(experts, (rows,), generator=torch.Generator().manual_seed(rows)).sort().values
    chosen[chosen == experts - 2] = experts - 1
    return chosen, torch.searchsorted(chosen, torch.arange(experts), right=True, out_int32=True)


def case_clamped_products():
    for (rows, width), dtype in [((7, 16), F32), ((7, 16), BF16), ((2, 1030), F16), ((40, 12), F32), ((0, 8), F32)]:
        experts, ends = routed(rows, 4)
        x, bias = 2 * random(rows, 2 * width, dtype=dtype), random(4, 2 * width, dtype=dtype)
        weights, upstream = random(rows), random(rows, width, dtype=dtype)
        if rows == 0:
            assert clamped_product(x, bias, experts, ends, weights, LIMIT, ALPHA).shape == (0, width)
            continue

        def exact(results, x, bias, weights, experts=experts):
            gate, up = (x + bias[experts])[:, ::2], (x + bias[experts])[:, 1::2]
            # At the limit itself the gradient passes. PyTorch 2.15 stops it in its clamp.
            gate, up = gate.where(gate <= LIMIT, LIMIT), up.where(up.abs() <= LIMIT, LIMIT * up.detach().sign())
            return [gate * torch.sigmoid(ALPHA * gate) * (up + 1) * weights[:, None]]

        [found], gradients, [wanted], wanted_gradients = differentiated(
            lambda x, bias, weights, routes=(experts, ends): [clamped_product(x, bias, *routes, weights, LIMIT, ALPHA)],
            exact,
            [x, bias, weights],
            upstream,
        )
        # The largest terms: gates are not limited below, but little of them passes.
        size = 10 * largest(upstream, weights)
        assert_rounded(found, wanted, TERMS, 10 * largest(weights))
        assert_rounded(gradients[0].to(dtype), wanted_gradients[0], TERMS, size, "gate and up")
        if dtype == F32:
            assert_rounded(gradients[1], wanted_gradients[1], TERMS + rows, size * rows, "bias")
        assert_rounded(gradients[2], wanted_gradients[2], TERMS + width, 10.0 * width, "weights")


def case_biases_of_experts():
    # 130 columns are two programs for each expert, 100 rows several passes of one.
    for (rows, width), dtype in [((100, 130), F32), ((100, 130), BF16), ((3, 7), F16), ((0, 5), F32)]:
        experts, ends = routed(rows, 5)
        x, bias, weights = random(rows, width, dtype=dtype), random(5, width, dtype=dtype), random(rows)
        if rows == 0:
            assert add_expert_bias(x, bias, experts, ends, weights).shape == (0, width)
            continue
        upstream = random(rows, width, dtype=dtype, seed=1)
        [found], gradients, [wanted], wanted_gradients = differentiated(
            lambda x, bias, weights, routes=(experts, ends): [add_expert_bias(x, bias, *routes, weights)],
            lambda results, x, bias, weights, experts=experts: [x + bias[experts] * weights[:, None]],
            [x, bias, weights],
            upstream,
        )
        assert_rounded(found, wanted, 4, 20.0)
        assert torch.equal(gradients[0].to(dtype), upstream)
        assert_rounded(gradients[1], wanted_gradients[1], rows + 4, 20.0 * (rows + 1), "bias")
        assert not gradients[1][3].any(), "an expert without rows"
        assert_rounded(gradients[2], wanted_gradients[2], width + 4, 20.0 * width, "weights")


def case_sinks():
    for (tokens, heads, channels), dtype in [((5, 4, 16), F32), ((40, 3, 6), BF16), ((1, 3, 6), F16), ((0, 2, 4), F32)]:
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
