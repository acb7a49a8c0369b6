"""The probe: each layer runs alone on the host with the first micro-batch, is checked, and is measured.

Stateless devices run a layer on any of several copies of it, a second time in its backward stage, and beside other layers
of other micro-batches. A layer that remembers something, changes its input, or gives other values when it runs again
would train wrongly without any error, so the probe refuses it by name. One layer's activations exist at a time.
"""

import copy
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchround.engine.store.bundles import owner_of
from torchround.engine.store.host_store import HostStore
from torchround.engine.worker.slots import PLAIN
from torchround.keeping import KeptActivationError, marking, recording, replaying
from torchround.layer import aligned
from torchround.library.module_layer import MEMBER, WrappedNet
from torchround.library.refusals import PipelineUsageError, layer_text
from torchround.library.sample_batch import SampleBatch
from torchround.library.seeds import UnseededDrawError, is_random
from torchround.library.watched_state import changes, remember
from torchround.planning.costs import KeptCost


@dataclass(frozen=True)
class LayerMeasure:
    """The probe's figures of one layer for one micro-batch: seconds on the host, and bytes as in `LayerWork`.

    `draws`, `receives` and `needs_graph` are as in `ModuleLayer`. `kept` are the parts that the layer is to keep.
    """

    forward_s: float
    backward_s: float
    activation_bytes: int
    boundary_bytes: int
    workspace_bytes: int
    draws: bool
    receives: tuple[bool, ...] = ()
    needs_graph: bool = False
    kept: tuple[KeptCost, ...] = ()


