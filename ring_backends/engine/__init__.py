"""Runs one rank's plan under autograd: the checked call, forward, backward, wire buffers, compiled graphs.

``schedule`` decides what to compute, ``kernels`` how to compute one tile, and the adapters how a hop travels.
"""
