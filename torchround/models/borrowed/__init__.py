"""Models whose modules are built by `transformers`, in layer form."""
