"""A host execution trace and the Kineto trace of the same run, linked into Chakra traces of all ranks."""

from stablecast.validation.linking.write import LinkReport, link_traces

__all__ = ["LinkReport", "link_traces"]
