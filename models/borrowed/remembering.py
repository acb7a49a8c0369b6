"""What a borrowed block remembers of earlier tokens, in the cache of `transformers` itself.

A block writes into the cache that it is called with: keys and values, or the state of a recurrence. Each block has a
cache of its own here. So blocks on several devices never share one, and each remembers what its own device computed.

A body makes rotary embeddings and masks from the lengths in its cache. The shell therefore runs with a cache that has
lengths and nothing else. A block that ran earlier in the same pass has lengthened its own cache already.

Shapes: B sequences, T new tokens, S tokens so far, T included, D model width.
"""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from torchround.layer import MicroBatch
from torchround.models.borrowed.counted_work import DTYPES, call_with, fake_parameters, no_memory
from torchround.models.borrowed.shell import BlockCall, Shell

# Tokens so far, and new ones: the start of a text, and a token that continues it.
PROBES = ((0, 3), (3, 1))


class BlockMemory:
    """The cache of block `index`. It grows as the block is called, without a limit of its own."""

    def __init__(self, config: Any, index: int) -> None:
        self.cache: Any = new_cache(config)
        self.length = 0
        self._index = index

    @property
    def nbytes(self) -> int:
        """The bytes of memory that it holds."""
        if self.cache is None:
            return 0
        held = torch.utils._pytree.tree_leaves(list(vars(self.cache.layers[self._index]).values()))
        return sum(leaf.nbytes for leaf in held if isinstance(leaf, Tensor) and leaf.ndim > 1)

    def clear(self) -> None:
        """Drop the memory."""
        self.cache = None


def new_cache(config: Any) -> Any:
    """Return an empty cache of `transformers` for all blocks of a model."""
    from transformers import DynamicCache

    return DynamicCache(config=config)


def remembering_call(shell: Shell, index: int, hidden: Tensor, micro_batch: MicroBatch) -> BlockCall:
    """Return the arguments of block `index` with its own cache, the `BlockMemory` in `micro_batch.cache`."""
    memory: BlockMemory = micro_batch.cache
    calls, lengths = calls_with_past(shell, hidden, micro_batch, memory.length)
    memory.length += hidden.shape[1]
    return _with_cache(calls[index], lengths, memory.cache)


def calls_with_past(
    shell: Shell, hidden: Tensor, micro_batch: MicroBatch, past: int
) -> tuple[list[BlockCall], Any]:
    """Return the arguments of each block after `past` tokens, and the cache among them, which holds nothing.

    Computed once while layers of the same micro-batch follow each other.
    """
    hidden = hidden.detach()

    def make() -> tuple[list[BlockCall], Any]:
        lengths = lengths_of(shell.body.config, past)
        real = real_tokens(micro_batch, past)
        more = {"attention_mask": real, "past_key_values": lengths, "use_cache": True}
        return shell.calls(hidden, micro_batch.positions, **more), lengths

    found: tuple[list[BlockCall], Any] = shell.shared(("borrowed past", hidden.dtype), micro_batch, make)
    return found


def lengths_of(config: Any, past: int) -> Any:
    """Return a cache that has seen `past` tokens of one sequence as far as masks can tell, and holds none of them."""
    cache = new_cache(config)
    for layer in cache.layers:
        if past:
            _pretend(layer, past)
    return cache


def real_tokens(micro_batch: MicroBatch, past: int) -> Tensor:
    """Return which of all tokens so far are no padding, int64 `[B, S]`. Padding is on the left."""
    if not past:
        return (micro_batch.document_ids >= 0).long()
    # A token's position says how many real ones are before it.
    every = torch.arange(past + 1, device=micro_batch.positions.device)
    return (every >= past - micro_batch.positions).long()


def remembers(shell: Shell, index: int) -> bool:
    """Return whether block `index` takes a cache. Decided for all blocks of a model once."""
    if shell.takes_cache is None:
        shell.takes_cache = (False,) * shell.num_blocks
        # A model that transformers itself cannot continue so: any exception of its code means that.
        with suppress(Exception):
            found = [calls_with_past(shell, *_probe(shell, tokens, past), past) for past, tokens in PROBES]
            shell.takes_cache = tuple(
                all(_has(calls[number], lengths) for calls, lengths in found)
                for number in range(shell.num_blocks)
            )
    return shell.takes_cache[index]


def memory_bytes(block: Any, tokens: int, element_bytes: int) -> int:
    """Return the memory of a block that remembers one sequence of `tokens` tokens. Windows count as unlimited."""
    key = (block.index, element_bytes)
    if key not in block.shell.remembered:
        few, more = (_measured(block, count, element_bytes) for count in (2, 3))
        block.shell.remembered[key] = (more - few, max(0, few - 2 * (more - few)))
    each, always = block.shell.remembered[key]
    return each * tokens + always


def _measured(block: Any, tokens: int, element_bytes: int) -> int:
    """Run a block without memory, and return what it then remembers."""
    dtype, shell = DTYPES[element_bytes], block.shell
    hidden, micro_batch = _probe(shell, tokens, 0)
    calls, lengths = calls_with_past(shell, hidden.to(dtype), micro_batch, 0)
    with no_memory(), torch.no_grad():
        memory = BlockMemory(shell.body.config, block.index)
        call = _with_cache(calls[block.index], lengths, memory.cache)
        states = torch.empty(hidden.shape, dtype=dtype)
        call_with(block.core, fake_parameters(block.core, dtype), states, *call.args, **call.kwargs)
        return memory.nbytes


def _probe(shell: Shell, tokens: int, past: int) -> tuple[Tensor, MicroBatch]:
    zeros = torch.zeros((1, tokens), dtype=torch.int64)
    positions = torch.arange(past, past + tokens)[None]
    return torch.zeros((1, tokens, shell.width)), MicroBatch(zeros, zeros, positions, zeros, max_documents=1)


def _pretend(layer: Any, past: int) -> None:
    """Give one layer of a cache the length of `past` tokens."""
    if hasattr(layer, "keys"):
        layer.is_initialized = True
        layer.keys = layer.values = torch.empty(1).expand(1, 1, past, 1)
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = past
    if hasattr(layer, "has_previous_state"):
        layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)


def _has(call: BlockCall, cache: Any) -> bool:
    return any(value is cache for value in (*call.args, *call.kwargs.values()))


def _with_cache(call: BlockCall, old: Any, new: Any) -> BlockCall:
    args = tuple(new if value is old else value for value in call.args)
    return BlockCall(args, {name: new if value is old else value for name, value in call.kwargs.items()})
