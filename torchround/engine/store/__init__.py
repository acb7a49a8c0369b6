"""Host memory: the allocator of page-locked buffers, and the store of all weights, gradients and optimizer state."""
