"""Conversion of other projects' configurations: tables of keys, readers of their files, and rules."""
