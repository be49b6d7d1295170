"""Who attends to whom, what travels, and what each rank computes: data and arithmetic.

From a pattern, a layout and the number of heads this package derives the schedule of a whole ring, and the plan of one
rank. It creates no process group, reads no model tensor, and communicates nothing. It imports nothing else of
``ring_backends``.
"""
