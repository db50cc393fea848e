"""The model zoo, and timing against other runtimes. Not installed."""
