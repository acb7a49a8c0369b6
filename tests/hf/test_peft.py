"""Adapters against the package peft: its model has our logits and gradients, and either reads what the other wrote.

Its Qwen3-MoE has gate and up fused (transformers 5): on loading, peft makes one adapter of twice the rank of the two,
so their gradients are its gradients' parts.
"""

import copy
import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch.nn import functional as F

from tests.support.released_run import saved_config
from tests.support.rounding import assert_close_in_sums
from torchround.checkpoint import Checkpointer
from torchround.commands import export_hf
from torchround.commands.configured_model import open_weights, saved_adapters
from torchround.config import LoraTable
from torchround.engine.store.host_store import HostStore
from torchround.hf import HFError, read_adapters
from torchround.models import LoraShape, adapter_names, add_adapters

RANK, ALPHA = 3, 12.0
ATTENTION, MLP = ("q_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
STACKED = ("gate_up_proj", "down_proj")
LAYERS = {r"layers\.0\..*": 5, "model.layers.1.self_attn.q_proj": 2}
PEFT = {"rslora": "use_rslora", "dora": "use_dora"}
CASES = [
    ("llama3", ATTENTION + MLP, {"rslora": True, "rank_pattern": LAYERS, "alpha_pattern": {"up_proj": 5.0}}),
    ("qwen3", ATTENTION + MLP, {"dora": True, "rank_pattern": LAYERS}),
    ("llama3 tied", ("k_proj",), {}),
    ("qwen3 moe", ATTENTION + MLP, {}),
    ("gpt_oss", (*ATTENTION, *STACKED), {"rslora": True, "rank_pattern": {"experts.down_proj": 5}}),
    ("borrowed phi3", ("qkv_proj", "gate_up_proj"), {"dora": True}),
    ("borrowed qwen3_moe", STACKED[1:], {"rslora": True, "alpha_pattern": {"layers.1.mlp.experts.down_proj": 7.0}}),
    ("borrowed mixtral", (*STACKED, "q_proj"), {"rank_pattern": {"experts.gate_up_proj": 2}}),
    ("borrowed gpt_oss", (*STACKED, "q_proj"), {}),  # inputs first, biases
]
BY_NIGHT = [
    ("gpt_oss", STACKED[1:]),
    ("borrowed qwen2", ATTENTION + MLP),
    ("borrowed gemma2", ("v_proj", "up_proj")),
    ("borrowed qwen3_moe", ATTENTION + STACKED),
    ("borrowed deepseek_v3", ("o_proj", "experts.gate_up_proj", "experts.down_proj")),
]
CASES += [pytest.param(*case, {}, marks=pytest.mark.nightly) for case in BY_NIGHT]
EACH_CASE = pytest.mark.parametrize(("kind", "targets", "settings"), CASES)


def opened(releases, kind):
    """Return a release whose model `theirs` is a copy in fp32, because peft changes the model that it is given."""
    release = releases(kind)
    theirs = type(release.theirs).from_pretrained(release.folder, dtype=torch.float32).eval()
    return SimpleNamespace(**{**vars(release), "theirs": theirs, "kind": kind})


def adapted(release, targets, settings, read=None):
    model, names = release.family.build(release.config), release.family.module_names(release.config)
    add_adapters(model, names, LoraShape(RANK, ALPHA, 0.0, targets, **settings))
    shapes = model.stored_shapes()
    weights = open_weights(release.folder, release.family, release.config, shapes)
    if read is not None:
        weights.adapters = read(model, names, weights)
    store = HostStore(model)
    store.initialize(model, 0, weights.load)
    if read is None:
        generator = torch.Generator().manual_seed(2)
        drawn = {
            name: torch.randn(value.shape, generator=generator) * 0.1
            for name, value in store.weights().items()
            if name.endswith(("lora_b", "lora_magnitude"))
        }
        store.write_weights(drawn)
    return SimpleNamespace(model=model, store=store, names=names)


def filled(ours, tools):
    model = tools.materialise(copy.deepcopy(ours.model))
    for name, parameter in tools.stored_parameters(model).items():
        parameter.data.copy_(ours.store.weights()[name])
        parameter.requires_grad_("lora_" in name)
    return model


def exported(ours, release, targets, settings, folder):
    run = saved_config(
        model={"family": release.family.name, "hf_path": str(release.folder)},
        training={"dtype": "float32"},
        lora={"rank": RANK, "alpha": ALPHA, "dropout": 0.1, "targets": targets, **settings},
    )
    checkpoint = Checkpointer(folder / "checkpoints").save(1, ours.store.named_views(), {"config": run})
    options = [f"--model.hf_path={release.folder}", "--adapters"]
    assert export_hf.main([str(checkpoint), str(folder / "adapters"), *options]) == 0
    return checkpoint, folder / "adapters"


def loss_of(logits, batch):
    return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")


def assert_same_logits(actual, expected):
    """Compare logits: peft adds up in another order, along the same thousand terms on the path of a logit."""
    assert_close_in_sums(actual, expected, 1000)


@EACH_CASE
def test_peft_loads_our_adapters_and_has_our_logits_gradients_and_merged_export(
    releases, kind, targets, settings, tmp_path, tools
):
    release = opened(releases, kind)
    ours = adapted(release, targets, settings)
    model, batch = filled(ours, tools), tools.micro_batch([[21]], 61)
    checkpoint, folder = exported(ours, release, targets, settings, tmp_path)
    theirs = PeftModel.from_pretrained(release.theirs, folder, is_trainable=True).eval()
    logits = theirs(batch.tokens).logits
    assert_same_logits(tools.all_logits(model, batch), logits)
    tools.loss_sum(model, batch).backward()
    loss_of(logits, batch).backward()
    expected = {name.replace(".default.", "."): p.grad for name, p in theirs.named_parameters() if "lora_" in name}
    assert not [name for name, p in theirs.named_parameters() if "lora_" not in name and p.grad is not None]
    parameters, compared = tools.stored_parameters(model), set()
    for name, tensors in adapter_names(ours.model, ours.names).items():
        theirs_name, gradient = peft_gradient(name, tensors, expected)
        error = (parameters[name].grad - gradient).norm() / gradient.norm()
        assert error < 1e-4, f"{name}: relative error {error}"
        compared.add(theirs_name)
    assert compared == expected.keys()
    merged = tmp_path / "merged"
    assert export_hf.main([str(checkpoint), str(merged), f"--model.hf_path={release.folder}", "--dtype=float32"]) == 0
    expected = theirs.merge_and_unload().state_dict()
    loaded = type(release.theirs).from_pretrained(merged, dtype=torch.float32).state_dict()
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_close_in_sums(loaded[name], tensor, 16, name)  # a sum over the rank, and one addition


def peft_gradient(name, tensors, gradients):
    if isinstance(tensors, str):
        key = tensors if tensors in gradients else f"{tensors}.weight"  # of a magnitude
        return key, gradients[key]
    part = name.rpartition(".")[2].split("_")[0]  # of Qwen3's experts: gate, up or down
    wrapper = "experts." if part == "down" else "experts.base_layer."
    key = f"{tensors[0].partition('experts.')[0]}{wrapper}lora_{name[-1].upper()}.weight"
    gradient, num_experts = gradients[key], len(tensors)
    if name.endswith("a"):
        stacked = gradient.unflatten(0, (num_experts, -1))  # [E, r or 2 r, A]
        return key, stacked if part == "down" else stacked.chunk(2, dim=1)[part == "up"]
    stacked = gradient.unflatten(1, (-1, num_experts)).permute(2, 0, 1)  # [E, Z, r]
    if part == "down":
        return key, stacked
    return key, stacked.chunk(2, dim=1)[part == "up"].chunk(2, dim=2)[part == "up"]


@EACH_CASE
def test_we_read_what_peft_wrote_and_have_its_logits(releases, kind, targets, settings, tmp_path, tools):
    release = opened(releases, kind)
    if release.kind == "qwen3 moe":
        targets = ATTENTION  # peft writes adapters on experts fused, see below
    has_stacks = hasattr(release.theirs.model.layers[-1].mlp, "experts")
    linear = [target for target in targets if not (has_stacks and target.endswith(STACKED))]
    stacked = [f"mlp.experts.{target.split('.')[-1]}" for target in targets if target not in linear]
    renamed = {PEFT.get(key, key): value for key, value in settings.items()}
    config = LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=linear, target_parameters=stacked, init_lora_weights=False, **renamed
    )
    torch.manual_seed(0)
    theirs = get_peft_model(release.theirs, config).eval()
    with torch.no_grad():  # adapters as small beside the weights as trained ones are, or logits lose digits
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.mul_(0.1)
    theirs.save_pretrained(tmp_path / "adapters")
    table = LoraTable(rank=RANK, alpha=ALPHA, targets=targets, path=str(tmp_path / "adapters"), **settings)
    ours = adapted(release, targets, settings, lambda *parts: saved_adapters(table, *parts, torch.bfloat16))
    batch = tools.micro_batch([[21]], 61)
    with torch.no_grad():
        expected = theirs(batch.tokens).logits
        assert_same_logits(tools.all_logits(filled(ours, tools), batch), expected)


