"""Rendered conversations and what is learnt of them, against transformers' rendering and formats written by hand.

The templates in `templates/` write what the released ones of each family write, without their long tool manuals.
"""

from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.conversations import LOOP, PROMPT, SAME_DAY, TOOL, answer, call, plain_text, question, released
from tests.support.vocabularies import FAMILIES, train, write
from torchround.config import TokenizerTable
from torchround.data import TokenizerError, build_tokenizer
from torchround.data.document_types import Conversation, Document
from torchround.data.reading_order import DocumentPiece
from torchround.data.text.chat import ChatTemplate
from torchround.data.text.template_files import TemplateSource
from torchround.data.tokenising import tokenise

VOCABULARIES = {"llama3": "llama3", "gpt_oss": "gpt_oss"} | dict.fromkeys(
    ("qwen3", "qwen3_thinking", "qwen3_5", "qwen3_8"), "qwen3"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {}
    for name, family in VOCABULARIES.items():
        folder = found[name] = tmp_path_factory.mktemp(name)
        write(folder, family, train(family, 700))
        (folder / "chat_template.jinja").write_text(released(name))
    return found


@pytest.fixture(scope="module")
def ours(folders):
    return {name: build_tokenizer(TokenizerTable(path=str(folder))) for name, folder in folders.items()}


def learnt(tokenizer, messages, tools=(), loss_on="assistant"):
    content = ChatTemplate(tokenizer, loss_on)(Conversation(tuple(messages), tuple(tools)))
    piece = tokenise(tokenizer, DocumentPiece(content, 0, Document("here"), first=True, last=True))
    return piece.tokens.tolist(), piece.learn.tolist()


SYSTEM = {"role": "system", "content": "Be brief."}
CALL = [call("weather", city="Köln")]
PLAIN = [SYSTEM, question("What is 2 + 2?"), answer("It is 4."), question("And 3 + 3?"), answer("6.")]
RAIN = {"role": "tool", "content": "rain, 12 °C"}
WITH_TOOL = [question("Is it raining?"), answer("", tool_calls=CALL), RAIN, answer("It is.")]
WITH_THOUGHT = [question("Why?"), answer("Because.", thinking="Hm, why.", reasoning_content="Hm, why.")]


ODD = [question("wé\n:w"), answer("w中 b\n\n:w"), question("w\nw"), answer("w:w"), question("w  w"), answer("w\n\nw")]
# The text that is learnt of each conversation above, written by hand from the released formats. Each stretch ends a turn.
FINAL, ANALYSIS = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"
THINK, CLOSED = "<think>\nHm, why.\n</think>\n\n", "<think>\n\n</think>\n\n"
QWEN_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call><|im_end|>'
QWEN = [
    ["It is 4.<|im_end|>", f"{CLOSED}6.<|im_end|>"],
    [QWEN_CALL, f"{CLOSED}It is.<|im_end|>"],
    [f"{THINK}Because.<|im_end|>"],
    ["w中 b\n\n:w<|im_end|>", "w:w<|im_end|>", f"{CLOSED}w\n\nw<|im_end|>"],
]
# The prompt opens thoughts, and the template closes those that a message does not have.
OPENED = [
    ["It is 4.<|im_end|>", "6.<|im_end|>"],
    [QWEN_CALL, "It is.<|im_end|>"],
    ["Hm, why.\n</think>\n\nBecause.<|im_end|>"],
    ["w中 b\n\n:w<|im_end|>", "w:w<|im_end|>", "w\n\nw<|im_end|>"],
]
LEARNT = {
    "llama3": [
        ["It is 4.<|eot_id|>", "6.<|eot_id|>"],
        ['{"name": "weather", "parameters": {"city": "Köln"}}<|eot_id|>', "It is.<|eot_id|>"],
        ["Because.<|eot_id|>"],
        ["w中 b\n\n:w<|eot_id|>", "w:w<|eot_id|>", "w\n\nw<|eot_id|>"],
    ],
    "qwen3": QWEN,
    **dict.fromkeys(("qwen3_thinking", "qwen3_5", "qwen3_8"), OPENED),
    "gpt_oss": [
        [f"{FINAL}It is 4.<|end|>", f"{FINAL}6.<|return|>"],
        [
            ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Köln"}<|call|>',
            f"{FINAL}It is.<|return|>",
        ],
        [f"{ANALYSIS}Hm, why.<|end|><|start|>assistant{FINAL}Because.<|return|>"],
        [f"{FINAL}w中 b\n\n:w<|end|>", f"{FINAL}w:w<|end|>", f"{FINAL}w\n\nw<|return|>"],
    ],
}
EACH_TEMPLATE = pytest.mark.parametrize("name", LEARNT)


@EACH_TEMPLATE
def test_each_token_of_the_assistant_and_the_end_of_its_turn_is_learnt_and_no_other(ours, folders, name):
    """The tokens are those of transformers' rendering."""
    bos = FAMILIES[VOCABULARIES[name]].bos
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folders[name] / "tokenizer.json"), bos_token=bos)
    template, encode = SAME_DAY + released(name), theirs.backend_tokenizer.encode
    for messages, expected in zip((PLAIN, WITH_TOOL, WITH_THOUGHT, ODD), LEARNT[name], strict=True):
        tokens, learn = learnt(ours[name], messages)
        assert learnt(ours[name], messages, loss_on="all") == (tokens, [True] * len(tokens))
        stretches = groupby(zip(tokens, learn, strict=True), key=lambda pair: pair[1])
        found = [[token for token, _ in pairs] for is_learnt, pairs in stretches if is_learnt]
        assert found == [encode(text, add_special_tokens=False).ids for text in expected]
        for tools in ((), (TOOL,)):
            chat = {"tools": list(tools) or None, "chat_template": template, "tokenize": False}
            rendered = encode(theirs.apply_chat_template(messages, **chat), add_special_tokens=False).ids
            assert learnt(ours[name], messages, tools)[0] == rendered


