"""The configuration: one schema, one loader."""
