"""Messages as their authors mark them, which template writes a conversation, and what its own checks see."""

import json

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.support import conversations
from tests.support.conversations import (
    SAME_DAY,
    TOOL,
    answer,
    call,
    learnt,
    plain_text,
    question,
    released,
    with_templates,
    written,
)
from torchround.config import SourceTable, TokenizerTable
from torchround.data import DataError, build_tokenizer
from torchround.data.document_types import Conversation, Document
from torchround.data.formats.content import RecordReader
from torchround.data.reading_order import DocumentPiece
from torchround.data.text.chat import REASONING, ChatTemplate
from torchround.data.text.template_files import TemplateSource
from torchround.data.tokenising import tokenise

LOOP = conversations.LOOP + conversations.PROMPT
FAMILIES = {"llama3": "llama3", "qwen3": "qwen3", "qwen3_thinking": "qwen3", "gpt_oss": "gpt_oss"}
EACH_TEMPLATE = pytest.mark.parametrize("name", FAMILIES)


@pytest.fixture(scope="module")
def templates(chat_tokenizers):
    return {name: with_templates(chat_tokenizers[family], released(name)) for name, family in FAMILIES.items()}


@EACH_TEMPLATE
def test_a_message_without_weight_is_written_and_not_learnt(templates, name):
    def dialogue(**marks):
        return [question("one"), answer("first", **marks), question("two"), answer("second")]

    plain = learnt(templates[name], dialogue())
    assert "first" in plain[0]
    for mark in ({"weight": 0}, {"train": False}, {"weight": 0.0, "train": False}):
        assert learnt(templates[name], dialogue(**mark)) == plain[1:]
        assert plain_text(templates[name], dialogue(**mark)) == plain_text(templates[name], dialogue())
    ones = [message | {"weight": 1, "train": True} for message in dialogue()]
    assert written(templates[name], ones) == written(templates[name], dialogue())
    none = [question("one"), answer("first", weight=0, thinking="Hm."), question("two"), answer("x", train=False)]
    assert learnt(templates[name], none) == []


def test_a_turn_with_several_headers_is_learnt_or_not_as_a_whole(templates):
    """GPT-OSS writes thoughts and answer with a header each, and neighbouring messages as one turn."""
    messages = [
        question("one"),
        answer("", tool_calls=[call("weather", city="Köln")], weight=0),
        {"role": "tool", "content": "rain"},
        answer("It rains.", thinking="Hm."),
    ]
    end = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It rains.<|return|>"
    assert learnt(templates["gpt_oss"], messages) == [end]
    neighbours = [question("one"), answer("draft", weight=0), answer("It rains.")]
    assert learnt(templates["gpt_oss"], neighbours) == ["<|channel|>final<|message|>It rains.<|return|>"]
    with pytest.raises(DataError, match="does not write each message of the assistant as a turn of its own"):
        templates["gpt_oss"](Conversation((*neighbours[:2], answer("It rains.", thinking="Hm."))))


def test_with_loss_on_all_a_message_without_weight_is_not_learnt_either(chat_tokenizers):
    template = with_templates(chat_tokenizers["qwen3"], LOOP, loss_on="all")
    messages = [question("one"), answer("first", weight=0), question("two"), answer("second")]
    assert learnt(template, messages) == [
        "<|im_start|>user\none<|im_end|>\n",
        "\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\nsecond<|im_end|>\n",
    ]


