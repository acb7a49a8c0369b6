"""A decoder of `transformers`, built on `meta` from its config and taken apart: body, blocks, what follows them.

`transformers` is an extra: it is imported only when such a model is built, by the functions of this file. Whether the model
can be cut into layers is found by running its body without its layers. Each check that fails ends in one `ModelConfigError`
that names the model type and the reason.

Shapes: B sequences, T tokens, D model width.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from torchround.models.borrowed.counted_work import call_with, fake_parameters, no_memory
from torchround.models.borrowed.shell import (
    BlockCall,
    MetBlock,
    MetModule,
    Shell,
    StandInBody,
    kind_of,
    refuse,
    same_arguments,
    with_modules,
)
from torchround.models.common.config import ModelConfigError

logger = logging.getLogger(__name__)

MISSING = (
    'model.family = "transformers" needs the package of that name, which is not installed: '
    "pip install 'transformers>=5.20'"
)
OLDEST = (5, 20)
# A table of positions may begin with so many rows that are no position.
PADDING_ROWS = 2
SIZES = ("num_hidden_layers", "hidden_size", "vocab_size")
# Parts of the keys of a config.json whose value above 0 makes a layer draw random numbers while it is trained.
RANDOM_KEYS = ("drop", "jitter")
# Two sequences of two documents each, of different lengths.
PROBE_LENGTHS = ((3, 4), (5, 2))
# Parameters of state space models and linear attention.
RECURRENT = ("A_log", "dt_bias", "slope_rate", "time_decay", "dt_proj")
MASKED = -1e4  # an additive mask hides what is below


def read_config(content: Mapping[str, Any], warns: bool = False) -> Any:
    """Return the config object of `transformers` for the content of a `config.json`. Raises `ModelConfigError`.

    `warns` is for the first reader of a config: others read it again for each use.
    """
    auto = _auto_classes()
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in auto.CONFIG_MAPPING:
        extra = "; its own code (auto_map) is never run" if content.get("auto_map") else ""
        raise ModelConfigError(
            f"config.json: model_type = {model_type!r} is unknown to transformers {_version()}{extra}; a newer "
            "transformers may know it"
        )
    if content.get("quantization_config") is not None:
        raise refuse(model_type, "its weights are quantised; give the folder of the unquantised model")
    known = {key: value for key, value in content.items() if key != "auto_map"}
    try:
        config = auto.CONFIG_MAPPING[model_type].from_dict(known)
    except Exception as error:  # each config class checks its own keys, and raises what it likes
        raise ModelConfigError(f"config.json is not one of model_type {model_type!r}: {error}") from error
    _refuse_config(config, model_type, auto)
    if getattr(config, "output_router_logits", False):
        if warns:
            logger.warning(
                "config.json turns the balance loss of the router on (output_router_logits): a model of family "
                '"transformers" trains without it; a family of torchround has it (family = "qwen3", "gpt_oss")'
            )
        config.output_router_logits = False
    return config


def random_keys(config: Any) -> str:
    """Say which keys of a config may make layers draw random numbers."""
    found = [
        f"{key} = {value!r}"
        for key, value in config.to_dict().items()
        if any(word in key for word in RANDOM_KEYS) and isinstance(value, int | float) and value > 0
    ]
    return f"; config.json has {', '.join(found)}: set the one that it comes from to 0" if found else ""


def build_on_meta(config: Any) -> nn.Module:
    """Return the causal language model of `transformers` for `config`: parameters on `meta`, buffers with their values."""
    auto = _auto_classes()
    model_class = auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    try:
        with torch.device("meta"):
            model = model_class._from_config(config, dtype=torch.float32)
        model.tie_weights()
        _settle_buffers(model, config.model_type)
    except ModelConfigError:
        raise
    except Exception as error:
        raise refuse(
            config.model_type, f"transformers cannot build it: {type(error).__name__}: {error}"
        ) from error
    model.eval()
    for module in model.modules():
        # Biases of experts are matrices only because they are stacked: weight decay is not for them.
        stacks = [
            name for name, one in module.named_parameters(recurse=False) if one.ndim > 1 and "bias" in name
        ]
        if stacks:
            module.undecayed = tuple(stacks)
    assert isinstance(model, nn.Module), "a model of transformers is a module"
    return model


@dataclass(frozen=True)
class Anatomy:
    """The parts of a model: the body, the name of its list of blocks, and the name of the body in the model."""

    model: nn.Module
    body: nn.Module
    body_name: str
    blocks: str

    @property
    def block_list(self) -> list[nn.Module]:
        """The blocks in the order in which they run."""
        return list(self.body.get_submodule(self.blocks).children())


def find_parts(model: Any, config: Any) -> Anatomy:
    """Find the body and its one list of blocks. Raises `ModelConfigError` for models that have none, or several."""
    kind = config.model_type
    name = model.base_model_prefix if hasattr(model, model.base_model_prefix) else "model"
    body = getattr(model, name, None)
    if not isinstance(body, nn.Module):
        raise refuse(kind, f"it has no body under the name {name!r}")
    # A list of rotations has buffers alone.
    lists = [
        path
        for path, child in body.named_children()
        if isinstance(child, nn.ModuleList) and any(True for _ in child.parameters())
    ]
    if len(lists) != 1:
        raise refuse(
            kind, f"its body has {len(lists)} lists of blocks ({', '.join(lists) or 'none'}), not one"
        )
    if any(True for _ in body.parameters(recurse=False)):
        raise refuse(kind, "its body has parameters of its own beside its modules")
    return Anatomy(model, body, name, lists[0])


def _refuse_config(config: Any, model_type: str, auto: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise refuse(model_type, "it has an encoder beside its decoder")
    if type(config) not in auto.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise refuse(model_type, "transformers has no causal language model of it")
    others = [key for key in ("vision_config", "audio_config") if getattr(config, key, None) is not None]
    if config.get_text_config() is not config or others:
        raise refuse(model_type, "it reads more than text; only models of text alone are cut into layers")
    if missing := [key for key in SIZES if not isinstance(getattr(config, key, None), int)]:
        raise refuse(model_type, f"its config has no {' and no '.join(missing)}")
    for table in _rope_tables(config):
        if "dynamic" in str(table.get("rope_type", "")):
            raise refuse(
                model_type,
                f"rope_type {table['rope_type']!r} changes its rotations with the longest batch so far",
            )


def longest_sequence(config: Any, body: nn.Module) -> tuple[int, str] | None:
    """Return the most tokens of a sequence that the body is right for, and what limits them; None if nothing does.

    The rotations of `longrope` change, for a whole batch, with its first longer document. A table with a row for each
    position has no row for a later one.
    """
    known = getattr(config, "max_position_embeddings", None)
    of_tokens = body.get_input_embeddings()  # type: ignore[operator]
    for path, module in body.named_modules():
        if not known or not isinstance(module, nn.Embedding) or module is of_tokens:
            continue
        if known <= module.num_embeddings <= known + PADDING_ROWS:
            return int(known), f"its {path} has no row for a later position"
    for table in _rope_tables(config):
        if table.get("rope_type") == "longrope":
            own = table.get("original_max_position_embeddings")
            limit = own or getattr(config, "original_max_position_embeddings", None)
            reason = (
                "its rotations (rope_type longrope) change for a whole batch with its first longer document"
            )
            return int(limit or config.max_position_embeddings), reason
    return None


def _rope_tables(config: Any) -> list[dict[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(table for table in rope.values() if isinstance(table, dict))]


def _settle_buffers(model: Any, model_type: str) -> None:
    """Give every buffer its value. A buffer that files hold becomes a frozen parameter, which the store keeps."""
    for path, module in list(model.named_modules()):
        lost = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
        for name in [name for name in lost if name not in module._non_persistent_buffers_set]:
            module._buffers.pop(name)
            kept = nn.Parameter(lost.pop(name), requires_grad=False)
            module.register_parameter(name, kept)
        if not lost:
            continue
        found = [_made_by(model, module, lost, fill) for fill in (math.nan, 3.0)]
        for name in lost:
            first, second = (made[name] for made in found)
            if not torch.equal(first, second):
                raise refuse(model_type, f"transformers does not say how to fill the buffer {path}.{name}")
            module._buffers[name] = first


def _made_by(model: Any, module: nn.Module, lost: Mapping[str, Tensor], fill: float) -> dict[str, Tensor]:
    """Return a module's buffers as the model's own initialiser makes them in memory filled with `fill`."""
    for name, buffer in lost.items():
        number = fill if buffer.is_floating_point() else (1 if math.isnan(fill) else 0)
        module._buffers[name] = torch.full(buffer.shape, number, dtype=buffer.dtype, device="cpu")
    with torch.no_grad():
        model._init_weights(module)
    return {name: module._buffers[name].clone() for name in lost}  # type: ignore[union-attr]


def post_order(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules below `module` and then itself, children first, as transformers' initialisers meet them."""
    for child in module.children():
        yield from post_order(child)
    yield module


def _auto_classes() -> Any:
    try:
        import transformers
        from transformers.models.auto import configuration_auto, modeling_auto
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise _broken(error) from error
        raise ModelConfigError(MISSING) from error
    except ImportError as error:
        raise _broken(error) from error
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < OLDEST:
        raise ModelConfigError(
            f"transformers {transformers.__version__} is too old; the oldest that works is "
            f"{'.'.join(map(str, OLDEST))}: pip install -U transformers"
        )

    class Auto:
        CONFIG_MAPPING = configuration_auto.CONFIG_MAPPING
        MODEL_FOR_CAUSAL_LM_MAPPING = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING

    return Auto


def _broken(error: ImportError) -> ModelConfigError:
    return ModelConfigError(
        f'model.family = "transformers": the installed package cannot be imported ({error}); '
        "pip install -U 'transformers>=5.20'"
    )


def _version() -> str:
    import transformers

    return str(transformers.__version__)


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
