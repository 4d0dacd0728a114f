"""HF model → ``ExportedProgram``: one signature a cache form, dynamic sequence, the model left as it was."""

from graphquant.capture.capture import capture

__all__ = ["capture"]
