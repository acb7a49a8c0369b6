"""The batches of a run's validation: the first ones of one unshuffled pass, the same each time."""

from collections.abc import Iterator

from torchround.config import DataTable, ValidationTable
from torchround.data.errors import DataError
from torchround.data.loader import Loader
from torchround.data.order_rules import OrderRules
from torchround.data.reading_order import FEW_DOCUMENTS
from torchround.data.text.tokenizer import Tokenizer
from torchround.layer import MicroBatch


def build_validation_loader(
    validation: ValidationTable,
    tokenizer: Tokenizer,
    seq_len: int,
    global_batch_size: int,
    data: DataTable | None = None,
    vocab_size: int | None = None,
) -> "ValidationLoader":
    """Make a loader of the first `validation.max_batches` batches of one unshuffled pass, the same each time.

    If validation has no sources of its own, the pass is over the documents that `data.validation_fraction` holds out.
    `data` also says how documents are treated; without it, the defaults hold. Reads the first batch. Raises
    `DataError`.
    """
    data = data or DataTable(sources=validation.sources)
    held_out = 0.0 if validation.sources else data.validation_fraction
    if not validation.sources and not held_out:
        raise DataError("validation has no sources, and data.validation_fraction is 0")
    treated = data.model_copy(
        update={
            "sources": validation.sources or data.sources,
            "shuffle": False,
            "shuffle_sequences": 0,
            "epochs": 1,
            "num_workers": 0,
            "streams": 1,
            "validation_fraction": held_out,
        }
    )
    sizes = seq_len, global_batch_size
    # One pass has no copies to keep apart, so its documents are packed as densely as they can be.
    rules = OrderRules(number=1, window=0)
    loader = Loader(
        treated, tokenizer, *sizes, 0, validation=bool(held_out), rules=rules, vocab_size=vocab_size
    )
    found = ValidationLoader(loader, validation.max_batches)
    next(iter(found))  # an error of the validation data should show now, and not after many steps of training
    return found


class ValidationLoader:
    """The batches of a validation. Each `iter()` begins at the first and ends after `max_batches`, or with the data."""

    def __init__(self, loader: Loader, max_batches: int) -> None:
        self._loader = loader
        self._max_batches = max_batches
        self._beginning = loader.state_dict()

    def __iter__(self) -> Iterator[MicroBatch]:
        self._loader.load_state_dict(self._beginning)
        batch = None
        for _, batch in zip(range(self._max_batches), self._loader, strict=False):
            yield batch
        if batch is None:
            raise DataError(
                "validation has no document: data.validation_fraction holds out none of these sources' documents "
                f"({FEW_DOCUMENTS})"
            )

    def fingerprints(self) -> dict[str, str]:
        """Return what must be alike on all machines, as `Loader.fingerprints` does."""
        return {f"validation: {key}": value for key, value in self._loader.fingerprints().items()}
