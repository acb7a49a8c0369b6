"""`scripts/inspect_data.py` on a small corpus whose numbers are known, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def inspect(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Three documents of 12, 7 and 32 tokens with BOS and EOS; 16 tokens per sequence."""
    (folder / "a.txt").write_text("0123456789")
    (folder / "b.jsonl").write_text(
        f"{json.dumps({'text': 'short'})}\n{json.dumps({'text': 'long' * 7 + '!!'})}\n"
    )
    (folder / "x.toml").write_text(
        f"""
        [model]
        family = "llama3"
        flavor = "debug"
        [tokenizer]
        name = "bytes"
        [data]
        sources = [{{ path = "{folder}/a.txt" }}, {{ path = "{folder}/b.jsonl", weight = 2.0 }}]
        shuffle = false
        [training]
        seq_len = 16
        global_batch_size = 2
        """
    )
    command = [
        sys.executable,
        str(REPOSITORY / "scripts" / "inspect_data.py"),
        "--config",
        str(folder / "x.toml"),
    ]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(
        [*command, *arguments], check=False, capture_output=True, encoding="utf-8", env=environment
    )


def test_documents_of_a_sequence_are_shown_with_what_is_not_learnt_marked(tmp_path: Path) -> None:
    lines = inspect(tmp_path).stdout.splitlines()
    assert lines[:6] == [
        "--- batch 0, sequence 0",
        "   0      12 tokens  «<|bos|>»0123456789<|eos|>",
        "   1       4 tokens  «<|bos|>»sho",
        "--- batch 0, sequence 1",
        "   0       3 tokens  «r»t<|eos|>",
        "   1      13 tokens  «<|bos|>»longlonglong",
    ]
    assert lines[6] == "--- 32 positions: 100.00% tokens, 93.75% with a label"


def test_sources_are_listed_with_their_tokens_and_longest_documents(tmp_path: Path) -> None:
    assert inspect(tmp_path).stdout.splitlines()[8:] == [
        f"--- {tmp_path}/a.txt: 1 documents, 12 tokens (23.5%)",
        f"          12 tokens  {tmp_path}/a.txt",
        f"--- {tmp_path}/b.jsonl: 2 documents, 39 tokens (76.5%)",
        f"          32 tokens  {tmp_path}/b.jsonl, line 2",
        f"           7 tokens  {tmp_path}/b.jsonl, line 1",
        "--- 0 bad records",
    ]


def test_conversations_are_shown_with_what_is_learnt_how_full_they_pack_and_what_is_bad(
    tmp_path: Path,
) -> None:
    """Turns begin with <|bos|> and the role's letter. The third conversation has 59 tokens. The last record is broken."""
    (tmp_path / "template.jinja").write_text(
        "{% for m in messages %}<|bos|>{{ m.role[0] }}:{{ m.content }}<|eos|>{% endfor %}"
        "{% if add_generation_prompt %}<|bos|>a:{% endif %}"
    )
    records = [{"instruction": "q", "output": "a" * length} for length in (1, 5, 50)]
    (tmp_path / "chats.jsonl").write_text("\n".join([*map(json.dumps, records), "broken"]))
    source = f"{{path='{tmp_path}/chats.jsonl', content='alpaca'}}"
    lines = inspect(
        tmp_path,
        f"--data.sources=[{source}]",
        f"--tokenizer.chat_template={tmp_path}/template.jinja",
        "--data.on_bad_record=skip",
        "--data.epochs=1",
        "--sequences=4",
        "--training.global_batch_size=4",
    ).stdout.splitlines()
    assert lines[:9] == [
        "--- batch 0, sequence 0",
        "   0      14 tokens  «<|bos|>u:q<|eos|><|bos|>a:»aaaaa<|eos|>",
        "   1       2 tokens  «<|pad|><|pad|>»",
        "--- batch 0, sequence 1",
        "   0      10 tokens  «<|bos|>u:q<|eos|><|bos|>a:»a<|eos|>",
        "   1       6 tokens  «" + "<|pad|>" * 6 + "»",
        "--- batch 0, sequence 2",
        "   0      16 tokens  «<|bos|>u:q<|eos|><|bos|>a:»aaaaaaaa",
        "--- 48 positions: 83.33% tokens, 35.42% with a label",
    ]
    assert lines[9] == "--- 1 documents longer than a sequence: cut"
    assert lines[-2:] == [
        "--- 1 bad records",
        f"     {tmp_path}/chats.jsonl, line 4: not valid JSON: Expecting value: line 1 column 1 (char 0)",
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--data.sources=[{path='nowhere.txt'}]", "source 'nowhere.txt' does not exist"),
        ("--training.seq_len=0", "training.seq_len"),
    ],
)
def test_a_users_mistake_ends_with_code_2_and_a_message_without_traceback(
    tmp_path: Path, override: str, message: str
) -> None:
    process = inspect(tmp_path, override)
    assert process.returncode == 2
    assert message in process.stderr
    assert "Traceback" not in process.stderr
