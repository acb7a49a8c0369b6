"""`torchround inspect_data` on a small corpus whose numbers are known."""

import io
import json
from contextlib import redirect_stdout

from torchround.commands.inspect_data import main

TEMPLATE = (
    "{% for m in messages %}<|bos|>{{ m.role[0] }}:{{ m.content }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>a:{% endif %}"
)


def prepare(folder):
    (folder / "a.txt").write_text("0123456789")
    (folder / "b.jsonl").write_text(f"{json.dumps({'text': 'short'})}\n{json.dumps({'text': 'long' * 7 + '!!'})}\n")
    (folder / "x.toml").write_text(
        f"""
        model = {{ family = "llama3", flavor = "debug" }}
        tokenizer = {{ name = "bytes" }}
        training = {{ seq_len = 16, global_batch_size = 2 }}
        [data]
        sources = [{{ path = "{folder}/a.txt" }}, {{ path = "{folder}/b.jsonl", weight = 2.0 }}]
        shuffle = false
        """
    )


def inspect(folder, *arguments):
    prepare(folder)
    with redirect_stdout(io.StringIO()) as printed:
        assert main(["--config", str(folder / "x.toml"), *arguments]) == 0
    return printed.getvalue().splitlines()


def test_documents_are_shown_with_what_is_not_learnt_marked(tmp_path):
    assert inspect(tmp_path) == [
        "--- batch 0, sequence 0",
        "   0      12 tokens  «<|bos|>»0123456789<|eos|>",
        "   1       4 tokens  «<|bos|>»sho",
        "--- batch 0, sequence 1",
        "   0       3 tokens  «r»t<|eos|>",
        "   1      13 tokens  «<|bos|>»longlonglong",
        "--- 32 positions: 100.00% tokens, 93.75% with a label",
    ]


def test_conversations_are_shown_with_what_is_learnt_and_how_full_they_pack(tmp_path):
    """Turns begin with <|bos|> and the role's letter. The third conversation has 59 tokens. The last record is broken."""
    (tmp_path / "template.jinja").write_text(TEMPLATE)
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
    )
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
    assert lines[9:] == ["--- 1 documents longer than a sequence: cut"]


def test_a_long_document_is_shown_whole_if_asked_for_with_what_is_not_learnt_inside_it(tmp_path, capsys):
    """A conversation of two answers, whose inner question lies where a shortened line has its gap."""
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    turns = [("user", "q" * 9), ("assistant", "a" * 90), ("user", "inner"), ("assistant", "b" * 90)]
    record = {"messages": [{"role": role, "content": text} for role, text in turns]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(record))
    prepare(tmp_path)
    overrides = (
        f"--config={tmp_path}/x.toml",
        f"--data.sources=[{{path='{tmp_path}/chats.jsonl', content='messages'}}]",
        f"--tokenizer.chat_template={tmp_path}/template.jinja",
        "--training.seq_len=256",
        "--training.global_batch_size=1",
        "--data.epochs=1",
    )
    start, inner = f"«<|bos|>u:{'q' * 9}<|eos|><|bos|>a:»", "«<|bos|>u:inner<|eos|><|bos|>a:»"
    shown = f"{start}{'a' * 90}<|eos|>{inner}{'b' * 90}<|eos|>"
    assert main(["--whole", *overrides]) == 0 and shown in capsys.readouterr().out
    assert main(overrides) == 0 and "inner" not in capsys.readouterr().out


def test_token_ids_of_the_model_that_the_tokenizer_does_not_know_are_shown_as_numbers(tmp_path, capsys):
    """The model here has 300 tokens, the tokenizer 259; an id of neither is a mistake."""
    (tmp_path / "model").mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 300}
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    more = {"num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | sizes | more))
    prepare(tmp_path)
    (tmp_path / "ids.jsonl").write_text(json.dumps({"tokens": [97, 98, 299, 99]}))
    arguments = (
        f"--config={tmp_path}/x.toml",
        f"--data.sources=[{{path='{tmp_path}/ids.jsonl', content='tokens'}}]",
        "--model.flavor=none",
        f"--model.hf_path={tmp_path}/model",
    )
    assert main(arguments) == 0 and "«a»b<id 299>c" in capsys.readouterr().out
    (tmp_path / "ids.jsonl").write_text(json.dumps({"tokens": [97, 300]}))
    assert main(arguments) == 2 and "the vocabulary has 0 to 299" in capsys.readouterr().err
