"""XLA itself as a frontend: a capture compiled for hardware that is not there, its scheduled HLO and memory."""

from stablecast.frontends.xla.compile import Compiled, Settings, check_terms, compile_ahead, compiler_installed
from stablecast.frontends.xla.targets import boards, target_config, topology

__all__ = [
    "Compiled",
    "Settings",
    "boards",
    "check_terms",
    "compile_ahead",
    "compiler_installed",
    "target_config",
    "topology",
]
