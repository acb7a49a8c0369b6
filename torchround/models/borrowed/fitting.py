"""Whether a model of `transformers` can be cut into layers, found by running its body without its layers.

Each check that fails ends in one `ModelConfigError` that names the model type and the reason.

Shapes: B sequences, T tokens, D model width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchround.models.borrowed.construction import Anatomy
from torchround.models.borrowed.shell import (
    BlockCall,
    MetBlock,
    Shell,
    kind_of,
    refuse,
    same_arguments,
    with_modules,
)
from torchround.models.borrowed.stand_in_body import StandInBody
from torchround.models.borrowed.without_memory import call_with, fake_parameters, no_memory

# Two sequences of two documents each, of different lengths.
PROBE_LENGTHS = ((3, 4), (5, 2))
# Parameters of state space models and linear attention.
RECURRENT = ("A_log", "dt_bias", "slope_rate", "time_decay", "dt_proj")
MASKED = -1e4  # an additive mask hides what is below


@dataclass(frozen=True)
class Fit:
    """How a model is cut.

    - `before`: the body's modules with parameters that run before the first block.
    - `after`: the modules that run after the last block, one after the other.
    - `gives_tuple`: for each block, whether it returns its hidden state as the only entry of a tuple.
    - `output_class`: what the body returns.
    - `projection`: the linear layer whose output is the logits, or None.
    - `alone`: for each block, whether documents have to run through it one by one.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    gives_tuple: tuple[bool, ...]
    output_class: type
    projection: str | None
    alone: tuple[bool, ...]


def fit_of(parts: Anatomy, config: Any) -> Fit:
    """Find out how a model is cut. Raises `ModelConfigError` if it cannot be."""
    kind, blocks = config.model_type, parts.block_list
    positions = probe_positions()
    hidden = torch.ones((*positions.shape, config.hidden_size))
    gives_tuple = tuple(False for _ in blocks)
    first = Shell(parts.body, parts.blocks, gives_tuple)
    try:
        # What the first block gets does not depend on what blocks return.
        met = first.first_call(hidden, positions)
        gives_tuple = tuple(_gives_tuple(blocks[0], met, kind, 0) for _ in blocks)
        shell = Shell(parts.body, parts.blocks, gives_tuple)
        found, others, output = shell.trace(hidden, positions)
        again = shell.record(hidden * 2, positions)
    except RuntimeError as error:
        raise refuse(kind, f"its body does not run without its layers: {error}") from error
    if len(found) != len(blocks):
        raise refuse(kind, f"its body calls {len(found)} of its {len(blocks)} blocks")
    _check_arguments(found, again, kind)
    _check_results(blocks, found, gives_tuple, kind)
    after = _tail(found, others, output, kind)
    children = [name for name, child in parts.body.named_children() if any(True for _ in child.parameters())]
    before = tuple(name for name in children if name != parts.blocks and name not in after)
    _check_positions(others[: len(others) - len(after)], positions, kind)
    alone = tuple(
        not keeps_documents_apart(block, met.call) for block, met in zip(blocks, found, strict=True)
    )
    return Fit(before, after, gives_tuple, type(output), _projection(parts, type(output), hidden), alone)


def probe_positions() -> Tensor:
    """Return positions `[B, T]` of packed documents."""
    return torch.stack([torch.cat([torch.arange(size) for size in sizes]) for sizes in PROBE_LENGTHS])


def _check_arguments(found: Sequence[MetBlock], again: Sequence[MetBlock], kind: str) -> None:
    for index, (first, second) in enumerate(zip(found, again, strict=True)):
        for leaf in torch.utils._pytree.tree_leaves((first.call.args, first.call.kwargs)):
            if not isinstance(leaf, Tensor | str | int | float | bool | type(None)):
                raise refuse(kind, f"block {index} gets a {type(leaf).__name__}, which outlives its call")
        if {} in (*first.call.args, *first.call.kwargs.values()):
            raise refuse(
                kind, f"block {index} gets an empty table, by which blocks hand on what they computed"
            )
        if not same_arguments(first.call, second.call):
            raise refuse(
                kind, f"the arguments of block {index} depend on hidden states, not on positions alone"
            )
        if index and first.hidden is not found[index - 1].result:
            raise refuse(kind, f"block {index} does not get what block {index - 1} returns as it is")


