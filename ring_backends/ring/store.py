"""Requests to a store, which may be gone, with a timeout."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

Answer = TypeVar("Answer")

unanswered: dict[threading.Thread, object] = {}
"""The threads that wait for a store, and who asked."""


def call_with_timeout(
    seconds: float, ask: Callable[[], Answer], *, default: Answer, asker: object | None = None
) -> Answer:
    """Call ``ask`` in a thread and return its answer; ``default`` if it fails or takes longer than ``seconds``.

    ``ask`` is a request to a store. If the process that hosts the store is gone, the request fails. If the network is
    gone, torch may wait forever.

    Args:
        asker: who asks repeatedly. While an earlier request of the same asker is not answered, ``ask`` is not called.
    """
    for thread in [thread for thread in list(unanswered) if not thread.is_alive()]:
        unanswered.pop(thread, None)
    if asker is not None and any(other is asker for other in list(unanswered.values())):
        return default
    answers = []

    def listen() -> None:
        with contextlib.suppress(dist.DistError):
            answers.append(ask())

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    listener.join(seconds)
    if listener.is_alive():
        unanswered[listener] = asker
    return answers[0] if answers else default
