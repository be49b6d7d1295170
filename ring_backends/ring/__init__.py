"""The ranks of a ring: process groups, rendezvous, agreement, transfers and the order of hosts.

Everything that communicates lives here, except the hop of K and V itself, which each adapter supplies. This package
does not depend on attention.
"""
