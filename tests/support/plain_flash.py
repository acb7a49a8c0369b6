"""Plain stand-ins for the flash kernels of packed documents, which the CPU does not have."""

import torch

from torchround.models.common import packed_attention


def plain_scores(query, key, offsets, window, scale):
    """Return scores `[H, N, N]`, minus infinity for pairs that may not attend, and keys for each query head."""
    numbers = torch.searchsorted(offsets, torch.arange(len(query)), right=True)
    distance = torch.arange(len(query))[:, None] - torch.arange(len(query))
    seen = (numbers[:, None] == numbers) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = torch.einsum("nhc,mhc->hnm", query, key) * scale
    return scores.masked_fill(~seen, -torch.inf), key


def plain_forward_kernel(query, key, value, offsets, longest, window, scale=None):
    """Compute what the flash kernel's documentation promises, with all scores in memory."""
    scores, _ = plain_scores(query, key, offsets, window, scale or query.shape[2] ** -0.5)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    output = torch.einsum("hnm,mhc->nhc", scores.softmax(-1), value)
    return output, scores.logsumexp(-1), torch.zeros(2)


def plain_backward_kernel(grad, query, key, value, output, log_sums, offsets, longest, window, scale, random_state):
    """Compute the gradients from output and log-sum-exp alone (FlashAttention-2, algorithm 2)."""
    scale = scale or query.shape[2] ** -0.5
    scores, keys = plain_scores(query, key, offsets, window, scale)
    groups = query.shape[1] // key.shape[1]
    shares = (scores - log_sums[..., None]).exp()
    grad_shares = torch.einsum("nhc,mhc->hnm", grad, value.repeat_interleave(groups, dim=1))
    moved = (grad * output).sum(-1).T[..., None]
    grad_scores = shares * (grad_shares - moved) * scale
    gradients = (
        torch.einsum("hnm,mhc->nhc", grad_scores, keys),
        torch.einsum("hnm,nhc->mhc", grad_scores, query).unflatten(1, (-1, groups)).sum(2),
        torch.einsum("hnm,nhc->mhc", shares, grad).unflatten(1, (-1, groups)).sum(2),
    )
    return gradients


def install(monkeypatch, backward_kernel=plain_backward_kernel):
    """Let attention by offsets run the plain kernels: layout, offsets, windows and sinks around them are ours to test."""

    def window_of(sides):
        return None if sides["window_size_left"] < 0 else sides["window_size_left"] + 1

    def forward(query, key, value, offsets, _, longest, *__, scale, **sides):
        return *plain_forward_kernel(query, key, value, offsets, longest, window_of(sides), scale), None, None

    def backward(grad, query, key, value, output, log_sums, offsets, _, longest, *others, scale, **sides):
        heads, results = (query, key, value), (output, log_sums)
        return backward_kernel(grad, *heads, *results, offsets, longest, window_of(sides), scale, others[-2])

    monkeypatch.setattr(packed_attention, "_forward_kernel", forward)
    monkeypatch.setattr(packed_attention, "_backward_kernel", backward)
