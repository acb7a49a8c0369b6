"""A page of the decoders of the installed `transformers`: which fit, and why others do not.

    python -m tests.support.list_of_models            print the page
    python -m tests.support.list_of_models --write    write it
    python -m tests.support.list_of_models qwen3 ...  print the rows of these types

A type fits if its toy model builds and then computes the logits, the loss and every gradient of the reference for packed
documents. A type that builds and computes anything else is an error here, and never a row of the page.
"""

import sys
import warnings
from pathlib import Path

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.support import model_tools
from tests.support.toy_decoders import MOST_PARAMETERS, causal_types, toy_config, toy_decoder
from tests.support.transformers_loop import compare, pair_of
from torchround.models import FAMILIES, ModelConfigError

PAGE = Path(__file__).parents[2] / "docs" / "models_of_transformers.md"
HEAD = """# Decoders of transformers

Reference: the types of causal language models, and of models that hold one, in `transformers` {version} that `[model] family = "transformers"` runs,
and why it refuses the others. `python -m tests.support.list_of_models --write` writes this page. Do not edit it.

Each type that fits was built at toy size with large random weights. Its logits, its loss and all its gradients
equal those of `transformers` in fp32, with packed documents against each document alone. A test compares every row with
this version of `transformers`; another version may have another list. Of a type that reads more than text, the text model
is trained ([models.md](models.md)); of some of these types there is no toy model, and they are not listed. A type that a family of torchround's own reads
runs faster there ([models.md](models.md)).

The list is about layers, and not about tokenizers: [data.md](data.md#tokenizer) says which are read. A fitting model with
another one is trained on token ids that its own tokenizer made (`content = "tokens"`), or with another tokenizer.
"""


def row(model_type, reason):
    return f"| `{model_type}` | {reason} |" if reason else f"`{model_type}`"


def look_at(model_type):
    family = FAMILIES["transformers"]
    config, is_toy = _config(model_type)
    if config is None:
        return "its config has no usual sizes"
    try:
        family.build(family.config_from_hf(config.to_dict()))
    except ModelConfigError as error:
        return _reason(str(error), model_type)
    assert is_toy, f"{model_type} fits, but has no toy size to compare it at"
    theirs = toy_decoder(config)
    assert sum(parameter.numel() for parameter in theirs.parameters()) <= MOST_PARAMETERS, "the toy size is large"
    try:
        pair = pair_of(model_tools, theirs)
    except AttributeError as error:  # raised by the initialiser of transformers
        return f"transformers cannot draw its first weights: {error}"
    compare(pair)
    return None


def page(reasons):
    fits = [row(name, None) for name, reason in reasons.items() if reason is None]
    refused = [row(name, reason) for name, reason in reasons.items() if reason is not None]
    parts = [
        HEAD.format(version=transformers.__version__),
        f"## Types that fit ({len(fits)})\n\n" + ", ".join(fits) + "\n",
        f"## Types that are refused ({len(refused)})\n\n| type | reason |\n|---|---|\n" + "\n".join(refused) + "\n",
    ]
    return "\n".join(parts)


def _config(model_type):
    """Return the toy config; if its class refuses it, the default one, which still shows whether a type is refused."""
    for make, is_toy in ((toy_config, True), (lambda name: CONFIG_MAPPING[name](), False)):
        try:
            return make(model_type), is_toy
        except Exception:  # noqa: BLE001, S112  (each class has rules and errors of its own)
            continue
    return None, False


def _reason(message, model_type):
    message = message.removeprefix(f"model_type {model_type!r} of transformers ")
    message = message.split("does not fit torchround's layers: ")[-1]
    return " ".join(message.replace("|", "\\|").split())


def main(arguments):
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    types = [name for name in arguments if not name.startswith("--")]
    reasons, wrong = {}, []
    for model_type in types or causal_types():
        try:
            reasons[model_type] = look_at(model_type)
        except Exception as error:  # noqa: BLE001  (all wrong types are listed)
            wrong.append(f"{model_type}: {type(error).__name__}: {error}"[:300])
    if types:
        print("\n".join(f"{name}: {reason or 'fits'}" for name, reason in reasons.items()))
    elif not wrong and "--write" in arguments:
        PAGE.write_text(page(reasons), encoding="utf-8")
    else:
        print(page(reasons))
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
