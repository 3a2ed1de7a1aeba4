"""Sweeps: many runs that differ in a few keys, each a Ray job of its own."""
