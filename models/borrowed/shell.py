"""The inputs of a borrowed model's blocks, taken from the model's own body.

The body (`model.base_model` of `transformers`) makes rotary embeddings, masks and all else that its blocks ask for, and
then calls one block after the other. A shell is that body with recorders in place of the blocks, and with stand-ins in
place of modules that have parameters. Running it computes no layer, and records what each block is called with.

Shapes: B sequences, T tokens, D model width.
"""

import copy
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from torchround.layer import LayerWork, MicroBatch

Plain = (str, int, float, bool, tuple, type(None))


@dataclass(frozen=True)
class MaskPlace:
    """The place of a mask of a recognised block: a token sees earlier ones of its document, or of the `window` that ends at it."""

    window: int | None = None
    documents: MicroBatch | None = None


@dataclass(frozen=True)
class BlockCall:
    """The arguments of one block beside its hidden state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def leaves(self) -> list[Any]:
        return torch.utils._pytree.tree_leaves((self.args, self.kwargs))

    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves() if isinstance(leaf, Tensor)]

    def with_places(self, places: Mapping[int, MaskPlace]) -> "BlockCall":
        leaves, structure = torch.utils._pytree.tree_flatten((self.args, self.kwargs))
        leaves = [places.get(number, leaf) for number, leaf in enumerate(leaves)]
        return BlockCall(*torch.utils._pytree.tree_unflatten(leaves, structure))

    def run(self, block: Callable[..., Any], hidden: Tensor, documents: MicroBatch) -> Tensor:
        """Call a block for its hidden state, with `documents` in the places of masks."""

        def fill(place: MaskPlace) -> MaskPlace:
            return replace(place, documents=documents)

        args, kwargs = torch.utils._pytree.tree_map_only(MaskPlace, fill, (self.args, self.kwargs))
        found = block(hidden, *args, **kwargs)
        result: Tensor = found[0] if isinstance(found, tuple) else found
        return result


# Of each block, the places of masks among its arguments' leaves; nothing if no block is recognised.
Places = tuple[Mapping[int, MaskPlace], ...]
# The hidden state and the other arguments of each block.
Recorded = list[tuple[Tensor, BlockCall]]


class Recorder(nn.Module):
    """The place of a block in a shell: it notes the hidden state and its other arguments, and returns the hidden state.

    It has the plain attributes of the block, because some bodies choose a mask by them. `entries` is the length of the
    tuple that the block returns, 0 if it returns its hidden state alone.
    """

    def __init__(self, block: nn.Module, calls: Recorded, entries: int) -> None:
        super().__init__()
        for name, value in vars(block).items():
            if isinstance(value, Plain) and not name.startswith("_"):
                setattr(self, name, value)
        self.calls, self.entries = calls, entries

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((hidden, BlockCall(args, kwargs)))
        # No body can use the places of what a block returns beside its hidden state.
        return (hidden, *[object()] * (self.entries - 1)) if self.entries else hidden


class StandIn(nn.Module):
    """The place of a module with parameters in a shell. An embedding returns its index in `dtype`, others their input."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        weight = getattr(module, "weight", None)
        self.width = weight.shape[-1] if isinstance(module, nn.Embedding) and weight is not None else None
        self.dtype = torch.float32

    def forward(self, first: Tensor, *_: Any, **__: Any) -> Tensor:
        if self.width is None:
            return first
        return first[..., None].expand(*first.shape, self.width).to(self.dtype)


class StandInBody(nn.Module):
    """The place of a body in a head. It returns its input, so that the model's own forward turns hidden states into logits.

    It has the body's numbers: a forward may scale logits by one of them.
    """

    def __init__(self, body: nn.Module, output_class: type) -> None:
        super().__init__()
        numbers = {name: value for name, value in vars(body).items() if isinstance(value, int | float)}
        self.__dict__.update(numbers)
        self.output_class = output_class

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return self.output_class(last_hidden_state=inputs_embeds)


@dataclass(frozen=True)
class Step:
    """A call of a child of the body, or of a block, in a trace: its name, its first argument, and what it made of that."""

    name: str
    given: Any
    made: Any


# A sequence, its first token of a document, the token after its last, and the arguments of each block.
DocumentCalls = tuple[int, int, int, list[BlockCall]]


class _Shared:
    """The arguments of all blocks for one micro-batch, as long as its layers follow each other."""

    calls: Any = None


