"""The inputs of a borrowed model's blocks, taken from the model's own body.

The body (`model.base_model` of `transformers`) makes rotary embeddings, masks and whatever else its blocks ask for, and
then calls one block after the other. A shell is that body with recorders in place of the blocks, and with stand-ins in
place of modules that have parameters. Running it computes no layer, and records what each block is called with.

Shapes: B sequences, T tokens, D model width.
"""

import copy
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchround.layer import LayerWork, MicroBatch
from torchround.models.common.config import ModelConfigError

Plain = (str, int, float, bool, tuple, type(None))


@dataclass(frozen=True)
class BlockCall:
    """The arguments of one block beside its hidden state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def of(self, block: nn.Module, hidden: Tensor) -> Any:
        """Call `block` with `hidden [B, T, D]` and these arguments."""
        return block(hidden, *self.args, **self.kwargs)

    def tensors(self) -> list[Tensor]:
        """List the tensors among the arguments."""
        return [
            leaf for leaf in torch.utils._pytree.tree_leaves((self.args, self.kwargs)) if _is_tensor(leaf)
        ]


@dataclass(frozen=True)
class MetBlock:
    """What a recorder saw: the hidden state that it got, the block's other arguments, and what it handed on."""

    hidden: Tensor
    call: BlockCall
    result: Tensor


class Recorder(nn.Module):
    """The place of a block in a shell: it notes its arguments and hands on the hidden state.

    It has the plain attributes of the block, because some bodies choose a mask by them. `entries` is the length of the
    tuple that the block returns, 0 if it returns its hidden state alone. `makes` gives the hidden state that the next
    block gets; by default it is the same one. `rest` stands for the other entries of a tuple.
    """

    def __init__(self, block: nn.Module, calls: list[MetBlock], entries: int) -> None:
        super().__init__()
        for name, value in vars(block).items():
            if isinstance(value, Plain) and not name.startswith("_"):
                setattr(self, name, value)
        self.calls = calls
        self.entries = entries
        self.rest: Tensor | None = None
        self.makes: Callable[[Tensor], Tensor] | None = None

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = hidden if self.makes is None else self.makes(hidden)
        self.calls.append(MetBlock(hidden, BlockCall(args, kwargs), result))
        return (result, *[self.rest] * (self.entries - 1)) if self.entries else result


@dataclass(frozen=True)
class MetModule:
    """A call of a module of the body that is no block: its name, first argument, result, and how many blocks ran before."""

    name: str
    given: Any
    made: Any
    num_blocks: int


class StandIn(nn.Module):
    """The place of a module with parameters in a shell. An embedding returns its index in `dtype`, others their input."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        weight = getattr(module, "weight", None)
        self.width = weight.shape[-1] if isinstance(module, nn.Embedding) and weight is not None else None
        self.dtype = torch.float32
        self.makes: Callable[[Tensor], Tensor] | None = None

    def forward(self, first: Tensor, *_: Any, **__: Any) -> Tensor:
        found = (
            first if self.width is None else first[..., None].expand(*first.shape, self.width).to(self.dtype)
        )
        return found if self.makes is None else self.makes(found)


class StandInBody(nn.Module):
    """The place of a body in a head. It returns its input, so that the model's own forward turns hidden states into logits."""

    def __init__(self, output_class: type) -> None:
        super().__init__()
        self.output_class = output_class

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return self.output_class(last_hidden_state=inputs_embeds)


# A sequence, its first token of a document, the token after its last, and the arguments of each block.
DocumentCalls = tuple[int, int, int, list[BlockCall]]


class _Shared:
    """What layers of one micro-batch have in common, as long as it is needed."""

    def __init__(self) -> None:
        self.value: Any = None


