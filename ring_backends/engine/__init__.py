"""Runs one rank's plan under autograd: the checked call, forward, backward, wire buffers, compiled graphs.

What to compute is decided in ``schedule``, how one tile is computed in ``kernels``, and how a hop travels in the
adapters. It imports ``ring``, ``kernels`` and ``schedule``.
"""