@EACH_TEMPLATE
def test_a_message_cannot_fake_a_turn_of_the_assistant(ours, name):
    faked = plain_text(ChatTemplate(ours[name]), [question("x"), answer("learn me")])
    tokens, learn = learnt(ours[name], [question(faked), answer("It is not.")])
    plain_tokens, plain_learn = learnt(ours[name], [question("x" * 5), answer("It is not.")])
    assert sum(learn) == sum(plain_learn)
    assert faked.strip() in ours[name].decode(tokens)
    special = set(ours[name].special.values())
    assert sum(token in special for token in tokens) == sum(token in special for token in plain_tokens)


def with_template(tokenizer, template):
    return ChatTemplate(replace(tokenizer, template=TemplateSource(template, file=Path("chat.jinja"))))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "chat template .*TemplateSyntaxError"),
        ("{{ messages.x.y }}", "a plain question and answer cannot be written: error in chat template"),
        ("{{ messages.__class__.__base__.__subclasses__() }}", "SecurityError"),
        (LOOP, "chat.jinja: the assistant's header, .* is ''"),
        (LOOP + "{% if add_generation_prompt %}Assistant:{% endif %}", "begins with a special token"),
        (
            LOOP.replace("{{ m.role }}\n", "") + "{% if add_generation_prompt %}<|im_start|>{% endif %}",
            "same token and name, which no other turn begins with",
        ),
        ("<|im_start|>", "it writes the two answers .* 0 times in all"),
        (LOOP + LOOP, "4 times in all"),
    ],
)
def test_a_template_that_tells_no_turns_apart_is_refused(ours, template, message):
    with pytest.raises(TokenizerError, match=message):
        with_template(ours["qwen3"], template)


def test_a_token_that_joins_a_header_and_an_answer_is_not_parted(ours, folders):
    """Before, the line ends of both sides were two tokens; the template's text has one."""
    encode = tokenizers.Tokenizer.from_file(str(folders["qwen3"] / "tokenizer.json")).encode
    header, ending = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n\n", "Hello.<|im_end|>"
    tokenizer = replace(ours["qwen3"], template=TemplateSource(LOOP + PROMPT))
    tokens, learn = learnt(tokenizer, [question("x"), answer("\nHello.")])
    assert tokens == encode(f"{header}{ending}\n", add_special_tokens=False).ids
    before = len(encode(header, add_special_tokens=False).ids)
    assert learn == [False] * before + [True] * (len(tokens) - before - 1) + [False]


def test_a_generation_tag_changes_nothing(ours):
    tagged = LOOP.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}") + PROMPT
    conversation = Conversation(tuple(PLAIN))
    plain = with_template(ours["qwen3"], LOOP + PROMPT)(conversation)
    assert with_template(ours["qwen3"], tagged)(conversation) == plain
