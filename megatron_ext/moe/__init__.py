"""Auxiliary-loss-free balance of a mixture of experts: pure rules and their Megatron adapter."""
