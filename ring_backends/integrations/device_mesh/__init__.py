"""Ring dilated attention on one axis of a DeviceMesh, with PyTorch's ``parallelize_module``::

    mesh = init_device_mesh("cpu", (data_size, ring_size), mesh_dim_names=("data", "ring"))
    parallelize_module(model, mesh["ring"], {"layers.*.inner_attention": RingDilated([2048, 16384], [1, 8])})

    with context_parallel(mesh["ring"], buffers=[tokens, labels, model.freqs], buffer_seq_dims=[1, 1, 0]):
        logits = model(tokens)  # this rank's rows

The first style on an axis makes the ring of the axis. All modules of the axis and ``context_parallel`` use that ring.
"""

from ring_backends.integrations.device_mesh.axis import context_parallel, ring_of
from ring_backends.integrations.device_mesh.style import RingDilated

__all__ = ["RingDilated", "context_parallel", "ring_of"]
