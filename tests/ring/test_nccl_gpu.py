"""One rank over NCCL, which sends hops to itself. Needs a GPU. The simulated communicator has the other tests."""

from __future__ import annotations

import subprocess
import sys

from ring_backends.testing.marks import needs_gpu

SCRIPT = """
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore

from ring_backends.errors import RingMismatchError
from ring_backends.ring import rendezvous
from ring_backends.ring.agreement import Agreement
from ring_backends.ring.calls import Configuration
from ring_backends.ring.stream_hops import Headers
from ring_backends.ring.transfer import WorkTransfer, post_batch, post_works

torch.cuda.set_device(0)
device, timeout = torch.device("cuda", 0), timedelta(seconds=60)
dist.init_process_group("cpu:gloo,cuda:nccl", store=HashStore(), rank=0, world_size=1)
store = PrefixStore("ring", dist.group.WORLD.get_group_store())
group = rendezvous._new_group((0,), store, "ring_backends/test", timeout)
rendezvous._open_connections(group, timeout)
agreement = Agreement(
    store, 0, 1, timeout, lambda: rendezvous.abort(group), lambda: rendezvous._nccl_has_error(group)
)
call = agreement.begin(Configuration({"seq_len": 8}))


def hop(transfer):
    agreement.follow(call, "rank 0 waited", transfer.wait(timeout))


sent = torch.arange(1 << 24, device=device).view(torch.uint8)
received = torch.zeros_like(sent)
for index in range(2):  # the first hop allocates pinned memory and events
    torch.cuda.synchronize()
    received.zero_()
    torch.cuda._sleep(1_000_000_000)  # about half a second
    if index:
        torch.cuda.set_sync_debug_mode("error")
    tag = call.tag(index)
    hop(post_works(group, lambda out, into: post_batch(group, out, into, tag), {0: sent}, {0: received}, tag))
    torch.cuda.set_sync_debug_mode("default")
    assert not index or len(agreement.connections.followed) == 1, "the host has waited for the hop"
    agreement.synchronize()
    assert torch.equal(sent, received)

expected, wrong = Headers.of(call.tag(2), [0], device), Headers.of(call.tag(3), [0], device)
(outgoing, _), (_, incoming) = wrong.before([(0, sent)], []), expected.before([], [(0, received)])
works = post_batch(group, outgoing, incoming, 0)
try:
    hop(WorkTransfer(works, [sent, received], expected))
    agreement.synchronize()
except RingMismatchError as error:
    assert "rank 0 sent hop 3" in str(error), error
    print("RingMismatchError", flush=True)
torch.cuda.synchronize()

buffers = [torch.zeros(1 << 20, dtype=torch.uint8, device=device) for _ in range(2)]
fresh = rendezvous._new_group((0,), PrefixStore("next", store), "ring_backends/next", timeout)
rendezvous._open_connections(fresh, timeout)
WorkTransfer(post_batch(fresh, [(0, buffers[0])], [(0, buffers[1])], 0), buffers).abandon()
torch.cuda.synchronize()
print("abandoned", flush=True)
"""


@needs_gpu
def test_hops_to_itself() -> None:
    """The host waits for no hop, a wrong header raises, and the process survives the abort."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["RingMismatchError", "abandoned"]
