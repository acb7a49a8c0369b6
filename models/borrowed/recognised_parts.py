"""Parts of borrowed blocks that run by operations of ours: attention, experts, and products whose results can be kept.

The modules of `transformers` stay. They look up their attention and their experts by the name of an implementation in their
config (`AttentionInterface`, `ExpertsInterface`), and this file registers ours. In place of masks, blocks then get the
documents. A part is recognised by what the block does with it, in a run without memory. Before it is used, both
implementations run on the same random numbers, forward and backward.

Shapes: B sequences, T tokens, H heads, K kv heads, C channels of a head, N tokens of a micro-batch, D model width, E experts,
k experts per token, R = N k rows sorted by expert, F expert width.
"""

import copy
import logging
from abc import ABCMeta
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from torchround.accelerators import as_if_on
from torchround.keeping import keep
from torchround.layer import MicroBatch
from torchround.models.borrowed.counted_work import call_without_memory, no_memory
from torchround.models.borrowed.shell import BlockCall, MaskPlace, Places, Shell, kind_of, with_modules
from torchround.models.common.attention import allowed_pairs, attend
from torchround.models.common.experts import ExpertStack, combine, dispatch, make_routes, sort_pairs
from torchround.models.common.primitives import gated_product
from torchround.models.kernels.projections import Projection
from torchround.packed_formats import PackedFormat

logger = logging.getLogger(__name__)

NAME = "torchround"
# A body with this name makes places of masks. With the other one it makes nothing, and asks no device whether documents are packed.
PROBE = "torchround probe"
# Arguments of `transformers`' own attention that change its result, and the values that change nothing.
PLAIN = {
    "dropout": (0.0,),
    "softcap": (None,),
    "position_bias": (None,),
    "is_causal": (None, True),
    "cache": (None,),
}
# What the decorator of `transformers` for classes of experts sets, and how the module computes follows from.
FACTS = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm")
# A window, and a chunk of tokens, of fewer tokens than a document of a probe.
SMALL_SIZES = {"sliding_window": 3, "attention_chunk_size": 3}
# Sums of some hundred terms in float32, relative to the largest result.
TOLERANCE = 1e-4


class NotRecognised(Exception):
    """A part that does something else than ours. The message says what."""


# What the modules of transformers call.


def attend_documents(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskPlace,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend inside documents: `[B, H, T, C]`, keys and values `[B, K, T, ..]`, to `[B, T, H, ..]`."""
    calls = None if torch.compiler.is_dynamo_compiling() else _observed().get()
    if calls is not None:
        calls.append(AttentionCall(module, (query, key, value), {"scaling": scaling, **others}))
    if not isinstance(attention_mask, MaskPlace) or attention_mask.documents is None:
        raise NotRecognised(f"attention gets a {type(attention_mask).__name__} for its mask")
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    batch, window = attention_mask.documents, attention_mask.window
    return keep("attention", attend, query, key, value, batch, window, None, scaling).contiguous(), None


def mask_place(*_: Any, local_size: int | None = None, use_vmap: bool = False, **__: Any) -> MaskPlace:
    if use_vmap:
        raise NotRecognised("its masks follow rules of its own")
    return MaskPlace(local_size)


def run_experts(experts: Any, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Pass tokens `[N, D]` through their `chosen [N, k]` experts, with `weights [N, k]`."""
    routes = make_routes(chosen, experts.num_experts)
    by_row, rows = sort_pairs(weights, routes), dispatch(tokens, routes)
    # What follows the last product is not linear: the weights come last too.
    weighs_late = experts.has_bias or experts.has_post_expert_norm
    inward = "gate_up_proj" if experts.has_gate else "up_proj"
    inner = _with_bias(experts, inward, keep("gate_up", experts.product, inward, rows, routes), routes)
    if experts.has_gate and not weighs_late and _is_swiglu(experts):
        gate, up = inner.chunk(2, dim=-1)
        inner = gated_product(gate, up, by_row)
    else:
        inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
        inner = inner if weighs_late else inner * by_row[:, None].to(inner.dtype)
    rows = keep("down", experts.product, "down_proj", inner, routes)
    if weighs_late:
        rows = _with_bias(experts, "down_proj", rows, routes)
        rows = experts.post_expert_norm(rows) if experts.has_post_expert_norm else rows
        rows = rows * by_row[:, None].to(rows.dtype)
    return combine(rows, routes).to(tokens.dtype)


class BorrowedExperts(ExpertStack):
    """A base beside a class of `transformers`, whose attributes and parameters it finds in the module.

    Without adapters it runs the module's own code. Adapters' products need the rows of each expert.
    """

    own_forward: Any
    config: Any

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        return (run_experts if self.adapted else type(self).own_forward)(self, hidden, chosen, weights)

    def stays_packed(self, name: str, packed: PackedFormat) -> bool:
        # The code of `transformers` reads whole stacks.
        is_ours = bool(self.adapted) or self.config._experts_implementation == NAME
        return is_ours and super().stays_packed(name, packed)


def let_adapt(model: nn.Module) -> None:
    """Let all experts of a model take adapters whose class is of the form that `transformers` knows itself."""
    for module in model.modules():
        if not all(hasattr(module, fact) for fact in FACTS):
            continue
        names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
        stacks = [getattr(module, name, None) for name in names]
        if all(isinstance(stack, nn.Parameter) and stack.ndim == 3 for stack in stacks):
            experts: Any = module
            kind: Any = type(module)
            experts.__class__ = _adaptable(kind)
            experts.adaptable, experts.inputs_first = names, module.is_transposed


@cache
def _adaptable(kind: Any) -> Any:
    # Under the same name: layers are of one kind if their modules' names are.
    return ABCMeta(kind.__name__, (BorrowedExperts, kind), {"own_forward": kind.forward})


def _with_bias(experts: Any, name: str, rows: Tensor, routes: Any) -> Tensor:
    return rows + getattr(experts, f"{name}_bias")[routes.experts] if experts.has_bias else rows


def _is_swiglu(experts: Any) -> bool:
    from transformers.integrations.moe import _default_apply_gate

    is_silu = isinstance(experts.act_fn, nn.SiLU) or type(experts.act_fn).__name__ == "SiLUActivation"
    return is_silu and type(experts)._apply_gate is _default_apply_gate


@cache
def _register() -> None:
    from transformers.integrations.moe import ExpertsInterface
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, attend_documents)
    AttentionMaskInterface.register(PROBE, mask_place)
    ExpertsInterface.register(NAME, run_experts)


