"""Real weights for a model built on meta, random micro-batches, one pass, and the tensors of a model of `transformers`."""

import copy
import json
import tempfile

import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.flop_counter import flop_registry

from torchround.accelerators import kind_of
from torchround.layer import IGNORED_LABEL, MicroBatch, most_documents
from torchround.models.borrowed import borrowed_layers, shell
from torchround.models.borrowed.borrowed_family import BorrowedFamily
from torchround.models.borrowed.counted_work import count_layer

# Versions before 2.15 leave out the attention kernel of the CPU.
COUNTS_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu in flop_registry


CUT_MODELS = {}


def cut_once(family, config, cut=BorrowedFamily.cut):
    """Cut a borrowed model once in this process by its own `cut`, and copy it, which takes a fortieth of the time."""
    key = json.dumps(dict(config.content))
    if key not in CUT_MODELS:
        CUT_MODELS[key] = cut(family, config)
    made = copy.deepcopy(CUT_MODELS[key])
    family._latest = config, made.names
    return made


def counted_once(layer, *sizes, counted={}, **options):  # noqa: B006  (kept on purpose)
    """Count a borrowed layer's work, at most once for layers of one kind and config: runs of one toy ask again and again."""
    config = layer.initialiser.__self__.config.to_dict()  # an export has tokens of its own
    config = json.dumps({key: value for key, value in config.items() if not key.endswith("token_id")}, default=str)
    key = type(layer), config, shell.kind_of(layer.core), kind_of("meta"), sizes, *options.items()
    if key not in counted:
        counted[key] = count_layer(layer, *sizes, **options)
    return counted[key]


def know_borrowed_models(patch):
    """Cut and count each borrowed model once in this process, whatever test asks.

    A model is known by its config alone. A test that changes how models are cut uses the fixture `cut_anew`.
    """
    patch.setattr(BorrowedFamily, "cut", cut_once)
    patch.setattr(borrowed_layers, "count_layer", counted_once)


def measure_peak_bytes(run):
    """Without oneDNN, whose bfloat16 products take scratch memory on some processors (3 % of a small block on AMD Zen 5)."""
    with torch.backends.mkldnn.flags(enabled=False):
        return peak_of_tensors(run)


def peak_of_tensors(run):
    """Return the most bytes of tensors on the CPU alive at once during `run`, by the profiler's events."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    assert peak > 0, "the profiler saw no tensor"
    return peak


def materialise(model, dtype=torch.float32, seed=0, reverse=False):
    real = {}
    for layer in model.layers:
        for module in layer.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is None:
                    continue
                if id(parameter) not in real:
                    values = torch.full(parameter.shape, torch.nan, dtype=dtype)
                    real[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
                module._parameters[name] = real[id(parameter)]
    order = list(enumerate(model.layers))
    for index, layer in reversed(order) if reverse else order:
        layer.init_weights(torch.Generator().manual_seed(seed * 1000 + index))
    return model


def stored_parameters(model):
    """Map `<layer>.<parameter>` to the parameter; a tied one appears under its first layer only."""
    found = {}
    seen = set()
    for layer_name, layer in zip(model.names, model.layers, strict=True):
        for name, parameter in layer.named_parameters():
            if id(parameter) not in seen:
                found[f"{layer_name}.{name}"] = parameter
                seen.add(id(parameter))
    return found


def micro_batch(documents, vocab_size, seed=0):
    """Make random tokens. `documents[b]` are the document lengths of sequence b; each row has the same sum."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for lengths in documents:
        parts = []
        for index, length in enumerate(lengths):
            tokens = torch.randint(0, vocab_size, (length,), generator=generator)
            labels = torch.cat((tokens[1:], torch.tensor([IGNORED_LABEL])))
            parts.append((tokens, labels, torch.arange(length), torch.full((length,), index)))
        rows.append([torch.cat(column) for column in zip(*parts, strict=True)])
    columns = [torch.stack(column) for column in zip(*rows, strict=True)]
    return MicroBatch(*columns, max_documents=most_documents(columns[3]))


def load_hf_weights(model, names, theirs):
    """Copy the weights of a transformers model by our name mapping, in the shapes in which it writes files.

    A weight that its files hold in another way may keep the name that it has in the model.
    """
    released = {**theirs.state_dict(), **released_tensors(theirs)}
    with torch.no_grad():
        for name, parameter in stored_parameters(model).items():
            parameter.copy_(gather(names[name], released))


def released_tensors(theirs):
    """Return the tensors that transformers writes for this model: experts one by one, without a tied head."""
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return load_file(f"{folder}/model.safetensors")


def gather(hf_names, tensors):
    if isinstance(hf_names, str):
        return tensors[hf_names]
    return torch.stack(
        [tensors[name] if isinstance(name, str) else torch.cat([tensors[part] for part in name]) for name in hf_names]
    )


def released_gradients(theirs):
    """Writes a copy whose weights are the gradients. A weight without a gradient has zeros."""
    holder = type(theirs)._from_config(theirs.config, dtype=torch.float32)
    gradients = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, parameter in holder.named_parameters():
            gradient = gradients[name].grad
            parameter.zero_() if gradient is None else parameter.copy_(gradient)
    return released_tensors(holder)


def hidden_before_head(model, batch):
    hidden = None
    for layer in model.layers[:-1]:
        hidden = layer(hidden, batch)
    return hidden


def all_logits(model, batch):
    hidden = hidden_before_head(model, batch)
    return model.layers[-1].logits(hidden if isinstance(hidden, torch.Tensor) else hidden[0])


def loss_sum(model, batch):
    return model.layers[-1](hidden_before_head(model, batch), batch)
