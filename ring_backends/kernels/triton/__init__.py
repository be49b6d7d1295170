"""The kernels in Triton's language: attention of a step in three launches, and moving and merging rows.

These modules import Triton, so ``kernels/triton_launch.py`` imports them when the first kernel is launched. What the
host does for a launch is in the room above. They import nothing but each other, and numbers of that room.
"""
