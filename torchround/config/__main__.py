"""Prints docs/configuration.md."""

from torchround.config.reference import page

if __name__ == "__main__":
    print(page(), end="")
