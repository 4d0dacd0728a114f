"""A bar for work that cannot say how far it is: it shows the seconds, once there have been two."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

SHOW_AFTER_SECONDS = 2.0


@contextmanager
def working(what: str, show: bool = True) -> Iterator[None]:
    """Show ``what`` with a running clock on stderr while the block runs, if it runs for more than 2 seconds."""
    if not show:
        yield
        return
    done = threading.Event()

    def clock() -> None:
        if done.wait(SHOW_AFTER_SECONDS):
            return
        with tqdm(desc=what, bar_format="{desc}: {elapsed}", leave=False) as bar:
            bar.start_t -= SHOW_AFTER_SECONDS
            while not done.wait(0.5):
                bar.refresh()

    thread = threading.Thread(target=clock, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
