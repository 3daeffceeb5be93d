"""The simulator: what would happen, on a clock and an allocator of its own."""
