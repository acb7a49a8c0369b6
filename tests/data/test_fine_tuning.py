"""Loaders over conversations, token ids and held-out documents: real files to batches."""

from collections import Counter

import datasets
import pytest

from tests.support.batch_contents import documents, loader_of, write_lines
from tests.support.conversations import answer, question
from tests.support.record_files import write_gzip, write_parquet, write_plain
from torchround.config import DataTable, SourceTable, ValidationTable
from torchround.data import DataError, Loader, build_validation_loader, num_tokens

TURNS = [(f"question {n} " + "why " * (n % 17), f"answer {n} " + "so " * (n * 7 % 31)) for n in range(90)]
pytestmark = pytest.mark.usefixtures("small_blocks")


def test_three_shapes_of_conversations_are_whole_and_learnt_from_the_assistants_first_letter_to_its_end(
    tmp_path, chat_tokenizer
):
    messages = [{"messages": [question(asked), answer(said)]} for asked, said in TURNS[:30]]
    sharegpt = [
        {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": said}]}
        for asked, said in TURNS[30:60]
    ]
    alpaca = [{"instruction": asked, "input": "", "output": said} for asked, said in TURNS[60:]]
    tables = (
        write_plain(tmp_path, messages, "messages").model_copy(update={"content": "messages"}),
        write_gzip(tmp_path, sharegpt, "sharegpt").model_copy(update={"content": "messages", "weight": 2.0}),
        write_parquet(tmp_path, alpaca, "alpaca").model_copy(update={"content": "alpaca"}),
    )
    loader, other = (loader_of(tables, chat_tokenizer, 256, 3, epochs=1, loss_on=on) for on in ("assistant", "all"))
    batches = list(loader)
    found = documents(batches, chat_tokenizer)
    assert sorted(found) == sorted(
        (f"<|bos|>user:{asked}<|eos|><|bos|>assistant:{said}<|eos|>", f"{said}<|eos|>") for asked, said in TURNS
    )
    # Padding is not counted as tokens. The text <|bos|> is 1 token, not 7.
    counted = sum(num_tokens(batch, chat_tokenizer.pad_id) for batch in batches)
    assert counted == sum(len(chat_tokenizer.encode(text)) - 4 * 6 for text, _ in found)
    with pytest.raises(DataError, match="other data: loss_on was"):
        other.load_state_dict(loader.state_dict())


def test_token_ids_are_used_as_they_are(tmp_path, tokenizer):
    path = write_lines(tmp_path / "x.jsonl", [{"tokens": [5, 6, 7]}, {"tokens": [8, 258]}, {"tokens": []}])
    keys = {"content": "tokens", "shuffle": False, "epochs": 1}
    (batch,) = loader_of(path, tokenizer, 6, 1, **keys)
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 258, tokenizer.pad_id]]
    assert batch.labels.tolist() == [[6, 7, -100, 258, -100, -100]]


@pytest.mark.parametrize("fraction", [0.05, 0.3])
def test_a_held_out_document_is_never_trained_on_not_even_as_a_copy(tmp_path, tokenizer, fraction):
    texts = [{"text": f"record {number % 300} {number % 300 * 7919}"} for number in range(600)]
    source = SourceTable(path=str(write_lines(tmp_path / "x.jsonl", texts)))
    data = DataTable(sources=(source,), epochs=2, validation_fraction=fraction, packing="best_fit")
    trained = [text for text, _ in documents(Loader(data, tokenizer, 64, 8, 3), tokenizer)]
    table = ValidationTable(interval_steps=1, max_batches=1000)
    validated = [text for text, _ in documents(build_validation_loader(table, tokenizer, 64, 8, data), tokenizer)]
    assert not set(trained) & set(validated)
    assert len(set(trained) | set(validated)) == 300
    assert (len(trained), len(validated)) == (2 * 2 * len(set(trained)), 2 * len(set(validated)))
    # 300 draws: within four standard deviations of the share.
    assert abs(len(set(validated)) / 300 - fraction) < 4 * (fraction * (1 - fraction) / 300) ** 0.5


def test_validation_on_another_split_reads_that_split_and_training_its_own(tmp_path, tokenizer):
    splits = {key: datasets.Dataset.from_list([{"text": f"{key} {n}"} for n in range(20)]) for key in ("train", "held")}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    train, held = (SourceTable(path=str(tmp_path / "saved"), format="dataset", split=split) for split in splits)
    data = DataTable(sources=(train,), epochs=2)
    table = ValidationTable(interval_steps=1, sources=(held,), max_batches=1000)
    trained = documents(Loader(data, tokenizer, 512, 4, 0), tokenizer)
    validated = documents(build_validation_loader(table, tokenizer, 512, 4, data), tokenizer)
    assert Counter(text.split()[0] for text, _ in trained) == {"<|bos|>train": 40}
    assert sorted(text for text, _ in validated) == sorted(f"<|bos|>held {n}<|eos|>" for n in range(20))


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_a_fraction_that_holds_out_none_or_all_is_an_error_and_no_loss_of_zero(tmp_path, tokenizer, fraction):
    (tmp_path / "x.txt").write_text("a long text " * 1000)
    data = DataTable(sources=(SourceTable(path=str(tmp_path / "x.txt")),), validation_fraction=fraction)
    table = ValidationTable(interval_steps=1)
    with pytest.raises(DataError, match=r"a text file is one: .*validation.sources"):
        build_validation_loader(table, tokenizer, 64, 8, data)
        next(Loader(data, tokenizer, 64, 8, 0))
    with pytest.raises(DataError, match="validation has no sources"):
        build_validation_loader(table, tokenizer, 64, 8, data.model_copy(update={"validation_fraction": 0.0}))
