"""Parts of borrowed blocks that run by our operations: no masks, the bits of kept results, their counts, and who is refused."""

import pytest
import torch

from tests.support import plain_flash
from tests.support.kept_blocks import CHOICES, DENSE, differing_choices, kept_by, kernels, with_dropout
from tests.support.toy_decoders import toy_config
from tests.support.transformers_loop import compare, make_pair
from torchround.engine.board import Board
from torchround.engine.compiled import LayerCompiler
from torchround.engine.worker.slots import Packing
from torchround.keeping import recording, replaying
from torchround.layer import KEEPABLE, MicroBatch
from torchround.models import FAMILIES
from torchround.models.borrowed import recognised_parts
from torchround.models.borrowed.shell import MaskPlace
from torchround.models.common import attention
from torchround.models.common.lora import LoraShape, add_adapters

FAMILY = FAMILIES["transformers"]
F32, BF16 = torch.float32, torch.bfloat16
# Windows and norms around heads; values narrower than keys; gated queries beside linear attention; fused projections.
LATENT = {"q_lora_rank": 16, "v_head_dim": 4}
RECOGNISED = {
    "llama": {},
    "mistral": {},
    "gemma3_text": {"query_pre_attn_scalar": 24},
    "glm4": {},
    "glm4_moe": {},
    "deepseek_v3": LATENT,
    "qwen3_next": {},
    "qwen3_5_text": {},
    "phi3": {},
}
# Four have a window, a gate or experts that another has too.
MORE = ("mistral", "glm4", "glm4_moe", "qwen3_5_text")
EACH = [pytest.param(kind, marks=pytest.mark.releases) if kind in MORE else kind for kind in RECOGNISED]
TOKENS = 24


def build(model_type, targets=(), dropout=0.0, **settings):
    config = FAMILY.config_from_hf(toy_config(model_type, **RECOGNISED.get(model_type, {}) | settings).to_dict())
    model = FAMILY.build(config)
    if targets:
        add_adapters(model, FAMILY.hf_names(config), LoraShape(4, 8.0, dropout, targets))
    return model


def bound(model, tools, dtype):
    """Give the model random weights, and fp32 gradients as the engine does."""
    trained = {name for name, one in tools.stored_parameters(model).items() if one.requires_grad}
    generator = torch.Generator().manual_seed(3)
    for name, parameter in tools.stored_parameters(tools.materialise(model, dtype)).items():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).mul_(0.1))
        parameter.requires_grad_(name in trained)
        if name in trained:
            parameter.grad_dtype, parameter.grad = F32, torch.zeros(parameter.shape)
    return model


@pytest.fixture(scope="module", autouse=True)
def _first_cuts(tools):
    """Forget the models and warnings of earlier files: the first test sees what is said when a model is cut."""
    tools.CUT_MODELS.clear()
    recognised_parts._warn_once.cache_clear()


@pytest.fixture
def batch(tools):
    return with_dropout(tools.micro_batch([[9, 15], [TOKENS]], 50))


def an_input(dtype):
    return torch.randn(2, TOKENS, 32, generator=torch.Generator().manual_seed(4)).to(dtype)


@pytest.mark.parametrize("model_type", EACH)
def test_a_recognised_model_makes_no_masks_and_says_nothing(model_type, batch, caplog):
    blocks = build(model_type).layers[1:-1]
    calls = blocks[0].shell.calls(an_input(F32), batch.positions)
    places = [leaf for call in calls for leaf in call.leaves() if isinstance(leaf, MaskPlace)]
    assert len(places) == sum(not block.alone for block in blocks) > 0
    assert [one for one in caplog.record_tuples if one[0].startswith("torchround")] == []
    assert not any(one.shape[-1] == one.shape[-2] == TOKENS for call in calls for one in call.tensors() if one.ndim > 2)
    windows = {place.window for place in places}
    assert windows == {"gemma3_text": {9, None}, "mistral": {9}, "phi3": {9}}.get(model_type, {None})


CASES = [
    *(("llama", DENSE, F32), ("deepseek_v3", (), BF16), ("qwen3_next", (), F32), ("phi3", (), BF16)),
    pytest.param("gemma3_text", (), BF16, marks=pytest.mark.releases),
    pytest.param("glm4_moe", ("q_proj", "down_proj"), F32, marks=pytest.mark.releases),
]


@pytest.mark.parametrize(("model_type", "targets", "dtype"), CASES)
def test_any_choice_of_parts_gives_the_bits_of_a_full_recomputation(model_type, targets, dtype, batch, tools):
    model = bound(build(model_type, targets, 0.1), tools, dtype)
    block = model.layers[-2]
    assert differing_choices(block, an_input(dtype), batch, CHOICES) == []


@pytest.mark.parametrize(("model_type", "targets", "dtype"), CASES)
def test_each_part_keeps_the_bytes_that_are_counted_and_no_kernel_runs_again(model_type, targets, dtype, batch, tools):
    model = build(model_type, targets, 0.1)
    work = model.layers[-2].work(2, TOKENS, dtype.itemsize, "cpu")
    assert sorted(part.name for part in work.keepable) == sorted(KEEPABLE)
    assert 0 < sum(part.activation_bytes for part in work.keepable) <= work.activation_bytes
    block = bound(model, tools, dtype).layers[-2]
    for part in work.keepable:
        kept = kept_by(block, an_input(dtype), batch, [part.name])
        assert part.nbytes == Packing.of(tuple(kept)).nbytes, part.name
    tensors = kept_by(block, an_input(dtype), batch, KEEPABLE)
    with kernels() as seen, replaying(KEEPABLE, tensors):
        block(an_input(dtype), batch)
    # Routers, and the weight of a shared expert.
    assert len(seen) <= 2 * any("gate" in name for name, _ in block.named_modules())


