"""The exceptions of graphquant: each says what was expected, what was found, where, and what to do.

::

    GraphQuantError
    ├── ConfigError              a configuration or recipe that cannot mean anything
    │   ├── SelectorError        a target, an ignore or a preset name that selects nothing
    │   └── StrategyError        a strategy or dtype that a site cannot take
    ├── CaptureError             a model that does not become an ExportedProgram
    ├── NoAttentionError         a program in which no attention core was matched
    ├── CalibrationError         statistics that are missing, foreign or unusable
    │   ├── NotCalibratedError   a planned site that observed nothing
    │   └── NonFiniteError       a NaN or Inf among the observed values
    ├── ConvertError             a graph edit that cannot be done exactly
    ├── LowerError               a program that a backend cannot take
    │   ├── BackendMissingError  a backend whose package is not installed
    │   ├── UnsupportedError     a setting that the backend is known not to do right
    │   └── MismatchError        an artifact that computes something else than its program
    ├── DataError                calibration or evaluation text that cannot be used
    ├── ModelError               a model that cannot be loaded
    └── OutputError              a result that cannot be written or read
"""


class GraphQuantError(Exception):
    """Base of every error that graphquant raises on purpose."""


class ConfigError(GraphQuantError):
    """A configuration value or recipe is invalid."""


class SelectorError(ConfigError):
    """A name or pattern selects nothing, or selects the same tensor twice."""


class StrategyError(ConfigError):
    """A strategy, dtype or symmetry cannot be applied at a site."""


class CaptureError(GraphQuantError):
    """A model could not be exported, or its export was specialised."""


class NoAttentionError(GraphQuantError):
    """No attention core was matched in a program."""


class CalibrationError(GraphQuantError):
    """Statistics are missing, belong to another model, or cannot answer a question."""


class NotCalibratedError(CalibrationError):
    """A planned static site has observed no values."""


class NonFiniteError(CalibrationError):
    """A NaN or Inf was observed during calibration."""


class ConvertError(GraphQuantError):
    """A program cannot be rewritten as planned."""


class LowerError(GraphQuantError):
    """A program cannot be lowered to a backend."""


class BackendMissingError(LowerError):
    """The package of a backend is not installed."""


class UnsupportedError(LowerError):
    """A backend cannot do a site's setting right, which is known before any work is done."""


class MismatchError(LowerError):
    """A lowered artifact does not compute what its program computes."""


class DataError(GraphQuantError):
    """Calibration or evaluation text is missing, empty or too short."""


class ModelError(GraphQuantError):
    """A model or tokenizer cannot be loaded."""


class OutputError(GraphQuantError):
    """A file cannot be written or read."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text that says anything: torch and compilers raise pages."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
