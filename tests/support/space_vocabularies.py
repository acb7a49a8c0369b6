"""Small vocabularies of SentencePiece's kind, trained on the texts of `vocabularies.py` and put together as releases are."""

import json
from functools import cache

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.support.vocabularies import real_text

SPACE = "▁"
REPLACE = normalizers.Replace(" ", SPACE)
PREPEND = normalizers.Sequence([normalizers.Prepend(SPACE), REPLACE])
# The chat templates of these releases, in short.
GEMMA_CHAT = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PHI_CHAT = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
MISTRAL_CHAT = (  # it takes no notice of add_generation_prompt
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
# Name: normalizer, pre-tokenizer, model, special tokens besides <unk>, bos and eos, chat template.
KINDS = {
    "gemma": (
        *(REPLACE, pre_tokenizers.Split(" ", "merged_with_previous"), models.BPE),
        *(("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), GEMMA_CHAT),
    ),
    "llama2": (PREPEND, None, models.BPE, ("<s>", "</s>"), None),
    "phi3": (PREPEND, None, models.BPE, ("<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"), PHI_CHAT),
    "mistral": (
        *(None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False), models.BPE),
        *(("<s>", "</s>", "[INST]", "[/INST]"), MISTRAL_CHAT),
    ),
    "unigram": (
        *(normalizers.NFKC(), pre_tokenizers.Metaspace(prepend_scheme="always"), models.Unigram),
        *(("<s>", "</s>", "[INST]", "[/INST]"), MISTRAL_CHAT),
    ),
}


@cache
def _trained(model):
    """Return the pieces of a vocabulary without any special token: for BPE with its merges, for Unigram with scores."""
    tokenizer = tokenizers.Tokenizer(model())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    kinds = {models.BPE: trainers.BpeTrainer, models.Unigram: trainers.UnigramTrainer}
    text = [part[:20_000] for part in real_text()]  # training on more of it takes Unigram seconds
    tokenizer.train_from_iterator(text, kinds[model](vocab_size=1500, show_progress=False))
    return json.loads(tokenizer.to_str())["model"]


@cache
def space_tokenizer(kind):
    normalizer, pre_tokenizer, model, (bos, eos, *others), _ = KINDS[kind]
    found = _trained(model)
    names = ["<unk>", bos, eos]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    if model is models.BPE:
        pieces = [piece for piece in found["vocab"] if piece not in names]
        vocab = {piece: number for number, piece in enumerate([*names, *bytes_, *pieces])}
        merges = [tuple(merge) for merge in found["merges"]]
        built = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    else:  # SentencePiece's files give special tokens the score 0: better than any text
        pieces = [(piece, score) for piece, score in found["vocab"] if piece not in names]
        built = models.Unigram([*((name, 0.0) for name in names), *pieces], 0, False)
    tokenizer = tokenizers.Tokenizer(built)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * (kind != "gemma"))
    # Phi-3's own take the white space behind them.
    strips = kind == "phi3"
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True, rstrip=strips) for name in others])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer


def write_kind(folder, kind, **settings):
    folder.mkdir(parents=True, exist_ok=True)
    _, _, _, (bos, eos, *_), template = KINDS[kind]
    space_tokenizer(kind).save(str(folder / "tokenizer.json"))
    names = {"bos_token": bos, "eos_token": eos, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, **settings}))
    return folder
