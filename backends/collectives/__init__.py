"""Times of collectives: measured curves of communication libraries, and alpha-beta costs of named algorithms."""

from stablecast.backends.collectives.curves import COLLECTIVE_CONSTANTS_FILE
from stablecast.backends.collectives.model import AUTO, KINDS, CollectiveEstimate, CollectiveModel, collective_time
from stablecast.backends.collectives.spans import Span, spans

__all__ = [
    "AUTO",
    "COLLECTIVE_CONSTANTS_FILE",
    "KINDS",
    "CollectiveEstimate",
    "CollectiveModel",
    "Span",
    "collective_time",
    "spans",
]
