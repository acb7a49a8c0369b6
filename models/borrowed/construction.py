"""A decoder of `transformers`, built on `meta` from its config and taken apart: body, blocks, what follows them.

`transformers` is an extra: it is imported only when such a model is built, by the functions of this file. Whether the model
can be cut into layers is found by running its body without its layers. Each check that fails ends in one `ModelConfigError`
that names the model type and the reason.

Shapes: B sequences, T tokens, D model width.
"""

from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from torchround.models.borrowed.counted_work import call_without_memory, no_memory
from torchround.models.borrowed.recognised_parts import let_adapt, recognise
from torchround.models.borrowed.shell import (
    BlockCall,
    Shell,
    StandInBody,
    Step,
    hollow,
    kind_of,
    with_modules,
    with_submodule,
)
from torchround.models.common.attention import allowed_pairs
from torchround.models.common.config import ModelConfigError

OLDEST = "5.20"
# A table of positions may begin with so many rows that are no position.
PADDING_ROWS = 2
SIZES = ("num_hidden_layers", "hidden_size", "vocab_size")
# Two sequences of two documents each, of different lengths.
PROBE_LENGTHS = ((3, 4), (5, 2))
# Parameters of state space models and linear attention.
RECURRENT = ("A_log", "dt_bias", "slope_rate", "time_decay", "dt_proj")
MASKED = -1e4  # an additive mask hides what is below
DRAWS = "draws random numbers while it is trained; legal: 0 for a key of dropout or jitter in config.json"


def refuse(model_type: str, reason: str) -> ModelConfigError:
    """Make the error for a model of `transformers` that cannot be cut into layers."""
    return ModelConfigError(
        f"model_type {model_type!r} of transformers does not fit torchround's layers: {reason}"
    )


def read_config(content: Mapping[str, Any]) -> Any:
    """Make the config object of `transformers` from the content of a `config.json`. Raises `ModelConfigError`.

    What is trained is its `get_text_config()`: another object if the release wraps its text model in one that reads more.
    """
    package = _transformers()
    configs = package.CONFIG_MAPPING
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in configs:
        extra = "; its own code (auto_map) is never run" if content.get("auto_map") else ""
        raise ModelConfigError(
            f"config.json: model_type = {model_type!r} is unknown to transformers {package.__version__}{extra}; a newer "
            "transformers may know it"
        )
    # Weights are read as 16-bit numbers, whatever format holds them.
    known = {key: value for key, value in content.items() if key not in ("auto_map", "quantization_config")}
    try:
        whole = configs[model_type].from_dict(known)
        is_pair = getattr(whole, "is_encoder_decoder", False)  # it may have two text models
        config = whole if is_pair else whole.get_text_config()
    except Exception as error:  # each config class checks its own keys, and raises what it likes
        raise ModelConfigError(f"config.json is not one of model_type {model_type!r}: {error}") from error
    if is_pair:
        raise refuse(model_type, "it has an encoder beside its decoder")
    if _causal_class(config, has_whole=config is not whole) is None:
        inner = "" if config is whole else f"its text model, {config.model_type!r}, does not fit: "
        raise refuse(model_type, f"{inner}transformers has no causal language model of it")
    if any(getattr(config, key, None) is not None for key in ("vision_config", "audio_config")):
        raise refuse(model_type, "it reads more than text, and its text model has no config of its own")
    if missing := [key for key in SIZES if not isinstance(getattr(config, key, None), int)]:
        raise refuse(model_type, f"its config has no {' and no '.join(missing)}")
    for table in _rope_tables(config):
        if "dynamic" in (kind := str(table.get("rope_type"))):
            raise refuse(
                model_type, f"rope_type {kind!r} changes its rotations with the longest batch so far"
            )
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False
    return whole


def _transformers() -> Any:
    """Import the package. Raises `ModelConfigError` if it is missing or too old."""
    needed = f"pip install 'transformers>={OLDEST}'"
    try:
        import transformers
    except ImportError as error:
        raise ModelConfigError(
            'model.family = "transformers" needs the package of that name, which cannot be imported or is not installed '
            f"({error}): {needed}"
        ) from error
    version: str = transformers.__version__
    if [int(part) for part in version.split(".")[:2]] < [int(part) for part in OLDEST.split(".")]:
        raise ModelConfigError(f"transformers {version} is too old: {needed}")
    return transformers


