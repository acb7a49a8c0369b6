"""Python's reader of TOML, which Python 3.10 lacks, and what `pyproject.toml` says of this project."""

import sys

from tests.support.processes import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
