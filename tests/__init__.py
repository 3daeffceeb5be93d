"""Tests, sorted by what they need: `pure` (no torch) and `torch` (on a CPU)."""
