"""Policies that answer requests but are not trained: finding the policy that a user names, and starting its
generators."""
