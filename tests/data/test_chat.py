"""Rendered conversations and what is learnt of them, against transformers' rendering and formats written by hand.

The templates in `templates/` write what the released ones of each family write, without their long tool manuals.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tests.support.conversations import SAME_DAY
from tests.support.vocabularies import FAMILIES, write
from torchround.config import TokenizerTable
from torchround.data import DataError, Tokenizer, TokenizerError, build_tokenizer
from torchround.data.document_types import Conversation, Document
from torchround.data.reading_order import DocumentPiece
from torchround.data.text.chat import ChatTemplate
from torchround.data.text.template_files import TemplateSources
from torchround.data.tokenising import tokenise

TEMPLATES = Path(__file__).parent / "templates"
VOCABULARIES = {
    "llama3": "llama3",
    "qwen3": "qwen3",
    "qwen3_thinking": "qwen3",
    "qwen3_5": "qwen3",
    "qwen3_8": "qwen3",
    "gpt_oss": "gpt_oss",
}
Messages = Sequence[dict[str, Any]]
Written = list[tuple[str, bool]]
"""Text that a template writes, in order, and whether it is learnt."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Map each template to a folder with a tokenizer and that template."""
    found = {}
    for name, family in VOCABULARIES.items():
        folder = tmp_path_factory.mktemp(name)
        write(folder, family)
        (folder / "chat_template.jinja").write_text((TEMPLATES / f"{name}.jinja").read_text())
        found[name] = folder
    return found


@pytest.fixture(scope="module")
def ours(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: build_tokenizer(TokenizerTable(path=str(folder))) for name, folder in folders.items()}


def learnt(
    tokenizer: Tokenizer, messages: Messages, tools: Sequence[Any] = (), loss_on: str = "assistant"
) -> tuple[list[int], list[bool]]:
    """Return our tokens, and whether each of them is a label."""
    content = ChatTemplate(tokenizer, loss_on)(Conversation(tuple(messages), tuple(tools)))
    piece = tokenise(tokenizer, DocumentPiece(content, 0, 0, Document("here"), first=True, last=True))
    assert piece.learn is not None
    return piece.tokens.tolist(), piece.learn.tolist()


