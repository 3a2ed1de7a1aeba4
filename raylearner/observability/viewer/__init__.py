"""A page in the browser: runs side by side, their trajectories token by token, and sweeps."""
