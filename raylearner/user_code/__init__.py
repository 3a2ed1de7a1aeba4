"""User-defined functions and classes, run where they cannot block an actor's event loop."""
