"""Where the metrics of a run go beside its folder: Weights & Biases, TensorBoard, trackio, Prometheus, or your own."""
