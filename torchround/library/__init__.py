"""The engine as a library: `torchround.Pipeline` trains any `nn.Sequential` of ordinary modules."""
