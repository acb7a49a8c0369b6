"""The commands that users start; `python -m torchround COMMAND`. They alone know the model families."""
