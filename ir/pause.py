"""Garbage collection paused while many long-lived objects are made: it would look at all of them again and again."""

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def paused_gc() -> Generator[None]:
    """No cyclic garbage collection inside; reference counting goes on."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
