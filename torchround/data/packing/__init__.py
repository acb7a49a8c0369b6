"""Token pieces to sequences of a fixed length, and sequences to batches."""
