"""Python's reader of TOML, which Python 3.10 lacks, what `pyproject.toml` says of this project, and the least of a config."""

import sys

from tests.support.processes import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
MINIMAL = """
[model]
family = "llama3"
flavor = "debug"
[tokenizer]
name = "bytes"
[data]
sources = [{path = "corpus.txt"}]
"""