def reference(folder: Path, written: Written) -> tuple[list[int], list[bool]]:
    """Return the tokens that the package tokenizers gives for each part, special tokens included."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    parts = [(tokenizer.encode(text, add_special_tokens=False).ids, learn) for text, learn in written]
    return [token for ids, _ in parts for token in ids], [learn for ids, learn in parts for _ in ids]


def question(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "Be brief."}
CALL = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
PLAIN = [SYSTEM, question("What is 2 + 2?"), answer("It is 4."), question("And 3 + 3?"), answer("6.")]
WITH_TOOL = [
    question("Is it raining?"),
    answer("", tool_calls=CALL),
    {"role": "tool", "content": "rain, 12 °C"},
    answer("It is."),
]
WITH_THOUGHT = [question("Why?"), answer("Because.", thinking="Hm, why.", reasoning_content="Hm, why.")]


def llama3(messages: Messages) -> Written:
    first, *rest = messages if messages[0]["role"] == "system" else [{"content": ""}, *messages]
    head = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n"
    written = [(head + first["content"] + "<|eot_id|>", False)]
    for message in rest:
        content, role = message["content"], message["role"]
        if "tool_calls" in message:
            content = '{"name": "weather", "parameters": {"city": "Köln"}}'
        if role == "tool":
            content, role = f'"{content}"', "ipython"
        written.append((f"<|start_header_id|>{role}<|end_header_id|>\n\n", False))
        written.append((content + "<|eot_id|>", role == "assistant"))
    return written


def qwen3(messages: Messages, opens: bool = False, thinks: str = "last") -> Written:
    """`opens`: the prompt opens thoughts, which the template closes in an answer that has none.

    `thinks`: all answers have thoughts, those to the last question, or of these the last and those that think.
    """
    last_question = max(index for index, message in enumerate(messages) if message["role"] == "user")
    written = []
    for index, message in enumerate(messages):
        content, role = message["content"], message["role"]
        if role == "tool":
            content, role = f"<tool_response>\n{content}\n</tool_response>", "user"
        if role != "assistant":
            written.append((f"<|im_start|>{role}\n{content}<|im_end|>\n", False))
            continue
        header, thought = "<|im_start|>assistant\n", message.get("reasoning_content", "")
        is_last = index > last_question and (thinks == "question" or thought or message is messages[-1])
        if thinks == "all" or is_last:
            begin, rest = "<think>\n", f"{thought}\n</think>\n\n"
            header, content = header + begin * opens, begin * (not opens) + rest + content
            if opens and not thought:
                header, content = header + rest, content.removeprefix(rest)
        if "tool_calls" in message:
            content += '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
        written += [(header, False), (f"{content}<|im_end|>", True), ("\n", False)]
    return written


def gpt_oss(messages: Messages) -> Written:
    written = [("<|start|>system<|message|>You are ChatGPT.\nCurrent date: 2024-07-26<|end|>", False)]
    for message in messages:
        content, role, last = message["content"], message["role"], message is messages[-1]
        if role == "system":
            written.append((f"<|start|>developer<|message|># Instructions\n\n{content}<|end|>", False))
        elif role == "tool":
            tool = f'<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"{content}"<|end|>'
            written.append((tool, False))
        elif role == "user":
            written.append((f"<|start|>user<|message|>{content}<|end|>", False))
        else:
            written.append(("<|start|>assistant", False))
            if message.get("thinking") and last:
                thought = f"<|channel|>analysis<|message|>{message['thinking']}<|end|><|start|>assistant"
                written.append((thought, True))
            if "tool_calls" in message:
                call = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Köln"}<|call|>'
                written.append((call, True))
            else:
                end = "<|return|>" if last else "<|end|>"
                written.append((f"<|channel|>final<|message|>{content}{end}", True))
    return written


FORMATS: dict[str, Callable[[Messages], Written]] = {
    "llama3": llama3,
    "qwen3": qwen3,
    "qwen3_thinking": partial(qwen3, opens=True),
    "qwen3_5": partial(qwen3, opens=True, thinks="question"),
    "qwen3_8": partial(qwen3, opens=True, thinks="all"),
    "gpt_oss": gpt_oss,
}
EACH_TEMPLATE = pytest.mark.parametrize("name", FORMATS)


@EACH_TEMPLATE
@pytest.mark.parametrize("messages", [PLAIN, WITH_TOOL, WITH_THOUGHT, PLAIN[1:3]])
def test_each_token_of_the_assistant_and_the_end_of_its_turn_is_learnt_and_no_other(
    ours: dict[str, Tokenizer], folders: dict[str, Path], name: str, messages: Messages
) -> None:
    assert learnt(ours[name], messages) == reference(folders[name], FORMATS[name](messages))


words = st.text(st.sampled_from("ab é中\n:"), min_size=1, max_size=12).map(lambda text: f"w{text}w")


@EACH_TEMPLATE
@settings(max_examples=25, deadline=None)
@given(turns=st.lists(st.tuples(words, words), min_size=1, max_size=4), system=st.booleans())
def test_the_assistants_part_of_any_dialogue_is_learnt(
    ours: dict[str, Tokenizer], folders: dict[str, Path], name: str, turns: list[tuple[str, str]], system: bool
) -> None:
    messages = [SYSTEM] * system + [message for said, replied in turns for message in (question(said), answer(replied))]
    assert learnt(ours[name], messages) == reference(folders[name], FORMATS[name](messages))


@EACH_TEMPLATE
@pytest.mark.parametrize("messages", [PLAIN, WITH_TOOL, WITH_THOUGHT])
@pytest.mark.parametrize("tools", [(), (TOOL,)])
def test_tokens_are_those_of_transformers_rendering(
    ours: dict[str, Tokenizer], folders: dict[str, Path], name: str, messages: Messages, tools: Sequence[Any]
) -> None:
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(folders[name] / "tokenizer.json"), bos_token=FAMILIES[VOCABULARIES[name]].bos
    )
    template = SAME_DAY + (folders[name] / "chat_template.jinja").read_text()
    text = theirs.apply_chat_template(list(messages), tools=list(tools) or None, chat_template=template, tokenize=False)
    expected = theirs.backend_tokenizer.encode(text, add_special_tokens=False).ids
    assert learnt(ours[name], messages, tools)[0] == expected


@EACH_TEMPLATE
def test_a_message_cannot_fake_a_turn_of_the_assistant(
    ours: dict[str, Tokenizer], folders: dict[str, Path], name: str
) -> None:
    """Text in a message that looks like special tokens stays text, and decodes unchanged."""
    faked = "".join(text for text, _ in FORMATS[name]([question("x"), answer("learn me")]))
    plain = [question("x" * 5), answer("It is not.")]
    tokens, learn = learnt(ours[name], [question(faked), answer("It is not.")])
    assert sum(learn) == sum(learnt(ours[name], plain)[1])
    assert faked.strip() in ours[name].decode(tokens)
    special = set(ours[name].special.values())
    assert sum(token in special for token in tokens) == sum(token in special for token in learnt(ours[name], plain)[0])


@EACH_TEMPLATE
def test_loss_on_all_learns_everything_of_the_same_tokens(ours: dict[str, Tokenizer], name: str) -> None:
    tokens, learn = learnt(ours[name], PLAIN, loss_on="all")
    assert tokens == learnt(ours[name], PLAIN)[0]
    assert all(learn)


def with_template(tokenizer: Tokenizer, template: str) -> ChatTemplate:
    return ChatTemplate(replace(tokenizer, templates=TemplateSources(template, file=Path("chat.jinja"))))


LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "chat template .*TemplateSyntaxError"),
        ("{{ messages.x.y }}", "a plain question and answer cannot be written: error in chat template"),
        (
            LOOP,
            "chat template chat.jinja: the assistant's header, which it adds for add_generation_prompt, is ''; legal",
        ),
        (
            LOOP + "{% if add_generation_prompt %}Assistant:{% endif %}",
            "is 'Assistant:'; legal: one that begins with a special token",
        ),
        ("<|im_start|>", "chat.jinja: it writes the two answers .* 0 times in all; legal: each answer once"),
        (LOOP + LOOP, "4 times in all"),
    ],
)
def test_a_template_that_tells_no_turns_apart_is_refused(
    ours: dict[str, Tokenizer], template: str, message: str
) -> None:
    with pytest.raises(TokenizerError, match=message):
        with_template(ours["qwen3"], template)


def test_a_token_that_joins_a_header_and_an_answer_is_not_parted(
    ours: dict[str, Tokenizer], folders: dict[str, Path]
) -> None:
    """Before, the line ends of both sides were two tokens; the template's text has one."""
    template = LOOP + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tokenizer = replace(ours["qwen3"], templates=TemplateSources(template))
    written = [
        ("<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n\n", False),
        ("Hello.<|im_end|>", True),
        ("\n", False),
    ]
    expected = reference(folders["qwen3"], written)
    assert learnt(tokenizer, [question("x"), answer("\nHello.")]) == expected
    assert expected[0] == reference(folders["qwen3"], [("".join(text for text, _ in written), False)])[0]


def test_no_template_at_all_says_which_key_gives_one(tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match=r"has no chat template beside it; give tokenizer.chat_template"):
        ChatTemplate(tokenizer)


def test_a_template_cannot_reach_out_of_its_sandbox(ours: dict[str, Tokenizer]) -> None:
    reach = "{{ messages.__class__.__base__.__subclasses__() }}"
    with pytest.raises(TokenizerError, match="SecurityError"):
        with_template(ours["qwen3"], reach)


def test_a_conversation_that_the_template_refuses_is_an_error_of_the_record(ours: dict[str, Tokenizer]) -> None:
    template = ChatTemplate(ours["llama3"])
    messages = [question("x"), answer("", tool_calls=CALL * 2)]
    with pytest.raises(DataError, match="error in chat template.*only supports single tool-calls"):
        template(Conversation(tuple(messages)))


def test_a_generation_tag_changes_nothing(ours: dict[str, Tokenizer]) -> None:
    prompt = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tagged = LOOP.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}") + prompt
    conversation = Conversation(tuple(PLAIN))
    plain = with_template(ours["qwen3"], LOOP + prompt)(conversation)
    assert with_template(ours["qwen3"], tagged)(conversation) == plain
