"""StableHLO of recorded ATen calls."""