def _causal_class(config: Any, has_whole: bool) -> Any:
    """Find the causal language model of a text config; None if `transformers` has none.

    It has none of some text models that a release wraps (Qwen's VL). With `has_whole` such a body gets a head without bias.
    """
    package = _transformers()
    kinds, bodies = package.MODEL_FOR_CAUSAL_LM_MAPPING, package.MODEL_MAPPING
    if type(config) in kinds:
        return kinds[type(config)]
    if not has_whole or type(config) not in bodies:
        return None
    try:
        body_class = bodies[type(config)]
    except ValueError:  # a table of transformers names a class that it does not have
        return None
    base: Any = next(kind for kind in body_class.__mro__[1:] if issubclass(kind, package.PreTrainedModel))

    class BodyWithHead(base):
        __module__ = body_class.__module__  # where transformers looks for what a class can do
        config_class, base_model_prefix = type(config), "model"
        _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = body_class(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, **arguments: Any) -> Any:
            hidden = self.model(**arguments).last_hidden_state
            return package.modeling_outputs.CausalLMOutputWithPast(logits=self.lm_head(hidden))

    return BodyWithHead


def build_whole(config: Any) -> Any:
    """Build the whole model of a release on `meta`, of the class that its config names. Raises `ModelConfigError`."""
    package = _transformers()
    named = [getattr(package, str(name), None) for name in getattr(config, "architectures", None) or ()]
    found: list[Any] = [one for one in named if getattr(one, "config_class", None) is type(config)]
    for kinds in (package.MODEL_FOR_MULTIMODAL_LM_MAPPING, package.MODEL_FOR_CAUSAL_LM_MAPPING):
        found += [kinds[type(config)]] if type(config) in kinds else []
    if not found:
        raise refuse(config.model_type, "transformers has no model of it that writes text")
    kind: Any = found[0]
    try:
        with torch.device("meta"):
            whole: Any = kind._from_config(config, dtype=torch.float32)
    except Exception as error:  # some towers need packages of their own
        text = " ".join(str(error).split())
        raise refuse(config.model_type, f"its whole model cannot be built: {text}") from error
    whole.tie_weights()
    return whole


def names_in_whole(whole: nn.Module, anatomy: "Anatomy") -> dict[str, str]:
    """Map each tensor's name in the text model to its name in the `whole` model that holds it.

    The whole model holds the causal language model itself, or its body; the head is then beside one of the body's parents.
    Raises `ModelConfigError` if it holds neither, or other shapes, or has other masks or logits for text.
    """
    model, body = anatomy.model, anatomy.body
    model_type = str(whole.config.model_type)  # type: ignore[union-attr]
    paths = {type(module): path for path, module in reversed(list(whole.named_modules()))}
    theirs = {name: tensor.shape for name, tensor in whole.state_dict(keep_vars=True).items()}
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        inner = name.removeprefix(f"{anatomy.body_name}.")
        if type(model) in paths:
            places = [f"{paths[type(model)]}.{name}"]
        elif inner != name:
            places = [f"{paths.get(type(body), '')}.{inner}"]
        else:
            above = paths.get(type(body), "").split(".")[:-1]
            places = [".".join([*above[:length], name]) for length in range(len(above), -1, -1)]
        place = next((place for place in places if theirs.get(place) == tensor.shape), None)
        if place is None:
            raise refuse(model_type, f"{type(whole).__name__} does not hold its text model's {name}")
        found[name] = place
    path = paths.get(type(model), paths.get(type(body), ""))
    path += f".{anatomy.body_name}" if type(model) in paths else ""
    try:
        alone, inside = (
            _run_without_layers(one, at, anatomy) for one, at in ((model, anatomy.body_name), (whole, path))
        )
    except Exception as error:  # code of any kind, called in a way that it was not written for
        reason = (
            f"{type(whole).__name__} cannot be compared with its text model: {type(error).__name__}: {error}"
        )
        raise refuse(model_type, reason) from error
    if len(alone) != len(inside) or not all(map(torch.equal, alone, inside)):
        reason = f"{type(whole).__name__} has other masks or logits for text than its text model alone"
        raise refuse(model_type, reason)
    return found


def _run_without_layers(model: Any, path: str, anatomy: "Anatomy") -> list[Tensor]:
    """Run a model without its blocks and its projection. Return the tensors that blocks get, and the logits.

    `path` names the body in `model`. States are large, so that a cap of logits shows.
    """
    body: Any = anatomy.body
    states = torch.linspace(-50, 50, 5 * body.config.hidden_size).view(1, 5, -1)
    calls: list[tuple[Tensor, BlockCall]] = []
    made = with_submodule(model, path, hollow(body, anatomy.shell.blocks, anatomy.shell.entries, calls))
    head = model.get_output_embeddings()
    name = next(name for name, child in model.named_modules() if child is head)
    logits = with_submodule(made, name, nn.Identity())(inputs_embeds=states, use_cache=False).logits
    return [logits, *(tensor for hidden, call in calls for tensor in (hidden, *call.tensors()))]


