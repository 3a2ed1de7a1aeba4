"""Functions and classes of the user's, run where they cannot hold up an actor's own event loop."""
