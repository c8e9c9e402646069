"""The learned backend: boosted trees on top of a physical base, trained on public measurements."""

from stablecast.backends.learned.backend import LearnedBackend

__all__ = ["LearnedBackend"]