def keeps_documents_apart(block: nn.Module, call: BlockCall) -> bool:
    """Return whether a block that is called like this on the probe's positions never looks into another document.

    It has to get a mask that allows no such pair of tokens, and no part that mixes neighbours by other means.
    """
    mixes = any(isinstance(module, nn.Conv1d) for module in block.modules()) or any(
        name.rpartition(".")[2] in RECURRENT for name, _ in block.named_parameters()
    )
    square = [
        tensor for tensor in call.tensors() if tensor.ndim == 4 and tensor.shape[-1] == tensor.shape[-2]
    ]
    return not mixes and bool(square) and all(map(_allows_own_document_alone, square))


def _allows_own_document_alone(mask: Tensor) -> bool:
    positions = probe_positions()
    documents = (positions == 0).cumsum(1)
    legal = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]  # [B, 1, T, T]
    allowed = mask if mask.dtype == torch.bool else mask > MASKED
    return bool((allowed & ~legal).sum() == 0) and bool(allowed.any(-1).all())


def _check_positions(others: Sequence[Any], positions: Tensor, kind: str) -> None:
    """Check that tables of positions are read at the positions of the documents."""
    for path, index, _ in others:
        if index.is_floating_point():
            continue
        offset = index - positions if index.shape[-1:] == positions.shape[-1:] else index
        if index.ndim > 2 or bool((offset != offset.flatten()[0]).any()):
            raise refuse(kind, f"its {path} does not begin anew with each document")


def _check_results(
    blocks: Sequence[nn.Module], found: Sequence[MetBlock], gives: Sequence[bool], kind: str
) -> None:
    """Run one block of each kind without memory: what it returns, and whether it draws random numbers."""
    seen = set()
    for index, (block, met) in enumerate(zip(blocks, found, strict=True)):
        signature = kind_of(block)
        if signature in seen:
            continue
        seen.add(signature)
        if _gives_tuple(block, met, kind, index) != gives[index]:
            raise refuse(kind, f"block {index} returns another structure than the others")


def _gives_tuple(block: nn.Module, met: MetBlock, kind: str, index: int) -> bool:
    block.train()
    try:
        with no_memory() as meter, torch.no_grad():
            result = call_with(
                block, fake_parameters(block, met.hidden.dtype), met.hidden, *met.call.args, **met.call.kwargs
            )
    finally:
        block.eval()
    if meter.drawn:
        raise refuse(kind, f"block {index} draws random numbers while it is trained ({meter.drawn[0]})")
    is_tuple = isinstance(result, tuple)
    states = result if is_tuple else (result,)
    if not isinstance(states[0], Tensor) or any(state is not None for state in states[1:]):
        raise refuse(kind, f"block {index} returns more than its hidden state")
    if states[0].shape != met.hidden.shape:
        raise refuse(kind, f"block {index} returns {list(states[0].shape)} for {list(met.hidden.shape)}")
    return is_tuple


def _tail(found: Sequence[MetBlock], others: Sequence[Any], output: Any, kind: str) -> tuple[str, ...]:
    """Return the modules between the last block and the body's output, which have to be a chain."""
    wanted = getattr(output, "last_hidden_state", None)
    if not isinstance(wanted, Tensor):
        raise refuse(kind, "its body returns no last_hidden_state")
    chain: list[str] = []
    # Backwards from the output: each module's output is the next one's input.
    for path, given, made in reversed(others):
        if _is_same(made, wanted):
            chain.insert(0, path)
            wanted = given
    if not _is_same(wanted, found[-1].result):
        raise refuse(kind, "its body does more after its last block than call modules one after the other")
    if len(set(chain)) != len(chain):
        raise refuse(kind, "its body calls a module twice after its last block")
    return tuple(chain)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.numel() == other.numel() and one.data_ptr() == other.data_ptr())


def _projection(parts: Anatomy, output_class: type, hidden: Tensor) -> str | None:
    """Return the name of the linear layer whose output is the logits as they are; None if there is none."""
    outer = with_modules(parts.model, {parts.body_name: StandInBody(output_class)})
    states = hidden[:1]
    met: dict[str, tuple[Tensor, Tensor]] = {}

    def note(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], result: Tensor) -> None:
            met[name] = (args[0], result)

        return hook

    linears = [
        (name, child)
        for name, child in outer.named_children()
        if type(child) is nn.Linear and child.bias is None
    ]
    handles = [child.register_forward_hook(note(name)) for name, child in linears]
    try:
        with no_memory(), torch.no_grad():
            logits = call_with(
                outer, fake_parameters(outer, hidden.dtype), inputs_embeds=states, use_cache=False
            ).logits
    finally:
        for handle in handles:
            handle.remove()
    for name, (given, made) in met.items():
        if logits is made and given.shape == states.shape:
            return name
    return None
