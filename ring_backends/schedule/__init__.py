"""Computes which query attends to which key, which rows travel between ranks, and what each rank computes.

From a pattern, a layout and the number of heads, this package derives the schedule of a whole ring and the plan of one
rank. It creates no process group, reads no model tensor, and does not communicate. It imports no other part of
``ring_backends``.
"""