def _build_on_meta(config: Any) -> nn.Module:
    """Build the causal language model of `transformers` for `config`: parameters on `meta`, buffers with their values."""
    model_class = _causal_class(config, has_whole=True)
    assert model_class is not None, "read_config has refused a config without one"
    with torch.device("meta"):
        model: Any = model_class._from_config(config, dtype=torch.float32)
    model.tie_weights()
    let_adapt(model)
    lost = _settle_buffers(model)
    _check(not lost, f"transformers does not say how to fill the buffer {', '.join(lost[:1])}")
    for module in model.modules():
        # Biases of experts are matrices only because they are stacked: weight decay is not for them.
        stacks = [
            name for name, one in module.named_parameters(recurse=False) if one.ndim > 1 and "bias" in name
        ]
        if stacks:
            module.undecayed = tuple(stacks)
    built: nn.Module = model.eval()
    return built


def _settle_buffers(model: Any) -> list[str]:
    """Give every buffer its value. Return those whose value does not follow from the model's own initialiser.

    A buffer that files hold becomes a frozen parameter, which the store keeps.
    """
    lost = []
    for path, module in list(model.named_modules()):
        on_meta = {name: one for name, one in module.named_buffers(recurse=False) if one.is_meta}
        for name in on_meta.keys() - module._non_persistent_buffers_set:
            del module._buffers[name]
            module.register_parameter(name, nn.Parameter(on_meta.pop(name), requires_grad=False))
        if not on_meta:
            continue
        found = []
        for fill in (0, 1):  # from memory of two contents it makes the same
            for name, buffer in on_meta.items():
                module._buffers[name] = torch.full(buffer.shape, fill, dtype=buffer.dtype, device="cpu")
            with torch.no_grad():
                for one in (module, *model.children()):  # a body may fill what its blocks hold
                    model._init_weights(one)
            found.append({name: module.get_buffer(name).clone() for name in on_meta})
        module._buffers.update(found[0])
        lost += [f"{path}.{name}" for name in on_meta if not torch.equal(found[0][name], found[1][name])]
    return lost


def longest_sequence(config: Any, body: nn.Module) -> tuple[int, str] | None:
    """Find the most tokens of a sequence that the body is right for, and what limits them; None if nothing does.

    The rotations of `longrope` change, for a whole batch, with its first longer document. A table with a row for each
    position has no row for a later one.
    """
    known: Any = getattr(config, "max_position_embeddings", None)
    of_tokens = body.get_input_embeddings()  # type: ignore[operator]
    for path, module in body.named_modules():
        is_table = isinstance(module, nn.Embedding) and module is not of_tokens
        if known and is_table and known <= module.num_embeddings <= known + PADDING_ROWS:
            return int(known), f"its {path} has no row for a later position"
    for table in _rope_tables(config):
        if table.get("rope_type") == "longrope":
            own = table.get("original_max_position_embeddings")
            limit = own or getattr(config, "original_max_position_embeddings", None) or known
            reason = "its rotations (longrope) change for a whole batch with its first longer document"
            return int(limit), reason
    return None