PREFIX = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
NAMES = {"a": f"{PREFIX}A.weight", "b": f"{PREFIX}B.weight"}
SHAPES = {"a": (2, 24), "b": (24, 2)}
PLAIN = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "use_rslora": False}


def read(folder, **setting):
    (folder / "adapter_config.json").write_text(json.dumps(PLAIN | setting))
    save_file({NAMES[key]: torch.randn(SHAPES[key]) for key in NAMES}, folder / "adapter_model.safetensors")
    return read_adapters(LoraTable(path=str(folder), rank=2, alpha=4.0), NAMES, SHAPES)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa': such adapters belong to a base that was"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
        ({"init_lora_weights": {"loftq": 4}}, "init_lora_weights is"),
        ({"use_dora": True}, "use_dora is True instead of False"),
        ({"use_rslora": True}, "use_rslora is True instead of False"),
        ({"rank_pattern": {"q_proj": 3}}, r"rank_pattern is {'q_proj': 3} instead of {}"),
        ({"alpha_pattern": {"q_proj": 3}}, r"alpha_pattern is {'q_proj': 3} instead of {}"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens is not supported"),
        ({"kasa_config": {"beta": 1.0}}, "kasa_config is not supported"),
        ({"velora_config": {"num_groups": 4}}, "velora_config is not supported"),
    ],
)
def test_adapters_that_compute_something_else_are_never_taken_as_plain_ones(setting, message, tmp_path):
    with pytest.raises(HFError, match=message):
        read(tmp_path, **setting)


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "orthogonal", None])
def test_adapters_that_began_in_a_way_that_leaves_the_base_alone_are_read(start, tmp_path):
    weights, views = read(tmp_path, init_lora_weights=start), {key: torch.zeros(SHAPES[key]) for key in NAMES}
    weights.load({name: nullcontext(view) for name, view in views.items()})
    assert all(view.any() for view in views.values())
