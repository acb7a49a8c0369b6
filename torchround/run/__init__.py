"""A run without its loop: its numbers, hardware, plan, folder, checkpoints, records and early ends."""
