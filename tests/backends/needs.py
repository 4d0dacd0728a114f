"""Tests of a compiler run where it is installed."""

import pytest

from graphquant.backends import BACKENDS


def needs(name: str) -> pytest.MarkDecorator:
    """Skip where the backend's package is missing; the ``[test]`` extra installs all of them."""
    return pytest.mark.skipif(bool(BACKENDS[name].missing()), reason=f"needs {name}")
