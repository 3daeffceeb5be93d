"""The planner: values in, a plan out. Pure: no torch, no clock, no hidden state."""
