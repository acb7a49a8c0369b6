"""Records that cannot be used: the run stops or continues without them, and the message names file and line."""

import json

import pytest

from tests.support.batch_contents import content, loader_of, write_lines
from torchround.config import DataTable, SourceTable
from torchround.data import DataError
from torchround.data.opening import open_sources

pytestmark = pytest.mark.usefixtures("small_groups")


def until_it_stops(loader, message):
    """Return the batches before the error."""
    batches = []
    with pytest.raises(DataError, match=message):
        batches.extend(loader)
    return batches


GOOD = '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}'
ASKED = '{"instruction": "q", "output": "a"'


def marked(**marks):
    """Return a conversation whose answer has these marks."""
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", **marks}]
    return json.dumps({"messages": turns})


BAD = [
    ("text", "broken", "not valid JSON"),
    ("text", '["no object"]', "a JSON list, not an object"),
    ("text", '{"body": "b", "also": 1}', "no field 'text'; fields: also, body .*key field"),
    ("text", '{"text": 7}', "the text is a int"),
    ("text", '{"text": null}', "the text is null"),
    ("text", '{"text": "\udcff"}', r"not valid UTF-8 \(byte 0xff"),
    ("text", '{"a":' * 100_000, "not valid JSON"),
    ("messages", '{"text": "x"}', r"no field 'messages' or 'conversations'; fields: text .*content = \"text\""),
    ("messages", '{"messages": []}', "at least one message"),
    ("messages", '{"messages": ["x"]}', "message 0 is a str"),
    ("messages", '{"messages": [{"content": "x"}]}', "message 0 has no role; fields: content"),
    ("messages", '{"messages": [{"role": "user", "text": "x"}]}', r"message 0 \(user\) has no content"),
    ("messages", '{"messages": [{"role": "user", "content": 7}]}', "the content is a int"),
    ("messages", '{"messages": [{"role": "user", "content": "x"}]}', "no message of the assistant; roles: user"),
    ("messages", GOOD.replace("]}", '], "tools": "{"}'), "field 'tools' is not valid JSON"),
    ("messages", GOOD.replace('"user"', '"stranger"'), "error in chat template .*no stranger here"),
    ("messages", GOOD[:-1] + ', "system": 7}', "field 'system' is a int"),
    ("messages", marked(weight=0.5), r"message 1 \(assistant\): weight = 0.5; legal"),
    ("messages", marked(weight="0"), "weight = '0'; legal"),
    ("messages", marked(train="no"), "train = 'no'; legal"),
    ("messages", marked(weight=1, train=False), "weight = 1 and train = False contradict"),
    ("messages", marked(train_detail=[{"begin_offset": 0}]), "train_detail is not supported"),
    (
        "messages",
        GOOD.replace('"q"', '[{"type": "text", "text": "q"}, {"type": "image_url"}]'),
        "part 1 .* 'image_url'",
    ),
    ("messages", '{"conversations": [{"from": 7, "value": "v"}]}', "message 0 has no role; fields: from"),
    ("alpaca", '{"instruction": "q"}', "no field 'output'; fields: instruction"),
    ("alpaca", '{"instruction": "q", "outputs": "a"}', "no field 'output'; .*; nearest: outputs"),
    ("alpaca", '{"instruction": "q", "output": null}', "field 'output' is null"),
    ("alpaca", '{"instruction": ["q"], "output": "a"}', "field 'instruction' is a list"),
    ("alpaca", ASKED + ', "input": 7}', "field 'input' is a int"),
    ("alpaca", ASKED + ', "system": ["s"]}', "field 'system' is a list"),
    ("alpaca", ASKED + ', "history": "h"}', "field 'history' is not a list of pairs"),
    ("alpaca", ASKED + ', "history": [["q"]]}', "field 'history' is not a list of pairs"),
    ("alpaca", ASKED + ', "history": [["q", 7]]}', r"message 1 \(assistant\): the content is a int"),
    ("prompt_completion", '{"prompt": "a", "completions": "b"}', "no field 'completion'; .*; nearest: completions"),
    ("prompt_completion", '{"prompt": "a", "answer": "b", "response": "c"}', "fields 'response' and 'answer'"),
    ("prompt_completion", '{"prompt": "a", "completion": ""}', "field 'completion' is an empty string"),
    ("prompt_completion", '{"prompt": "a", "completion": null}', "field 'completion' is null"),
    (
        "prompt_completion",
        '{"prompt": "a", "completion": [{"role": "user", "content": "b"}]}',
        "no message of the assi",
    ),
    ("tokens", '{"tokens": [259]}', "token ids from 259 to 259; the vocabulary has 0 to 258"),
    ("tokens", '{"tokens": "1 2"}', "not a list of integers"),
    ("tokens", '{"tokens": [1, true]}', "not a list of integers"),
]
GOOD_OF = {"text": '{"text": "a"}', "messages": GOOD, "alpaca": ASKED + "}", "tokens": '{"tokens": [1]}'}
GOOD_OF["prompt_completion"] = '{"prompt": "a", "completion": "b"}'


@pytest.fixture(scope="module")
def sources(tmp_path_factory, chat_tokenizer):
    """Open a source for each bad record, which stands between two good ones."""
    folder = tmp_path_factory.mktemp("bad")
    tables = []
    for number, (kind, bad, _) in enumerate(BAD):
        path = write_lines(folder / f"{number}.jsonl", [GOOD_OF[kind], bad, GOOD_OF[kind]])
        tables.append(SourceTable(path=str(path), content=kind))
    return open_sources(DataTable(sources=tuple(tables)), chat_tokenizer)


@pytest.mark.parametrize("number", range(len(BAD)))
def test_a_bad_record_is_named_by_file_and_line_and_costs_no_other(sources, number):
    source = sources[number]
    first, bad, last = source.first_documents(3)
    assert source.read(first, 0) == source.read(last, 0)
    with pytest.raises(DataError, match=rf"{number}.jsonl, line 2: .*{BAD[number][2]}"):
        source.read(bad, 0)


@pytest.mark.parametrize(
    ("bad", "workers", "packing"),
    [(0, 0, "best_fit"), (17, 2, "contiguous"), (35, 1, "best_fit"), (59, 0, "contiguous"), (40, 2, "best_fit")],
)
def test_a_run_stopped_by_a_bad_record_continues_as_if_the_record_had_been_left_out_from_the_start(
    tmp_path, tokenizer, bad, workers, packing
):
    lines = ["broken" if n == bad else {"text": f"record {n} " * (n % 13)} for n in range(60)]
    path = write_lines(tmp_path / "x.jsonl", lines)
    keys = {"seed": 5, "epochs": 2, "packing": packing, "num_workers": workers}
    loader = loader_of(path, tokenizer, **keys)
    batches = until_it_stops(loader, rf"line {bad + 1}: not valid JSON.*data.on_bad_record = \"skip\"")
    resumed, skipping = (loader_of(path, tokenizer, on_bad_record="skip", **keys) for _ in range(2))
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert content([*batches, *resumed]) == content(skipping)


def test_skipping_ends_with_an_error_if_every_record_is_bad(tmp_path, tokenizer):
    for lines, message in (
        (["broken", "broken"], "none of its documents holds any text; 2 records were skipped as bad$"),
        (["broken", {"text": "held out"}], r"1 records were skipped as bad; data.validation_fraction 0.9 holds"),
    ):
        path = write_lines(tmp_path / "x.jsonl", lines)
        with pytest.raises(DataError, match=message):
            next(loader_of(path, tokenizer, 64, 1, on_bad_record="skip", validation_fraction=0.9))
