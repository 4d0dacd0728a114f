"""Downstream compilers: one file each, a capability table, and ``lower``."""

from graphquant.backends.base import Backend, Capability, Lowered, Summary
from graphquant.backends.lowering import lower
from graphquant.backends.registry import BACKENDS, backend

__all__ = ["BACKENDS", "Backend", "Capability", "Lowered", "Summary", "backend", "lower"]
