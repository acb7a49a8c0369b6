"""Loaders over conversations, token ids, bad records and held-out documents: real files to batches."""

import gzip
import json
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.batch_contents import TEMPLATE, content, documents
from torchround.config import DataTable, SourceTable, TokenizerTable, ValidationTable
from torchround.data import (
    DataError,
    Loader,
    Tokenizer,
    build_loader,
    build_tokenizer,
    build_validation_loader,
    num_tokens,
)
from torchround.data.formats import sources as sources_module
from torchround.data.packing import best_fit as best_fit_module


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 150 conversations in three shapes and kinds of file, and the template that writes them."""
    folder = tmp_path_factory.mktemp("chats")
    (folder / "template.jinja").write_text(TEMPLATE)
    turns = [(f"question {n} " + "why " * (n % 17), f"answer {n} " + "so " * (n * 7 % 31)) for n in range(150)]
    messages = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}
        for asked, said in turns[:50]
    ]
    sharegpt = [
        {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": said}]}
        for asked, said in turns[50:100]
    ]
    alpaca = [{"instruction": asked, "input": "", "output": said} for asked, said in turns[100:]]
    (folder / "messages.jsonl").write_text("\n".join(map(json.dumps, messages)))
    (folder / "sharegpt.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, sharegpt)).encode()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(alpaca), folder / "alpaca.parquet", row_group_size=11)
    return folder


@pytest.fixture(autouse=True)
def small_blocks_and_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "BLOCK_RECORDS", 8)
    monkeypatch.setattr(best_fit_module, "GROUP_SEQUENCES", 5)


@pytest.fixture(scope="module")
def chat_tokenizer(chats: Path) -> Tokenizer:
    return build_tokenizer(TokenizerTable(name="bytes", chat_template=str(chats / "template.jinja")))


Make = Callable[..., Loader]


@pytest.fixture(scope="module")
def make_chat_loader(chats: Path, chat_tokenizer: Tokenizer) -> Make:
    def make(seq_len: int = 128, global_batch_size: int = 3, seed: int = 0, **keys: Any) -> Loader:
        sources = (
            SourceTable(path=str(chats / "messages.jsonl"), content="messages"),
            SourceTable(path=str(chats / "sharegpt.jsonl.gz"), content="messages", weight=2.0),
            SourceTable(path=str(chats / "alpaca.parquet"), content="alpaca"),
        )
        return build_loader(DataTable(sources=sources, **keys), chat_tokenizer, seq_len, global_batch_size, seed)

    return make


def test_three_shapes_of_conversations_are_whole_and_learnt_from_the_assistants_first_letter_to_its_end(
    make_chat_loader: Make, chat_tokenizer: Tokenizer
) -> None:
    loader = make_chat_loader(epochs=1, seq_len=256)
    found = sorted(documents(loader, chat_tokenizer))
    turns = [(f"question {n} " + "why " * (n % 17), f"answer {n} " + "so " * (n * 7 % 31)) for n in range(150)]
    assert found == sorted(
        (f"<|bos|>user:{asked}<|eos|><|bos|>assistant:{said}<|eos|>", f"{said}<|eos|>") for asked, said in turns
    )


@settings(max_examples=20, deadline=None)
@given(
    stop=st.integers(0, 70),
    workers=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    packing=st.sampled_from(["contiguous", "best_fit"]),
    epochs=st.sampled_from([1, 2]),
)
def test_resuming_at_any_batch_with_other_workers_gives_the_same_remaining_batches(
    make_chat_loader: Make, stop: int, workers: tuple[int, int], packing: str, epochs: int
) -> None:
    keys: dict[str, Any] = {"packing": packing, "epochs": epochs, "long_documents": "split"}
    loader = make_chat_loader(num_workers=workers[0], **keys)
    list(islice(loader, stop))
    state = json.loads(json.dumps(loader.state_dict()))
    rest = content(loader)
    resumed = make_chat_loader(num_workers=workers[1], **keys)
    resumed.load_state_dict(state)
    assert content(resumed) == rest


def test_two_epochs_differ_in_order_and_repeat_by_seed(make_chat_loader: Make, chat_tokenizer: Tokenizer) -> None:
    def order(seed: int) -> list[tuple[str, str]]:
        return documents(make_chat_loader(seed=seed, epochs=2, packing="contiguous", seq_len=4096), chat_tokenizer)

    assert order(1) == order(1)
    assert order(1) != order(2)
    counted = Counter(text for text, _ in order(1) if text.endswith("<|eos|>") and text.startswith("<|bos|>user"))
    assert max(counted.values()) == 2


def test_weight_by_size_visits_every_document_equally_often(
    make_chat_loader: Make, chat_tokenizer: Tokenizer, chats: Path
) -> None:
    """The sources are 50 lines, 50 compressed lines and 50 rows: weights 1, 2, 1 give 25, 50 and 25 of 100 documents."""
    loader = make_chat_loader(
        weight_by="size", packing="contiguous", shuffle_sequences=0, seq_len=64, global_batch_size=1
    )
    found = " ".join(text for text, _ in documents(islice(loader, 250), chat_tokenizer))
    progress = loader.state_dict()["position"]["reader"]["sources"]
    assert "question" in found
    drawn = [source["drawn"] for source in progress]
    assert abs(drawn[1] - drawn[0] * 2) <= 2 and abs(drawn[0] - drawn[2]) <= 1


@pytest.mark.parametrize(("handling", "kept"), [("cut", 3), ("skip", 2), ("split", 4)])
def test_a_conversation_longer_than_a_sequence_is_handled_by_key_and_counted(
    tmp_path: Path, chat_tokenizer: Tokenizer, handling: str, kept: int
) -> None:
    path = tmp_path / "x.jsonl"
    records = [{"instruction": "q", "output": "a" * length} for length in (3, 100, 5)]
    path.write_text("\n".join(map(json.dumps, records)))
    data = DataTable(sources=(SourceTable(path=str(path), content="alpaca"),), long_documents=handling, epochs=1)
    loader = build_loader(data, chat_tokenizer, 64, 4, 0)
    assert len(documents(loader, chat_tokenizer)) == kept
    assert loader.num_long_documents() == 1


def test_token_ids_are_used_as_they_are_and_must_be_in_the_vocabulary(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"tokens": [5, 6, 7]}\n{"tokens": [8, 258]}\n{"tokens": []}\n')
    table = SourceTable(path=str(path), content="tokens")
    data = DataTable(sources=(table,), shuffle=False, epochs=1)
    (batch,) = build_loader(data, tokenizer, 6, 1, 0)
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 258, tokenizer.pad_id]]
    assert batch.labels.tolist() == [[6, 7, -100, 258, -100, -100]]
    path.write_text('{"tokens": [1]}\n{"tokens": [259]}\n')
    with pytest.raises(DataError, match=r"x.jsonl, line 2: token ids from 259 to 259; the vocabulary has 0 to 258"):
        list(build_loader(data, tokenizer, 6, 1, 0))


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 600 records, the second half copies of the first."""
    path = tmp_path_factory.mktemp("many") / "x.jsonl"
    lines = [json.dumps({"text": f"record {number % 300} {number % 300 * 7919}"}) for number in range(600)]
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("fraction", [0.05, 0.3])
def test_a_held_out_document_is_never_trained_on_not_even_as_a_copy(
    many: Path, tokenizer: Tokenizer, fraction: float
) -> None:
    data = DataTable(sources=(SourceTable(path=str(many)),), epochs=2, validation_fraction=fraction, packing="best_fit")
    trained = [text for text, _ in documents(build_loader(data, tokenizer, 64, 8, 3), tokenizer)]
    table = ValidationTable(interval_steps=1, max_batches=1000)
    validated = [text for text, _ in documents(build_validation_loader(table, tokenizer, 64, 8, data), tokenizer)]
    assert not set(trained) & set(validated)
    assert len(set(trained) | set(validated)) == 300
    assert (len(trained), len(validated)) == (2 * 2 * len(set(trained)), 2 * len(set(validated)))
    # 300 draws: within four standard deviations of the share.
    assert abs(len(set(validated)) / 300 - fraction) < 4 * (fraction * (1 - fraction) / 300) ** 0.5


