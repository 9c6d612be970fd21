"""Metric sinks besides the run's folder: Weights & Biases, TensorBoard, trackio, Prometheus, or your own."""
