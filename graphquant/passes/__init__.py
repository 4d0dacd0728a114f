"""The only code that edits graphs: prepare and convert, and what makes attention over a stored cache fast."""

from graphquant.passes.convert import convert
from graphquant.passes.fold import fold_scales
from graphquant.passes.fuse_decode import fuse_decode
from graphquant.passes.pack_gqa import pack_gqa
from graphquant.passes.prepare import prepare
from graphquant.passes.prepared import calibration_of, set_mode
from graphquant.passes.specialize import specialize

__all__ = ["calibration_of", "convert", "fold_scales", "fuse_decode", "pack_gqa", "prepare", "set_mode", "specialize"]
