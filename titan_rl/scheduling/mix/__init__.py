"""Which task a group is of, and with which of its samples."""
