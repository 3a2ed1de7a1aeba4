"""Execution of user-defined functions and classes without blocking an actor's event loop."""
