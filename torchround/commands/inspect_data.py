"""Show what a run would read: its first batches as text, and how well they are packed.

    torchround inspect_data --config debug.toml --batches 2 --data.shuffle false

Takes the overrides that `train.py` takes. A line is one document of a sequence. Text between « and » is not learnt: none
of its tokens is a label that counts. No token in a line predicts the line's first token. If a document continues from the
sequence before, its first token here is the last label there. Long documents are shortened unless `--whole` is given.
"""

from collections.abc import Sequence
from itertools import groupby

import torch

from torchround.commands import end_with_message, new_parser, positive_integer
from torchround.commands.configured_model import MISTAKES, find_tokenizer, model_config
from torchround.config import parse_command_line
from torchround.data import DataError, Loader, Tokenizer, num_tokens
from torchround.data.loader import packs_whole_documents
from torchround.layer import IGNORED_LABEL

CHARACTERS_SHOWN = 160


def main(arguments: Sequence[str]) -> int:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--config", required=True, help="the run's TOML file")
    add("--batches", type=positive_integer, default=1, help="global batches to read (default 1)")
    add("--sequences", type=positive_integer, default=2, help="sequences of each to print (default 2)")
    add("--whole", action="store_true", help="print all of each document, not shortened")
    options, overrides = parser.parse_known_args(arguments)

    def inspect() -> None:
        parsed = parse_command_line(["--config", options.config, *overrides])
        config, tokenizer = parsed.config, find_tokenizer(parsed)
        vocab_size = tokenizer.vocab_size
        # Only ids need the model's vocabulary: text can be looked at before the model's folder is there.
        if any(source.content == "tokens" for source in config.data.sources):
            vocab_size = model_config(parsed, tokenizer.vocab_size)[1].vocab_size
        sizes = config.training.seq_len, config.training.global_batch_size
        loader = Loader(config.data, tokenizer, *sizes, config.run.seed, vocab_size=vocab_size)
        loader.check_first_records()
        positions = tokens = labels = 0
        for number in range(options.batches):
            batch = next(loader, None)
            if batch is None:
                print(f"--- the data ends after {number} batches")
                break
            positions += batch.tokens.numel()
            tokens += num_tokens(batch, tokenizer.pad_id)
            labels += batch.num_labels()
            for row in range(min(options.sequences, len(batch.tokens))):
                print(f"--- batch {number}, sequence {row}")
                for document in batch.document_ids[row].unique().tolist():
                    inside = batch.document_ids[row] == document
                    text = marked(batch.tokens[row][inside], batch.labels[row][inside], tokenizer)
                    text = text.replace("\n", "⏎")
                    if not options.whole and len(text) > CHARACTERS_SHOWN:
                        text = f"{text[: CHARACTERS_SHOWN // 2]} … {text[-(CHARACTERS_SHOWN // 2) :]}"
                    print(f"{document:4} {int(inside.sum()):7} tokens  {text}")
        loader.close()
        if not positions:
            return
        shares = f"{tokens / positions:.2%} tokens, {labels / positions:.2%} with a label"
        print(f"--- {positions} positions: {shares}")
        if packs_whole_documents(config.data):
            handled = f"longer than a sequence: {config.data.long_documents}"
            print(f"--- {loader.num_long_documents()} documents {handled}")

    return end_with_message(inspect, (*MISTAKES, DataError))


def marked(tokens: torch.Tensor, labels: torch.Tensor, tokenizer: Tokenizer) -> str:
    """Show the text of a document's `tokens` `[n]`, with « and » around the tokens that are not learnt.

    `labels` `[n]`: `labels[i]` is token `i + 1`, or `IGNORED_LABEL` if that token is not learnt.
    """
    # No label tells whether the first token is learnt, so it counts as not learnt.
    ignored = [True, *(labels == IGNORED_LABEL).tolist()[:-1]]
    text, before = "", list[int]()
    for masked, run in groupby(zip(tokens.tolist(), ignored, strict=True), key=lambda pair: pair[1]):
        # An id of the model that the tokenizer does not know is shown as a number.
        ids = [token for token, _ in run]
        shown = tokenizer.decode_after(before, ids)
        before += ids
        text += f"«{shown}»" if masked else shown
    return text
