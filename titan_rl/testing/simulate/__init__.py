"""A run in virtual time: what a schedule comes to, before any hardware is paid for."""
