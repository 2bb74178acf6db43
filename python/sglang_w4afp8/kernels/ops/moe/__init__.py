"""Kernels of the expert path. Importing them from here gives them the measured launches of this GPU."""

from sglang_w4afp8.kernels.ops.moe import ep_moe_kernels, launch_table

ep_moe_kernels.set_launch_lookup(launch_table.lookup)