def _rope_tables(config: Any) -> list[dict[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(table for table in rope.values() if isinstance(table, dict))]


@dataclass(frozen=True)
class Anatomy:
    """A model and how it is cut.

    - `body` and `body_name`: the body, and its name in the model.
    - `shell`: the body without its layers, which all layers share.
    - `before`: the body's modules with parameters that run before the first block.
    - `after`: the modules that run after the last block, one after the other.
    - `output_class`: what the body returns.
    - `projection`: the linear layer whose output is the logits, or None.
    - `alone`: for each block, whether documents have to run through it one by one.
    """

    model: nn.Module
    body: nn.Module
    body_name: str
    shell: Shell
    before: tuple[str, ...]
    after: tuple[str, ...]
    output_class: type
    projection: str | None
    alone: tuple[bool, ...]


def take_apart(config: Any) -> Anatomy:
    """Build the model of `config` and find out how it is cut. Raises `ModelConfigError` if it cannot be."""
    try:
        return _anatomy(_build_on_meta(config), config)
    except Exception as error:  # code of any kind runs here, in a way that it was not written for
        reason = f"it cannot be built and run without its layers: {type(error).__name__}: {error}"
        if isinstance(error, ModelConfigError):
            reason = str(error)
        elif isinstance(error, DynamicOutputShapeException | DataDependentOutputException):
            reason = f"its code waits for values on the device ({error}), so its cost cannot be counted"
        raise refuse(config.model_type, reason) from error


def _find_blocks(model: Any) -> tuple[str, Any, str]:
    body_name = model.base_model_prefix if hasattr(model, model.base_model_prefix) else "model"
    body: Any = getattr(model, body_name, None)
    _check(isinstance(body, nn.Module), f"it has no body under the name {body_name!r}")
    # A list of rotations has buffers alone.
    lists = [
        name
        for name, child in body.named_children()
        if isinstance(child, nn.ModuleList) and _is_trained(child)
    ]
    found = ", ".join(lists) or "none"
    _check(len(lists) == 1, f"its body has {len(lists)} lists of blocks ({found}), not one")
    own = [name for name, _ in body.named_parameters(recurse=False)]
    _check(not own, "its body has parameters of its own beside its modules")
    for path, module in body.named_modules():
        _check(
            "Indexer" not in type(module).__name__,
            f"its {path} chooses tokens to attend to, in a way that does not know documents",
        )
        _check(not isinstance(module, nn.Dropout) or module.p == 0, f"its {path} {DRAWS}")
    return body_name, body, lists[0]


def _is_trained(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _anatomy(model: nn.Module, config: Any) -> Anatomy:
    body_name, body, blocks = _find_blocks(model)
    block_list = list(body.get_submodule(blocks).children())
    positions = torch.stack([torch.cat([torch.arange(size) for size in sizes]) for sizes in PROBE_LENGTHS])
    hidden = torch.ones((*positions.shape, config.hidden_size))
    # What the first block gets does not depend on what blocks return.
    entries = _num_entries(block_list[0], 0, *Shell(body, blocks, 0).first_call(hidden, positions))
    shell = Shell(body, blocks, entries)
    recorded = shell.record(hidden, positions)
    given, calls = recorded[0][0], [call for _, call in recorded]
    _check_arguments(calls, shell.calls(hidden * 2, positions))
    # What the body does before its blocks begins anew with each document.
    for row, sizes in enumerate(PROBE_LENGTHS):
        for start, size in zip((0, sizes[0]), sizes, strict=True):
            place = slice(row, row + 1), slice(start, start + size)
            single = shell.record(hidden[place], positions[place])[0][0]
            _check(torch.equal(single, given[place]), "its positions do not begin anew with each document")
    seen = {kind_of(block_list[0])}
    for index, (block, call) in enumerate(zip(block_list, calls, strict=True)):
        shared = [leaf for leaf in torch.utils._pytree.tree_leaves(call.kwargs) if isinstance(leaf, UserDict)]
        if kind_of(block) not in seen or shared:
            same = _num_entries(block, index, given, call) == entries
            _check(same, f"block {index} returns another structure than the others")
        _check(not any(shared), f"block {index} keeps what it computed for a later block")
        seen.add(kind_of(block))
    steps, output = shell.trace(hidden, positions)
    after = _chain(steps, output, [f"{blocks}.{index}" for index in range(len(block_list))])
    at = [index for index, step in enumerate(steps) if step.name.startswith(f"{blocks}.")]
    early = {step.name for step in steps[: at[0]]}
    trained = [name for name, child in body.named_children() if _is_trained(child)]
    between = {step.name for step in steps[at[0] : at[-1]]}
    _check(not between.intersection(trained), "its body calls modules with parameters between its blocks")
    alone = tuple(
        not keeps_documents_apart(block, call, positions)
        for block, call in zip(block_list, calls, strict=True)
    )
    body, places = recognise(body, block_list, shell, positions, hidden)
    return Anatomy(
        model,
        body,
        body_name,
        Shell(body, blocks, entries, places, longest_sequence(config, body)),
        before=tuple(name for name in trained if name != blocks and (name in early or name not in after)),
        after=after,
        output_class=type(output),
        projection=_projection(model, body_name, type(output), hidden.shape[-1]),
        alone=alone,
    )


def _check(fits: bool, reason: str) -> None:
    if not fits:
        raise ModelConfigError(reason)


def _check_arguments(calls: Sequence[BlockCall], others: Sequence[BlockCall]) -> None:
    """Check that blocks are called with tensors and plain values, which do not depend on hidden states."""

    def is_empty(value: Any) -> bool:
        return isinstance(value, dict) and not value  # by which blocks share what they computed

    for index, (call, other) in enumerate(zip(calls, others, strict=True)):
        (ours, structure), (theirs, their_structure) = (
            torch.utils._pytree.tree_flatten([*one.args, *one.kwargs.values()], is_empty)
            for one in (call, other)
        )
        for leaf in ours:
            # Some bodies always hand out a place for results, though most of their sizes share none.
            is_unused = isinstance(leaf, UserDict) and not leaf
            _check(
                is_unused or isinstance(leaf, Tensor | str | int | float | bool | type(None)),
                f"block {index} gets a {type(leaf).__name__}, by which blocks share what they computed",
            )
        same = structure == their_structure and all(
            torch.equal(one, two) if isinstance(one, Tensor) else one == two
            for one, two in zip(ours, theirs, strict=True)
        )
        _check(same, f"the arguments of block {index} depend on hidden states, not on positions alone")


def keeps_documents_apart(block: nn.Module, call: BlockCall, positions: Tensor) -> bool:
    """Check whether a block that is called like this on positions `[B, T]` never looks into another document.

    It has to get a mask that allows no such pair of tokens, and no part that mixes neighbours by other means.
    """
    mixes = any(isinstance(module, nn.Conv1d) for module in block.modules()) or any(
        name.rpartition(".")[2] in RECURRENT for name, _ in block.named_parameters()
    )
    legal = allowed_pairs((positions == 0).cumsum(1))
    masks = [one for one in call.tensors() if one.ndim == 4 and one.shape[-1] == one.shape[-2]]
    allowed = [mask if mask.dtype == torch.bool else mask > MASKED for mask in masks]
    return bool(
        not mixes and allowed and all(not (one & ~legal).any() and one.any(-1).all() for one in allowed)
    )


def _num_entries(block: nn.Module, index: int, hidden: Tensor, call: BlockCall) -> int:
    """Run a block without memory. Return the length of the tuple that it returns, 0 for a tensor."""
    block.train()
    try:
        with no_memory() as meter:
            result = call_without_memory(block, hidden.dtype, hidden, *call.args, **call.kwargs)
    finally:
        block.eval()
    _check(not meter.drawn, f"block {index} {DRAWS}")
    first = result[0] if isinstance(result, tuple) else result
    reason = f"block {index} returns no hidden state of the shape of its input, but a {type(result).__name__}"
    _check(isinstance(first, Tensor) and first.shape == hidden.shape, reason)
    return len(result) if isinstance(result, tuple) else 0


def _chain(steps: Sequence[Step], output: Any, blocks: Sequence[str]) -> tuple[str, ...]:
    """List the modules between the last block and the body's output.

    From the first block on the body has to be a chain, in which each module gets the result of the one before it.
    """
    wanted: Any = getattr(output, "last_hidden_state", None)
    _check(isinstance(wanted, Tensor), "its body returns no last_hidden_state")
    chain: list[str] = []
    # Backwards from the output: each module's output is the next one's input.
    for step in reversed(steps):
        if isinstance(step.made, Tensor) and isinstance(step.given, Tensor) and _is_same(step.made, wanted):
            chain.insert(0, step.name)
            wanted = step.given
            if step.name == blocks[0]:
                break
    _check(
        chain[: len(blocks)] == list(blocks) and len(set(chain)) == len(chain),
        f"its body is no chain of its {len(blocks)} blocks and of modules that follow them",
    )
    return tuple(chain[len(blocks) :])


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.numel() == other.numel() and one.data_ptr() == other.data_ptr())


def _projection(model: Any, body_name: str, output_class: type, width: int) -> str | None:
    """Name the linear layer whose output is the logits as they are; None if there is none."""
    last = model.get_output_embeddings()
    name = next((name for name, child in model.named_children() if child is last), None)
    if type(last) is not nn.Linear or last.bias is not None:
        return None
    calls: list[tuple[Tensor, Tensor]] = []
    handle = last.register_forward_hook(lambda _, args, result: calls.append((args[0], result)))
    outer = with_modules(model, {body_name: StandInBody(model.get_submodule(body_name), output_class)})
    with no_memory():
        states = torch.empty((1, 3, width))
        logits = call_without_memory(outer, states.dtype, inputs_embeds=states, use_cache=False).logits
    handle.remove()
    [(given, made)] = calls
    # The model may scale what it projects, or cap what it gets.
    is_as_it_is = given.untyped_storage()._cdata == states.untyped_storage()._cdata
    return name if logits is made and is_as_it_is and given.shape == states.shape else None