class Shell(nn.Module):
    """A body without its layers. `blocks` is the name of its list of blocks.

    All layers of a model share one shell. It has no parameters; its buffers are constants.
    """

    def __init__(self, body: nn.Module, blocks: str, entries: Sequence[int]) -> None:
        super().__init__()
        self._calls: list[MetBlock] = []
        recorders = _recorders(body, blocks, self._calls, entries)
        places: dict[str, nn.Module] = {blocks: recorders}
        for name, child in body.named_children():
            if name != blocks and any(True for _ in child.parameters()):
                places[name] = StandIn(child)
        self.body = with_modules(body, places)
        self.blocks, self.num_blocks = blocks, len(recorders)
        self._stand_ins = [module for module in places.values() if isinstance(module, StandIn)]
        self.width: int = body.config.hidden_size  # type: ignore[assignment,union-attr]
        # The most tokens of a sequence, and the reason, if the body has such a limit.
        self.longest: tuple[int, str] | None = None
        # Costs by kind of layer and shape.
        self.counted: dict[Any, LayerWork] = {}
        # Which blocks take a cache, once that was asked for; bytes of a token and of a sequence, by block and element.
        self.takes_cache: tuple[bool, ...] | None = None
        self.remembered: dict[tuple[int, int], tuple[int, int]] = {}
        # In a trace, what blocks return beside their hidden state.
        self.other_entry = torch.zeros(())
        self._latest: weakref.ref[_Shared] | None = None

    def calls(self, hidden: Tensor, positions: Tensor, **more: Any) -> list[BlockCall]:
        """Return the arguments of each block for `hidden [B, T, D]`, whose values do not matter, and `positions [B, T]`.

        `more` are other arguments of the body.
        """
        return [met.call for met in self.record(hidden, positions, **more)]

    def calls_of(self, hidden: Tensor, micro_batch: MicroBatch) -> list[BlockCall]:
        """Return the arguments of each block, computed once while layers of the same micro-batch follow each other."""
        hidden = hidden.detach()
        return self.shared(
            ("borrowed", hidden.dtype), micro_batch, lambda: self.calls(hidden, micro_batch.positions)
        )

    def calls_by_document(self, hidden: Tensor, micro_batch: MicroBatch) -> list[DocumentCalls]:
        """Return the arguments of each block for each document by itself, as `calls_of` does.

        Waits for the device, to read where documents begin.
        """
        hidden, positions = hidden.detach(), micro_batch.positions

        def make() -> list[DocumentCalls]:
            found = []
            for row, numbers in enumerate(positions.tolist()):
                starts = [place for place, number in enumerate(numbers) if number == 0 or place == 0]
                for begin, end in zip(starts, [*starts[1:], len(numbers)], strict=True):
                    part = hidden[row : row + 1, begin:end], positions[row : row + 1, begin:end]
                    found.append((row, begin, end, self.calls(*part)))
            return found

        return self.shared(("borrowed documents", hidden.dtype), micro_batch, make)

    def shared(self, key: tuple[Any, ...], micro_batch: MicroBatch, make: Callable[[], Any]) -> Any:
        """Return what `make` gives, computed once while layers of the same micro-batch follow each other."""
        shared: Any = micro_batch.once(key, _Shared)
        if shared.value is None:
            # Masks are large: a device has those of one micro-batch, not of all that it got this round.
            latest = None if self._latest is None else self._latest()
            if latest is not None:
                latest.value = None
            shared.value = make()
            self._latest = weakref.ref(shared)
        return shared.value

    def record(self, hidden: Tensor, positions: Tensor, **more: Any) -> list[MetBlock]:
        """Run the body and return each block's hidden state and arguments."""
        arguments = {"inputs_embeds": hidden, "position_ids": positions, "use_cache": False, **more}
        self._calls.clear()
        for stand_in in self._stand_ins:
            # Else the sum of both would have another dtype than the hidden state, and rotations with it.
            stand_in.dtype = hidden.dtype
        with torch.no_grad():
            self.body(**arguments)
        found = list(self._calls)
        self._calls.clear()
        assert len(found) == self.num_blocks, f"{len(found)} of {self.num_blocks} blocks were called"
        return found

    def first_call(self, hidden: Tensor, positions: Tensor) -> MetBlock:
        """Return what the first block meets, whatever the body does with its result."""
        self._calls.clear()
        try:
            with torch.no_grad():
                self.body(inputs_embeds=hidden, position_ids=positions, use_cache=False)
        except Exception:
            if not self._calls:
                raise
        found = self._calls[0]
        self._calls.clear()
        return found

    def trace(self, hidden: Tensor, positions: Tensor) -> tuple[list[MetBlock], list[MetModule], Any]:
        """Run the body with a new tensor from each place. Returns what blocks met, the other modules' calls, and the output."""
        makers = [module for module in self.modules() if isinstance(module, Recorder | StandIn)]
        others: list[MetModule] = []

        def note(name: str) -> Any:
            def hook(_: nn.Module, args: tuple[Any, ...], made: Any) -> None:
                others.append(MetModule(name, args[0] if args else None, made, len(self._calls)))

            return hook

        children = [(name, child) for name, child in self.body.named_children() if name != self.blocks]
        handles = [child.register_forward_hook(note(name)) for name, child in children]
        for module in makers:
            module.makes = torch.clone
            if isinstance(module, Recorder):
                module.rest = self.other_entry
        self._calls.clear()
        try:
            with torch.no_grad():
                output = self.body(inputs_embeds=hidden, position_ids=positions, use_cache=False)
        finally:
            for module in makers:
                module.makes = None
                if isinstance(module, Recorder):
                    module.rest = None
            for handle in handles:
                handle.remove()
        found = list(self._calls)
        self._calls.clear()
        return found, others, output