# Recognition.


@dataclass(frozen=True)
class AttentionCall:
    """A call of an attention function: the module, `[B, H, T, C]` and `[B, K, T, ..]` twice, and the other arguments."""

    module: nn.Module
    heads: tuple[Tensor, Tensor, Tensor]
    others: Mapping[str, Any]


@cache
def _observed() -> ContextVar[list[AttentionCall] | None]:
    return ContextVar("calls of attention", default=None)


def recognise(
    body: Any, blocks: Sequence[nn.Module], shell: Shell, positions: Tensor, hidden: Tensor
) -> tuple[Any, Places]:
    """Let the blocks run by our parts where these are recognised. Return a body that makes no masks for them, and their places.

    `hidden [B, T, D]` and `positions [B, T]` are a small batch of several documents. `shell` is the body's.
    """
    _register()
    original = body.config
    places: Places = ()
    config = copy.deepcopy(original)
    for block in blocks:
        for module in block.modules():
            if getattr(module, "config", None) is original:
                module.config = config
    body = with_modules(body, {})
    body.config = config
    for part in ("experts", "attention"):
        names = config._attn_implementation, config._experts_implementation
        try:
            if part == "experts":
                _take_experts(config, blocks)
            else:
                places = _take_attention(config, body, blocks, shell, positions, hidden)
        except Exception as error:  # noqa: BLE001  (code of any kind runs here, with arguments that it was not written for)
            config._attn_implementation, config._experts_implementation = names
            _warn_once(config.model_type, part, f"{error}" or type(error).__name__)
    return body, places


@cache
def _warn_once(model_type: str, part: str, reason: str) -> None:
    costs = {
        "attention": "masks take B T^2 bytes, and none of its results are kept",
        "experts": "their gradients pass through memory more often",
    }
    text = "%s of model_type %r runs by the code of transformers (%s): %s"
    logger.warning(text, part, model_type, reason[:300], costs[part])


def _take_experts(config: Any, blocks: Sequence[nn.Module]) -> None:
    every = [one for block in blocks for one in block.modules() if hasattr(one, "_is_expert_parallel")]
    kinds: dict[Any, nn.Module] = {}
    for one in every:
        kinds.setdefault(kind_of(one), one)
    for experts in kinds.values():
        _compare_experts(experts)
    if every:
        config._experts_implementation = NAME


