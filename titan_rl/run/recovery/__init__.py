"""A trainer that died comes back: its processes are started again, and the steps since the checkpoint are repeated."""