class Shell(nn.Module):
    """A body without its layers. `blocks` is the name of its list of blocks, `entries` as in `Recorder`. `places` are those of
    recognised blocks, for which the body makes no masks. `longest`: the most tokens of a sequence, and the reason, if limited.

    All layers of a model share one shell. It has no parameters; its buffers are constants.
    """

    def __init__(
        self,
        body: nn.Module,
        blocks: str,
        entries: int,
        places: Places = (),
        longest: tuple[int, str] | None = None,
    ) -> None:
        super().__init__()
        self.entries, self.places, self.longest = entries, places, longest
        self._calls: Recorded = []
        self.body = hollow(body, blocks, entries, self._calls)
        self.blocks = blocks
        self.num_blocks = len(self.body.get_submodule(blocks))  # type: ignore[arg-type]
        self.width: int = body.config.hidden_size  # type: ignore[assignment,union-attr]
        # Costs by kind of layer and shape.
        self.counted: dict[Any, LayerWork] = {}
        self._latest: weakref.ref[_Shared] | None = None

    def calls(self, hidden: Tensor, positions: Tensor) -> list[BlockCall]:
        """Make the arguments of each block for `hidden [B, T, D]`, whose values do not matter, and `positions [B, T]`."""
        calls = [call for _, call in self.record(hidden, positions)]
        if not self.places:
            return calls
        return [call.with_places(own) for call, own in zip(calls, self.places, strict=True)]

    def calls_of(self, hidden: Tensor, micro_batch: MicroBatch) -> list[BlockCall]:
        """Make the arguments of each block, computed once while layers of the same micro-batch follow each other."""
        hidden = hidden.detach()
        key = "borrowed", hidden.dtype
        return self._once(key, micro_batch, lambda: self.calls(hidden, micro_batch.positions))

    def calls_by_document(self, hidden: Tensor, micro_batch: MicroBatch) -> list[DocumentCalls]:
        """Make the arguments of each block for each document by itself. Waits for the device, to find the documents."""
        hidden, positions = hidden.detach(), micro_batch.positions

        def make() -> list[DocumentCalls]:
            found = []
            for row, numbers in enumerate(positions.tolist()):
                starts = [place for place, number in enumerate(numbers) if number == 0 or place == 0]
                for begin, end in zip(starts, [*starts[1:], len(numbers)], strict=True):
                    part = hidden[row : row + 1, begin:end], positions[row : row + 1, begin:end]
                    found.append((row, begin, end, self.calls(*part)))
            return found

        return self._once(("borrowed documents", hidden.dtype), micro_batch, make)

    def _once(self, key: tuple[Any, ...], micro_batch: MicroBatch, make: Callable[[], Any]) -> Any:
        shared: _Shared = micro_batch.once(key, _Shared)
        if shared.calls is None:
            # Masks are large: a device has those of one micro-batch, not of all that it got this round.
            latest = None if self._latest is None else self._latest()
            if latest is not None:
                latest.calls = None
            shared.calls = make()
            self._latest = weakref.ref(shared)
        return shared.calls

    def record(self, hidden: Tensor, positions: Tensor) -> Recorded:
        self._run(hidden, positions)
        found = list(self._calls)
        assert len(found) == self.num_blocks, f"{len(found)} of {self.num_blocks} blocks were called"
        self._calls.clear()
        return found

    def first_call(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, BlockCall]:
        """Find what the first block gets, whatever the body does with its result."""
        try:
            self._run(hidden, positions)
        except Exception:
            if not self._calls:
                raise
        found = self._calls[0]
        self._calls.clear()
        return found

    def trace(self, hidden: Tensor, positions: Tensor) -> tuple[list[Step], Any]:
        """Run the body with a new tensor from each place. Return the calls of its children and blocks, and the output."""
        steps: list[Step] = []

        def note(name: str) -> Callable[..., Any]:
            def hook(module: nn.Module, args: tuple[Any, ...], made: Any) -> Any:
                if isinstance(module, Recorder | StandIn):
                    made = torch.utils._pytree.tree_map_only(Tensor, torch.clone, made)
                is_tuple = isinstance(module, Recorder) and module.entries
                steps.append(Step(name, args[0] if args else None, made[0] if is_tuple else made))
                return made

            return hook

        places = [(name, child) for name, child in self.body.named_children() if name != self.blocks]
        places += [
            (f"{self.blocks}.{index}", block)
            for index, block in enumerate(self.body.get_submodule(self.blocks).children())
        ]
        handles = [place.register_forward_hook(note(name)) for name, place in places]
        try:
            output = self._run(hidden, positions)
        finally:
            for handle in handles:
                handle.remove()
        self._calls.clear()
        return steps, output

    def _run(self, hidden: Tensor, positions: Tensor) -> Any:
        self._calls.clear()
        for module in self.body.children():
            if isinstance(module, StandIn):
                # Otherwise the sum of both would have another dtype than the hidden state, and rotations with it.
                module.dtype = hidden.dtype
        with torch.no_grad():
            return self.body(inputs_embeds=hidden, position_ids=positions, use_cache=False)


def hollow(
    body: nn.Module, blocks: str, entries: int, calls: Recorded, used: Collection[str] = ()
) -> nn.Module:
    """Copy `body` with recorders in place of blocks, and stand-ins for modules with parameters, except those `used`."""
    recorders = [Recorder(block, calls, entries) for block in body.get_submodule(blocks).children()]
    places: dict[str, nn.Module] = {blocks: nn.ModuleList(recorders)}
    for name, child in body.named_children():
        if name not in (blocks, *used) and any(True for _ in child.parameters()):
            places[name] = StandIn(child)
    return with_modules(body, places)


def with_modules(module: nn.Module, places: Mapping[str, nn.Module]) -> Any:
    """Copy `module` with other children by name. All other children are shared with the original."""
    twin = copy.copy(module)
    for kind in ("_modules", "_parameters", "_buffers"):
        setattr(twin, kind, dict(getattr(module, kind)))
    twin._modules.update(places)
    return twin


def with_submodule(module: nn.Module, path: str, place: nn.Module) -> Any:
    """Copy `module` and those inside it down to `path`, where the copy has another module."""
    name, _, rest = path.partition(".")
    inner = with_submodule(module.get_submodule(name), rest, place) if rest else place
    return with_modules(module, {name: inner})


def shared_tensors(micro_batch: MicroBatch) -> list[Tensor]:
    kept = [shared.calls for shared in micro_batch._derived.values() if isinstance(shared, _Shared)]
    calls = [leaf for leaf in torch.utils._pytree.tree_leaves(kept) if isinstance(leaf, BlockCall)]
    return [tensor for call in calls for tensor in call.tensors()]


def kind_of(module: nn.Module) -> tuple[Any, ...]:
    """List what layers of the same kind have in common: classes, shapes, and what is trained."""
    classes = tuple(
        f"{path}:{type(part).__name__}" for path, part in module.named_modules() if "shell" not in path
    )
    shapes = tuple((name, tuple(one.shape), one.requires_grad) for name, one in module.named_parameters())
    return classes, shapes, str(getattr(module, "attention_type", None))
