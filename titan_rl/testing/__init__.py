"""What tests of an engine, a strategy or a router of your own are made of. Needs pytest at most."""
