"""ASTRA-sim's analytical backend, cycle for cycle: its file formats, its collectives, its traces."""
