"""Sweeps: many runs that differ in a few keys, each a separate Ray job."""
