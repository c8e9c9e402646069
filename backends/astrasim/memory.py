"""Remote memory of ASTRA-sim's analytical model: one request at a time of a node or of the whole pool."""

from collections import deque
from collections.abc import Callable

from stablecast.backends.astrasim.config import MemoryConfig
from stablecast.ir.errors import InputError


class RemoteMemory:
    """`after(rank, delay, action, key)` sets a timer of a rank; `done(rank, node)` ends a request."""

    def __init__(
        self,
        config: MemoryConfig,
        after: Callable[[int, int, Callable[[tuple[int, int]], None], tuple[int, int]], None],
        done: Callable[[tuple[int, int]], None],
    ) -> None:
        self._config, self._after, self._done = config, after, done
        self._busy: set[int] = set()
        self._waiting: dict[int, deque[tuple[int, int, int]]] = {}

    def time_ns(self, nbytes: int) -> int:
        """Latency + floor(bytes / rate)."""
        return int(self._config.latency_ns) + int(nbytes / self._config.bytes_per_ns)

    def _bank(self, rank: int) -> int:
        return rank // self._config.npus_per_node if self._config.kind == "PER_NODE_MEMORY_EXPANSION" else 0

    def request(self, rank: int, node: int, nbytes: int, what: str) -> None:
        """Begin a load or store. Raises `InputError` where there is no remote memory."""
        if self._config.kind == "NO_MEMORY_EXPANSION":
            raise InputError(
                f"rank {rank} {what}: there is no remote memory", "give --memory a file with a memory-type"
            )
        if self._config.kind == "PER_NPU_MEMORY_EXPANSION":
            self._after(rank, self.time_ns(nbytes), self._done, (rank, node))
            return
        bank = self._bank(rank)
        if bank in self._busy:
            self._waiting.setdefault(bank, deque()).append((rank, node, nbytes))
            return
        self._busy.add(bank)
        self._after(rank, self.time_ns(nbytes), self._finish, (rank, node))

    def _finish(self, key: tuple[int, int]) -> None:
        bank = self._bank(key[0])
        self._busy.discard(bank)
        waiting = self._waiting.get(bank)
        if waiting:
            rank, node, nbytes = waiting.popleft()
            self._busy.add(bank)
            self._after(rank, self.time_ns(nbytes), self._finish, (rank, node))
        self._done(key)
