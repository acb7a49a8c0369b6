"""Records that cannot be used: the run stops or continues without them, and the message names file and line."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.batch_contents import TEMPLATE, content, documents
from torchround.config import DataTable, SourceTable, TokenizerTable
from torchround.data import DataError, Loader, Tokenizer, build_loader, build_tokenizer
from torchround.data.packing import best_fit as best_fit_module
from torchround.layer import MicroBatch


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_fit_module, "GROUP_SEQUENCES", 5)


def until_it_stops(loader: Loader, message: str) -> list[MicroBatch]:
    """Return the batches before the error."""
    batches: list[MicroBatch] = []
    with pytest.raises(DataError, match=message):
        batches.extend(loader)
    return batches


GOOD = '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}'
BAD = [
    ("broken", r"line 2: not valid JSON"),
    ("[]", r"line 2: a JSON list, not an object"),
    (
        '{"text": "x"}',
        r"line 2: no field 'messages' or 'conversations'; fields: text \(is it a source of content = \"text\"\?\)",
    ),
    ('{"messages": []}', r"line 2: the messages are not a list with at least one message"),
    ('{"messages": ["x"]}', r"line 2: message 0 is a str, not an object"),
    ('{"messages": [{"content": "x"}]}', r"line 2: message 0 has no role; fields: content"),
    ('{"messages": [{"role": "user", "text": "x"}]}', r"line 2: message 0 \(user\) has no content; fields: role, text"),
    (
        '{"messages": [{"role": "user", "content": 7}]}',
        r"line 2: message 0 \(user\): the content is a int, not a string",
    ),
    ('{"messages": [{"role": "user", "content": "x"}]}', r"line 2: no message of the assistant; roles: user"),
    (GOOD.replace("]}", '], "tools": "{"}'), r"line 2: field 'tools' is not valid JSON"),
    (GOOD.replace('"user"', '"stranger"'), r"line 2: error in chat template .*no stranger here"),
    (GOOD.encode().replace(b'"q"', b'"\xff"'), r"line 2: not valid UTF-8 \(byte 0xff"),
]


@pytest.mark.parametrize(("bad", "message"), BAD)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_record_stops_the_run_or_is_skipped_and_counted_with_file_and_line(
    tmp_path: Path, bad: str | bytes, message: str, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    template = tmp_path / "template.jinja"
    refusal = "{% if messages[0].role == 'stranger' %}{{ raise_exception('no stranger here') }}{% endif %}"
    template.write_text(refusal + TEMPLATE)
    tokenizer = build_tokenizer(TokenizerTable(name="bytes", chat_template=str(template)))
    line = bad if isinstance(bad, bytes) else bad.encode()
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\n".join([GOOD.encode(), line, GOOD.encode()]))
    data = DataTable(
        sources=(SourceTable(path=str(path), content="messages"),), epochs=1, shuffle=False, num_workers=workers
    )
    with pytest.raises(DataError, match=f"x.jsonl, {message}"):
        list(build_loader(data, tokenizer, 64, 8, 0))
    loader = build_loader(data.model_copy(update={"on_bad_record": "skip"}), tokenizer, 64, 8, 0)
    assert len(documents(loader, tokenizer)) == 2
    assert loader.num_bad_records() == 1
    assert "x.jsonl, line 2: " in caplog.text


ASKED = '{"instruction": "q", "output": "a"'


@pytest.mark.parametrize(
    ("content", "bad", "message"),
    [
        ("alpaca", '{"instruction": "q"}', "no field 'output'; fields: instruction"),
        ("alpaca", '{"instruction": "q", "outputs": "a"}', "no field 'output'; .*; nearest: outputs"),
        ("alpaca", '{"instruction": "q", "output": null}', "field 'output' is null, not a string"),
        ("alpaca", '{"instruction": ["q"], "output": "a"}', "field 'instruction' is a list, not a string"),
        ("alpaca", ASKED + ', "input": 7}', "field 'input' is a int, not a string"),
        ("alpaca", ASKED + ', "system": ["s"]}', "field 'system' is a list, not a string"),
        ("alpaca", ASKED + ', "history": "h"}', "field 'history' is not a list of pairs"),
        ("alpaca", ASKED + ', "history": [["q"]]}', "field 'history' is not a list of pairs"),
        ("alpaca", ASKED + ', "history": [["q", 7]]}', r"message 1 \(assistant\): the content is a int"),
        ("messages", GOOD[:-1] + ', "system": 7}', "field 'system' is a int, not a string"),
        ("messages", '{"conversations": [{"from": 7, "value": "v"}]}', "message 0 has no role; fields: from"),
        ("tokens", '{"tokens": "1 2"}', "the tokens are not a list of integers"),
        ("tokens", '{"tokens": [1, true]}', "the tokens are not a list of integers"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(tmp_path: Path, content: str, bad: str, message: str) -> None:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    tokenizer = build_tokenizer(TokenizerTable(name="bytes", chat_template=str(tmp_path / "template.jinja")))
    (tmp_path / "x.jsonl").write_text(bad)
    data = DataTable(sources=(SourceTable(path=str(tmp_path / "x.jsonl"), content=content),), epochs=1)
    with pytest.raises(DataError, match=f"x.jsonl, line 1: {message}"):
        list(build_loader(data, tokenizer, 64, 8, 0))


@settings(max_examples=15, deadline=None)
@given(bad=st.integers(0, 59), workers=st.integers(0, 2), packing=st.sampled_from(["contiguous", "best_fit"]))
def test_a_run_stopped_by_a_bad_record_continues_as_if_the_record_had_been_left_out_from_the_start(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer, bad: int, workers: int, packing: str
) -> None:
    path = tmp_path_factory.mktemp("bad") / "x.jsonl"
    lines = [json.dumps({"text": f"record {n} " * (n % 13)}) for n in range(60)]
    path.write_text("\n".join([*lines[:bad], "broken", *lines[bad + 1 :]]))
    keys = {"sources": (SourceTable(path=str(path)),), "epochs": 2, "packing": packing, "num_workers": workers}
    stopping, skipping = DataTable(**keys), DataTable(**keys, on_bad_record="skip")
    loader = build_loader(stopping, tokenizer, 64, 2, 5)
    batches = until_it_stops(loader, rf"line {bad + 1}: not valid JSON.*data.on_bad_record = \"skip\"")
    resumed = build_loader(skipping, tokenizer, 64, 2, 5)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert content([*batches, *resumed]) == content(build_loader(skipping, tokenizer, 64, 2, 5))


def test_after_a_repair_that_changes_a_files_size_a_run_continues_if_asked_to(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x.jsonl"
    lines = [json.dumps({"text": f"record {n} " * 5}) for n in range(60)]
    path.write_text("\n".join(lines))
    data = DataTable(sources=(SourceTable(path=str(path)),), epochs=1)
    whole = content(build_loader(data, tokenizer, 64, 2, 0))
    path.write_text("\n".join([*lines[:40], lines[40][:-3], *lines[41:]]))
    loader = build_loader(data, tokenizer, 64, 2, 0)
    batches = until_it_stops(loader, "line 41")
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match="other data: sources was .*--data.on_changed_files go_on keeps the place"):
        build_loader(data, tokenizer, 64, 2, 0).load_state_dict(loader.state_dict())
    going_on = build_loader(data.model_copy(update={"on_changed_files": "go_on"}), tokenizer, 64, 2, 0)
    going_on.load_state_dict(loader.state_dict())
    assert "in changed files: sources was ['60 documents" in caplog.text
    assert content([*batches, *going_on]) == whole
    with pytest.raises(DataError, match="other data: seed was 0, is 1"):
        build_loader(data.model_copy(update={"on_changed_files": "go_on"}), tokenizer, 64, 2, 1).load_state_dict(
            loader.state_dict()
        )


def test_skipping_ends_with_an_error_if_every_record_is_bad(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "x.jsonl").write_text("broken\nbroken\n")
    data = DataTable(
        sources=(SourceTable(path=str(tmp_path / "x.jsonl")),), on_bad_record="skip", validation_fraction=0.9
    )
    with pytest.raises(DataError, match="none of its documents holds any text; 2 records were skipped as bad$"):
        next(build_loader(data, tokenizer, 64, 1, 0))
    (tmp_path / "x.jsonl").write_text('broken\n{"text": "held out"}\n')
    with pytest.raises(DataError, match=r"1 records were skipped as bad; data.validation_fraction 0.9 holds"):
        next(build_loader(data, tokenizer, 64, 1, 0))


def test_a_truncated_archive_still_gives_its_records_before_the_cut(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lines = "\n".join(json.dumps({"text": f"{number} {number**9}"}) for number in range(2000))
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(lines.encode())[:-2000])
    data = DataTable(
        sources=(SourceTable(path=str(tmp_path / "x.jsonl.gz")),), on_bad_record="skip", epochs=1, shuffle=False
    )
    loader = build_loader(data, tokenizer, 512, 8, 0)
    texts = [text for text, _ in documents(loader, tokenizer)]
    assert texts[0].startswith("<|bos|>0 0<|eos|>") and len(texts) > 100
    assert loader.num_bad_records() == 1
