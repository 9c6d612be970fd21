"""The ways a version can take: shared memory, GPU memory, RDMA."""
