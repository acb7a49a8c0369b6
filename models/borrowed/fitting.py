"""Whether a model of `transformers` can be cut into layers, found by running its body without its layers.

Each check that fails ends in one `ModelConfigError` that names the model type and the reason.

Shapes: B sequences, T tokens, D model width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from torchround.models.borrowed.construction import Anatomy, random_keys
from torchround.models.borrowed.shell import (
    BlockCall,
    MetBlock,
    MetModule,
    Shell,
    kind_of,
    refuse,
    same_arguments,
    with_modules,
)
from torchround.models.borrowed.stand_in_body import StandInBody
from torchround.models.borrowed.without_memory import call_with, fake_parameters, no_memory
from torchround.models.common.config import ModelConfigError

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
    - `entries`: for each block, the length of the tuple that it returns, 0 if it returns its hidden state alone.
    - `output_class`: what the body returns.
    - `projection`: the linear layer whose output is the logits, or None.
    - `alone`: for each block, whether documents have to run through it one by one.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    entries: tuple[int, ...]
    output_class: type
    projection: str | None
    alone: tuple[bool, ...]


def fit_of(parts: Anatomy, config: Any) -> Fit:
    """Find out how a model is cut. Raises `ModelConfigError` if it cannot be."""
    try:
        return _fit(parts, config)
    except ModelConfigError:
        raise
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise refuse(
            config.model_type,
            f"its code waits for values on the device ({error}), so its cost cannot be counted",
        ) from error
    except Exception as error:  # code of any kind runs here, in a way that it was not written for
        raise refuse(
            config.model_type, f"its body does not run without its layers: {type(error).__name__}: {error}"
        ) from error


def _fit(parts: Anatomy, config: Any) -> Fit:
    kind, blocks = config.model_type, parts.block_list
    indexed = [path for path, module in parts.body.named_modules() if "Indexer" in type(module).__name__]
    if indexed:
        raise refuse(
            kind, f"its {indexed[0]} chooses tokens to attend to, in a way that does not know documents"
        )
    hint = random_keys(config)
    drops = [path for path, one in parts.body.named_modules() if isinstance(one, nn.Dropout) and one.p > 0]
    if drops:
        raise refuse(kind, f"its {drops[0]} draws random numbers while it is trained{hint}")
    positions = probe_positions()
    hidden = torch.ones((*positions.shape, config.hidden_size))
    first = Shell(parts.body, parts.blocks, tuple(0 for _ in blocks))
    # What the first block gets does not depend on what blocks return.
    met = first.first_call(hidden, positions)
    entries = (_num_entries(blocks[0], met, kind, 0, hint),) * len(blocks)
    shell = Shell(parts.body, parts.blocks, entries)
    found, others, output = shell.trace(hidden, positions)
    if len(found) != len(blocks):
        raise refuse(kind, f"its body calls {len(found)} of its {len(blocks)} blocks")
    _check_arguments(found, shell, hidden, positions, kind)
    _check_documents(shell, hidden, positions, kind)
    _check_results(blocks, found, entries, kind, hint)
    trained = {name for name, child in parts.body.named_children() if any(True for _ in child.parameters())}
    between = [one.name for one in others if one.name in trained and 0 < one.num_blocks < len(blocks)]
    if between:
        raise refuse(kind, f"its body calls {between[0]} between its blocks")
    after = _tail(found, [one for one in others if one.num_blocks == len(blocks)], output, kind)
    early = {one.name for one in others if one.num_blocks == 0}
    before = tuple(trained - {parts.blocks} - (set(after) - early))
    alone = tuple(
        not keeps_documents_apart(block, met.call) for block, met in zip(blocks, found, strict=True)
    )
    return Fit(before, after, entries, type(output), _projection(parts, type(output), hidden), alone)


def probe_positions() -> Tensor:
    """Return positions `[B, T]` of packed documents."""
    return torch.stack([torch.cat([torch.arange(size) for size in sizes]) for sizes in PROBE_LENGTHS])


def _check_arguments(
    found: Sequence[MetBlock], shell: Shell, hidden: Tensor, positions: Tensor, kind: str
) -> None:
    again = shell.record(hidden * 2, positions)
    for index, (first, second) in enumerate(zip(found, again, strict=True)):
        for leaf in torch.utils._pytree.tree_leaves((first.call.args, first.call.kwargs)):
            if not isinstance(leaf, Tensor | str | int | float | bool | type(None)):
                raise refuse(kind, f"block {index} gets a {type(leaf).__name__}, which outlives its call")
        if any(leaf is shell.other_entry for leaf in first.call.tensors()):
            raise refuse(kind, f"block {index} gets what another block computes beside its hidden state")
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


def _check_documents(shell: Shell, hidden: Tensor, positions: Tensor, kind: str) -> None:
    """Check that what the body does before its blocks begins anew with each document."""
    packed = shell.record(hidden, positions)[0]
    for row, sizes in enumerate(PROBE_LENGTHS):
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        for start, size in zip(starts, sizes, strict=True):
            place = slice(row, row + 1), slice(start, start + size)
            alone = shell.record(hidden[place], positions[place])[0].hidden
            if not torch.equal(alone, packed.hidden[place]):
                raise refuse(kind, "its positions do not begin anew with each document")


def _check_results(
    blocks: Sequence[nn.Module], found: Sequence[MetBlock], entries: Sequence[int], kind: str, hint: str
) -> None:
    """Run one block of each kind without memory: what it returns, and whether it draws random numbers."""
    seen = set()
    for index, (block, met) in enumerate(zip(blocks, found, strict=True)):
        signature = kind_of(block)
        if signature in seen:
            continue
        seen.add(signature)
        if _num_entries(block, met, kind, index, hint) != entries[index]:
            raise refuse(kind, f"block {index} returns another structure than the others")


def _num_entries(block: nn.Module, met: MetBlock, kind: str, index: int, hint: str) -> int:
    block.train()
    try:
        with no_memory() as meter, torch.no_grad():
            result = call_with(
                block, fake_parameters(block, met.hidden.dtype), met.hidden, *met.call.args, **met.call.kwargs
            )
    finally:
        block.eval()
    if meter.drawn:
        raise refuse(kind, f"block {index} draws random numbers while it is trained ({meter.drawn[0]}){hint}")
    states = result if isinstance(result, tuple) else (result,)
    if not isinstance(states[0], Tensor):
        raise refuse(kind, f"block {index} returns a {type(states[0]).__name__}")
    if states[0].shape != met.hidden.shape:
        raise refuse(kind, f"block {index} returns {list(states[0].shape)} for {list(met.hidden.shape)}")
    return len(result) if isinstance(result, tuple) else 0


def _tail(found: Sequence[MetBlock], others: Sequence[MetModule], output: Any, kind: str) -> tuple[str, ...]:
    """Return the modules between the last block and the body's output, which have to be a chain."""
    wanted = getattr(output, "last_hidden_state", None)
    if not isinstance(wanted, Tensor):
        raise refuse(kind, "its body returns no last_hidden_state")
    chain: list[str] = []
    # Backwards from the output: each module's output is the next one's input.
    for one in reversed(others):
        if isinstance(one.made, Tensor) and isinstance(one.given, Tensor) and _is_same(one.made, wanted):
            chain.insert(0, one.name)
            wanted = one.given
    if not _is_same(wanted, found[-1].result):
        raise refuse(kind, "its body does more after its last block than call modules one after the other")
    if len(set(chain)) != len(chain):
        raise refuse(kind, "its body calls a module twice after its last block")
    return tuple(chain)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.numel() == other.numel() and one.data_ptr() == other.data_ptr())


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _projection(parts: Anatomy, output_class: type, hidden: Tensor) -> str | None:
    """Return the name of the linear layer whose output is the logits as they are; None if there is none."""
    outer = with_modules(parts.model, {parts.body_name: StandInBody(output_class)})
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
            states = torch.empty((1, 3, hidden.shape[-1]), dtype=hidden.dtype)
            logits = call_with(
                outer, fake_parameters(outer, hidden.dtype), inputs_embeds=states, use_cache=False
            ).logits
    finally:
        for handle in handles:
            handle.remove()
    for name, (given, made) in met.items():
        # The model may scale what it projects.
        if logits is made and given.shape == states.shape and _shares_memory(given, states):
            return name
    return None
