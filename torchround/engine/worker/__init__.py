"""One device's worker thread and what it moves: weights, activations and gradients."""