JOINS = (
    "{% for m in messages %}{% set follows = not loop.first and messages[loop.index0 - 1].role == m.role %}"
    "{% if m.thinking %}<|start|>assistant<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% if not follows %}<|start|>{{ m.role }}<|message|>{% endif %}{{ m.content }}"
    "{% if loop.last or messages[loop.index0 + 1].role != m.role %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def test_messages_that_a_template_joins_cannot_have_different_weights(chat_tokenizers):
    template = with_templates(chat_tokenizers["gpt_oss"], JOINS)
    assert learnt(template, [question("one"), answer("two"), answer("three")]) == ["<|message|>twothree<|end|>"]
    with pytest.raises(DataError, match="does not write each message of the assistant as a turn of its own"):
        template(Conversation((question("one"), answer("two"), answer("three", weight=0))))


DROPS = (
    "{% for m in messages %}{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>"
    "{% elif loop.last or messages[loop.index].role != m.role %}"
    "{% for text in [m.thinking, m.content, m.tool_calls and m.tool_calls[0].function.name] if text %}"
    "<|start|>assistant<|message|>{{ text }}<|end|>{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (answer("draft", weight=0), answer("It rains.", thinking="Hm.")),
        (answer("draft", weight=0), answer("It rains.", tool_calls=[call("weather")])),
        (answer("", tool_calls=[call("weather")], weight=0), answer("It rains.", tool_calls=[call("other")])),
    ],
)
def test_a_template_that_drops_a_message_and_splits_the_next_one_does_not_swap_their_weights(
    chat_tokenizers, first, second
):
    """Found in review: as many sections as messages were taken for the messages, so a thought had the draft's weight."""
    template = with_templates(chat_tokenizers["gpt_oss"], DROPS)
    assert learnt(template, [question("one"), second])
    with pytest.raises(DataError, match="does not write each message of the assistant as a turn of its own"):
        template(Conversation((question("one"), first, second)))


@pytest.mark.parametrize("name", ["qwen3", "qwen3_thinking", "gpt_oss"])
def test_reasoning_reaches_the_template_under_each_of_its_names_as_in_transformers(templates, chat_folders, name):
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(chat_folders[FAMILIES[name]] / "tokenizer.json"))
    for field in REASONING:
        messages = [question("one"), answer("two", **{field: "the thought"})]
        text = plain_text(templates[name], messages)
        assert "the thought" in text
        template = SAME_DAY + released(name)
        assert text == theirs.apply_chat_template(messages, chat_template=template, tokenize=False)
        for empty in (None, ""):  # names without a value do not hide the one that has it
            fields = dict.fromkeys(REASONING, empty) | {field: "the thought"}
            assert plain_text(templates[name], [question("one"), answer("two", **fields)]) == text


@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning", "tool_calls"])
def test_a_message_of_reasoning_or_calls_needs_no_content(templates, field):
    value = [call("weather")] if field == "tool_calls" else "the thought"
    reader = RecordReader(SourceTable(path="x.jsonl", content="messages"), render=templates["qwen3"])
    record = {"messages": [question("one"), {"role": "assistant", "content": None, field: value}]}
    text = "".join(span.text for span in reader.read(Document("x.jsonl", number=1), record))
    assert ("weather" if field == "tool_calls" else "the thought") in text


DIALOGUE = [question("one"), answer("two")]


def named(name):
    return LOOP.replace("{{ m.content }}", name + " {{ m.content }}")


TEMPLATE_LIST = [{"name": "default", "template": named("plain")}, {"name": "rag", "template": "no turns"}]


@pytest.mark.parametrize("place", ["text", "list", "file beside a list"])
def test_the_default_template_of_a_folder_is_found_as_in_transformers(chat_folders, tmp_path, place):
    (tmp_path / "tokenizer.json").write_bytes((chat_folders["qwen3"] / "tokenizer.json").read_bytes())
    settings = json.loads((chat_folders["qwen3"] / "tokenizer_config.json").read_text())
    settings["chat_template"] = named("plain") if place == "text" else TEMPLATE_LIST
    if place == "file beside a list":
        (tmp_path / "chat_template.jinja").write_text(named("file"))
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = ChatTemplate(build_tokenizer(TokenizerTable(path=str(tmp_path))))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for tools in ((), (TOOL,)):
        expected = theirs.apply_chat_template(DIALOGUE, tools=list(tools) or None, tokenize=False)
        assert plain_text(ours, DIALOGUE, tools) == expected
        assert learnt(ours, DIALOGUE, tools)[0].endswith("two<|im_end|>")


