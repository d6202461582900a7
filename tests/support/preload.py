"""What every test rank needs, imported once in the server that ranks are forked from."""

import os

# Before torch: threads that exist at a fork do not exist in the child.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MEGATRON_EXT_DEVICE"] = "cpu"

import megatron_ext

megatron_ext.install()

import megatron.training.checkpointing  # noqa: E402
import megatron.training.training  # noqa: E402, F401
