"""Crash-safe checkpoints: one file (`single`), or a folder that all ranks write (`sharded`)."""

from tritonamp.checkpoint.random_states import RNGState as RNGState
from tritonamp.checkpoint.sharded import load_sharded as load_sharded
from tritonamp.checkpoint.sharded import save_sharded as save_sharded
from tritonamp.checkpoint.single import load as load
from tritonamp.checkpoint.single import save as save