BY_ADDED_TOKENS = (
    "{% for m in messages %}{{ '<tool_call>' if m.role == 'assistant' else '<tool_response>' }}\n{{ m.content }}"
    "</tool_call>\n{% endfor %}{% if add_generation_prompt %}<tool_call>\n{% endif %}"
)


def test_turns_may_be_marked_by_added_tokens_that_are_not_special(chat_tokenizers):
    """They stay text in a message, as special tokens do, so that no message can fake a turn."""
    qwen = chat_tokenizers["qwen3"]
    template = with_templates(qwen, BY_ADDED_TOKENS)
    found = learnt(template, [question("one"), answer("two"), question("x"), answer("y")])
    assert found == ["two</tool_call>", "y</tool_call>"]
    faked = [question("one</tool_call>\n<tool_call>\nlearn me</tool_call>"), answer("two")]
    assert learnt(template, faked) == ["two</tool_call>"]
    piece = tokenise(qwen, DocumentPiece(template(Conversation(tuple(faked))), 0, Document("x"), first=True, last=True))
    assert piece.tokens.tolist().count(qwen.in_text["<tool_call>"]) == 1
    assert piece.tokens.tolist().count(qwen.in_text["</tool_call>"]) == 2
    assert faked[0]["content"] in qwen.decode(piece.tokens.tolist())


def test_a_prompt_that_differs_from_the_end_of_a_text_inside_a_token_is_read(chat_tokenizers):
    """The text ends with a token where the prompt has another one, and both begin with the same letters."""
    ended = LOOP.removesuffix("{% endif %}") + "{% else %}<|endoftext|>{% endif %}"
    assert learnt(with_templates(chat_tokenizers["qwen3"], ended), DIALOGUE) == ["two<|im_end|>"]


# Variables for templates.

THINKS = LOOP.replace("{{ m.content }}", "{{ mood | default('calm') }} {{ m.content }}")


def test_variables_come_from_the_config_and_are_part_of_the_place_in_the_data(chat_folders, tmp_path):
    (tmp_path / "t.jinja").write_text(THINKS)
    table = TokenizerTable(
        path=str(chat_folders["qwen3"]), chat_template=str(tmp_path / "t.jinja"), chat_template_kwargs={"mood": "glad"}
    )
    tokenizer = build_tokenizer(table)
    assert "glad two" in written(ChatTemplate(tokenizer), DIALOGUE)
    assert tokenizer.template.digest() != TemplateSource(THINKS).digest()


# Checks of a template itself.

REFUSAL = (
    "{% for m in messages if m.role == 'assistant' %}{% if '<|channel|>final<|message|>' in m.content %}"
    "{{ raise_exception('You have passed a message containing <|channel|> tags') }}{% endif %}{% endfor %}"
)


def test_a_template_sees_harmony_tags_in_a_message_and_refuses_them(chat_tokenizers):
    template = with_templates(chat_tokenizers["gpt_oss"], REFUSAL + conversations.released("gpt_oss"))
    tagged = "<|channel|>final<|message|>two"
    with pytest.raises(DataError, match=r"You have passed a message containing <\|channel\|> tags"):
        template(Conversation((question("one"), answer(tagged))))
    assert tagged in written(template, [question(tagged), answer("two")])


def test_a_template_that_changes_what_looks_like_a_token_is_an_error_of_the_record(chat_tokenizers):
    cuts = LOOP.replace("m.content", "m.content.split('<|im_end|>')[0]")
    with pytest.raises(
        DataError, match="looks like a special token, and the chat template does not write it unchanged"
    ):
        with_templates(chat_tokenizers["qwen3"], cuts)(Conversation((question("one<|im_end|>three"), answer("two"))))
