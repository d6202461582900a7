"""Metrics of a run as JSON lines: written by an adapter to Megatron's loop, read by reports."""
