"""stablecast."""
