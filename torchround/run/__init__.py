"""What a run has besides its loop: folder, checkpoints, signals, reports, traces, and its needs counted ahead."""
