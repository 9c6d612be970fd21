"""Transports of weights: shared memory, TCP, RDMA, and GPU memory."""
