"""The packing of token pieces into sequences of a fixed length, and of sequences into batches."""
