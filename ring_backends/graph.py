"""Ring attention inside a compiled graph: hops as custom operators, everything between them as plain tensor code.

Under ``torch.compile`` the walk of the plan is traced, not run: the graph holds every gather, tile and merge, and for
each hop that this rank takes part in one ``ring_backends::post_hop`` and one ``ring_backends::wait_hop``; one
``ring_backends::begin_walk`` per direction agrees with the other ranks before the first of them. The compiled forward
graph holds the hops of the forward, the compiled backward graph those of the backward, each as many as the schedule
says. The operators are registered as ordered effects, so that no pass drops, repeats or reorders them.

What an operator posts outlives it: transfers under way stay here, by number, between a post and its wait.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ring_backends.agreement import Configuration
from ring_backends.packing import PackedRows
from ring_backends.plan import Message
from ring_backends.walk import Arrival, Hops