def _compare_experts(experts: Any) -> None:
    """Run a small twin of some experts, of the same class and settings, by both implementations."""
    if any(size % 8 for one in experts.parameters() for size in one.shape[1:]):
        raise NotRecognised("kernels for rows sorted by expert take widths of multiples of 8")
    number, width, inner = 3, 16, 8
    generator = torch.Generator().manual_seed(1)
    sizes = {"gate_up_proj": (2 * inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
    twin = with_modules(experts, {})
    twin.config = copy.copy(experts.config)
    twin.num_experts = number
    for name, parameter in experts.named_parameters(recurse=False):
        outputs, inputs = sizes[name.removesuffix("_bias")]
        matrix = (inputs, outputs) if experts.is_transposed else (outputs, inputs)
        shape = (number, *(matrix if parameter.ndim == 3 else (outputs,)))
        twin._parameters[name] = nn.Parameter(torch.randn(shape, generator=generator))
    tokens = torch.randn((5, width), generator=generator)
    chosen = torch.tensor([[0, 2], [2, 0], [0, 2], [2, 0], [0, 2]])  # one expert serves no token
    weights = torch.rand(chosen.shape, generator=generator)
    numbers = [tokens, weights, *twin.parameters()]

    def run(name: str) -> list[Tensor]:
        twin.config._experts_implementation = name
        return _derivatives(lambda: twin(leaves[0], chosen, leaves[1]), leaves)

    leaves = [one.detach().requires_grad_() for one in numbers[:2]] + numbers[2:]
    _expect_equal(run(NAME), run(experts.config._experts_implementation), type(experts).__name__)


def _derivatives(function: Callable[[], Any], leaves: Sequence[Tensor]) -> list[Tensor]:
    found = function()
    result = found[0] if isinstance(found, tuple) else found
    grad = torch.linspace(-1, 1, result.numel()).view_as(result)
    gradients = torch.autograd.grad(result, list(leaves), grad, allow_unused=True)
    return [result.detach(), *(torch.zeros(()) if one is None else one for one in gradients)]


def _expect_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor], name: str) -> None:
    for one, other in zip(ours, theirs, strict=True):
        if one.shape != other.shape or not (one - other).abs().max() <= TOLERANCE * other.abs().max():
            raise NotRecognised(f"{name} computes something else than expected")


def _take_attention(
    config: Any, body: Any, blocks: Sequence[nn.Module], shell: Shell, positions: Tensor, hidden: Tensor
) -> Places:
    if config._attn_implementation != "sdpa":
        raise NotRecognised(f"it is {config._attn_implementation!r} attention")
    places = _compared_places(config, body, shell, positions, hidden)
    if not any(places):
        raise NotRecognised("its blocks get no mask from the functions of transformers")
    config._attn_implementation = NAME
    calls = Shell(body, shell.blocks, shell.entries, places).calls(hidden, positions)
    names: dict[Any, dict[str, str]] = {}
    unnumbered: dict[Any, bool] = {}
    for block, call, own in zip(blocks, calls, places, strict=True):
        if own and (kind := kind_of(block)) not in names:
            seen = _observe_without_number(block, call, hidden)
            unnumbered[kind] = seen is not None
            attended, order = seen or _observe(block, call, hidden)
            for one in attended:
                _compare_attention(one)
            names[kind] = _product_names(block, attended, order, hidden.shape[-1])
    for block, own in zip(blocks, places, strict=True):
        if own and unnumbered[kind_of(block)]:
            take_numbers(block.children())
        for path, name in names[kind_of(block)].items() if own else ():
            linear: Any = block.get_submodule(path)
            named = Projection(linear.in_features, linear.out_features, linear.bias is not None)
            named.weight, named.bias, named.part = linear.weight, linear.bias, name
            block.set_submodule(path, named)
    return places


def _compared_places(config: Any, body: Any, shell: Shell, positions: Tensor, hidden: Tensor) -> Places:
    """Find where blocks get masks. Raises if these have other rules than ours, or if other arguments change without them."""

    def calls(name: str, sizes: Mapping[str, int]) -> list[list[Any]]:
        twin = with_modules(body, {})
        twin.config = copy.deepcopy(config)
        for key, value in sizes.items():
            if isinstance(getattr(config, key, None), int):
                setattr(twin.config, key, value)
        twin.config._attn_implementation = name
        return [call.leaves() for call in Shell(twin, shell.blocks, shell.entries).calls(hidden, positions)]

    small, masked, plain = calls(PROBE, SMALL_SIZES), calls("sdpa", SMALL_SIZES), calls(NAME, {})
    for probed, theirs, ours in zip(small, masked, plain, strict=True):
        for place, mask, other in zip(probed, theirs, ours, strict=True):
            is_place = isinstance(place, MaskPlace)
            wanted = allowed_pairs((positions == 0).cumsum(1), place.window) if is_place else other
            same = torch.equal(mask, wanted) if isinstance(mask, Tensor) else mask == wanted
            if not same or (is_place and other is not None):
                raise NotRecognised("its masks are not those of documents and windows")
    return tuple(
        {index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, MaskPlace)}
        for leaves in calls(PROBE, {})
    )