def test_kept_results_of_a_llama_save_what_those_of_our_own_save():
    """At equal bytes the same FLOPs: the same parts of the same sizes."""
    content = toy_config("llama", hidden_size=64, head_dim=16).to_dict()
    works = []
    for name in ("transformers", "llama3"):
        family = FAMILIES[name]
        block = family.build(family.config_from_hf(content)).layers[1]
        works.append({kind: block.work(2, 256, 2, kind) for kind in ("cpu", "cuda")})
    for kind in ("cpu", "cuda"):
        borrowed, own = (work[kind].keepable for work in works)
        assert [(part.name, part.nbytes, part.flops) for part in borrowed] == [
            (part.name, part.nbytes, part.flops) for part in own
        ], kind
        assert works[0][kind].forward_flops == works[1][kind].forward_flops


def test_linear_attention_keeps_nothing():
    blocks = build("qwen3_next").layers[1:3]
    assert [bool(block.work(1, 1, 4).keepable) for block in blocks] == [False, True]


@pytest.mark.parametrize(("window", "channels", "scale"), [(None, 4, 0.3), (3, 8, None), (4, 6, 0.5)])
def test_attention_by_offsets_scales_and_takes_narrow_values_as_that_under_a_mask_does(
    window, channels, scale, monkeypatch
):
    plain_flash.install(monkeypatch)
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, TOKENS, 4, 8), (2, TOKENS, 2, 8), (2, TOKENS, 2, channels))
    heads = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    ids = torch.arange(TOKENS).expand(2, -1) // 9
    results = []
    for kernel in (attention.AttentionKernel.MASK, attention.AttentionKernel.OFFSETS):
        monkeypatch.setattr(attention, "choose_kernel", lambda *_, kernel=kernel: kernel)
        batch = MicroBatch(ids, ids, ids, ids, max_documents=3)
        mixed = attention.attend(*heads, batch, window, None, scale)
        results.append([mixed, *torch.autograd.grad(mixed.square().sum(), heads)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)  # sums of up to 24 terms in another order


@pytest.mark.usefixtures("cut_anew")
@pytest.mark.parametrize(
    ("part", "function", "model_type"), [("attention", "attend", "mistral"), ("experts", "combine", "qwen3_moe")]
)
def test_a_part_that_computes_something_else_stays_with_transformers_which_a_warning_says(
    part, function, model_type, monkeypatch, caplog, tools
):
    right = getattr(recognised_parts, function)
    recognised_parts._warn_once.cache_clear()
    with monkeypatch.context() as wrong:
        wrong.setattr(recognised_parts, function, lambda *arguments: 1.01 * right(*arguments))
        pair = make_pair(tools, model_type)
        build(model_type)
    [message] = caplog.messages
    assert message.startswith(f"{part} of model_type {model_type!r}") and "computes something else" in message
    monkeypatch.setattr(recognised_parts, function, None)  # nothing calls it
    compare(pair)


@pytest.mark.usefixtures("cut_anew")
@pytest.mark.parametrize("model_type", ["gemma2", "llama4_text", "gpt_neox"])
def test_rules_that_attention_of_ours_lacks_are_left_to_transformers(model_type, caplog, tools):
    recognised_parts._warn_once.cache_clear()
    pair = make_pair(tools, model_type)
    assert model_type == "gpt_neox" or f"attention of model_type {model_type!r}" in caplog.text
    compare(pair)


@pytest.mark.compiles
@pytest.mark.parametrize("model_type", ["gemma3_text", "deepseek_v3"])
def test_compiled_blocks_are_as_many_kinds_as_differ_and_have_the_bits_of_plain_ones(model_type, batch, tools):
    """Windows, and experts behind the first block; Inductor alone would round in other ways."""
    model = bound(build(model_type, ("o_proj",), 0.1), tools, F32)
    compiler = LayerCompiler(model, "aot_eager")
    kinds = {"gemma3_text": [["block.0", "block.2"], ["block.1", "block.3"]]}
    others = [["block.0"], ["block.1", "block.2", "block.3"]]
    assert [kind.layer_names for kind in compiler.kinds[1:-1]] == kinds.get(model_type, others)
    block = model.layers[-2]
    compiled, found = compiler.compiled(len(model.layers) - 2, block, Board()), []
    for layer in (block, compiled):
        block.zero_grad()
        hidden = an_input(F32).requires_grad_()
        mixed = layer(hidden, batch)
        mixed.square().sum().backward()
        found.append([mixed, hidden.grad, *(one.grad for one in block.parameters() if one.requires_grad)])
    assert compiled is not block and not compiler.kinds[-2]._failed
    assert all(map(torch.equal, *found))
    with torch.no_grad(), recording(KEEPABLE) as record:
        compiled(an_input(F32), batch)
    with replaying(KEEPABLE, [one.clone() for one in record.tensors]):
        assert torch.equal(compiled(an_input(F32).requires_grad_(), batch), found[0][0])
    assert record.tensors
