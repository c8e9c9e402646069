"""Execution models: what one launch is under XLA, TorchInductor and eager PyTorch."""