# A linear layer by its path, and whether attention was called before it.
Use = tuple[str, bool]


def _observe(block: nn.Module, call: BlockCall, hidden: Tensor) -> tuple[list[AttentionCall], list[Use]]:
    """Run a block without memory. Return its calls of attention, and its linear layers in the order of their use."""
    attended: list[AttentionCall] = []
    order: list[Use] = []
    handles = [
        module.register_forward_hook(lambda *_, path=path: order.append((path, bool(attended))))
        for path, module in block.named_modules()
        if isinstance(module, nn.Linear)
    ]
    token = _observed().set(attended)
    try:
        with as_if_on("cpu"), no_memory():
            ids = torch.zeros(hidden.shape[:2], dtype=torch.int64)
            micro_batch = MicroBatch(ids, ids, ids, ids)
            call.run(partial(call_without_memory, block, hidden.dtype), hidden, micro_batch)
    finally:
        _observed().reset(token)
        for handle in handles:
            handle.remove()
    if not attended:
        raise NotRecognised(f"{type(block).__name__} makes no use of its mask")
    return attended, order


def _observe_without_number(
    block: nn.Module, call: BlockCall, hidden: Tensor
) -> tuple[list[AttentionCall], list[Use]] | None:
    """Observe a block that has no number. Return None if it reads its number."""
    block = with_modules(block, {})
    numbers = take_numbers([block])
    try:
        return _observe(block, call, hidden)
    except TypeError:
        return None
    finally:
        for module, number in numbers:
            module.layer_idx = number


class Unread:
    """The place of a block's number, which `transformers` needs for a cache, and which would make each block a kind of its own.

    Comparing it, computing with it or looking something up by it raises.
    """

    __hash__ = None  # type: ignore[assignment]

    def __deepcopy__(self, _: Any) -> "Unread":
        return self

    def _raise(self, *_: Any) -> Any:
        raise TypeError("the block reads its number")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __index__ = __int__ = __float__ = _raise
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __truediv__ = _raise
    __rtruediv__ = __floordiv__ = __str__ = __format__ = _raise


UNREAD = Unread()


def take_numbers(blocks: Iterable[nn.Module]) -> list[tuple[Any, int]]:
    """Replace the numbers of blocks in all their modules. Returns these, each with its number."""
    modules: list[Any] = [module for block in blocks for module in block.modules()]
    taken = [
        (module, module.layer_idx)
        for module in modules
        if isinstance(getattr(module, "layer_idx", None), int)
    ]
    for module, _ in taken:
        module.layer_idx = UNREAD
    return taken


def _compare_attention(call: AttentionCall) -> None:
    """Run both implementations on heads of the call's shapes, in documents, with a small window and without one."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    for key, legal in PLAIN.items():
        if call.others.get(key, legal[0]) not in legal:
            raise NotRecognised(f"attention with {key} = {call.others[key]!r}")
    if call.others.get("s_aux") is not None:
        raise NotRecognised("attention with sinks")
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7]])
    ids = (positions == 0).cumsum(1)
    documents = MicroBatch(ids, ids, positions, ids, max_documents=2)
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, heads.shape[1], positions.shape[1], heads.shape[3]) for heads in call.heads]
    leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    for window in (None, 3):
        masks = MaskPlace(window, documents), allowed_pairs(ids, window)
        functions: tuple[Any, Any] = attend_documents, sdpa_attention_forward
        ours, theirs = (
            _derivatives(partial(run, call.module, *leaves, mask, **call.others), leaves)
            for run, mask in zip(functions, masks, strict=True)
        )
        _expect_equal(ours, theirs, type(call.module).__name__)


def _product_names(
    block: nn.Module, attended: Sequence[AttentionCall], order: Sequence[Use], width: int
) -> dict[str, str]:
    """Name the linear layers that are parts of a block: those around attention, and those of feed-forwards of this width.

    A name changes no result. It says which results the block can keep.
    """
    paths = {module: path for path, module in block.named_modules()}
    inside = tuple(f"{paths[one.module]}." for one in attended)
    others: dict[str, list[str]] = {}
    names: dict[str, str] = {}
    for path, is_behind in order:
        if path.startswith(inside):
            names[path] = "output" if is_behind else "qkv"
        else:
            others.setdefault(path.rpartition(".")[0], []).append(path)
    for paths_of_one in others.values():
        linears: list[Any] = [block.get_submodule(path) for path in paths_of_one]
        *inward, down = linears
        if inward and down.out_features == width and all(one.in_features == width for one in inward):
            names |= dict.fromkeys(paths_of_one, "gate_up") | {paths_of_one[-1]: "down"}
    return {path: name for path, name in names.items() if type(block.get_submodule(path)) is nn.Linear}
