"""What the engines of several machines exchange in a step: gradients out, sums of norms and losses, weights back."""
