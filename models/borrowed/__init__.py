"""Decoders of `transformers` in layer form: built from their config, run by their own modules."""

from torchround.models.borrowed.borrowed_family import TRANSFORMERS as TRANSFORMERS
from torchround.models.borrowed.borrowed_family import BorrowedFamily as BorrowedFamily