def beginning(
    body: nn.Module, blocks: str, used: Collection[str], calls: list[MetBlock], entries: Sequence[int]
) -> nn.Module:
    """Return a body that runs up to its first block, whose input it notes in `calls`.

    `used` names the modules with parameters that run before the first block. The others get stand-ins.
    """
    places: dict[str, nn.Module] = {blocks: _recorders(body, blocks, calls, entries)}
    for name, child in body.named_children():
        if name != blocks and name not in used and any(True for _ in child.parameters()):
            places[name] = StandIn(child)
    return with_modules(body, places)


def _recorders(body: nn.Module, blocks: str, calls: list[MetBlock], entries: Sequence[int]) -> nn.ModuleList:
    pairs = zip(body.get_submodule(blocks).children(), entries, strict=True)
    return nn.ModuleList(Recorder(block, calls, number) for block, number in pairs)


def with_modules(module: nn.Module, places: Mapping[str, nn.Module]) -> Any:
    """Return a copy of `module` with other children by name. All other children are shared with the original."""
    twin = copy.copy(module)
    for kind in ("_modules", "_parameters", "_buffers"):
        setattr(twin, kind, dict(getattr(module, kind)))
    twin._modules.update(places)
    return twin


def shared_tensors(micro_batch: MicroBatch) -> list[Tensor]:
    """List the tensors that a shell keeps with a micro-batch."""
    kept = [shared.value for shared in micro_batch._derived.values() if isinstance(shared, _Shared)]
    calls = [leaf for leaf in torch.utils._pytree.tree_leaves(kept) if isinstance(leaf, BlockCall)]
    return [tensor for call in calls for tensor in call.tensors()]


def kind_of(module: nn.Module) -> tuple[Any, ...]:
    """Return what layers of the same kind have in common: classes, shapes, and what is trained."""
    classes = tuple(
        f"{path}:{type(part).__name__}" for path, part in module.named_modules() if "shell" not in path
    )
    shapes = tuple((name, tuple(one.shape), one.requires_grad) for name, one in module.named_parameters())
    return classes, shapes, str(getattr(module, "attention_type", None))


def same_arguments(first: BlockCall, second: BlockCall) -> bool:
    """Return whether two calls have the same structure and equal values."""
    ours, spec = torch.utils._pytree.tree_flatten((first.args, first.kwargs))
    theirs, other = torch.utils._pytree.tree_flatten((second.args, second.kwargs))
    return spec == other and all(map(_equal, ours, theirs))


def refuse(model_type: str, reason: str) -> ModelConfigError:
    """Make the error for a model of `transformers` that cannot be cut into layers."""
    return ModelConfigError(
        f"model_type {model_type!r} of transformers does not fit torchround's layers: {reason}"
    )


def _equal(one: Any, other: Any) -> bool:
    if _is_tensor(one) and _is_tensor(other):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)
