"""The only code that edits graphs: prepare and convert."""

from graphquant.passes.convert import convert
from graphquant.passes.prepare import prepare
from graphquant.passes.prepared import calibration_of, set_mode

__all__ = ["calibration_of", "convert", "prepare", "set_mode"]