class _Watch(TorchDispatchMode):
    """A mode that sees whether operations draw random numbers, and the largest tensor that one of them makes."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = False
        self.largest_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.draws |= is_random(func, args, kwargs)
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                self.largest_bytes = max(self.largest_bytes, leaf.nbytes)
        return result


def probe(
    wrapped: WrappedNet, store: HostStore, batch: SampleBatch, keep: Sequence[str] = ()
) -> list[LayerMeasure]:
    """Run every layer on the host with one micro-batch and return what it costs, and which of the parts `keep` it has.

    Raises `PipelineUsageError` for the first layer that cannot work. The layers of `wrapped` learn whether they draw.
    """
    hidden: Any = None
    wanted: tuple[bool, ...] = ()
    measures = []
    for index, name in enumerate(wrapped.model.names):
        run = _LayerProbe(wrapped, store, index, name, batch.for_layer(index))
        hidden, measure, wanted = run.measure(hidden, wanted, keep)
        layer = wrapped.layers()[index]
        layer.draws, layer.receives, layer.needs_graph = measure.draws, measure.receives, measure.needs_graph
        measures.append(measure)
    return measures


class _LayerProbe:
    """The probe of one layer: a copy of it with its weights from the store."""

    def __init__(
        self, wrapped: WrappedNet, store: HostStore, index: int, name: str, batch: SampleBatch
    ) -> None:
        shell = wrapped.layers()[index]
        self._layer = copy.deepcopy(shell)
        self._layer.use_modes(batch.is_training)
        # A probe of another kind of call may have found no draw. Inputs are made here as they are to be received.
        self._layer.draws, self._layer.receives, self._layer.needs_graph = True, (), False
        self._batch = batch
        self._what = layer_text(name, shell.module)
        weights = store.weights()
        own = {location.path: location.parameter.name for location in store.locations[index]}
        leaves: dict[str, nn.Parameter] = {}
        for path, parameter in shell.named_parameters(remove_duplicate=False):
            stored = own[path]
            if stored not in leaves:
                value = weights[stored].detach().to(parameter.dtype)
                leaves[stored] = nn.Parameter(value, parameter.requires_grad)
            owner, key = owner_of(self._layer, path)
            setattr(owner, key, leaves[stored])
        self._leaves = [leaf for leaf in leaves.values() if leaf.requires_grad]

    def measure(
        self, hidden: Any, wanted: Sequence[bool], keep: Sequence[str] = ()
    ) -> tuple[Any, LayerMeasure, tuple[bool, ...]]:
        """Check and measure the layer. Returns its output, its figures, and which tensors of the output need gradients."""
        watch = _Watch()
        plain = self._checked(hidden, watch)
        marks: list[tuple[str, float]] = []
        start = time.perf_counter()
        with torch.no_grad(), marking(lambda name: marks.append((name, time.perf_counter()))):
            self._call(hidden)
        forward_s = time.perf_counter() - start
        boundary = sum(aligned(leaf.nbytes) for leaf in _tensors(plain))
        if not self._batch.is_training:
            # A pass without gradients keeps nothing. The planner still cuts backward stages, by the usual proportion.
            guess_s = 2 * forward_s
            figures = (forward_s, guess_s, 0, boundary, watch.largest_bytes)
            return plain, LayerMeasure(*figures, watch.draws), ()
        kept: dict[int, int] = {}
        leaf, output = self._with_graph(hidden, wanted, kept)
        needs_graph = not alike(plain, output)
        if needs_graph and not alike(output, self._with_graph(hidden, wanted, {})[1]):
            raise PipelineUsageError(
                f"{self._what} gives other values when it runs again with the same input, so its backward stage would "
                "not fit its forward. Draw random numbers with torch and the default generator"
            )
        self._check_graph(leaf, output)
        if self._layer.is_last and self._leaves and not output.requires_grad:
            raise PipelineUsageError(
                f"{self._what}: the loss does not depend on anything that is trained; compute it from the outputs"
            )
        needs = tuple(tensor.requires_grad for tensor in _tensors(output))
        start = time.perf_counter()
        self._differentiate(leaf, output)
        backward_s = time.perf_counter() - start
        figures = (forward_s, backward_s, sum(kept.values()), boundary, watch.largest_bytes)
        part_s: dict[str, float] = defaultdict(float)
        for (name, begun), (_, ended) in zip(marks[::2], marks[1::2], strict=True):
            part_s[name] += ended - begun
        parts = tuple(
            KeptCost(name, nbytes, part_s[name])
            for name in keep
            if (nbytes := self._kept_bytes(hidden, wanted, output, name))
        )
        measure = LayerMeasure(*figures, watch.draws, tuple(wanted), needs_graph, parts)
        return pytree.tree_map_only(Tensor, Tensor.detach, output), measure, needs

    def _call(self, hidden: Any) -> Any:
        try:
            return self._layer(hidden, self._batch)
        except (PipelineUsageError, MemoryError):
            raise
        except UnseededDrawError as error:
            raise PipelineUsageError(f"{self._what}: {error}") from error
        except Exception as error:
            raise PipelineUsageError(
                f"{self._what} failed with the first micro-batch: {type(error).__name__}: {error}"
            ) from error

    def _checked(self, hidden: Any, watch: _Watch) -> Any:
        """Run the layer for the first time, and refuse what changes anything but its output."""
        state = remember(self._layer.get_submodule(MEMBER))
        inputs = [*_tensors(hidden), *self._batch.parts]
        versions = [tensor._version for tensor in inputs]
        with torch.no_grad(), watch:
            output = self._call(hidden)
        if [tensor._version for tensor in inputs] != versions:
            raise PipelineUsageError(
                f"{self._what} changes its input in place, which its recomputation needs as it came; "
                "use an operation that makes a new tensor (inplace=False)"
            )
        if changed := changes(self._layer.get_submodule(MEMBER), state):
            raise PipelineUsageError(
                f"{self._what} changes {changed} in its forward; each device has its own copy of the layer and may "
                "run it twice for a micro-batch. Compute the value anew, or pass it on to the next layer"
            )
        for leaf in pytree.tree_leaves(output):
            self._check_leaf(leaf)
        return output

    def _check_leaf(self, leaf: Any) -> None:
        if isinstance(leaf, Tensor):
            if (
                leaf.layout is not torch.strided
                or leaf.is_quantized
                or type(leaf) not in (Tensor, nn.Parameter)
            ):
                raise PipelineUsageError(
                    f"{self._what} returns a {type(leaf).__name__} of layout {leaf.layout}; only plain dense tensors "
                    "travel between layers"
                )
            if leaf.device.type != "cpu":
                raise PipelineUsageError(
                    f"{self._what} returns a tensor on {leaf.device} for an input on the host; make tensors on the "
                    "device of the input"
                )
        elif not isinstance(leaf, PLAIN):
            raise PipelineUsageError(
                f"{self._what} returns a {type(leaf).__name__}, whose tensors cannot be found; return tuples, lists, "
                "dicts or named tuples of tensors, or register the class with torch.utils._pytree"
            )

    def _with_graph(self, hidden: Any, wanted: Sequence[bool], kept: dict[int, int]) -> tuple[Any, Any]:
        """Run the layer with gradients from leaves of its own, and note what it keeps for its backward."""
        flags = iter(wanted)
        leaf = pytree.tree_map_only(
            Tensor, lambda tensor: tensor.detach().requires_grad_(next(flags, False)), hidden
        )
        held = {
            tensor.untyped_storage().data_ptr() for tensor in (*self._layer.parameters(), *_tensors(leaf))
        }

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in held:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # a saved output that held its own node would never be freed

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return leaf, self._call(leaf)

    def _kept_bytes(self, hidden: Any, wanted: Sequence[bool], output: Any, name: str) -> int:
        """Record a part as a forward stage and replay it as a backward stage. Returns its bytes, 0 without such a part."""
        try:
            with torch.no_grad(), recording((name,)) as record:
                first = self._call(hidden)
            if not record.tensors:
                return 0
            with replaying((name,), record.tensors):
                _, second = self._with_graph(hidden, wanted, {})
        except KeptActivationError as error:
            raise PipelineUsageError(f"{self._what} cannot keep its part {name}: {error}") from error
        if not (alike(first, output) and alike(second, output)):
            raise PipelineUsageError(
                f"{self._what} gives other values if its part {name} is kept; leave {name} out of Pipeline(keep=..)"
            )
        return sum(aligned(tensor.nbytes) for tensor in record.tensors)

    def _check_graph(self, leaf: Any, output: Any) -> None:
        """Refuse a layer whose output depends on trained tensors that are not its own."""
        own = {id(tensor) for tensor in (*self._leaves, *_tensors(leaf))}
        for tensor in _foreign_leaves(output, own):
            raise PipelineUsageError(
                f"{self._what} uses a trained tensor of shape {tuple(tensor.shape)} that is not among its parameters; "
                "make it a parameter of the layer (a parameter may belong to several layers)"
            )

    def _differentiate(self, leaf: Any, output: Any) -> None:
        ends = [tensor for tensor in _floating(output) if tensor.requires_grad]
        wanted = [tensor for tensor in (*self._leaves, *_floating(leaf)) if tensor.requires_grad]
        if not ends or not wanted:
            return
        watch = _Watch()
        with watch:
            torch.autograd.grad(ends, wanted, [torch.ones_like(end) for end in ends], allow_unused=True)
        if watch.draws:
            raise PipelineUsageError(
                f"{self._what} draws random numbers in its backward, as torch.utils.checkpoint does around dropout; "
                "leave the checkpointing out: torchround recomputes by itself"
            )


def alike(first: Any, second: Any) -> bool:
    """Return whether two outputs have the same structure, plain values and bits."""
    one, structure = pytree.tree_flatten(first)
    other, again = pytree.tree_flatten(second)
    return structure == again and all(map(same, one, other))


def same(one: Any, other: Any) -> bool:
    """Return whether two leaves are the same plain value, or tensors of equal bits."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and bool(one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    bits = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*bits)


def _foreign_leaves(output: Any, own: set[int]) -> list[Tensor]:
    """Return the leaves of the output's graph that are not among `own`."""
    nodes: list[Any] = [tensor.grad_fn for tensor in _tensors(output) if tensor.grad_fn is not None]
    seen, found = set(nodes), []
    while nodes:
        node = nodes.pop()
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in own:
            found.append(variable)
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                nodes.append(after)
    return found


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _floating(value: Any) -> list[Tensor]:
    return [tensor for tensor in _tensors(value) if tensor.is_floating_point()]
