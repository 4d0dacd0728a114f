"""What a KV cache is asked to be, and which askings mean nothing."""

from dataclasses import dataclass

from torch.export import ExportedProgram

from graphquant.errors import CaptureError

CACHES = ("static", "inputs")


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """The options of ``capture`` that are about the cache, as they were given."""

    cache: str | None
    max_cache_len: int | None
    sequence: int | None
    batch: int | None

    def check(self, model: object, example: bool) -> None:
        """Refuse what means nothing for this model, which was given with or without example inputs.

        Raises:
            CaptureError: what was expected, what was found, what to do.
        """
        if self.cache is not None and self.cache not in CACHES:
            raise CaptureError(f"unknown cache {self.cache!r}; there are {', '.join(map(repr, CACHES))} and None")
        if (self.cache == "static") != (self.max_cache_len is not None):
            raise CaptureError('cache="static" and max_cache_len=… (in tokens) are given together, or neither is')
        if self.max_cache_len is not None and not _is_count(self.max_cache_len, 2):
            raise CaptureError(f"max_cache_len must be at least 2 tokens, not {self.max_cache_len!r}")
        self._check_shapes(model)
        if self.cache is not None and (example or isinstance(model, ExportedProgram)):
            what = "an ExportedProgram" if isinstance(model, ExportedProgram) else "a model with example inputs"
            raise CaptureError(
                f"cache={self.cache!r} is for a Hugging Face causal model, and {what} was given: leave one out"
            )

    def _check_shapes(self, model: object) -> None:
        if self.sequence is not None:
            self._check_shape("sequence", self.sequence, "token", 'cache="static" or cache="inputs"', model)
        if self.batch is not None:
            self._check_shape("batch", self.batch, "row", 'cache="static"', model)
        if self.cache == "inputs" and self.batch is not None:
            raise CaptureError(
                f'batch={self.batch} is for cache="static", and cache="inputs" was given, whose batch is dynamic: '
                "leave batch out, and run the program on any"
            )
        if self.sequence is not None and self.max_cache_len is not None and self.sequence > self.max_cache_len:
            raise CaptureError(
                f"sequence={self.sequence} does not fit into a cache of max_cache_len={self.max_cache_len} tokens: "
                "make one of them fit the other"
            )

    def _check_shape(self, name: str, value: int, unit: str, caches: str, model: object) -> None:
        if not _is_count(value, 1):
            raise CaptureError(f"{name} must be an int of at least 1 {unit}, or None, not {value!r}")
        if isinstance(model, ExportedProgram):
            raise CaptureError(
                f"{name}={value} is for a model, and an ExportedProgram was given, whose shapes are made: capture its "
                f"model with {name}={value}, or leave {name} out"
            )
        if self.cache is None:
            raise CaptureError(
                f"{name}={value} is for a graph with a KV cache, and there is none: add {caches}, or leave {name} out"
            )


def _is_count(value: object, least: int) -> bool:
    """Whether a value is an int of at least so much; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
