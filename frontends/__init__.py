"""From programs, files and traces to workloads. Frontends know nothing of devices or time."""
