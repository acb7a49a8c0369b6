"""A decoder of `transformers`, built on `meta` from its config and taken apart: body, blocks, what follows them.

`transformers` is an extra: it is imported only when such a model is built, by the functions of this file.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchround.models.borrowed.shell import refuse
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