def test_validation_on_another_split_reads_that_split_and_training_its_own(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    splits = {
        name: datasets.Dataset.from_list([{"text": f"{name} {number}"} for number in range(20)])
        for name in ("train", "held")
    }
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    train, held = (SourceTable(path=str(tmp_path / "saved"), format="dataset", split=split) for split in splits)
    data = DataTable(sources=(train,), epochs=2)
    table = ValidationTable(interval_steps=1, sources=(held,), max_batches=1000)
    trained = documents(build_loader(data, tokenizer, 512, 4, 0), tokenizer)
    validated = documents(build_validation_loader(table, tokenizer, 512, 4, data), tokenizer)
    assert Counter(text.split()[0] for text, _ in trained) == {"<|bos|>train": 40}
    assert sorted(text for text, _ in validated) == sorted(f"<|bos|>held {n}<|eos|>" for n in range(20))


def test_a_fraction_that_holds_nothing_out_is_an_error_and_no_loss_of_zero(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "only one"}')
    data = DataTable(sources=(SourceTable(path=str(tmp_path / "x.jsonl")),), validation_fraction=1e-9)
    table = ValidationTable(interval_steps=1)
    with pytest.raises(DataError, match="validation_fraction holds out none"):
        build_validation_loader(table, tokenizer, 64, 8, data)
    with pytest.raises(DataError, match="validation has no sources, and data.validation_fraction is 0"):
        build_validation_loader(table, tokenizer, 64, 8, data.model_copy(update={"validation_fraction": 0.0}))


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_a_fraction_of_one_text_file_says_what_helps(tmp_path: Path, tokenizer: Tokenizer, fraction: float) -> None:
    """All of it is held out, or none: then either training or validation has no document."""
    (tmp_path / "x.txt").write_text("a long text " * 1000)
    data = DataTable(sources=(SourceTable(path=str(tmp_path / "x.txt")),), validation_fraction=fraction)
    with pytest.raises(DataError, match=r"a text file is one: .*validation.sources"):
        build_validation_loader(ValidationTable(interval_steps=1), tokenizer, 64, 8, data)
        next(build_loader(data, tokenizer, 64, 8, 0))


def test_validation_of_conversations_learns_what_training_does(
    chats: Path, chat_tokenizer: Tokenizer, make_chat_loader: Make
) -> None:
    source = SourceTable(path=str(chats / "messages.jsonl"), content="messages")
    data = DataTable(sources=(source,), epochs=1, loss_on="assistant")
    table = ValidationTable(interval_steps=1, sources=(source,), max_batches=100)
    validated = documents(build_validation_loader(table, chat_tokenizer, 256, 4, data), chat_tokenizer)
    assert sorted(validated) == sorted(documents(build_loader(data, chat_tokenizer, 256, 4, 0), chat_tokenizer))


def test_a_position_is_refused_if_the_template_or_packing_changed(make_chat_loader: Make) -> None:
    loader = make_chat_loader()
    next(loader)
    state = loader.state_dict()
    for keys in ({"packing": "contiguous"}, {"loss_on": "all"}, {"long_documents": "skip"}, {"seq_len": 64}):
        with pytest.raises(DataError, match=f"other data: .*{next(iter(keys))} was"):
            make_chat_loader(**keys).load_state_dict(state)


def test_padding_of_packed_conversations_is_not_counted_as_tokens(
    make_chat_loader: Make, chat_tokenizer: Tokenizer
) -> None:
    batches = list(make_chat_loader(epochs=1, seq_len=256))
    counted = sum(num_tokens(batch, chat_tokenizer.pad_id) for batch in batches)
    texts = [text for text, _ in documents(batches, chat_tokenizer)]
    assert counted == sum(len(chat_tokenizer.encode(text)) - 4 * 6 for text in texts)  # <|bos|> is 1 token, not 7
