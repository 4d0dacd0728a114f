"""What the benchmarks ask of the allocator of C."""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of ``mallopt`` (glibc, malloc.h)."""


def keep_memory() -> None:
    """Keep what is freed: scratch tensors of some MB would else come as new pages in each call, for a time like theirs.

    Raises:
        RuntimeError: the allocator is another one, or refuses.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not all(mallopt(name, 2**30) for name in (_TRIM_THRESHOLD, _MMAP_THRESHOLD)):
        raise RuntimeError("this benchmark needs glibc's mallopt, to time all forms with memory that is kept")
