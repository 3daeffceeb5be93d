"""Measure lowtide: exactness, memory and speed, side by side with plain PyTorch."""
